"""One command on three servers: ``python benchmarks/endpoints.py --peers FOLDER``.

``sluice bench`` searches capacity and SLO rate of sluice's embedded engine, of a llama.cpp server
and of vLLM's CPU build, in turn, each with the same model, prompts, targets and time, and prints
them beside each other. sluice is searched twice with different seeds: the two intervals are to
overlap. ``benchmarks/load/install.py`` makes the peers' environments. Run it alone: the server and
the client share the cores, and a search takes ``--budget``. Documents of searches are kept in
``--runs``, and a search whose document is there is not repeated.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.load.engines import Places, default_gguf, start
from benchmarks.load.outcomes import Targets

Found = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """A search: which engine, what it is called in the table, and its seed."""

    engine: str
    title: str
    seed: int

    @property
    def file(self) -> str:
        """Name of its document."""
        return f"{self.engine}-{self.seed}.json"


RUNS = (
    Run("slo", "sluice", 1),
    Run("slo", "sluice, again", 2),
    Run("llama", "llama.cpp", 1),
    Run("vllm", "vLLM, CPU build", 1),
)


def bench(options: argparse.Namespace, places: Places, run: Run) -> Found:
    """Start the engine, search, stop it. Raises ``RuntimeError`` where it finds nothing."""
    document = options.runs / run.file
    if not _kept(document):
        engine = start(run.engine, places, Targets(options.ttft, options.tpot))
        try:
            command = [
                sys.executable, "-m", "sluice", "bench", engine.target.url,
                "--ttft", f"{options.ttft}s", "--tpot", f"{options.tpot}s",
                "--input", str(options.input), "--output", str(options.output), "--class", "chat=1",
                "--budget", options.budget, "--seed", str(run.seed), "--out", str(document),
                *(["--quick"] if options.quick else []),
            ]  # fmt: skip
            print(f"{run.title}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
            subprocess.run(command, check=False, stdout=sys.stderr)
        finally:
            engine.stop()
    found: Found = json.loads(document.read_text()) if _kept(document) else {}
    if not found.get("slo_rps"):
        raise RuntimeError(f"the search of {run.title} found no SLO rate: see {document}")
    return found


def _kept(document: Path) -> bool:
    """Whether a search ended with it; the file is made empty when a search begins."""
    return document.exists() and document.stat().st_size > 0


def row(title: str, found: Found) -> Sequence[str]:
    """What a search found, as cells."""
    capacity, slo = found["capacity_rps"], found["slo_rps"]
    closed = capacity["closed_loop"]
    return (
        title,
        _between(capacity),
        "–" if closed is None else f"{_rate(closed['estimate'])} ({closed['concurrency']})",
        _between(slo) if slo["high"] is None else f"{_rate(slo['estimate'])} ({_between(slo)})",
        _rate(slo["certified"]),
        found["binding"] or "–",
        f"{found['spent_s']:.0f} s",
    )


def _between(bounds: Found) -> str:
    """The bounds; one that has no upper one was missed by no trial."""
    if bounds["high"] is None:
        return f"at least {_rate(bounds['low'])}"
    return f"{_rate(bounds['low'])} to {_rate(bounds['high'])}"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


HEADER = (
    "server", "capacity, requests/s", "closed loop (clients)", "SLO rate (90 % interval)",
    "certified", "binding", "took",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Search each server in turn, then print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--peers", type=Path, required=True, help="folder of environments")
    parser.add_argument("--runs", type=Path, required=True, help="folder for documents")
    parser.add_argument("--engines", nargs="+", default=["slo", "llama", "vllm"])
    parser.add_argument("--quick", action="store_true", help="searches of five minutes")
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--ttft", type=float, default=1.0, help="seconds")
    parser.add_argument("--tpot", type=float, default=0.2, help="seconds")
    parser.add_argument("--input", type=int, default=80)
    parser.add_argument("--output", type=int, default=16)
    options = parser.parse_args(arguments)
    options.runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        places = Places(options.peers, default_gguf(), Path(folder))
        rows = [
            row(run.title, bench(options, places, run))
            for run in RUNS
            if run.engine in options.engines and places.has(run.engine)
        ]
    for cells in (HEADER, ("---",) * len(HEADER), *rows):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
