"""What weights, precision and threads cost the embedded engine in quality and in speed.

Run with ``python benchmarks/quality.py`` (``--parts`` picks tables, ``--json`` gives one document).
Perplexity is of a fixed text, each token predicted from up to 1,023 before it. Its ratio is to
`exact` on the same weights, with one standard deviation; the mean squared error is of a token's
log-probability against the weights of the file, and tells settings apart that ratios do not.
For speed every setting lives in a process of its own, and the processes take turns step by step, so
that a disturbance of the machine meets all of them: ratios are medians over rounds against the
first row, tokens/s come from the lowest quarter of the rounds.

The model is converted from the GGUF into a temporary folder twice: by GenAI alone, and as sluice
does it.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.children import Child, started
from benchmarks.load.engines import default_gguf

REPOSITORY = Path(__file__).parent.parent
TEXTS = (REPOSITORY / "tests" / "executors" / "prose.txt", REPOSITORY / "LICENSE")
WINDOW, CHUNK = 1024, 256
BLOCKS_EACH = 34  # of 32 tokens, for the longest context that is timed

GROUP = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
EXACT = {**F32, GROUP: "0", "KV_CACHE_PRECISION": "f32"}
BF16 = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
F32_F16 = {**F32, "KV_CACHE_PRECISION": "f16"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the model.

    ``weights`` is "file" (float32 values of the Q4_1 file), "genai" (4 bits, as GenAI converts) or
    "ours" (8 bits per row, channels evened out). ``threads`` ``None`` is OpenVINO's choice.
    """

    title: str
    weights: str
    settings: Mapping[str, str]
    joined: bool = True
    large_pages: bool = True
    threads: int | None = None


def ours(group: int, **changes: Any) -> Variant:
    """Our weights in bfloat16, activations quantised in groups of ``group``; 0 leaves them."""
    kind = f"groups of {group}" if group else "not quantised"
    return Variant(f"8-bit, bfloat16, {kind}", "ours", {**BF16, GROUP: str(group)}, **changes)


GENAI = Variant("GenAI's conversion and defaults", "genai", {}, joined=False, large_pages=False)
QUALITY = (
    Variant("Q4_1 as in the file, float32", "file", EXACT, joined=False),
    Variant("GenAI's conversion, float32", "genai", EXACT, joined=False),
    GENAI,
    Variant("8-bit (`exact`)", "ours", EXACT, joined=False),
    *(ours(group) for group in (0, 32, 64, 96, 192, 288)),
)
SPEED = (
    GENAI,
    Variant("4-bit, bfloat16, groups of 32", "genai", BF16),
    *(ours(group) for group in (64, 96, 192, 288)),
    Variant("8-bit, bfloat16, groups of 192, small pages", "ours", {**BF16, GROUP: "192"}, True, False),  # noqa: E501, FBT003
    Variant("8-bit, bfloat16, groups of 192, 8-bit KV", "ours", {**BF16, GROUP: "192", "KV_CACHE_PRECISION": "u8"}),  # noqa: E501
    Variant("8-bit, float32, groups of 192", "ours", {**F32_F16, GROUP: "192"}),
)  # fmt: skip
SINGLE = (
    ours(192),
    ours(192, threads=1),
    ours(192, large_pages=False),
    ours(32),
    ours(0),
    Variant("8-bit, float32, groups of 192", "ours", {**F32_F16, GROUP: "192"}),
    Variant("8-bit, float32, not quantised", "ours", {**F32_F16, GROUP: "0"}),
    Variant("4-bit, bfloat16, groups of 32", "genai", BF16),
    Variant("4-bit, float32, not quantised", "genai", {**F32_F16, GROUP: "0"}),
)
PARTS = {"perplexity": QUALITY, "speed": SPEED, "single": SINGLE}

# Name: (rows, tokens per row, tokens before them).
SPEED_CELLS = {
    "×1": (1, 1, 150), "×8": (8, 1, 150), "×16": (16, 1, 150), "×32": (32, 1, 150),
    "×32 after 1,000": (32, 1, 1000), "prefill 256": (1, 256, 0), "256 after 500": (1, 256, 500),
}  # fmt: skip
SINGLE_CELLS = {"×1": (1, 1, 100), "×4": (4, 1, 100), "×8": (8, 1, 100)}


