"""Three plain ways to name a cause, which ``benchmarks/doctor.py`` puts beside the doctor.

All see the same columns and windows and the spike that the doctor saw. *Rules*: thresholds on
figures of a dashboard, the first that fires. *Attributes*: what sets slow requests of the incident
apart from all others. *Correlation*: the series over time that follows the latency most closely.
"""

from collections.abc import Callable

import numpy as np

from sluice.doctor.columns import Floats, Ints, Journal, Mask
from sluice.doctor.spike import Spike, latency_of
from sluice.doctor.windows import Window, Windows

_BINS = 24


def rules(journal: Journal, windows: Windows, spike: Spike) -> str | None:
    """The first threshold that is crossed, as an alert page would have them in order."""
    before, after = _figures(journal, windows.baseline), _figures(journal, windows.incident)

    def rose(name: str, factor: float, least: float = 0.0) -> bool:
        return after[name] > factor * before[name] + least

    del spike
    ordered: tuple[tuple[str, bool], ...] = (
        ("vendor_throttling", rose("full", 2.0, 0.02)),
        ("upstream_failover", rose("faults", 2.0, 0.02)),
        ("cold_start", after["lost"] > before["lost"]),
        ("slow_retrieval", rose("retrieval", 1.5, 0.02)),
        ("preemption", after["kv"] > 0.9 and rose("kv", 1.1)),
        ("cache_hits", before["hits"] > 0.1 and after["hits"] < 0.7 * before["hits"]),
        ("long_prompts", rose("prompt_max", 2.0)),
        ("longer_context", rose("prompt", 1.2)),
        ("output_length", rose("output", 1.2)),
        ("noisy_tenant", rose("top_tenant", 1.4)),
        ("queue_backed_up", rose("rate", 1.15)),
        ("host_cpu", rose("pause", 2.0, 0.05)),
        ("imbalance", rose("imbalance", 1.2)),
        ("engine_slowdown", rose("step", 1.2)),
        ("admission_limits", rose("waiting", 1.5, 0.5)),
        ("slow_clients", rose("decode", 1.5)),
    )
    return next((name for name, fires in ordered if fires), None)


def attributes(journal: Journal, windows: Windows, spike: Spike) -> str | None:
    """The attribute whose values differ most between slow requests and the baseline."""
    requests = journal.requests
    latency_s = latency_of(requests, spike.metric)
    inside = windows.incident.of(requests) & ~np.isnan(latency_s)
    usual = windows.baseline.of(requests) & ~np.isnan(latency_s)
    slow = inside & (latency_s > (spike.before_s or 0.0))
    if slow.sum() < 2 or usual.sum() < 2:
        return None
    columns = {
        "longer_context": requests["prompt"],
        "output_length": requests["completion"],
        "cache_hits": -np.nan_to_num(requests["cached"]),
        "slow_retrieval": np.nan_to_num(requests["retrieval_ns"]),
        "vendor_throttling": requests["full"],
        "upstream_failover": requests["faults"],
        "preemption": np.nan_to_num(requests["preemptions"]),
        "queue_backed_up": np.nan_to_num(requests["queue_ns"]),
        "slow_clients": np.nan_to_num(requests["decode_ns"]),
    }
    scores = {name: _distance(values[slow], values[usual]) for name, values in columns.items()}
    scores["noisy_tenant"] = _categories(requests.names["tenant"], slow, usual)
    scores["imbalance"] = _categories(requests.names["replica"], slow, usual)
    return max(scores, key=lambda name: scores[name])


