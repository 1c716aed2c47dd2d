"""Whether so many parallel requests of a fixed context fit into memory, and the nearest that do.

For engines that set KV aside per slot when they load: each slot takes the whole context, whether it
is used or not. Called by ``sluice plan --slots``; rates are not calculated here.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from math import floor
from typing import Literal

from sluice.planner.memory import Budget, budget_of
from sluice.planner.names import CannotPlan
from sluice.planner.work import Deployment

# No engine takes a longer context.
CONTEXT_TOKENS_MAX = 10**9
Sharing = Literal["each", "divided"]


@dataclass(frozen=True, slots=True)
class Slots:
    """``count`` requests at once. ``sharing`` says whether each has ``context_tokens`` of its own
    or all divide them, as engines do that are told one context for all."""

    count: int
    context_tokens: int
    sharing: Sharing = "each"

    @property
    def request_tokens(self) -> int:
        """Context of one request."""
        return (
            self.context_tokens // self.count
            if self.sharing == "divided"
            else (self.context_tokens)
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether they fit: memory of one device line by line, what KV needs, the nearest that fit.

    ``count_max`` slots of the same context fit, and ``request_tokens_max`` tokens of context in
    the same number of slots; each 0 where not even that does.
    """

    slots: Slots
    budget: Budget
    kv_bytes: float
    count_max: int
    request_tokens_max: int

    @property
    def fits(self) -> bool:
        """Whether KV of all slots fits what is left for it."""
        return self.kv_bytes <= self.budget.pool_bytes

    def lines(self) -> dict[str, float]:
        """Each line of the memory of one device in bytes, KV and what remains at the end."""
        lines = self.budget.lines()
        left = lines.pop("left for KV")
        return {**lines, "KV": self.kv_bytes, "remaining": left - self.kv_bytes}


def verdict(deployment: Deployment, slots: Slots, *, memory_share: float) -> Verdict:
    """What slots take on each device of this deployment.

    Raises ``CannotPlan`` for counts and contexts that are not possible.
    """
    longest = deployment.shape.context_tokens_max
    if not 1 <= slots.count <= 1_000_000:
        raise CannotPlan(f"slots must be 1 to 1,000,000, not {slots.count}")
    if not 1 <= slots.context_tokens <= CONTEXT_TOKENS_MAX:
        raise CannotPlan(f"context must be 1 to 1e+09 tokens, not {slots.context_tokens}")
    if not 0.0 < memory_share <= 1.0:
        raise CannotPlan(f"memory share must be above 0 and at most 1, not {memory_share:g}")
    if slots.request_tokens < 1:
        raise CannotPlan(
            f"{slots.context_tokens} tokens of context divided among {slots.count} slots leave "
            f"none for each; nearest are {slots.context_tokens} slots"
        )
    if longest is not None and slots.request_tokens > longest:
        raise CannotPlan(
            f"a context of {slots.request_tokens:,} tokens is longer than the {longest:,} that "
            f"{deployment.shape.name} takes"
        )
    return of_budget(deployment, slots, budget_of(deployment, memory_share=memory_share))


def of_budget(deployment: Deployment, slots: Slots, budget: Budget) -> Verdict:
    """The same with a budget that is known otherwise, as from a start-up log."""
    groups = deployment.layout.groups

    def kv_bytes(count: int, tokens: int) -> float:
        # A group has its own slots; the fullest one decides.
        return -(-count // groups) * deployment.kv_bytes(float(tokens))

    pool = max(0.0, budget.pool_bytes)
    each = deployment.kv_bytes(float(slots.request_tokens))
    return Verdict(
        slots=slots,
        budget=budget,
        kv_bytes=kv_bytes(slots.count, slots.request_tokens),
        count_max=groups * floor(pool / each) if each > 0.0 else slots.count,
        request_tokens_max=_longest(lambda tokens: kv_bytes(slots.count, tokens) > pool),
    )


def _longest(too_long: Callable[[int], bool]) -> int:
    """The most tokens that are not too long."""
    lengths = range(1, CONTEXT_TOKENS_MAX + 1)
    return bisect_right(lengths, x=False, key=too_long)