# ------------------------------------------------------------------------------------------ child


class Engine:
    """One compiled variant whose inputs are set row by row, with logits wherever asked for."""

    def __init__(self, variant: Variant, folder: Path) -> None:
        import openvino as ov  # noqa: PLC0415
        from openvino._offline_transformations import (  # noqa: PLC0415
            paged_attention_transformation,
        )

        from sluice.executors import openvino_graph as graph  # noqa: PLC0415

        self._ov = ov
        model = ov.Core().read_model(folder / "openvino_model.xml")
        if variant.joined:
            graph.join_products(model)
        paged_attention_transformation(model)
        graph.gather_sampled_rows(model)
        settings = {"ENABLE_CPU_PINNING": "NO", **variant.settings}
        if variant is GENAI:
            settings = {}
        if variant.threads is not None:
            settings["INFERENCE_NUM_THREADS"] = str(variant.threads)
        compiled = ov.Core().compile_model(model, "CPU", settings)
        self._request = compiled.create_infer_request()
        self._caches = []
        for port in compiled.inputs:
            if port.any_name.startswith(("key_cache.", "value_cache.")):
                block = [size.get_length() for size in list(port.partial_shape)[1:]]
                shape = ov.Shape([32 * BLOCKS_EACH, *block])
                self._caches.append(ov.Tensor(port.element_type, shape))
                self._request.set_tensor(port.any_name, self._caches[-1])

    def prepare(self, rows: int, tokens: Sequence[int], past: int, sampled: Sequence[int]) -> None:
        """Set the inputs of a step in which ``rows`` sequences compute the same ``tokens``."""
        count = len(tokens)
        blocks = -(-(past + count) // 32)
        tables = np.arange(rows)[:, None] * BLOCKS_EACH + np.arange(blocks)
        inputs = {
            "input_ids": np.tile(tokens, rows).astype(np.int64),
            "position_ids": np.tile(np.arange(past, past + count), rows).astype(np.int64),
            "past_lens": np.full(rows, past, np.int32),
            "subsequence_begins": np.arange(rows + 1, dtype=np.int32) * count,
            "block_indices": tables.reshape(-1).astype(np.int32),
            "block_indices_begins": np.arange(rows + 1, dtype=np.int32) * blocks,
            "max_context_len": np.array(past + count, np.int32),
            "sampled_rows": np.asarray(sampled, np.int64),
        }
        for name, values in inputs.items():
            self._request.set_tensor(name, self._ov.Tensor(values))

    def compute(self) -> Any:
        """Run the step that was prepared; return its logits, [sampled rows, vocabulary]."""
        self._request.infer()
        logits = self._request.get_output_tensor(0).data
        return logits.reshape(-1, logits.shape[-1])

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first, given those before it in its window."""
        found: list[float] = []
        for start in range(0, len(tokens), WINDOW):
            window = tokens[start : start + WINDOW]
            for past in range(0, len(window), CHUNK):
                chunk = window[past : past + CHUNK]
                self.prepare(1, chunk, past, range(len(chunk)))
                nexts = np.array(window[past + 1 : past + CHUNK + 1], np.int64)
                logits = self.compute()[: len(nexts)].astype(np.float64)
                top = logits.max(axis=1)
                total = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
                found += (logits[np.arange(len(nexts)), nexts] - total).tolist()
        return found

    def fill(self, tokens: Sequence[int]) -> None:
        """Compute a context and give all sequences a copy: memory never written is too quick."""
        text = (list(tokens) * WINDOW)[:WINDOW]
        for past in range(0, WINDOW, CHUNK):
            self.prepare(1, text[past : past + CHUNK], past, [0])
            self.compute()
        for cache in self._caches:
            values = cache.data
            for block in range(WINDOW // 32, values.shape[0]):
                values[block] = values[block % (WINDOW // 32)]

    def time_s(self, rows: int, count: int, past: int) -> float:
        """Duration of one step, the second of two alike."""
        tokens, duration_s = range(500, 500 + count), 0.0
        for _ in range(2):
            self.prepare(rows, tokens, past, [(row + 1) * count - 1 for row in range(rows)])
            start_s = time.perf_counter()
            self._request.infer()
            duration_s = time.perf_counter() - start_s
        return duration_s


def child_main(part: str, place: int, folder: Path, tokens: Sequence[int]) -> None:
    """Load one variant; answer each line, a cell or ``null`` for log-probabilities, with JSON."""
    from sluice.executors.large_pages import use_large_pages  # noqa: PLC0415

    variant = PARTS[part][place]
    engine = Engine(variant, folder / variant.weights)
    if part != "perplexity":
        engine.fill(tokens)
    if variant.large_pages:
        use_large_pages()
    for line in sys.stdin:
        cell = json.loads(line)
        answer: Any = engine.logprobs(tokens) if cell is None else engine.time_s(*cell)
        print("@" + json.dumps(answer), flush=True)


# ----------------------------------------------------------------------------------------- parent


def convert_all(gguf: Path, folder: Path) -> None:
    """Write the model in the three kinds of weights; each kind is a folder of IR."""
    import openvino as ov  # noqa: PLC0415
    from openvino import opset13 as opset  # noqa: PLC0415

    from sluice.executors.gguf import read_gguf  # noqa: PLC0415
    from sluice.executors.gguf_weights import Weights  # noqa: PLC0415
    from sluice.executors.openvino_convert import write_genai_ir  # noqa: PLC0415
    from sluice.executors.openvino_graph import packed_weight  # noqa: PLC0415
    from sluice.executors.openvino_ir import prepare_ir  # noqa: PLC0415
    from sluice.executors.openvino_weights import match_matrices  # noqa: PLC0415

    prepare_ir(gguf, folder / "ours", progress)
    (folder / "genai").mkdir()
    write_genai_ir(gguf.resolve(), folder / "genai")
    model = ov.Core().read_model(folder / "genai" / "openvino_model.xml")
    products = [node for node in model.get_ordered_ops() if packed_weight(node) is not None]
    matrices = match_matrices(products, Weights(read_gguf(gguf)))
    if matrices is None:
        raise SystemExit(f"{gguf} is not a Q4_1 file that sluice converts by its own weights")
    for product, matrix in zip(products, matrices, strict=True):
        product.input(1).replace_source_output(opset.constant(matrix).output(0))
    (folder / "file").mkdir()
    ov.save_model(model, folder / "file" / "openvino_model.xml", compress_to_fp16=False)


def child_of(part: str, place: int, folder: Path) -> AbstractContextManager[Child]:
    """A variant's process."""
    return started(__file__, ["--child", part, str(place), str(folder)])


def progress(text: str) -> None:
    """Say on standard error what is being done."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure_perplexity(folder: Path) -> list[dict[str, Any]]:
    """Perplexity of each variant and its ratio to `exact` on the same weights, with an error."""
    found: dict[str, Any] = {}
    for place, variant in enumerate(QUALITY):
        progress(f"perplexity: {variant.title}")
        with child_of("perplexity", place, folder) as child:
            found[variant.title] = np.array(child.ask(None))
    exact = {"file": QUALITY[0], "genai": QUALITY[1], "ours": QUALITY[3]}
    rows = []
    for variant in QUALITY:
        logprobs = found[variant.title]
        differences = found[exact[variant.weights].title] - logprobs
        rows.append(
            {
                "setting": variant.title,
                "tokens": logprobs.size,
                "perplexity": float(np.exp(-logprobs.mean())),
                "ratio_to_exact": float(np.exp(differences.mean())),
                "ratio_error": float(differences.std() / np.sqrt(differences.size)),
                "squared_error": float(((logprobs - found[QUALITY[0].title]) ** 2).mean()),
            }
        )
    return rows


def measure_speed(
    part: str, cells: Mapping[str, tuple[int, int, int]], folder: Path, rounds: int
) -> list[dict[str, Any]]:
    """Tokens/s and ratio to the first variant of each cell, all variants in turn."""
    variants = PARTS[part]
    times: dict[tuple[int, str], list[float]] = {}
    with ExitStack() as stack:
        children = []
        for place, variant in enumerate(variants):
            progress(f"{part}: loading {variant.title}")
            children.append(stack.enter_context(child_of(part, place, folder)))
            children[-1].ask((1, 1, 0))
        for number in range(rounds):
            progress(f"{part}: round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}")
            turn = [(place + number) % len(children) for place in range(len(children))]
            for name, cell in cells.items():
                for place in turn:
                    times.setdefault((place, name), []).append(children[place].ask(cell))
    rows = []
    for place, variant in enumerate(variants):
        row: dict[str, Any] = {"setting": variant.title, "threads": variant.threads}
        row["large_pages"] = variant.large_pages
        for name, (count, tokens, _) in cells.items():
            own, first = times[place, name], times[0, name]
            low_s = quantiles(own, n=4)[0] if len(own) > 1 else own[0]
            ratio = median(a / b for a, b in zip(first, own, strict=True))
            row[name] = {"tokens_per_s": count * tokens / low_s, "ratio": ratio}
        rows.append(row)
    return rows


def print_perplexity(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of perplexities."""
    print(
        f"\n| setting | perplexity of {rows[0]['tokens']} tokens | to exact on the same weights |"
    )
    print("|---|---|---|")
    for row in rows:
        ratio = f"{row['ratio_to_exact']:.4f} ± {row['ratio_error']:.4f}"
        error = f"{row['squared_error']:.4f}"
        print(f"| {row['setting']} | {row['perplexity']:.2f} | {ratio} | {error} |")


def print_speed(rows: Sequence[Mapping[str, Any]], cells: Sequence[str]) -> None:
    """Print tokens/s and ratios, a column per cell."""
    print(f"\n| setting | threads | large pages | {' | '.join(cells)} |")
    print("|---" * (len(cells) + 3) + "|")
    for row in rows:
        parts = [f"{row[name]['tokens_per_s']:.0f} ({row[name]['ratio']:.2f})" for name in cells]
        pages = "yes" if row["large_pages"] else "no"
        print(f"| {row['setting']} | {row['threads'] or 'all'} | {pages} | {' | '.join(parts)} |")


def text_tokens(folder: Path, texts: Sequence[Path]) -> list[int]:
    """Return the tokens of the texts, which are read as one."""
    from tokenizers import Tokenizer  # noqa: PLC0415

    text = "\n".join(path.read_text() for path in texts)
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, help="a Q4_1 file; default: the catalogue's model")
    parser.add_argument("--text", type=Path, nargs="*", default=TEXTS)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def write_tokens(gguf: Path, texts: Sequence[Path], folder: Path) -> None:
    """Tokenise the text once, for all children."""
    from sluice.executors.gguf import read_gguf  # noqa: PLC0415
    from sluice.runtime.prepare import write_text_side  # noqa: PLC0415

    write_text_side(read_gguf(gguf), "", folder)
    (folder / "tokens.json").write_text(json.dumps(text_tokens(folder, texts)))


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    options = parse(arguments)
    if options.child:
        part, place, folder = options.child
        tokens = json.loads((Path(folder) / "tokens.json").read_text())
        child_main(part, int(place), Path(folder), tokens)
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        gguf = options.gguf or default_gguf()
        convert_all(gguf, folder)
        write_tokens(gguf, options.text, folder)
        for part in options.parts:
            results[part] = measure(part, folder, options)
    if options.json:
        print(json.dumps(results, indent=1))


def measure(part: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Make one table and print it, unless one document is asked for."""
    if part == "perplexity":
        rows = measure_perplexity(folder)
        if not options.json:
            print_perplexity(rows)
        return rows
    cells = SPEED_CELLS if part == "speed" else SINGLE_CELLS
    rows = measure_speed(part, cells, folder, options.rounds)
    if not options.json:
        print_speed(rows, list(cells))
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
