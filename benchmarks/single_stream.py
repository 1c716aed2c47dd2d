"""Single-stream decode of the embedded engine against llama.cpp, on the same GGUF and machine.

Run with ``python benchmarks/single_stream.py --gguf FILE --folder FOLDER --llama-python PYTHON``,
where FOLDER is the model folder made of FILE and PYTHON has the package ``xllamacpp``. Both decode
short stretches in turns from processes of their own; the best and the median stretch of each are
printed. Other load on the machine disturbs the median, hardly the best.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

TOKENS = 24
PROMPT = "Once upon a time there was a little fox who lived in the forest and"

LLAMA = """
import json, sys, xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = 1024, 1, 0
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = int(sys.argv[2])
server = xllamacpp.Server(parameters)
for line in sys.stdin:
    asked = {"prompt": sys.argv[4], "n_predict": int(sys.argv[3]), "temperature": 0,
             "ignore_eos": True, "cache_prompt": False}
    answers = []
    answer = server.handle_completions(asked, answers.append) or answers[-1]
    print("@" + json.dumps(answer["timings"]["predicted_per_token_ms"]), flush=True)
"""


def sluice_child(folder: Path, threads: int) -> None:
    """Answer each line of standard input with milliseconds per token of one stretch."""
    from sluice.core.request import SequenceId  # noqa: PLC0415
    from sluice.core.sampling import Sampling  # noqa: PLC0415
    from sluice.core.step import Plan, Row  # noqa: PLC0415
    from sluice.executors.openvino import OpenVinoExecutor  # noqa: PLC0415
    from sluice.executors.openvino_settings import EngineSettings  # noqa: PLC0415

    executor = OpenVinoExecutor(EngineSettings(folder, 1024, kv_bytes=2**28, threads=threads))
    executor.load()
    sequence, blocks = SequenceId("one", 0), tuple(range(32))
    executor.open_sequence(sequence, Sampling(temperature=0.0), ())
    for _ in sys.stdin:
        tokens, past, start_ns = tuple(range(300, 316)), 0, 0
        for step in range(TOKENS + 1):
            row = Row(sequence, tokens, past, blocks, sample=True)
            past += len(tokens)
            tokens = (executor.run(Plan(step, (row,), 0)).sampled[0].token,)
            if step == 0:
                start_ns = time.monotonic_ns()
        print("@" + json.dumps((time.monotonic_ns() - start_ns) / TOKENS / 1e6), flush=True)


def start(command: list[str]) -> subprocess.Popen[str]:
    """Start an engine's process."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
    )


def stretch_ms(process: subprocess.Popen[str]) -> float:
    """Have one stretch decoded; return milliseconds per token."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("@"):
            return float(line[1:])
    raise SystemExit("an engine's process ended early")


def main() -> None:
    """Measure in turns and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--llama-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sluice_child(options.folder, options.threads)
        return
    llama = [options.llama_python, "-c", LLAMA, str(options.gguf), str(options.threads)]
    processes = {
        "sluice": start([sys.executable, *sys.argv, "--child"]),
        "llama.cpp": start([*llama, str(TOKENS), PROMPT]),
    }
    stretches: dict[str, list[float]] = {name: [] for name in processes}
    for _ in range(options.repeats):
        for name, process in processes.items():
            stretches[name].append(stretch_ms(process))
    for name, values in stretches.items():
        best, middle = 1000 / min(values), 1000 / median(values)
        print(f"{name:10} best {best:6.1f} tokens/s   median {middle:6.1f} tokens/s")
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)


if __name__ == "__main__":
    main()
