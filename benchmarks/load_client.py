"""What the client of ``sluice bench`` can send: ``python benchmarks/load_client.py``.

A null server (the C program of ``benchmarks/relay``) answers at once from one core; the client has
the other one, with one process. Rates rise until one is not reached; the last row in which p99 of
the lag from the plan is within 1 ms is what the client can do. The peer is GuideLLM: ``--peer``
names the Python of its environment and ``--tokenizer`` a folder with any tokenizer, which it wants;
it gets the same prompts and rates from the same server.

- ``whole``: answers that are not streamed: requests/s.
- ``stream``: streams of 200 chunks, 5 ms apart: chunks/s.

CPU is that of the client's processes over the whole run, so that figures hold on a busy machine
too; lags only hold on an idle one. Run it alone: two cores, about three minutes.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.relay.programs import GATEWAY_CORE, Programs
from benchmarks.relay.systems import free_ports
from sluice.loadtest.crew import LiveRunner, Texts
from sluice.loadtest.plans import Traffic
from sluice.loadtest.trial import Span, TrialOutcome
from sluice.loadtest.wire import Target
from sluice.workload.arrivals import Constant
from sluice.workload.lengths import lengths_of
from sluice.workload.synthetic import Synthetic

LAG_S_MAX = 1e-3
CHUNKS = 200
WHOLE_RPS = (500, 1000, 2000, 3000, 4000, 5000)
STREAM_RPS = (25, 50, 100, 150, 200, 250)
PROMPT = "word " * 60
MARK = f"@@events={CHUNKS},gap=5000@@ "


@dataclass(frozen=True, slots=True)
class Peer:
    """Where GuideLLM is, a tokenizer for it, and the CPU time that a run of it takes to start."""

    python: Path
    tokenizer: Path
    start_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One client at one rate. ``units`` are answers, or chunks where answers are streamed."""

    client: str
    kind: str
    asked_rps: float
    units_per_s: float
    units_per_core_s: float
    lag_s_p99: float | None

    @property
    def reached(self) -> bool:
        """Whether the rate was about reached; a peer leaves the streams of the last second."""
        units = CHUNKS if self.kind == "stream" else 1
        return self.units_per_s >= 0.75 * units * self.asked_rps

    @property
    def kept(self) -> bool:
        """Whether the client kept its schedule."""
        return self.reached and self.lag_s_p99 is not None and self.lag_s_p99 <= LAG_S_MAX


def ours(port: int, kind: str, rate_rps: float, counted_s: float) -> Row:
    """One trial of the package's own client."""
    streamed = kind == "stream"
    text = (MARK if streamed else "") + PROMPT
    target = Target("127.0.0.1", port, "mock", streamed=streamed)
    traffic = Traffic(Synthetic(1.0, lengths_of(64, CHUNKS), Constant()), run="client")
    plan = traffic.open_loop(rate_rps, Span(counted_s, 1.0, 0.0, 30.0), seed=1)
    with LiveRunner(target, Texts(own=(text.encode(),))) as runner:
        outcome = runner.run(plan)
    units = _units(outcome, streamed=streamed)
    cpu_s = outcome.client["cpu_share"] * (counted_s + 1.0)
    lag_s = outcome.client["lag_s_p99"]
    whole = units * (counted_s + 1.0) / counted_s
    return Row("sluice", kind, rate_rps, units / counted_s, whole / cpu_s, lag_s)


def _units(outcome: TrialOutcome, *, streamed: bool) -> int:
    done = [one for one in outcome.counted if one.done]
    return sum(one.chunks for one in done) if streamed else len(done)


def guidellm(peer: "Peer", port: int, kind: str, rate_rps: float, counted_s: float) -> Row:
    """One run of GuideLLM. What it takes to start is taken off its CPU time."""
    cpu_s, report = _run_guidellm(peer, port, kind, rate_rps, counted_s)
    answers, delays_s = _of_guidellm(report)
    units = answers * (CHUNKS if kind == "stream" else 1)
    lag_s = sorted(delays_s)[int(0.99 * (len(delays_s) - 1))] if delays_s else None
    per_core = units / max(cpu_s - peer.start_cpu_s, 0.01)
    return Row("GuideLLM", kind, rate_rps, units / counted_s, per_core, lag_s)


