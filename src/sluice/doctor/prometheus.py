"""What a Prometheus has of engines, as samples: for journals of gateways that cannot read it there.

``range_path`` is what to ask its HTTP API for, ``samples_of`` reads the answer, which may also have
been kept in a file. Names are those of the dialects. Who asks is the command.
"""

from collections import defaultdict
from collections.abc import Iterator
from urllib.parse import urlencode

import msgspec

from sluice.doctor.columns import Sample
from sluice.doctor.windows import Window
from sluice.executors.dialects import DIALECTS, Dialect
from sluice.executors.scrape import read_gauges

# A server of Prometheus gives 11,000 points of a series at most.
_POINTS_MAX = 5000
_STEP_S_MIN = 2.0


class _Series(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]]


class _Matrix(msgspec.Struct):
    result: list[_Series]


class _Answer(msgspec.Struct):
    status: str
    matrix: _Matrix | None = msgspec.field(name="data", default=None)
    error: str = ""


def range_path(window: Window) -> str:
    """Path and query for all metrics of engines in a window."""
    names = sorted({name for dialect in DIALECTS.values() for name in _names(dialect)})
    asked = {
        "query": f'{{__name__=~"{"|".join(names)}"}}',
        "start": f"{window.start_ns / 1e9:.3f}",
        "end": f"{window.end_ns / 1e9:.3f}",
        "step": f"{max(_STEP_S_MIN, window.duration_s / _POINTS_MAX):.3f}",
    }
    return f"/api/v1/query_range?{urlencode(asked)}"


def samples_of(answer: bytes) -> tuple[Sample, ...]:
    """The samples of each instance, in order of time.

    Raises ``ValueError`` with what is wrong where it is no answer, or has no metric of an engine.
    """
    try:
        read = msgspec.json.decode(answer, type=_Answer)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"this is no answer of /api/v1/query_range: {error}") from None
    if read.status != "success" or read.matrix is None:
        raise ValueError(f"Prometheus refused the query: {read.error or read.status}")
    lines: dict[tuple[float, str], list[str]] = defaultdict(list)
    for series in read.matrix.result:
        name, instance = series.metric.get("__name__", ""), series.metric.get("instance", "")
        for at_s, value in series.values:
            lines[at_s, instance].append(f"{name} {value}")
    found = tuple(
        sample
        for (at_s, instance), told in sorted(lines.items())
        for sample in _samples(at_s, instance, "\n".join(told))
    )
    if not found:
        raise ValueError("it has no metrics of vLLM, SGLang, TGI or llama-server in that time")
    return found


def _samples(at_s: float, instance: str, page: str) -> Iterator[Sample]:
    for dialect in DIALECTS.values():
        told = read_gauges(dialect, page)
        if told.waiting is not None or told.running is not None or told.counters:
            yield Sample(
                at_s * 1e9, instance, told.waiting, told.running, told.kv_use, told.counters
            )


def _names(dialect: Dialect) -> Iterator[str]:
    names = dialect.metrics
    yield from (*names.waiting, *names.running, *names.kv_use)
    for accepted in names.counters.values():
        yield from accepted
