"""Checks of what computes: its speed, its host, its memory and limits, and who got the work."""

from dataclasses import replace

import numpy as np

from sluice.core.roster import BatchingLimits
from sluice.doctor import remote_checks
from sluice.doctor.columns import Floats, Mask
from sluice.doctor.scene import (
    SLOWER_MIN,
    Finding,
    Moved,
    Scene,
    absent,
    increase,
    moved,
    times,
    unknown,
)
from sluice.doctor.speeds import predicted, step_features
from sluice.doctor.traffic_checks import deployments
from sluice.doctor.world import ReplicaWorld, World

PAUSE_MIN = 0.05
# What the share of time in which threads wait for processors grows by where others take them.
STARVED_MIN = 0.15
_NO_STEPS = "steps of replicas: only engines that sluice runs record them"
# Share of the KV pool at which it is full, and at which a further request may not fit.
_FULL, _SHORT = 0.92, 0.6
_MATCHED_MIN = 15
_CROWDED_MIN = 1.2


def engine_slowdown(scene: Scene) -> Finding:
    """Steps take longer than before at the same work; of a remote engine, its answers."""
    if not scene.has_steps:
        return remote_checks.slowdown(scene)
    factors = _slower(scene)
    replicas = len(np.unique(scene.steps.replica))
    if not factors:
        return absent("steps are as fast as before at the same work")
    if len(factors) == replicas:
        where = "on all replicas"
    else:
        where = f"on {len(factors)} of {replicas} replicas, not on the others"
    told = ", ".join(f"{name} {factor:.2f}×" for name, factor in factors.items())
    starved = _is_starved(_waits(scene))
    return Finding(
        (f"steps take longer at the same work, {where}: {told}",),
        ("their threads wait for processors, which slows them",) if starved else (),
        remove=lambda world: _at_speed(scene, world, factors),
        downstream=starved,
        next_look="clocks, temperature and power of the device; other programs on it",
    )


def host_cpu(scene: Scene) -> Finding:
    """The host has no processor time for replicas: they pause between steps, or threads wait."""
    if not scene.has_steps:
        return unknown(_NO_STEPS)
    change, waits = _pauses_moved(scene), _waits(scene)
    paused = change.rose and change.after - change.before >= PAUSE_MIN
    starved = _is_starved(waits)
    waited = "" if waits is None else f"; threads waited {waits[1]:.0%} of their time"
    if not paused and not starved:
        return absent(f"replicas pause as before: {change.after:.1%} of a step's time{waited}")
    evidence = [
        (
            f"between steps replicas with work computed nothing for {change.before:.1%} of a "
            f"step's time before, {change.after:.1%} then"
        )
    ]
    if waits is not None:
        evidence.insert(
            0,
            f"of the time that threads of replicas could have computed they waited "
            f"for a processor for {waits[0]:.0%} before, {waits[1]:.0%} then",
        )
    factors = _slower(scene) if starved else {}

    def remove(world: World) -> World:
        return _at_speed(scene, _without_pauses(scene, world), factors)

    return Finding(
        (*evidence, f"reading and tokenising: {times(_reading(scene))}"),
        remove=remove,
        next_look="load, steal and throttling of the host: top, /proc/pressure/cpu, cpu.max",
    )


def cold_start(scene: Scene) -> Finding:
    """A replica was not there: lost, restarting or still loading."""
    incident, late = scene.windows.incident, _first_ready(scene)
    absences = _absences(scene)
    away_s = sum(end_ns - start_ns for _, start_ns, end_ns in absences) / 1e9
    names = [
        f"{name} was away for {(end_ns - start_ns) / 1e9:.1f} s"
        for name, start_ns, end_ns in absences
    ]
    replicas = max(1, len({change.replica for change in scene.journal.replicas}))
    if not scene.journal.replicas:
        return unknown("states of replicas")
    if away_s < 0.02 * replicas * incident.duration_s and not late:
        return absent("all replicas were there")
    if late:
        names.append(f"{', '.join(late)} became ready in the window: the first requests meet it")
    return Finding(
        tuple(names),
        remove=_never_away,
        next_look="why it ended (its log), and warm replicas that take its place",
    )


