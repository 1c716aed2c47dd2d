"""The embedded engine against OpenVINO GenAI's continuous batching, on the same IR and machine.

Run with ``python benchmarks/engine.py`` (``--quick`` for a few minutes, ``--json`` for one
document). Both engines generate greedily to the full length, without prefix caches. Each lives in a
child process of its own; they take turns run by run, so that a disturbance of the machine meets
both. sluice is driven through ``core.replica.Replica`` as its replica process does it, without text
and channel; the time spent there and around the kernels is printed as host overhead.

Output tokens/s are over the whole run, prompts included. Prefill tokens/s come from runs with one
output token. Ratios are medians of the ratios of neighbouring runs. "step ms" compares decode steps
with all rows by their undisturbed time: the lowest 10th percentile of any run, which other load on
the machine hardly moves.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.children import Child, started

VOCAB_FROM, VOCAB_TO = 300, 40_000  # ids of ordinary tokens of the default model
CONCURRENCIES = (1, 8, 16, 32)
KV_BYTES = 2 * 2**30

Prompts = list[list[int]]


class Engine(Protocol):
    """What a child process measures."""

    def generate(self, prompts: Prompts, outputs: int) -> dict[str, float]:
        """Generate for all prompts at once; return facts about the run."""
        ...


def undisturbed_ms(step_ns: Sequence[int], outputs: int) -> float:
    """The 10th percentile of the steps in which every sequence decodes, in milliseconds.

    Prompts are through when steps begin to exceed the outputs; the sequence that began first ends
    ``outputs`` steps after it began. With one output there are no such steps, and the answer is 0.
    """
    prefill_steps = len(step_ns) - outputs
    decoding = sorted(step_ns[prefill_steps + 1 : outputs - 1])
    return decoding[len(decoding) // 10] / 1e6 if decoding else 0.0


# ---------------------------------------------------------------------------------------- sluice


class Sluice:
    """Our executor, driven by the replica policy."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        from sluice.executors.openvino import OpenVinoExecutor  # noqa: PLC0415
        from sluice.executors.openvino_settings import EngineSettings  # noqa: PLC0415

        self._executor = OpenVinoExecutor(
            EngineSettings(
                folder,
                context_tokens_max=4096,
                numerics=options.numerics,
                kv_bytes=KV_BYTES,
                threads=options.threads,
            )
        )
        self._limits = self._executor.load()
        self._options = options
        self._runs = 0
        self._replica: Any = None

    def _new_replica(self) -> Any:
        from sluice.core.costmodel import Coefficients, LinearCostModel  # noqa: PLC0415
        from sluice.core.replica import Replica  # noqa: PLC0415
        from sluice.core.roster import BatchingLimits  # noqa: PLC0415

        limits = BatchingLimits(
            context_tokens_max=self._limits.context_tokens_max,
            block_size=self._limits.block_size,
            blocks_total=self._limits.blocks_total,
            sequences_max=self._limits.sequences_max,
            chunk_tokens_max=self._options.chunk_tokens,
            step_ns_max=self._options.step_ms * 1_000_000,
            prefix_cache=False,
        )
        return Replica(limits, LinearCostModel(Coefficients()))

    def generate(self, prompts: Prompts, outputs: int) -> dict[str, float]:
        """See ``Engine``; the replica is kept between runs, as its cost model learns."""
        from sluice.core.events import RunStep, StepDone, Submitted  # noqa: PLC0415
        from sluice.core.request import Request, SequenceId  # noqa: PLC0415
        from sluice.core.sampling import Sampling  # noqa: PLC0415

        if self._replica is None:
            self._replica = self._new_replica()
        clock, executor, replica = time.monotonic_ns, self._executor, self._replica
        self._runs += 1
        counts = dict.fromkeys(("handle", "run", "sampling"), 0)
        step_ns: list[int] = []
        inferred_before_ns, start_ns = executor.inferred_ns, clock()
        effects: list[Any] = []
        for number, prompt in enumerate(prompts):
            request = Request(f"{self._runs}-{number}", clock(), tuple(prompt), outputs)
            sequence = SequenceId(request.id, 0)
            executor.open_sequence(sequence, Sampling(temperature=0.0), request.prompt)
            effects += replica.handle(Submitted(request), clock())
        before_ns = clock()
        counts["handle"] = before_ns - start_ns
        while plan := next((e.plan for e in effects if isinstance(e, RunStep)), None):
            outcome = executor.run(plan)
            done_ns = clock()
            event = StepDone(plan.step, outcome.sampled, outcome.duration_ns)
            effects = replica.handle(event, done_ns)
            now_ns = clock()
            step_ns.append(now_ns - before_ns)
            before_ns = now_ns
            counts["handle"] += now_ns - done_ns
            counts["run"] += outcome.duration_ns
            counts["sampling"] += outcome.sampling_ns
        end_ns = clock()
        for number in range(len(prompts)):
            executor.end_sequence(SequenceId(f"{self._runs}-{number}", 0))
        inferred_ns, steps = executor.inferred_ns - inferred_before_ns, len(step_ns)
        return {
            "duration_s": (end_ns - start_ns) / 1e9,
            "decode_step_ms": undisturbed_ms(step_ns, outputs),
            "steps": steps,
            "infer_ms": inferred_ns / steps / 1e6,
            "handle_ms": counts["handle"] / steps / 1e6,
            "sampling_ms": counts["sampling"] / steps / 1e6,
            "inputs_ms": (counts["run"] - counts["sampling"] - inferred_ns) / steps / 1e6,
        }


