"""What other autoscalers' laws ask for, and how sluice's policy is judged beside them."""

from typing import Any

import pytest

from benchmarks.scaling.baselines import Oracle, Seen, hpa_concurrency
from benchmarks.scaling.tables import comparison, groups, verdict


def seen(at_s: float, replicas: int = 2, running: int = 0, waiting: int = 0) -> Seen:
    return Seen(at_s, replicas, replicas, running, waiting, seats=4)


def burst_at(begin_s: float, span_s: float, busy: float):
    """Work that keeps so many replicas busy for so long."""

    def between(from_s: float, to_s: float) -> float:
        overlap_s = min(to_s, begin_s + span_s) - max(from_s, begin_s)
        return busy * max(0.0, overlap_s)

    return between


def test_llm_d_1499_the_oracle_orders_so_early_that_the_slowest_start_is_in_time():
    oracle = Oracle(burst_at(1000, 120, 6.0), cold_s=180, ttft_s=10)
    assert oracle.wanted(seen(400)) == 0
    assert oracle.wanted(seen(1000 - 2.1 * 180)) >= 6
    assert oracle.wanted(seen(1100)) >= 6
    assert oracle.wanted(seen(1200)) == 0


def test_the_oracle_counts_what_is_in_the_fleet():
    oracle = Oracle(burst_at(1000, 1, 0.0), cold_s=30, ttft_s=10)
    assert oracle.wanted(seen(10, running=8, waiting=9)) == 5


def test_hpa_doubles_at_once_and_comes_down_after_five_minutes():
    law = hpa_concurrency(seats=4, share=0.5)
    law.wanted(seen(0, replicas=6, running=60))  # its metric is one look old
    assert law.wanted(seen(15, replicas=6, running=24)) == 12
    for look in range(2, 22):
        assert law.wanted(seen(15 * look, replicas=12, running=2)) == 12
    assert law.wanted(seen(345, replicas=12, running=2)) == 1


def row(policy: str, attainment: float, hours: float, flips: int = 0) -> dict[str, Any]:
    return {
        "scene": "s", "cold_s": 30.0, "policy": policy, "attainment": attainment,
        "hours": hours, "flips": flips,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "hours", "oracle", "held"),
    [
        (0.91, 8.4, 0.95, True),
        (0.91, 8.6, 0.95, False),  # above 0.85 of its hours
        (0.89, 5.0, 0.95, False),  # fewer in time
        (0.995, 20.0, 0.999, True),
        (0.995, 20.0, 0.990, False),  # more than can be asked, and dear
    ],
)
def test_it_holds_with_as_many_in_time_for_less_or_where_nearly_all_are(ours, hours, oracle, held):
    rows = [
        row("sluice", ours, hours, 3), row("oracle", oracle, 4.0), row("hpa 50%", 0.90, 10.0, 6),
        row("hpa 70%", 0.85, 7.0, 8), row("sluice, no forecast", 0.99, 1.0),
    ]  # fmt: skip
    (group,) = groups(rows).values()
    judged = verdict(group)
    assert judged is not None
    assert judged.best["policy"] == "hpa 50%"
    assert judged.held is held
    assert judged.steady
    assert ("yes" if held else "**no**") in comparison(rows)
