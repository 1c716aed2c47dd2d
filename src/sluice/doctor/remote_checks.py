"""Checks of engines that run elsewhere, from requests and from what the engines tell of themselves.

They record no steps. Where the gateway could read their metrics, the journal has samples of those,
and time in an engine is told apart: its queue, prefill, decode. Nothing is replayed: what a
request lost is a span of its own.
"""

import numpy as np

from sluice.doctor.columns import Floats
from sluice.doctor.engines import Engines
from sluice.doctor.scene import SLOWER_MIN, Finding, Scene, absent, beyond, times, unknown

NO_SAMPLES = "metrics of engines elsewhere: no samples of them are in the journal"
# Share of the KV pool at which it is full.
_FULL = 0.92
# Where the engine's own queue is more of what grew than this, it is not slower.
_QUEUED_MAX = 0.8


def engine_queue(scene: Scene) -> Finding:
    """Requests wait inside an engine, which has more than it can run at a time."""
    if scene.has_steps:
        return absent("replicas that run here have no queue that is not seen")
    engines = Engines(scene)
    if not engines.tell:
        return unknown(NO_SAMPLES)
    waiting = engines.gauge("waiting")
    if not engines.queues and (waiting is None or not waiting.rose_by(0.2)):
        return absent(f"engines have no longer queues than before: {_stages(engines)}")
    evidence = [*_told(engines)]
    if waiting is not None:
        evidence.append(
            f"waiting in engines: {waiting.before:.1f} → {waiting.after:.1f} on average"
        )
    return Finding(
        tuple(evidence),
        span_s=_queue_span_s(scene, engines) if engines.queues else None,
        downstream=_is_full(engines),
        next_look="in_flight_max of the model, so that requests wait where they can be ordered, "
        "and sluice plan with this rate",
    )


def preemption(scene: Scene) -> Finding:
    """KV memory of an engine is full: requests wait for it or are preempted."""
    engines = Engines(scene)
    if not engines.tell:
        return unknown(NO_SAMPLES)
    use, evicted = engines.gauge("kv_use"), engines.rate("preemptions")
    more = evicted is not None and evicted[1] > 1.5 * evicted[0] + 0.01
    if use is None and evicted is None:
        return unknown("KV use and preemptions: these engines tell neither")
    if not more and not _is_full(engines):
        told = "" if use is None else f": KV memory is used to {use.after:.0%}"
        return absent(f"engines preempt no more than before{told}")
    evidence = [*_told(engines)]
    if use is not None:
        evidence.append(f"KV memory in use: {use.before:.0%} → {use.after:.0%} on average")
    if evicted is not None:
        evidence.append(f"preemptions: {evicted[0]:.2f} → {evicted[1]:.2f} per second")
    return Finding(
        tuple(evidence),
        span_s=_queue_span_s(scene, engines) + _decode_span_s(scene),
        next_look="KV memory of the engine (--gpu-memory-utilization, --max-num-seqs), lengths of "
        "context and answers",
    )


def slowdown(scene: Scene) -> Finding:
    """First token and tokens after it take longer on first attempts, beside the engine's queue."""
    requests = scene.requests
    first = (requests["full"] == 0) & (requests["faults"] == 0)
    prefill = scene.moved(requests["prefill_ns"] / 1e9, first)
    tpot = scene.moved(requests["tpot_ns"] / 1e9, first)
    engines = Engines(scene)
    queued = engines.queue_share
    slower_first = prefill.rose_by(2 * SLOWER_MIN) and queued < _QUEUED_MAX
    if not (slower_first or tpot.rose_by(2 * SLOWER_MIN)):
        why = "the engine answers as fast as before"
        if queued:
            why = f"the engine computes as fast as before: {_stages(engines)}"
        return absent(why)
    span_s = np.zeros(len(requests))
    after = scene.after[first[scene.after]]
    spans = {"ttft": ("prefill_ns",), "e2e": ("prefill_ns", "decode_ns"), "tpot": ()}
    for column in spans[scene.spike.metric]:
        share = 1.0 - queued if column == "prefill_ns" else 1.0
        span_s[after] += share * beyond(scene, requests[column] / 1e9, first)[after]
    if scene.spike.metric == "tpot":
        span_s[after] = beyond(scene, requests["tpot_ns"] / 1e9, first)[after]
    prompt = scene.moved(requests["prompt"], requests["prompt"] > 0)
    return Finding(
        (
            (
                f"the engine takes longer at first attempts: to the first token {times(prefill)}, "
                f"per token {times(tpot)}"
            ),
            *(_told(engines)),
        ),
        span_s=span_s,
        controls=(("prompts did not grow", not prompt.rose_by(0.15)),),
        series=requests["prefill_ns"],
        next_look="the vendor's status page and the engine's own queue time",
    )


def _is_full(engines: Engines) -> bool:
    """Whether KV memory is full that was not before."""
    use = engines.gauge("kv_use")
    return use is not None and use.rose and use.after >= _FULL


def _queue_span_s(scene: Scene, engines: Engines) -> Floats:
    """What each request waited longer in the engine's queue, as far as the metric has it in it."""
    if scene.spike.metric == "tpot":
        return np.zeros(len(scene.requests))
    seconds = scene.requests["prefill_ns"] / 1e9
    return engines.queue_share * beyond(scene, seconds, np.ones(len(seconds), dtype=bool))


def _decode_span_s(scene: Scene) -> Floats:
    """What each request decoded longer; preempted ones wait there."""
    requests = scene.requests
    everyone = np.ones(len(requests), dtype=bool)
    match scene.spike.metric:
        case "tpot":
            return beyond(scene, requests["tpot_ns"] / 1e9, everyone)
        case "e2e":
            return beyond(scene, requests["decode_ns"] / 1e9, everyone)
        case _:
            return np.zeros(len(requests))


def _told(engines: Engines) -> tuple[str, ...]:
    stages = _stages(engines)
    return (f"engines tell of each request: {stages}",) if stages else ()


def _stages(engines: Engines) -> str:
    return ", ".join(
        f"{name} {1e3 * told.before_s:,.0f} → {1e3 * told.after_s:,.0f} ms"
        for name, told in engines.stages().items()
    )