def preemption(scene: Scene) -> Finding:
    """KV memory is full: requests wait for it or are preempted and computed again."""
    if not scene.has_steps:
        return remote_checks.preemption(scene)
    steps = scene.steps
    most = max((change.sequences_max for change in scene.journal.replicas), default=0)
    # Requests wait though there are places: what they would need at their peak does not fit.
    short = (steps.waiting > 0) & (steps.running < 0.9 * most) & (_kv_share(scene) >= _SHORT)
    full = scene.steps_moved((short | (_kv_share(scene) >= _FULL)).astype(float))
    evicted = scene.moved(scene.requests["preemptions"])
    shrunk = _fallen(scene, "blocks_total")
    pressed = full.rose and full.after - full.before >= 0.08
    if not pressed and not evicted.rose and shrunk is None:
        return absent(f"KV memory was short in {full.after:.0%} of the steps")
    evidence = [
        f"KV memory was short in {full.before:.0%} of the steps before, {full.after:.0%} then",
        f"preemptions per request: {evicted.before:.3f} → {evicted.after:.3f}",
    ]
    if shrunk is not None:
        evidence.append(f"the pool shrank: {shrunk[0]:,} → {shrunk[1]:,} blocks")
        evidence += deployments(scene)
    return Finding(
        tuple(evidence),
        remove=lambda world: _with_limits(world, "blocks_total", 4),
        series=scene.requests["preempted_ns"],
        downstream=shrunk is None,
        next_look="KV memory per sequence: context, answers, kv_headroom; fewer sequences_max",
    )


def admission_limits(scene: Scene) -> Finding:
    """Replicas may hold fewer sequences than before, so that requests wait beside idle capacity."""
    fallen = _fallen(scene, "sequences_max")
    if fallen is None:
        if not scene.journal.replicas:
            return unknown("limits of replicas")
        return absent("the limits of replicas are what they were")
    evidence = [f"sequences_max of replicas fell: {fallen[0]:,} → {fallen[1]:,}"]
    if scene.has_steps:
        capped = scene.steps_moved((scene.steps.running >= fallen[1]).astype(float))
        evidence.append(f"steps at that limit: {capped.after:.0%}; KV memory was not short")
    return Finding(
        (*evidence, *deployments(scene)),
        remove=lambda world: _with_limits(world, "sequences_max", 1),
        next_look="the setting sequences_max, and who changed it",
    )


def imbalance(scene: Scene) -> Finding:
    """Some replicas get more than their part while others have places."""
    if not scene.has_steps:
        return unknown(_NO_STEPS)
    numbers = np.unique(scene.steps.replica)
    if len(numbers) < 2:
        return absent("there is one replica")
    after = scene.steps_after
    for _, start_ns, end_ns in _absences(scene):  # others do its work then, as they are to
        after = after & ((scene.steps.end_ns < start_ns) | (scene.steps.end_ns >= end_ns))
    if after.sum() < max(_MATCHED_MIN, 0.2 * scene.steps_after.sum()):
        return absent("a replica was away for most of the time; the others did its work")
    shares = [_busy(scene, mask) for mask in (scene.steps_before, after)]
    spread = [float(each.max() / max(1e-9, each.mean())) for each in shares]
    names = scene.requests.of["replica"]
    top = int(numbers[int(np.argmax(shares[1]))])
    queue = scene.steps.running + scene.steps.waiting
    least = int(numbers[int(np.argmin(shares[1]))])
    loads = [
        float(queue[after & (scene.steps.replica == number)].mean())
        for number in (top, least)
        if np.any(after & (scene.steps.replica == number))
    ]
    # A slow replica gets less work and still has more on board: that is no fault of who spreads it.
    crowded = len(loads) == 2 and loads[0] > _CROWDED_MIN * loads[1]
    if spread[1] < 1.15 or spread[1] - spread[0] < 0.12 or not crowded:
        return absent("work is spread over the replicas as before")
    return Finding(
        (
            (
                f"{names[top]} got {spread[1]:.2f} times the mean of the replicas' work, where the "
                f"busiest got {spread[0]:.2f} times before"
            ),
            f"requests on board: {loads[0]:.1f} on {names[top]}, {loads[1]:.1f} on {names[least]}",
            *deployments(scene),
        ),
        remove=lambda world: world.changed(pinned=False),
        next_look="weights of replicas, sticky sessions, one hot prefix",
    )