# ----------------------------------------------------------------------------------------- genai


class GenAi:
    """OpenVINO GenAI's continuous batching with its own defaults, or with our compile settings."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        import openvino_genai  # noqa: PLC0415

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = KV_BYTES // 2**30
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = options.chunk_tokens
        settings: dict[str, Any] = {}
        if options.numerics == "exact":
            settings = {
                "INFERENCE_PRECISION_HINT": "f32",
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
                "KV_CACHE_PRECISION": "f32",
            }
        elif options.genai_settings == "ours":
            settings = {"KV_CACHE_PRECISION": "bf16", "ENABLE_CPU_PINNING": "NO"}
        if options.threads is not None:
            settings["INFERENCE_NUM_THREADS"] = str(options.threads)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(folder), scheduler, "CPU", settings
        )

    def generate(self, prompts: Prompts, outputs: int) -> dict[str, float]:
        """See ``Engine``."""
        import openvino  # noqa: PLC0415

        config = self._genai.GenerationConfig(
            max_new_tokens=outputs, ignore_eos=True, do_sample=False
        )
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        step_ns = []
        start_ns = before_ns = time.monotonic_ns()
        handles = [
            self._pipeline.add_request(number, tokens, config)
            for number, tokens in enumerate(inputs)
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now_ns = time.monotonic_ns()
            step_ns.append(now_ns - before_ns)
            before_ns = now_ns
        answers = [handle.read_all()[0] for handle in handles]
        assert all(len(a.generated_ids) == outputs for a in answers)
        return {
            "duration_s": (before_ns - start_ns) / 1e9,
            "decode_step_ms": undisturbed_ms(step_ns, outputs),
        }


ENGINES: Mapping[str, type[Sluice] | type[GenAi]] = {"sluice": Sluice, "genai": GenAi}


def child_main(options: argparse.Namespace) -> None:
    """Load one engine and answer one line of JSON per run, until standard input closes."""
    engine: Engine = ENGINES[options.child](options.folder, options)
    for line in sys.stdin:
        cell = json.loads(line)
        random = np.random.default_rng(sorted(cell.values()))
        shape = (cell["concurrency"], cell["prompt_tokens"])
        prompts = random.integers(VOCAB_FROM, VOCAB_TO, shape).tolist()
        print("@" + json.dumps(engine.generate(prompts, cell["output_tokens"])), flush=True)


# ---------------------------------------------------------------------------------------- parent


def measure(
    children: Mapping[str, Child], cell: dict[str, int], repeats: int
) -> dict[str, list[dict[str, float]]]:
    """Run one cell on all engines in turn, ``repeats`` times after one unmeasured round."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in children}
    for number in range(repeats + 1):
        # Whoever goes first in one round goes last in the next.
        order = list(children) if number % 2 else list(children)[::-1]
        for name in order:
            facts = children[name].ask({**cell, "seed": number})
            if number:
                runs[name].append(facts)
    return runs


