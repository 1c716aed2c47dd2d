"""A replica says how many sequences it can run, in time and in its KV pool."""

import pytest

from sluice.core.costmodel import Coefficients, FixedCostModel
from sluice.core.events import Emit, Report, RunStep, StepDone, Submitted
from sluice.core.replica import Replica
from sluice.core.request import Request
from sluice.core.roster import BatchingLimits
from sluice.core.step import Sampled

MS = 1_000_000


def seats(count: int, *, tpot_ms: int | None, blocks: int = 4096, output: int = 100) -> int | None:
    """What a replica reports after it took so many requests and began to decode them."""
    limits = BatchingLimits(2048, 32, blocks, sequences_max=32, chunk_tokens_max=2048)
    replica = Replica(limits, FixedCostModel(Coefficients(10e6, 0, 1e6, 0, 0)))
    now_ns, reported, plan = 0, None, None
    for number in range(count):
        tpot_ns = None if tpot_ms is None else tpot_ms * MS
        request = Request(f"r{number}", 0, (number,) * 64, output, tpot_ns=tpot_ns)
        for effect in replica.handle(Submitted(request), now_ns):
            plan = effect.plan if isinstance(effect, RunStep) else plan
    for _ in range(6):
        assert plan is not None
        now_ns += 20 * MS
        sampled = tuple(Sampled(row.sequence, 7) for row in plan.rows if row.sample)
        for effect in replica.handle(StepDone(plan.step, sampled, 20 * MS), now_ns):
            assert not isinstance(effect, Emit) or effect.sampled
            plan = effect.plan if isinstance(effect, RunStep) else plan
            reported = effect if isinstance(effect, Report) else reported
    return None if reported is None else reported.seats


def test_without_targets_and_with_blocks_to_spare_it_is_the_configured_number() -> None:
    assert seats(3, tpot_ms=None) == 32


@pytest.mark.parametrize(("tpot_ms", "rows"), [(20, 6), (30, 14)])
def test_rows_take_no_more_than_the_time_per_token_but_for_the_share_of_prefill(
    tpot_ms: int, rows: int
) -> None:
    # A step takes 10 ms and 1 ms per row; a fifth of the time is for prompts.
    assert seats(3, tpot_ms=tpot_ms) == rows


def test_a_short_kv_pool_leaves_seats_for_what_it_holds_at_its_worst() -> None:
    # 64 tokens of prompt and 100 of output are 6 blocks, of 32 less a reserve.
    assert seats(2, tpot_ms=None, blocks=32) == 4


def test_a_target_that_no_row_alone_can_meet_holds_nobody_back() -> None:
    assert seats(1, tpot_ms=1) == 32
