"""Any order of events keeps the fleet's promises."""

import random
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from sluice.core.admission import NS_PER_S, REASONS
from sluice.core.attempts import LOSSES_MAX
from sluice.core.events import (
    Abort,
    Arrived,
    Cancelled,
    Dispatch,
    Ended,
    Fail,
    FleetDraining,
    FleetEffect,
    FleetEvent,
    Progress,
    Reconfigured,
    Reject,
    ReplicaDraining,
    ReplicaLimits,
    ReplicaLost,
    ReplicaReady,
    ReplicaReported,
    Report,
    Retarget,
    Shorten,
    StartReplica,
    Tick,
    WakeAt,
)
from sluice.core.fleet import Fleet
from sluice.core.fleet_replica import RestartLimits
from sluice.core.lifecycle import REPLICA_MOVES, ReplicaState
from sluice.core.limits import PoolLimits, TenantLimits
from sluice.core.request import LADDER_DEFAULT, EndReason, PhaseTimes, Request, Rung, Usage

LIMITS = ReplicaLimits(context_tokens_max=256, block_size=16, blocks_total=32, sequences_max=3)
POOLS = (
    PoolLimits("small", ("s0", "s1"), queue_places_max=3, queue_wait_ns_max=10 * NS_PER_S),
    PoolLimits(
        "large",
        ("l0",),
        queue_places_max=2,
        queue_wait_ns_max=10 * NS_PER_S,
        queue_tokens_max=400,
        queue_bytes_max=300,
        smaller="small",
        aging_ns=3 * NS_PER_S,
    ),
)
TENANTS = (TenantLimits("b", requests_per_minute=30, tokens_per_minute=4000, concurrency=3),)
TIGHT = (TenantLimits("a", concurrency=1), TenantLimits("b", tokens_per_minute=50))
LADDERS = (
    LADDER_DEFAULT,
    (Rung.REFUSE,),
    (Rung.SHORTEN, Rung.SMALLER, Rung.QUEUE, Rung.REFUSE),
    (Rung.SMALLER,),
)
MODEL_OF = {"s0": "small", "s1": "small", "l0": "large"}


def new_fleet() -> Fleet:
    restarts = RestartLimits(losses_max=3, window_ns=60 * NS_PER_S)
    return Fleet(POOLS, chance=random.Random(7), tenants=TENANTS, restarts=restarts)