def _run_guidellm(
    peer: "Peer", port: int, kind: str, rate_rps: float, counted_s: float
) -> tuple[float, Mapping[str, Any]]:
    """Its CPU seconds and its report."""
    streamed = kind == "stream"
    with tempfile.TemporaryDirectory() as scratch:
        prompts, out = Path(scratch) / "prompts.txt", Path(scratch) / "out.json"
        line = (MARK if streamed else "") + PROMPT
        prompts.write_text(f"{line}\n" * max(1000, round(rate_rps * counted_s * 1.2)))
        backend = f"kind=openai_http,target=http://127.0.0.1:{port},model=mock"
        command = [
            str(peer.python.parent / "guidellm"), "run", "--disable-console-outputs",
            "--backend", f"{backend},stream={'true' if streamed else 'false'}",
            "--profile", f"kind=constant,rate={rate_rps}",
            "--constraint", f"kind=max_duration,seconds={counted_s}",
            "--tokenizer", f"kind=hf_auto,model={peer.tokenizer}",
            "--data", f"kind=text_file,path={prompts}",
            "--output", f"kind=json,path={out}",
        ]  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command, check=False, capture_output=True, text=True,
            env={"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1", "HOME": scratch},
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode or not out.exists():
            raise SystemExit(f"GuideLLM failed: {(done.stderr or done.stdout)[-2000:]}")
        report = json.loads(out.read_text())
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, report


def _of_guidellm(report: Mapping[str, Any]) -> tuple[int, list[float]]:
    """Whole answers, and how much later than targeted each request began."""
    requests = report["benchmarks"][0]["requests"]["successful"]
    delays_s = []
    for each in requests:
        timings = each.get("info", {}).get("timings", {})
        targeted, began = timings.get("targeted_start"), timings.get("request_start")
        if targeted and began:
            delays_s.append(began - targeted)
    return len(requests), delays_s


@contextmanager
def null_server() -> Iterator[int]:
    """The port of a server that answers at once."""
    with tempfile.TemporaryDirectory() as scratch:
        programs = Programs(Path(scratch))
        (port,) = free_ports(1)
        programs.start_upstream([port])
        try:
            yield port
        finally:
            programs.stop()


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| client | answers | asked/s | answers or chunks/s | per core·s | lag p99 ms | kept |"
    ]
    lines.append("|---|---|---:|---:|---:|---:|---|")
    for row in rows:
        lag = "not told" if row.lag_s_p99 is None else f"{1e3 * row.lag_s_p99:.2f}"
        cells = (
            row.client, row.kind, f"{row.asked_rps:,.0f}", f"{row.units_per_s:,.0f}",
            f"{row.units_per_core_s:,.0f}", lag, "yes" if row.kept else "no",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, help="Python of an environment with guidellm")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each trial")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer for the peer")
    options = parser.parse_args()
    peer = None
    if options.peer is not None:
        if options.tokenizer is None:
            parser.error("--peer needs --tokenizer")
        peer = Peer(options.peer, options.tokenizer)
    rows: list[Row] = []
    began_s = time.monotonic()
    with null_server() as port:
        os.sched_setaffinity(0, {GATEWAY_CORE})
        for kind, rates in (("whole", WHOLE_RPS), ("stream", STREAM_RPS)):
            for rate in rates:
                rows.append(ours(port, kind, rate, options.seconds))
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
                if not rows[-1].reached:
                    break
            if peer is None:
                continue
            start_cpu_s, _ = _run_guidellm(peer, port, "whole", 2.0, 1.5)
            peer = replace(peer, start_cpu_s=start_cpu_s)
            for rate in rates:
                rows.append(guidellm(peer, port, kind, rate, options.seconds))
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
                if not rows[-1].reached:
                    break
    print(table(rows))
    took_s = time.monotonic() - began_s
    print(f"{took_s:.0f} s, load average {os.getloadavg()[0]:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