def correlation(journal: Journal, windows: Windows, spike: Spike) -> str | None:
    """The series whose course over both windows is most like that of the latency."""
    requests, steps = journal.requests, journal.steps
    start_ns, end_ns = windows.baseline.start_ns, windows.incident.end_ns
    edges = np.linspace(start_ns, end_ns, _BINS + 1)
    latency_s = latency_of(requests, spike.metric)
    place = np.digitize(requests["arrived_ns"], edges) - 1
    target = _binned(latency_s, place, lambda values: float(np.quantile(values, 0.9)))
    mean: Callable[[Floats], float] = lambda values: float(np.mean(values))  # noqa: E731
    series = {
        "longer_context": _binned(requests["prompt"], place, mean),
        "long_prompts": _binned(requests["prompt"], place, lambda values: float(values.max())),
        "output_length": _binned(requests["completion"], place, mean),
        "cache_hits": -_binned(np.nan_to_num(requests["cached"]), place, mean),
        "slow_retrieval": _binned(np.nan_to_num(requests["retrieval_ns"]), place, mean),
        "vendor_throttling": _binned(requests["full"], place, mean),
        "upstream_failover": _binned(requests["faults"], place, mean),
        "queue_backed_up": np.histogram(requests["arrived_ns"], edges)[0].astype(np.float64),
        "slow_clients": _binned(np.nan_to_num(requests["decode_ns"]), place, mean),
    }
    if len(steps):
        at = np.digitize(steps.end_ns, edges) - 1
        series |= {
            "engine_slowdown": _binned(steps.measured_ns, at, mean),
            "host_cpu": _binned(steps.pause_ns, at, mean),
            "preemption": _binned(steps.kv_blocks, at, mean),
            "admission_limits": _binned(steps.waiting, at, mean),
        }
    scores = {name: _correlated(values, target) for name, values in series.items()}
    return max(scores, key=lambda name: scores[name])


BASELINES = {"rules": rules, "attributes": attributes, "correlation": correlation}


def _figures(journal: Journal, window: Window) -> dict[str, float]:
    """Means as a dashboard shows them."""
    requests, steps = journal.requests, journal.steps
    rows = window.of(requests)
    inside = (steps.end_ns >= window.start_ns) & (steps.end_ns < window.end_ns)
    prompt, cached = requests["prompt"][rows], np.nan_to_num(requests["cached"][rows])
    tenants = np.bincount(requests.names["tenant"][rows])
    busy = np.bincount(steps.replica[inside], weights=steps.rows[inside] + steps.prefill[inside])
    busy = busy[busy > 0]
    any_steps = bool(inside.any())
    return {
        "full": float(requests["full"][rows].mean()),
        "faults": float(requests["faults"][rows].mean()),
        "lost": float(
            sum(
                change.state == "lost" and window.start_ns <= change.t_ns < window.end_ns
                for change in journal.replicas
            )
        ),
        "retrieval": float(np.nan_to_num(requests["retrieval_ns"][rows]).mean() / 1e9),
        "kv": float((steps.kv_blocks / np.maximum(1, steps.kv_total))[inside].mean())
        if any_steps
        else 0.0,
        "hits": float(cached.sum() / max(1.0, prompt.sum())),
        "prompt": float(prompt.mean()),
        "prompt_max": float(prompt.max()),
        "output": float(np.nanmean(requests["completion"][rows])),
        "top_tenant": float(tenants.max() / tenants.sum()),
        "rate": float(rows.sum() / window.duration_s),
        "pause": float(steps.pause_ns[inside].sum() / max(1.0, steps.measured_ns[inside].sum()))
        if any_steps
        else 0.0,
        "imbalance": float(busy.max() / busy.mean()) if len(busy) else 1.0,
        "step": float(steps.measured_ns[inside].mean()) if any_steps else 0.0,
        "waiting": float(steps.waiting[inside].mean()) if any_steps else 0.0,
        "decode": float(np.nanmean(requests["decode_ns"][rows])),
    }


def _distance(slow: Floats, usual: Floats) -> float:
    """Largest distance of the two distribution functions, where slow ones are higher."""
    slow, usual = slow[~np.isnan(slow)], np.sort(usual[~np.isnan(usual)])
    if not len(slow) or not len(usual):
        return 0.0
    points = np.sort(slow)
    below = np.searchsorted(usual, points, side="left") / len(usual)
    return float(np.max(below - np.arange(len(points)) / len(points)))


def _categories(names: Ints, slow: Mask, usual: Mask) -> float:
    """By how much the share of a name rose at most."""
    most = int(names.max()) + 1
    shares = [np.bincount(names[mask], minlength=most) / mask.sum() for mask in (slow, usual)]
    return float((shares[0] - shares[1]).max())


def _binned(values: Floats, place: Ints, of: Callable[[Floats], float]) -> Floats:
    found = np.zeros(_BINS)
    for number in range(_BINS):
        inside = values[(place == number) & ~np.isnan(values)]
        found[number] = of(inside) if len(inside) else 0.0
    return found


def _correlated(series: Floats, target: Floats) -> float:
    if np.ptp(series) == 0 or np.ptp(target) == 0:
        return 0.0
    return float(np.corrcoef(series, target)[0, 1])