class FleetMachine(RuleBasedStateMachine):
    """Plays the gateway: performs effects in its own books and compares them with the fleet's."""

    requests: Bundle[str] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.fleet = new_fleet()
        self.history: list[tuple[FleetEvent, int, list[FleetEffect]]] = []
        self.now_ns = 0
        self.count = 0
        self.endings: dict[str, list[str]] = {}
        self.places: dict[str, int] = {}
        self.waiting: set[str] = set()
        self.on_board: dict[str, str] = {}
        self.losses: dict[str, int] = {}
        self.states = dict.fromkeys(MODEL_OF, ReplicaState.STOPPED)
        self.wake_ns: int | None = None
        self.draining = False
        self.asked: dict[str, Request] = {}
        self.models: dict[str, str] = {}
        self.retargeted: list[tuple[str, Request]] = []
        self.told: list[tuple[Reject, int]] = []
        self.aside: set[str] = set()

    # ---------------------------------------------------------------------------------- books

    def handle(self, event: FleetEvent) -> None:
        effects = self.fleet.handle(event, self.now_ns)
        self.history.append((event, self.now_ns, effects))
        for effect in effects:
            self.perform(effect)
        while self.retargeted:
            model, request = self.retargeted.pop()
            self.count += 1
            degraded = (*request.degraded, Rung.SMALLER)
            self.ask(model, replace(request, id=f"r{self.count}", degraded=degraded))

    def ask(self, model: str, request: Request) -> None:
        self.endings[request.id] = []
        self.places[request.id] = request.choices
        self.losses[request.id] = 0
        self.asked[request.id] = request
        self.models[request.id] = model
        self.waiting.add(request.id)
        self.handle(Arrived(model, request))

    def perform(self, effect: FleetEffect) -> None:
        match effect:
            case Dispatch():
                self.waiting.remove(effect.request_id)
                self.on_board[effect.request_id] = effect.replica_id
                assert effect.attempt == self.losses[effect.request_id] + 1 <= 2
                assert self.states[effect.replica_id] is ReplicaState.READY
                assert effect.replica_id not in self.aside
            case Reject():
                self.waiting.remove(effect.request_id)
                self.end(effect.request_id, "rejected")
                assert self.losses[effect.request_id] == 0
                assert effect.reason in REASONS
                self.told.append((effect, self.now_ns))
            case Fail():
                self.waiting.discard(effect.request_id)
                self.on_board.pop(effect.request_id, None)
                self.end(effect.request_id, "failed")
            case Abort():
                assert effect.request_id in self.endings
            case Shorten():
                assert effect.request_id in self.waiting
                assert effect.output_tokens_max < self.asked[effect.request_id].output_tokens_max
            case Retarget():
                self.waiting.remove(effect.request_id)
                self.end(effect.request_id, "retargeted")
                assert Rung.SMALLER not in self.asked[effect.request_id].degraded
                self.retargeted.append((effect.model, self.asked[effect.request_id]))
            case StartReplica():
                assert not self.draining
                assert self.states[effect.replica_id] is not ReplicaState.FAILED
                self.states[effect.replica_id] = ReplicaState.STARTING
            case WakeAt():
                assert effect.at_ns >= self.now_ns
                self.wake_ns = effect.at_ns

    def end(self, request_id: str, how: str) -> None:
        self.endings[request_id].append(how)

    # ---------------------------------------------------------------------------------- rules

    @initialize()
    def start(self) -> None:
        self.handle(Tick())

    @rule(
        target=requests,
        model=st.sampled_from(["small", "large"]),
        prompt=st.integers(1, 300),
        output=st.integers(1, 64),
        choices=st.integers(1, 4),
        tier=st.integers(0, 1),
        tenant=st.sampled_from(["", "b", "c"]),
        ladder=st.sampled_from(LADDERS),
        due_s=st.none() | st.floats(0.01, 5),
        deadline_s=st.none() | st.integers(0, 20),
    )
    def arrive(
        self,
        model: str,
        prompt: int,
        output: int,
        choices: int,
        tier: int,
        tenant: str,
        ladder: tuple[Rung, ...],
        due_s: float | None,
        deadline_s: int | None,
    ) -> str:
        self.count += 1
        name = f"r{self.count}"
        request = Request(name, self.now_ns, (1,) * prompt, output, choices, tier, tenant)
        request = replace(request, overload=ladder, shorten_tokens=8, body_bytes=prompt)
        if due_s is not None:
            request = replace(request, ttft_due_ns=self.now_ns + round(due_s * NS_PER_S))
        if deadline_s is not None:
            request = replace(request, deadline_ns=self.now_ns + deadline_s * NS_PER_S)
        self.ask(model, request)
        return name

    @precondition(lambda self: bool(self.told))
    @rule(target=requests, early=st.booleans())
    def come_back(self, early: bool) -> str:
        """A refused client asks again, as it was told or at once."""
        reject, at_ns = self.told.pop()
        if reject.retry_after_s is not None and not early:
            self.let_pass(max(0, at_ns + round(reject.retry_after_s * NS_PER_S) - self.now_ns))
        self.count += 1
        name = f"r{self.count}"
        request = self.asked[reject.request_id]
        self.ask(self.models[reject.request_id], replace(request, id=name, arrived_ns=self.now_ns))
        return name

    @rule(name=requests)
    def progress(self, name: str) -> None:
        self.handle(Progress(name, 1))

    @rule(target=requests, name=consumes(requests), again=st.booleans())
    def cancel(self, name: str, again: bool) -> str | MultipleResults[str]:
        if not self.endings[name]:
            self.end(name, "cancelled")
        self.waiting.discard(name)
        self.on_board.pop(name, None)
        self.handle(Cancelled(name))
        return name if again else multiple()

    @rule(name=requests, reason=st.sampled_from([EndReason.STOP, EndReason.FAILED]))
    def finish(self, name: str, reason: EndReason) -> None:
        if name in self.on_board:
            del self.on_board[name]
            self.end(name, "ended")
            phases = PhaseTimes(prefill_ns=10**8, decode_ns=10**9)
            self.handle(Ended(name, reason, Usage(9, 3, 5), phases))

    @rule(replica=st.sampled_from(sorted(MODEL_OF)))
    def ready(self, replica: str) -> None:
        if self.states[replica] is ReplicaState.STARTING:
            self.states[replica] = ReplicaState.READY
            self.handle(ReplicaReady(replica, LIMITS))

    @rule(
        replica=st.sampled_from(sorted(MODEL_OF)),
        free=st.integers(0, 32),
        blocked=st.integers(0, 2),
        seats=st.none() | st.integers(1, 3),
    )
    def report(self, replica: str, free: int, blocked: int, seats: int | None) -> None:
        load = Report(blocked, 2, free, 32, 0, 0, 0, 0, 100.0, 10**7, blocked, seats)
        self.handle(ReplicaReported(replica, load))

    @rule(replica=st.sampled_from(sorted(MODEL_OF)), chance=st.integers(0, 9))
    def lose(self, replica: str, chance: int) -> None:
        if self.states[replica] in (ReplicaState.READY, ReplicaState.STARTING):
            permanent = chance == 9
            self.states[replica] = ReplicaState.FAILED if permanent else ReplicaState.BACKOFF
            for name in [n for n, at in self.on_board.items() if at == replica]:
                del self.on_board[name]
                self.losses[name] += LOSSES_MAX if chance == 8 else 1
                self.waiting.add(name)
            self.handle(ReplicaLost(replica, "x", permanent=permanent, silent=chance == 8))

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        """Let time pass, with a tick at each time asked for."""
        self.let_pass(seconds * NS_PER_S)

    def let_pass(self, duration_ns: int) -> None:
        until_ns = self.now_ns + duration_ns
        while self.wake_ns is not None and self.wake_ns <= until_ns:
            self.now_ns, self.wake_ns = max(self.now_ns, self.wake_ns), None
            self.handle(Tick())
        self.now_ns = until_ns

    @rule(replica=st.sampled_from(sorted(MODEL_OF)), on=st.booleans())
    def set_aside(self, replica: str, on: bool) -> None:
        """The operator gives a replica nothing more, or uses it again."""
        (self.aside.add if on else self.aside.discard)(replica)
        self.handle(ReplicaDraining(replica, on))

    @rule(places=st.integers(0, 4), tenants=st.sampled_from([(), TENANTS, TIGHT]))
    def reconfigure(self, places: int, tenants: tuple[TenantLimits, ...]) -> None:
        pools = tuple(replace(pool, queue_places_max=places) for pool in POOLS)
        self.handle(Reconfigured(pools, tenants))

    @precondition(lambda self: not self.draining and self.count > 4)
    @rule(seconds=st.integers(0, 5))
    def drain(self, seconds: int) -> None:
        self.draining = True
        self.handle(FleetDraining(self.now_ns + seconds * NS_PER_S))

    # ----------------------------------------------------------------------------- invariants

    @invariant()
    def every_request_ends_at_most_once_and_lives_in_one_place(self) -> None:
        for name, endings in self.endings.items():
            lives = (name in self.waiting) + (name in self.on_board)
            assert len(endings) + lives == 1, name

    @invariant()
    def counts_agree_with_the_books_and_stay_within_bounds(self) -> None:
        assert self.fleet.requests == len(self.waiting) + len(self.on_board)
        for pool in self.fleet.pools(self.now_ns):
            for replica in pool.replicas:
                mine = [self.places[n] for n, at in self.on_board.items() if at == replica.id]
                assert replica.places == sum(mine) <= LIMITS.sequences_max
                assert replica.requests == len(mine)
        waiting = sum(pool.waiting_places for pool in self.fleet.pools(self.now_ns))
        assert waiting == sum(self.places[name] for name in self.waiting)

    @invariant()
    def an_empty_replica_has_nothing_reserved(self) -> None:
        for replica in self.fleet._replicas.values():
            reserved = (replica.places, replica.prefill_tokens, replica.blocks_reserved)
            assert min(reserved) >= 0
            if not replica.on_board:
                assert reserved == (0, 0, 0)

    @invariant()
    def what_a_pool_keeps_of_its_replicas_is_what_they_are(self) -> None:
        for pool in self.fleet._pools.values():
            kept = pool.lineup()
            assert kept.tally.places == sum(replica.places for replica in pool.replicas)
            assert kept.tally.blocks == sum(replica.blocks_reserved for replica in pool.replicas)
            pool.set_replicas(pool.replicas)  # sorted and counted anew
            anew = pool.lineup()
            assert kept == replace(anew, tally=kept.tally)

    @invariant()
    def an_idle_ready_replica_leaves_nobody_waiting(self) -> None:
        for pool in self.fleet.pools(self.now_ns):
            if any(r.is_serving and r.places == 0 for r in pool.replicas):
                assert pool.waiting == 0

    def teardown(self) -> None:
        """The same events give the same effects; after the grace period nothing is left."""
        twin = new_fleet()
        for event, now_ns, effects in self.history:
            assert twin.handle(event, now_ns) == effects
        self.draining = True
        self.handle(FleetDraining(self.now_ns))
        self.handle(Tick())
        assert self.fleet.requests == 0
        assert all(len(endings) == 1 for endings in self.endings.values())
        self.an_empty_replica_has_nothing_reserved()


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(stateful_step_count=50)


def test_the_table_of_replica_moves_covers_every_state_and_each_can_be_left_or_reached() -> None:
    assert set(REPLICA_MOVES) == set(ReplicaState)
    reached = {target for targets in REPLICA_MOVES.values() for target in targets}
    assert reached == set(ReplicaState)
    finals = [state for state in ReplicaState if not REPLICA_MOVES[state]]
    assert finals == [ReplicaState.FAILED]
