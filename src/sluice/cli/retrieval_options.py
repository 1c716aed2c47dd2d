"""``--retrieval`` and ``--chunks``, which ``plan`` and ``simulate`` share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from sluice.config.units import parse_duration_s
from sluice.workload.asks import BadWorkload
from sluice.workload.retrieval import RetrievalTime, passages_of

F = TypeVar("F", bound=Callable[..., Any])
_NAMES = {"p50": "p50_s", "p99": "p99_s", "within": "within_s"}


class _Time(click.ParamType[RetrievalTime]):
    """One duration, or some of a lognormal distribution."""

    name = "retrieval"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> RetrievalTime:
        if isinstance(value, RetrievalTime):
            return value
        try:
            return retrieval_time(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Passages(click.ParamType[int]):
    """The tokens of so many passages of so many tokens."""

    name = "passages"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return passages_of(str(value))
        except BadWorkload as error:
            self.fail(str(error), param, ctx)


def retrieval_time(text: str) -> RetrievalTime:
    """``80ms``, or ``p50=80ms,p99=400ms`` with ``within=1s`` if it is left then.

    Raises ``ValueError``.
    """
    if "=" not in text:
        time_s = parse_duration_s(text)
        return RetrievalTime(time_s, time_s)
    given = {}
    for entry in text.split(","):
        name, _, value = entry.partition("=")
        if name.strip() not in _NAMES:
            raise ValueError(f"write p50=80ms,p99=400ms or one time; there is no {name.strip()!r}")
        given[_NAMES[name.strip()]] = parse_duration_s(value)
    if "p50_s" not in given:
        raise ValueError("p50 is missing: write p50=80ms,p99=400ms")
    return RetrievalTime(**{"p99_s": given["p50_s"], **given})


def retrieval_options(function: F) -> F:
    """Add the options as ``retrieval``, ``None`` or a ``RetrievalTime``, and ``chunks``, tokens."""
    function = click.option(
        "--chunks",
        type=_Passages(),
        metavar="COUNTxTOKENS",
        default=0,
        help='Passages that retrieval puts into each prompt, beside --input: "8x300".',
    )(function)
    return click.option(
        "--retrieval",
        type=_Time(),
        metavar="TIME",
        help='Time before the prompt is known: "80ms", or "p50=80ms,p99=400ms" (lognormal), with '
        '",within=1s" where it is given up then. Part of TTFT and of --e2e.',
    )(function)
