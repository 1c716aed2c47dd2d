"""What runs in virtual time alone: settings turned one by one, and live runs played again."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.load.backends import VirtualBackend
from benchmarks.load.outcomes import Run
from benchmarks.load.plans import Plan
from benchmarks.load.scenarios import LIVE_STEPS, MIXES, Session, goodput_plan, tenants_plan
from benchmarks.load.virtual import known_knobs

KNOB_LOADS = (1.0, 2.0)
ASKED_TOKENS = 400  # where lengths are to be predictions
# Live runs that are played again: below capacity, at it and beyond.
AGREE_STEPS = (0.75, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting and the load that shows what it does.

    ``requests`` is a mix, or ``tenants`` for one that sends ten times its share beside another,
    whose TTFT is what counts. ``blocks`` makes the KV pool so small that it binds; then they ask
    for more than they will take, so that lengths are predictions.
    """

    label: str
    values: tuple[float, ...]
    requests: str = "poisson"
    blocks: int | None = None


KNOBS: Mapping[str, Knob] = {
    "pool.utilisation": Knob("utilisation", (0.4, 0.5, 0.6, 0.75, 0.9, 1.0)),
    "batching.sequences_max": Knob("sequences_max", (4, 8, 16, 24, 32, 48)),
    "batching.prefill_share": Knob("prefill_share", (0.05, 0.1, 0.2, 0.35, 0.5, 0.8), "azure"),
    "batching.kv_headroom": Knob("KV headroom", (0.0, 0.02, 0.05, 0.1, 0.2, 0.4), "azure", 192),
    "pool.headroom": Knob("headroom", (0.0, 0.05, 0.1, 0.2, 0.3, 0.5), "tenants"),
}


def knob_key(name: str, value: float, load: float) -> str:
    """Under which a run with one setting turned is kept."""
    return f"knob-{name}-{value:g}-{load:g}x"


def measure_knobs(session: Session) -> None:
    """Each value of each setting at each load; capacity is that of the defaults."""
    assert isinstance(session.backend, VirtualBackend)
    for name, knob in KNOBS.items():
        if name not in known_knobs():
            sys.stderr.write(f"there is no {name}; left out\n")
            continue
        for value in knob.values:
            turned: dict[str, float] = {name: value}
            if knob.blocks is not None:
                turned["batching.blocks_total"] = knob.blocks
            backend = replace(session.backend, knobs=turned)
            for load in KNOB_LOADS:
                plan = _knob_plan(session, knob, load)
                replace(session, backend=backend).played(knob_key(name, value, load), plan)


def _knob_plan(session: Session, knob: Knob, load: float) -> Plan:
    if knob.requests == "tenants":
        return tenants_plan(session, over_share=5.0 * load)
    plan = goodput_plan(session, knob.requests, load)
    if knob.blocks is None:
        return plan
    return replace(plan, asks=tuple(replace(ask, limit_tokens=ASKED_TOKENS) for ask in plan.asks))


def measure_agree(session: Session) -> None:
    """The very plans of live runs, in virtual time, on a machine as fast as it was in each."""
    assert isinstance(session.backend, VirtualBackend)
    live = replace(session, world="live")
    for mix in MIXES:
        for step in LIVE_STEPS["slo"][mix]:
            run = live_run(session, mix, step)
            if step in AGREE_STEPS and run is not None:
                calibration = session.backend.calibration.as_fast(run.facts)
                backend = replace(session.backend, calibration=calibration)
                plan = goodput_plan(live, mix, step)
                replace(session, backend=backend).played(f"agree-{mix}-{step:g}x", plan)


def live_run(session: Session, mix: str, step: float) -> Run | None:
    """The live run of a load, where it was made."""
    return session.store.get(session.settings.key("live", "slo", f"goodput-{mix}-{step:g}x"))
