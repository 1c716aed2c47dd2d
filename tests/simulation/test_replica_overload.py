"""One replica under more than it can do, in virtual time: who is served, and at what pace."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest

from sluice.core.costmodel import Coefficients, FixedCostModel, LinearCostModel
from sluice.core.request import Request, SequenceId
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.executors.simulated import SimulatedExecutor, load_of
from sluice.runtime.virtual import Stretching
from sluice.testing.executors import FakeExecutor
from sluice.testing.replicas import ReplicaRun, executor_limits

MS = 1_000_000
S = 1_000_000_000
COEFFICIENTS = Coefficients()
LIMITS = BatchingLimits(8192, 32, 512)
SEEDS = pytest.mark.parametrize("seed", [1, 2, 3], ids=lambda seed: f"seed{seed}")


def distinct(number, tokens):
    """A prompt that shares no block with that of another number."""
    return tuple(range(number * 10_000, number * 10_000 + tokens))


@dataclass(frozen=True)
class Traffic:
    """Chats, and with a share of ``longs`` prompts of 2,500 tokens, in random intervals."""

    per_s: float
    requests: int
    longs: float = 0.0
    ttft_ns: int = 2 * S
    tpot_ns: int = 60 * MS
    tenant: str = ""


def run_of(traffics, limits=LIMITS, *, seed=1):
    """A run of all these together; outputs of 20 to 110 tokens end by themselves."""
    lengths: dict[str, int] = {}
    executor = SimulatedExecutor(
        executor_limits(limits), COEFFICIENTS, output_tokens=lambda s: lengths.get(s.request_id)
    )
    run = ReplicaRun(limits, executor, LinearCostModel(COEFFICIENTS), frozenset({0}), Stretching())
    for traffic in traffics:
        random, at_ns = Random(f"{seed} {traffic.tenant}"), 0
        for number in range(traffic.requests):
            at_ns += int(random.expovariate(traffic.per_s) * S)
            tokens = 2500 if random.random() < traffic.longs else random.randint(60, 100)
            name = f"{traffic.tenant}{number}"
            lengths[name] = random.randint(20, 110)
            prompt = tuple(random.randrange(30_000) for _ in range(tokens))
            request = Request(
                name,
                at_ns,
                prompt,
                256,
                tenant=traffic.tenant,
                ttft_due_ns=at_ns + traffic.ttft_ns,
                tpot_ns=traffic.tpot_ns,
            )
            run.submit(request, at_ns)
    return run


def tpot_ns(run, name):
    """Mean time per token after the first."""
    times, tokens = run.token_ns[SequenceId(name, 0)], run.ends[name].usage.completion_tokens
    return (times[-1] - times[0]) / max(1, tokens - 1)


def good(run, traffic):
    """The requests of this traffic that met both targets."""
    return [
        name
        for name, request in run.submitted.items()
        if request.tenant == traffic.tenant
        and run.ttft_ns(name) <= traffic.ttft_ns
        and tpot_ns(run, name) <= traffic.tpot_ns
    ]


def policy_limits(policy):
    return BatchingLimits(8192, 32, 512, policy=policy)


# ---------------------------------------------------------------------------------- deep overload


@SEEDS
def test_in_deep_overload_the_slo_policy_keeps_many_more_targets_than_fcfs(seed):
    """2.5 requests a second, one in seven of them so long that it cannot be on time at all."""
    traffic = Traffic(2.5, 160, longs=0.15, tpot_ns=200 * MS)
    kept = {
        policy: len(good(run_of([traffic], policy_limits(policy), seed=seed).run(), traffic))
        for policy in (BatchingPolicy.SLO, BatchingPolicy.FCFS)
    }
    assert kept[BatchingPolicy.SLO] > 1.5 * kept[BatchingPolicy.FCFS]
    assert kept[BatchingPolicy.SLO] > 0.75 * 160


@SEEDS
def test_goodput_holds_however_far_demand_goes_beyond_capacity(seed):
    """Chats at about 0.9, 2 and 4 times of what the replica can do within their targets."""
    good_per_s = []
    for per_s, requests in ((4.5, 120), (9.0, 160), (18.0, 240)):
        traffic = Traffic(per_s, requests)
        run = run_of([traffic], seed=seed).run()
        arrived_s = max(request.arrived_ns for request in run.submitted.values()) / S
        good_per_s.append(len(good(run, traffic)) / arrived_s)
        assert run.replica.roster.preemptions == 0
    assert min(good_per_s[1:]) >= 0.95 * good_per_s[0]


@SEEDS
def test_streams_keep_their_pace_in_overload(seed):
    """Whoever is started, in time or late, gets its tokens at the pace of its class."""
    traffic = Traffic(10.0, 150)
    run = run_of([traffic], seed=seed).run()
    slow = [name for name in run.ends if tpot_ns(run, name) > traffic.tpot_ns]
    assert len(slow) <= 0.01 * len(run.ends)


def test_late_requests_get_their_small_share_in_order_of_arrival_beside_endless_urgent_ones():
    """One token in seventeen of what is computed of prompts goes to those that are late."""
    run = run_of([Traffic(12.0, 350)])
    for number in range(3):
        at_ns = S + number
        prompt = distinct(number, 100)
        run.submit(Request(f"late{number}", at_ns, prompt, 5, ttft_due_ns=at_ns + 1), at_ns)
    run.run()
    first_ns = [run.token_ns[SequenceId(f"late{number}", 0)][0] for number in range(3)]
    assert first_ns == sorted(first_ns)
    last_arrived_ns = max(request.arrived_ns for request in run.submitted.values())
    assert first_ns[-1] < last_arrived_ns / 2


# --------------------------------------------------------------------- long prompts beside chats


def chats_beside(prompts, *, chats=10):
    """Streams with a target of 60 ms per token, and prompts of 4,000 tokens every 15 seconds."""
    executor = SimulatedExecutor(executor_limits(LIMITS), COEFFICIENTS)
    run = ReplicaRun(LIMITS, executor, FixedCostModel(COEFFICIENTS))
    for number in range(chats):
        at_ns = number * 100 * MS
        prompt = distinct(number, 40)
        chat = Request(f"chat{number}", at_ns, prompt, 700, ttft_due_ns=at_ns + S, tpot_ns=60 * MS)
        run.submit(chat, at_ns)
    for number in range(prompts):
        at_ns = 3 * S + number * 15 * S
        prompt = distinct(20 + number, 4000)
        run.submit(Request(f"long{number}", at_ns, prompt, 8, ttft_due_ns=at_ns + 30 * S), at_ns)
    return run.run()


def gaps_ns(run, chats=10):
    """Time between tokens over all chats, in order."""
    times = [run.token_ns[SequenceId(f"chat{number}", 0)] for number in range(chats)]
    return sorted(b - a for stream in times for a, b in pairwise(stream))


def test_d10_chats_keep_their_pace_beside_long_prompts_which_get_all_the_time_that_is_left():
    alone, beside = gaps_ns(chats_beside(0)), chats_beside(2)
    p99 = int(0.99 * len(alone))
    assert gaps_ns(beside)[p99] <= 2 * alone[p99]
    assert all(tpot_ns(beside, f"chat{number}") <= 60 * MS for number in range(10))
    left = 1 - alone[len(alone) // 2] / (60 * MS)
    work_ns = chats_beside(1, chats=0).ttft_ns("long0")
    for number in range(2):
        assert beside.ttft_ns(f"long{number}") <= 1.3 * work_ns / left


# -------------------------------------------------------------------------------------- tenants


@SEEDS
def test_tenant_within_its_share_is_served_in_time_beside_one_that_floods(seed):
    quiet, flood = Traffic(1.0, 30, tenant="quiet"), Traffic(8.0, 250, tenant="flood")
    run = run_of([quiet, flood], seed=seed).run()
    assert len(good(run, quiet)) >= 29
    assert len(good(run, flood)) >= 100  # it has the rest


def test_tenants_of_unequal_weight_get_tokens_by_their_weights():
    run = ReplicaRun(LIMITS)
    for number in range(200):
        for tenant, weight in (("one", 1.0), ("three", 3.0)):
            prompt = distinct(2 * number + (tenant == "one"), 400)
            run.submit(Request(f"{tenant}{number}", 0, prompt, 40, tenant=tenant, weight=weight))
    run.run(until_ns=4 * S)
    tokens = {
        tenant: sum(run.computed_tokens(f"{tenant}{number}") for number in range(200))
        for tenant in ("one", "three")
    }
    assert tokens["three"] == pytest.approx(3 * tokens["one"], rel=0.15)


# ------------------------------------------------------------------------------ hostile machines


def test_target_that_nobody_could_meet_keeps_nobody_out():
    chats = Traffic(3.0, 30, tenant="chats")
    run = run_of([chats])
    run.submit(Request("absurd", 0, distinct(1, 20), 250, ttft_due_ns=1, tpot_ns=1))
    run.run()
    assert len(good(run, chats)) == 30


def stalling(stalls):
    """An executor whose steps take as long as predicted, but for those of these numbers: 5 s."""
    ran = []

    def duration_ns(plan):
        ran.append(plan)
        stalled = len(ran) in stalls
        return 5 * S if stalled else int(COEFFICIENTS.predict_ns(load_of(plan)))

    return FakeExecutor(executor_limits(LIMITS), duration_ns=duration_ns)


def test_step_of_a_stalled_machine_hardly_moves_what_is_reported():
    run = ReplicaRun(LIMITS, stalling({300}), LinearCostModel(COEFFICIENTS))
    for number in range(40):
        at_ns = number * 400 * MS
        run.submit(Request(f"r{number}", at_ns, distinct(number, 200), 60), at_ns)
    run.run()
    stalled = next(
        index for index, ((a, _), (b, _)) in enumerate(pairwise(run.steps)) if b - a >= 5 * S
    )
    step_ns = [report.step_ns for report in run.reports]
    before = max(step_ns[200:stalled])
    assert max(step_ns[stalled : stalled + 20]) <= 2 * before
    rates = [report.prefill_tokens_per_s for report in run.reports]
    assert min(rates[stalled:]) >= 0.8 * min(rates[200:stalled])


def test_machine_that_stalls_in_its_first_step_is_known_well_soon_after():
    run = ReplicaRun(LIMITS, stalling({1}), LinearCostModel(COEFFICIENTS))
    run.submit(Request("r", 0, distinct(1, 100), 60))
    run.run()
    assert run.reports[40].step_ns == pytest.approx(20 * MS, rel=0.2)