def summary(cell: dict[str, int], runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians and ratio of one cell; tokens are outputs, or prompts where one output was asked."""
    kind = "prefill" if cell["output_tokens"] == 1 else "output"
    each = cell["prompt_tokens"] if kind == "prefill" else cell["output_tokens"]
    rates = {
        name: [cell["concurrency"] * each / run["duration_s"] for run in facts]
        for name, facts in runs.items()
    }
    ours = runs["sluice"]
    ratios = [a / b for a, b in zip(rates["sluice"], rates["genai"], strict=True)]
    facts = {key: median(run[key] for run in ours) for key in ours[0] if key != "duration_s"}
    decode_ms = {name: min(run["decode_step_ms"] for run in runs[name]) for name in runs}
    parts_ms = ("handle_ms", "sampling_ms", "inputs_ms")
    host_ms = sum(facts[key] for key in parts_ms)
    return {
        **cell,
        "kind": kind,
        **{f"{name}_tokens_per_s": median(values) for name, values in rates.items()},
        "ratio": median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        **facts,
        "decode_step_ms": decode_ms["sluice"],
        "genai_decode_step_ms": decode_ms["genai"],
        "decode_ratio": decode_ms["genai"] / (decode_ms["sluice"] or 1),
        "host_share": host_ms / (host_ms + facts["infer_ms"]),
        "load_average": os.getloadavg()[0],
    }


COLUMNS = (
    ("kind", "{kind:8}"),
    ("prompt", "{prompt_tokens:6d}"),
    ("rows", "{concurrency:4d}"),
    ("sluice/s", "{sluice_tokens_per_s:8.0f}"),
    ("genai/s", "{genai_tokens_per_s:8.0f}"),
    ("ratio", "{ratio:5.2f}"),
    ("low..high", "{ratio_low:4.2f}..{ratio_high:4.2f}"),
    ("step ms", "{decode_step_ms:8.2f}"),
    ("genai ms", "{genai_decode_step_ms:8.2f}"),
    ("ratio", "{decode_ratio:5.2f}"),
    ("infer ms", "{infer_ms:8.2f}"),
    ("handle", "{handle_ms:6.3f}"),
    ("sample", "{sampling_ms:6.3f}"),
    ("inputs", "{inputs_ms:6.3f}"),
    ("host", "{host_share:6.1%}"),
    ("load", "{load_average:4.1f}"),
)


def print_row(result: dict[str, Any] | None, stream: Any) -> None:
    """Print one line of the table, or its heading for ``None``."""
    cells = []
    for title, form in COLUMNS:
        text = title if result is None else form.format(**result)
        cells.append(text.rjust(max(len(title), 8)))
    print(" | ".join(cells), file=stream, flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="model folder; default: the catalogue's model")
    parser.add_argument("--numerics", choices=("fast", "exact"), default="fast")
    parser.add_argument("--genai-settings", choices=("defaults", "ours"), default="defaults")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=int, default=100)
    parser.add_argument("--concurrency", type=int, nargs="*", default=CONCURRENCIES)
    parser.add_argument("--prompts", type=int, nargs="*")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--outputs", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def default_folder() -> Path:
    """Fetch and convert the catalogue's default model, or find it in the cache."""
    from sluice.catalog.models import DEFAULT_MODEL  # noqa: PLC0415
    from sluice.config.load import load_settings  # noqa: PLC0415
    from sluice.config.sections import ModelSection  # noqa: PLC0415
    from sluice.runtime.model_folder import ModelFolder  # noqa: PLC0415
    from sluice.wiring.gateway import prepare  # noqa: PLC0415

    section = load_settings().settings.catalogue
    (prepared,) = prepare({"m": ModelSection(source=DEFAULT_MODEL)}, section, lambda *_: None)
    assert isinstance(prepared.folder, ModelFolder), "the default model is a real one"
    return prepared.folder.path


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    options = parse(arguments)
    if options.child:
        child_main(options)
        return
    folder = options.folder or default_folder()
    repeats = options.repeats or (3 if options.quick else 5)
    outputs = options.outputs or (32 if options.quick else 128)
    results = []
    stream = sys.stderr if options.json else sys.stdout
    with ExitStack() as stack:
        passed = [*arguments, "--folder", str(folder)]
        children = {
            name: stack.enter_context(started(__file__, [*passed, "--child", name]))
            for name in ENGINES
        }
        print_row(None, stream)
        for prompt_tokens in options.prompts or ((100,) if options.quick else (100, 1000)):
            for concurrency in options.concurrency:
                for output_tokens in (outputs, 1):
                    cell = {
                        "prompt_tokens": prompt_tokens,
                        "concurrency": concurrency,
                        "output_tokens": output_tokens,
                    }
                    results.append(summary(cell, measure(children, cell, repeats)))
                    print_row(results[-1], stream)
    if options.json:
        print(json.dumps({"results": results}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
