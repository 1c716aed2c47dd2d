"""What is measured of each gateway, one function for each scenario: loads in, figures out.

Figures are those of one run; what a gateway adds is the difference to the run without one in the
same round, which ``tables.py`` takes.
"""

import json
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from benchmarks.relay.programs import Group, Load, Printed, Programs, awake
from benchmarks.relay.systems import KEY, MODEL, System

Figures = Mapping[str, float | None]

_WORDS = ("river", "stone", "cloud", "paper", 'so "far"', "light", "water", "n\u00f6rth", "glass")
_SMALL_BYTES, _LARGE_BYTES = 1_700, 398_000
_SOAK_REQUESTS = 100_000


def prepare(programs: Programs) -> None:
    """Make the bodies that the loads send, and the headers."""
    programs.put("no-headers", b"")
    programs.put("key-header", f"authorization: Bearer {KEY}\r\n".encode())
    programs.put("small", _body("", _SMALL_BYTES, stream=False))
    programs.put("large", _body("", _LARGE_BYTES, stream=False))
    programs.put("first", _body("@@events=4,gap=1000@@ ", _SMALL_BYTES, stream=True))
    programs.put("paced", _body("@@events=200,gap=20000@@ ", _SMALL_BYTES, stream=True))
    programs.put("slow", _body("@@events=60,gap=100000@@ ", _SMALL_BYTES, stream=True))


def _body(mark: str, size: int, *, stream: bool) -> bytes:
    words, random = [mark], Random(size)
    length = len(mark)
    while length < size:
        word = random.choice(_WORDS) + (" " if random.random() < 0.9 else "\n")
        words.append(word)
        length += len(word.encode())
    messages = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "".join(words)},
    ]
    request = {"model": MODEL, "messages": messages, "max_tokens": 256, "stream": stream}
    return json.dumps(request, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(slots=True)
class Bench:
    """Runs loads against one gateway at a time.

    ``errors`` counts answers that were none, by gateway and status; 0 is a connection that closed.
    """

    programs: Programs
    errors: dict[str, int]

    def run(self, system: System, load: Load) -> "Measured":
        """Run a load while the gateway is awake, and note what it used."""
        used_s: list[float] = []
        with suppress(ProcessLookupError):
            system.send(signal.SIGCONT)
        try:
            printed = self.programs.drive(
                system.port, system.headers, load, lambda: used_s.append(system.cpu_s())
            )
            resident_mb = system.resident_mb()
        finally:
            with suppress(ProcessLookupError):
                system.send(signal.SIGSTOP)
        for group in printed:
            if group["errors"]:
                key = f"{system.name}, last status {group['status']}"
                self.errors[key] = self.errors.get(key, 0) + group["errors"]
        return Measured(printed, used_s[1] - used_s[0], resident_mb)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the driver printed for each group, and what the gateway used meanwhile."""

    groups: list[Printed]
    cpu_s: float
    resident_mb: float

    def rate(self, what: str = "answers") -> float:
        """Answers, or events, of the first group per second."""
        return float(self.groups[0][what] / self.groups[0]["seconds"])

    def cpu_us(self) -> float | None:
        """Processor time of the gateway for each answer of the first group."""
        answers = self.groups[0]["answers"]
        return self.cpu_s * 1e6 / answers if answers and self.cpu_s else None

    def share(self) -> float:
        """The part of its core that the gateway used."""
        return float(self.cpu_s / self.groups[0]["seconds"])

    def time(self, what: str, point: str, unit_ns: float, group: int = 0) -> float | None:
        """A point of the times of a group, in a unit; ``None`` where nothing came."""
        times = self.groups[group][what]
        return None if times is None else times[point] / unit_ns


Scenario = Callable[[Bench, System], Figures]
_US, _MS = 1e3, 1e6


def one(bench: Bench, system: System) -> Figures:
    """Latencies of a request at a time."""
    with awake():
        whole = bench.run(system, Load((Group(1, "small"),), 0.4))
        first = bench.run(system, Load((Group(1, "first"),), 0.6))
        large = bench.run(system, Load((Group(1, "large"),), 0.5))
    return {
        "whole_us": whole.time("whole", "p50", _US),
        "whole_us_p99": whole.time("whole", "p99", _US),
        "first_us": first.time("first", "p50", _US),
        "large_us": large.time("whole", "p50", _US),
        "cpu_us": whole.cpu_us(),
    }


def load(bench: Bench, system: System) -> Figures:
    """What 64 connections get."""
    run = bench.run(system, Load((Group(64, "small"),), 1.0, 0.3))
    return {
        "requests_per_s": run.rate(),
        "cpu_us": run.cpu_us(),
        "whole_ms": run.time("whole", "p50", _MS),
        "whole_ms_p99": run.time("whole", "p99", _MS),
    }


def paced(bench: Bench, system: System) -> Figures:
    """How 256 streams are passed on."""
    run = bench.run(system, Load((Group(256, "paced"),), 2.0, 1.0))
    share, delivered = run.share(), run.rate("events")
    return {
        "events_per_s": delivered,
        "share": share,
        "events_per_core_s": delivered / share if share else None,
        "event_ms": run.time("event", "p50", _MS),
        "event_ms_p99": run.time("event", "p99", _MS),
        "event_ms_max": run.time("event", "max", _MS),
        "gap_ms_max": run.time("gap", "max", _MS),
    }


def large(bench: Bench, system: System) -> Figures:
    """Bodies of 400 KB, and small requests alone and beside half as many as must be served."""
    run = bench.run(system, Load((Group(64, "large"),), 1.2, 0.3))
    small = Group(32, "small", rate=200)
    alone = bench.run(system, Load((small,), 1.0))
    beside = bench.run(system, Load((small, Group(32, "large", rate=300)), 1.0))
    alone_ms, beside_ms = (r.time("whole", "p99", _MS) for r in (alone, beside))
    raised_ms = None if alone_ms is None or beside_ms is None else beside_ms - alone_ms
    return {
        "requests_per_s": run.rate(),
        "cpu_us": run.cpu_us(),
        "small_ms_p99": alone_ms,
        "beside_ms_p99": beside_ms,
        "raised_ms": raised_ms,
    }


def memory(bench: Bench, system: System) -> Figures:
    """Resident memory: at rest, with 1,000 streams open, and over many requests."""
    if system.process is None:
        return {}
    ready_mb = system.resident_mb()
    streams = bench.run(system, Load((Group(1000, "slow"),), 1.0, 3.0))
    figures: dict[str, float | None] = {"ready_mb": ready_mb, "streams_mb": streams.resident_mb}
    if system.name == "sluice":
        soak = Group(64, "small")
        for name, part in (("early_mb", 0.2), ("late_mb", 0.8)):
            run = bench.run(system, Load((soak,), 120, 0, round(_SOAK_REQUESTS * part)))
            figures[name] = run.resident_mb
    return figures


SCENARIOS: Mapping[str, Scenario] = {
    "one": one,
    "load": load,
    "paced": paced,
    "large": large,
    "memory": memory,
}
# Measured once: what they show does not vary from run to run.
ONCE = frozenset({"memory"})