# ------------------------------------------------------------------------------ worlds without it


def _at_speed(scene: Scene, world: World, factors: dict[str, float]) -> World:
    """Steps of the incident take as long as before at the same work."""
    start_ns = scene.windows.incident.start_ns - world.began_ns
    replicas = tuple(
        replace(replica, factors=_divided(replica.factors, start_ns, factors[replica.name]))
        if replica.name in factors
        else replica
        for replica in world.replicas
    )
    return world.changed(replicas=replicas)


def _divided(
    factors: tuple[tuple[float, float], ...], start_ns: float, by: float
) -> tuple[tuple[float, float], ...]:
    return tuple(
        (at_ns, factor / by if at_ns >= start_ns - 2e9 and factor > 1.0 else factor)
        for at_ns, factor in factors
    )


def _without_pauses(scene: Scene, world: World) -> World:
    """Steps follow each other as closely as before."""
    steps = scene.steps
    whole = steps.measured_ns + steps.pause_ns
    usual = float(np.mean((whole / steps.measured_ns)[scene.steps_before]))
    factors = {}
    names = scene.requests.of["replica"]
    for replica in world.replicas:
        mine = scene.steps_after & (steps.replica == _index(names, replica.name))
        if np.any(mine):
            held = float(whole[mine].sum() / steps.measured_ns[mine].sum())
            factors[replica.name] = max(1.0, held / usual)
    return _at_speed(scene, world, factors)


def _never_away(world: World) -> World:
    """Replicas that were lost are back at once, those that came late were there."""
    return world.changed(
        replicas=tuple(
            replace(
                replica,
                # Other limits came with the restart.
                away=tuple((gone, gone) for gone, _ in replica.away if gone > 0.0)
                if len(replica.limits) > 1
                else (),
            )
            for replica in world.replicas
        )
    )


def _with_limits(world: World, name: str, times: int) -> World:
    """A limit is what it was at first; where it never fell, so many times that."""

    def lifted(replica: ReplicaWorld) -> ReplicaWorld:
        first: int = getattr(replica.limits[0][1], name)
        fell = any(getattr(limits, name) < first for _, limits in replica.limits)
        wanted = first if fell else first * times
        limits: tuple[tuple[float, BatchingLimits], ...] = tuple(
            (at_ns, _limited(each, name, wanted)) for at_ns, each in replica.limits
        )
        return replace(replica, limits=limits)

    return world.changed(replicas=tuple(map(lifted, world.replicas)))


def _limited(limits: BatchingLimits, name: str, wanted: int) -> BatchingLimits:
    if name == "blocks_total":
        return replace(limits, blocks_total=wanted)
    return replace(limits, sequences_max=wanted)


# ------------------------------------------------------------------------------------ the numbers


def _slower(scene: Scene) -> dict[str, float]:
    """How many times longer steps take at the same work, by replica; those that do alone."""
    ratio, names = _ratio(scene), scene.requests.of["replica"]
    found = {}
    for number in np.unique(scene.steps.replica):
        change = _matched(scene, ratio, scene.steps.replica == number)
        if change is not None and change.rose_by(SLOWER_MIN):
            found[names[number]] = change.ratio
    return found


def _pauses_moved(scene: Scene) -> Moved:
    """Time between steps as a share of a step."""
    steps = scene.steps
    usual = np.median(steps.measured_ns[steps.measured_ns > 0])
    pause = np.minimum(steps.pause_ns, 20 * usual) / np.maximum(steps.measured_ns, 1.0)
    return scene.steps_moved(pause)


def _reading(scene: Scene) -> Moved:
    """Seconds from a request's first byte until it was tokenised, beside retrieval."""
    requests = scene.requests
    seconds = requests["seen_ns"] - requests["arrived_ns"]
    return scene.moved((seconds - np.nan_to_num(requests["retrieval_ns"])) / 1e9)


