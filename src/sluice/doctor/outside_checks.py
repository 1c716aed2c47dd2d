"""Checks of what lies outside the engine: vendors, retrieval, clients, and the journal itself.

No replay is needed: what a request lost is a span of its own, which is taken away.
"""

import numpy as np

from sluice.doctor.columns import Floats, Mask
from sluice.doctor.scene import Finding, Scene, absent, beyond, unknown

_SHARE_MIN = 0.02


def vendor_throttling(scene: Scene) -> Finding:
    """A vendor or engine says that it takes no more for now, and requests wait and try again."""
    return _attempts(scene, "full", "was told to come back later (429, 529 or full)")


def upstream_failover(scene: Scene) -> Finding:
    """Attempts on an upstream fail, and requests go to another one."""
    return _attempts(scene, "faults", "failed at an upstream and went on elsewhere")


def _attempts(scene: Scene, column: str, words: str) -> Finding:
    requests = scene.requests
    hit = scene.moved((requests[column] > 0).astype(float))
    if not hit.rose or hit.after - hit.before < _SHARE_MIN:
        return absent(f"{hit.after:.1%} of requests {words}")
    struck = requests[column] > 0
    span_s = np.where(struck, _before_last_attempt_s(scene), 0.0)
    if scene.spike.metric == "tpot":
        span_s = np.zeros(len(requests))
    retried = requests["attempts"][scene.after]
    lost_s = span_s[scene.after][struck[scene.after]].mean()
    return Finding((
            f"{hit.before:.1%} of requests {words} before, {hit.after:.1%} then",
            f"attempts per request: at most {np.nanmax(retried, initial=1.0):.0f}",
            f"time before the last attempt: mean {lost_s:,.2f} s",
        ),
        span_s=span_s,
        series=struck.astype(float),
        next_look="the limits in the vendor's headers, and retries of clients"
        if column == "full"
        else "the health of the upstreams: sluice_attempts_failed_total by replica",
    )  # fmt: skip


def slow_retrieval(scene: Scene) -> Finding:
    """Documents are found more slowly."""
    seconds = scene.requests["retrieval_ns"] / 1e9
    if not np.any(seconds[~np.isnan(seconds)] > 0):
        return unknown("retrieval times: no request had that phase")
    spent = scene.moved(seconds)
    told = (
        f"retrieval took {1e3 * spent.before:,.0f} ms before and {1e3 * spent.after:,.0f} ms then"
    )
    if not spent.rose_by(0.1):
        return absent(told)
    span_s = beyond(scene, seconds, np.ones(len(seconds), dtype=bool))
    if scene.spike.metric == "tpot":
        span_s = np.zeros(len(seconds))
    return Finding(
        (told,),
        span_s=span_s,
        played=True,
        series=seconds,
        next_look="the vector store: its load, index size and network",
    )


def slow_clients(scene: Scene) -> Finding:
    """Answers are ready and wait for clients that read slowly."""
    if not scene.has_steps:
        return unknown("steps, without which reading and generating look the same")
    stuck_s = _stuck_s(scene)
    spent = scene.moved(stuck_s)
    if not spent.rose or spent.after - spent.before < 0.02:
        return absent(f"answers end with their last step ({spent.after:.3f} s behind it)")
    requests = scene.requests
    span_s = np.nan_to_num(stuck_s)
    share = float(np.mean(span_s[scene.after] > 0.5))
    if scene.spike.metric == "tpot":
        span_s = span_s / np.maximum(1.0, requests["completion"] - 1.0)
    elif scene.spike.metric == "ttft":
        span_s = np.zeros(len(span_s))
    return Finding(
        (
            (
                f"streams stayed open behind their last token for {spent.before:.2f} s before "
                f"and {spent.after:.2f} s then on average; {share:.1%} for over half a second"
            ),
        ),
        span_s=np.nan_to_num(span_s),
        series=stuck_s,
        next_look="networks and programs of the clients that read slowly",
    )


def journal_pressure(scene: Scene) -> Finding:
    """Records were lost: the disk or the exporter does not keep up, and what is seen has holes."""
    lost, before = (
        sum(count for t_ns, count in scene.journal.gaps if each.start_ns <= t_ns < each.end_ns)
        for each in (scene.windows.incident, scene.windows.baseline)
    )
    if lost <= before:
        return absent(f"{lost:,} records were lost in the window")
    return Finding((f"{lost:,} records could not be written in the window ({before:,} before)",),
        next_look="the disk of the journal; shares above rest on what was recorded",
    )  # fmt: skip


def _before_last_attempt_s(scene: Scene) -> Floats:
    """Time of each request between its first dispatch and its last one."""
    requests = scene.requests
    admitted_ns = (
        requests["arrived_ns"] + requests["admission_ns"] + np.nan_to_num(requests["retrieval_ns"])
    )
    found = (admitted_ns - requests["dispatched_ns"]) / 1e9
    # Without an ending, the last failure is the latest that is known.
    failed = (requests["failed_ns"] - requests["dispatched_ns"]) / 1e9
    found = np.where(np.isnan(found), failed, np.maximum(found, failed))
    return np.maximum(0.0, np.nan_to_num(found))


def _stuck_s(scene: Scene) -> Floats:
    """How long each answer went on behind what the steps of its replica took to compute it."""
    requests, steps = scene.requests, scene.steps
    first_ns = requests["arrived_ns"] + requests["ttft_ns"]
    found = np.full(len(requests), np.nan)
    for number in np.unique(steps.replica):
        mine = np.flatnonzero((requests.names["replica"] == number) & ~np.isnan(first_ns))
        whole: Mask = ~np.isnan(requests["ended_ns"][mine]) & (requests["completion"][mine] > 1)
        mine = mine[whole]
        ends = steps.end_ns[steps.replica == number]
        if not len(mine) or not len(ends):
            continue
        # Its last token was computed in the step that is so many after the first one's.
        begin = np.searchsorted(ends, first_ns[mine] - 1e3, side="left")
        last = begin + requests["completion"][mine].astype(np.int64) - 1
        over = ends[np.minimum(last, len(ends) - 1)]
        preempted = np.nan_to_num(requests["preempted_ns"][mine])
        behind = (requests["ended_ns"][mine] - over - preempted) / 1e9
        found[mine] = np.where(last < len(ends), np.maximum(0.0, behind), np.nan)
    return found
