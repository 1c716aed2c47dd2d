"""A recorded trace as a workload: its times scaled to a rate, its lengths and prefixes kept.

``facts_of`` reads a file once from front to back, which checks every row; playing it reads it
again, so that memory does not grow with its length.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from sluice.core.admission import NS_PER_S
from sluice.workload.arrivals import checked_rate
from sluice.workload.asks import Ask, BadWorkload, Part, own_text, shared_text
from sluice.workload.mixes import Mix
from sluice.workload.synthetic import Names
from sluice.workload.trace_rows import Columns, TraceRow, trace_rows

OWN = ("azure-conv", "azure-code")
# Mooncake's traces, the only ones that tell blocks, and what their times were rounded to.
BLOCK_TOKENS = 512
ROUNDED_S = 3.0


def trace_path(name: str) -> Path:
    """The file of one of our own traces by its name, else the path ``name``."""
    if name in OWN:
        return Path(str(files("sluice.workload") / "own" / f"{name}.csv.gz"))
    path = Path(name)
    if not path.is_file():
        raise BadWorkload(f"there is no trace file {name}; traces by name are {', '.join(OWN)}")
    return path


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """A trace as a whole: how many requests in what time, and their mean lengths."""

    path: Path
    columns: Columns | None
    requests: int
    span_s: float
    prompt_tokens: float
    output_tokens: float

    @property
    def rate_rps(self) -> float:
        """Mean rate, with as long a gap after the last request as there is between others."""
        return self.requests / self.period_s

    @property
    def period_s(self) -> float:
        """Time after which the trace begins again where it is repeated."""
        return self.span_s * self.requests / (self.requests - 1)


def facts_of(path: Path, columns: Columns | None = None) -> TraceFacts:
    """Read and check a whole trace. Raises ``BadWorkload``."""
    requests = prompt = output = 0
    last_s = 0.0
    for row in trace_rows(path, columns):
        requests += 1
        prompt += row.prompt_tokens
        output += row.output_tokens
        last_s = row.at_s
    if requests < 2 or last_s <= 0.0:
        raise BadWorkload(
            f"the trace {path} has {requests} request{'s' if requests > 1 else ''} in "
            f"{last_s:g} s: a rate needs two at different times"
        )
    return TraceFacts(path, columns, requests, last_s, prompt / requests, output / requests)


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace, over and over. ``rate_rps`` stretches or shrinks its time, ``None``
    keeps it. Names in its rows count before those of ``mix``.
    """

    facts: TraceFacts
    rate_rps: float | None = None
    mix: Mix = field(default_factory=Mix)
    output_tokens_max: int | None = None

    def asks(self, seed: int) -> Iterator[Ask]:
        """See ``Workload``; endless. ``seed`` decides the names of the mix alone."""
        names, number, past_s = Names(self.mix, seed), 0, 0.0
        facts = self.facts
        scale = 1.0
        if self.rate_rps is not None:
            scale = facts.rate_rps / checked_rate(self.rate_rps)
        while True:
            for row in spread_out(trace_rows(facts.path, facts.columns), facts.period_s):
                model, slo_class, tenant = names.draw()
                yield Ask(
                    number,
                    round((past_s + row.at_s) * scale * NS_PER_S),
                    _parts(row, number),
                    row.output_tokens,
                    self.output_tokens_max,
                    row.model or model,
                    row.slo_class or slo_class,
                    row.tenant or tenant,
                )
                number += 1
            past_s += facts.period_s


def spread_out(rows: Iterator[TraceRow], end_s: float) -> Iterator[TraceRow]:
    """Rows with blocks spread evenly from their common time to the next one, or ``end_s``.

    Times that were rounded put requests into one instant that came one after the other.
    """
    group: list[TraceRow] = []
    for row in rows:
        if group and row.at_s > group[0].at_s:
            yield from _spread(group, row.at_s)
            group = []
        if row.blocks:
            group.append(row)
        else:
            yield row
    yield from _spread(group, end_s)


def _spread(group: list[TraceRow], next_s: float) -> Iterator[TraceRow]:
    for number, row in enumerate(group):
        over_s = min(ROUNDED_S, next_s - row.at_s)
        yield row._replace(at_s=row.at_s + over_s * number / len(group))


def _parts(row: TraceRow, number: int) -> tuple[Part, ...]:
    """The prompt's blocks as texts of their own; what follows the last whole one is unique."""
    whole = min(len(row.blocks), row.prompt_tokens // BLOCK_TOKENS)
    parts = tuple(Part(shared_text(block + 1), BLOCK_TOKENS) for block in row.blocks[:whole])
    left = row.prompt_tokens - whole * BLOCK_TOKENS
    return (*parts, Part(own_text(number), left)) if left else parts