def _waits(scene: Scene) -> tuple[float, float] | None:
    """The share of the time in which threads of replicas were ready and had no processor."""
    found = []
    for window in (scene.windows.baseline, scene.windows.incident):
        inside = [each for each in scene.journal.hosts
                  if window.start_ns <= each.t_ns < window.end_ns]  # fmt: skip
        grown = np.zeros(2)
        for name in {each.replica: None for each in inside}:
            mine = [each for each in inside if each.replica == name]
            grown += [
                increase(np.array([each.used_ns for each in mine], dtype=float)),
                increase(np.array([each.waited_ns for each in mine], dtype=float)),
            ]
        if grown.sum() <= 0:
            return None
        found.append(float(grown[1] / grown.sum()))
    return found[0], found[1]


def _is_starved(waits: tuple[float, float] | None) -> bool:
    return waits is not None and waits[1] - waits[0] >= STARVED_MIN


def _ratio(scene: Scene) -> Floats:
    """Measured time of each step, without its pause, over what its work predicts."""
    features, _ = step_features(scene.journal)
    return scene.steps.measured_ns / predicted(scene.speeds.coefficients, features)


def _matched(scene: Scene, ratio: Floats, mine: Mask) -> Moved | None:
    """How the ratio moved among steps with like work in both windows."""
    steps = scene.steps
    kind = np.floor(np.log2(1.0 + steps.rows) * 2) * 64 + np.floor(np.log2(1.0 + steps.prefill))
    before, after = mine & scene.steps_before, mine & scene.steps_after
    kinds_before, counts = np.unique(kind[before], return_counts=True)
    known = kinds_before[counts >= _MATCHED_MIN]
    after = after & np.isin(kind, known)
    if np.count_nonzero(before) < _MATCHED_MIN or np.count_nonzero(after) < _MATCHED_MIN:
        return None
    usual = {each: float(np.median(ratio[before & (kind == each)])) for each in known}
    usual_after = np.array([usual.get(each, np.nan) for each in kind[after]])
    inside = before & np.isin(kind, known)
    usual_inside = np.array([usual[each] for each in kind[inside]])
    capped = (
        np.minimum(ratio[after] / usual_after, 20.0),
        np.minimum(ratio[inside] / usual_inside, 20.0),
    )
    return moved(capped[1], capped[0], scene.seed)


def _kv_share(scene: Scene) -> Floats:
    steps = scene.steps
    found: Floats = steps.kv_blocks / np.maximum(1.0, steps.kv_total)
    return found


def _fallen(scene: Scene, name: str) -> tuple[int, int] | None:
    """A limit before and in the incident, where it fell."""
    incident = scene.windows.incident
    before: dict[str, int] = {}
    for change in scene.journal.replicas:
        value: int = getattr(change, name)
        if value <= 0:
            continue
        inside = _near(change.t_ns, incident.start_ns, incident.end_ns)
        if inside and value < before.get(change.replica, 0):
            return before[change.replica], value
        before[change.replica] = value
    return None


def _near(t_ns: float, start_ns: float, end_ns: float) -> bool:
    """In a window, or so shortly before that its effect begins with it."""
    return start_ns - 0.2 * (end_ns - start_ns) <= t_ns < end_ns


def _absences(scene: Scene) -> list[tuple[str, float, float]]:
    """Replicas that were lost in the incident: from when until they were ready, or its end."""
    incident, found = scene.windows.incident, []
    for change in scene.journal.replicas:
        if change.state != "lost" or not _near(change.t_ns, incident.start_ns, incident.end_ns):
            continue
        back = [
            other.t_ns
            for other in scene.journal.replicas
            if other.replica == change.replica
            and other.state == "ready"
            and other.t_ns >= change.t_ns
        ]
        found.append((change.replica, change.t_ns, min([*back, incident.end_ns])))
    return found


def _first_ready(scene: Scene) -> list[str]:
    """Replicas that were ready for the first time in the incident."""
    incident, seen, found = scene.windows.incident, set(), []
    for change in scene.journal.replicas:
        if change.state == "ready" and change.replica not in seen:
            seen.add(change.replica)
            if incident.start_ns < change.t_ns < incident.end_ns:
                found.append(change.replica)
    return found


def _busy(scene: Scene, mask: Mask) -> Floats:
    """Tokens that each replica computed."""
    steps = scene.steps
    numbers = np.unique(steps.replica)
    tokens = steps.rows + 0.2 * steps.prefill
    return np.array([tokens[mask & (steps.replica == number)].sum() for number in numbers])


def _index(names: list[str], name: str) -> int | None:
    return names.index(name) if name in names else None
