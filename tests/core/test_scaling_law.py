"""What the law asks for, decision by decision, with no fleet around it."""

import pytest

from sluice.core.forecast import PERIOD_NS
from sluice.core.limits import ScaleLimits
from sluice.core.scaling import Scaler, Standing


def standing(**fields: float) -> Standing:
    """Two replicas serve, and are half used."""
    here = {"serving": 2, "coming": 0, "warm": 0, "requests": 8, "waiting": 0} | fields
    return Standing(**{"waiting_s": 0.0, "places": 1.0, "kv": 0.0, "stale": False} | here)  # type: ignore[arg-type]


@pytest.mark.parametrize(("warm", "asks"), [(0, True), (1, False)], ids=["none warm", "one warm"])
def test_late_requests_ask_for_more_where_no_warm_replica_answers_them(warm, asks):
    scaler = Scaler(ScaleLimits(replicas_max=8, warm=1))
    for period in range(1, 4):
        scaler.asked(1.0, period * PERIOD_NS - 1)
        scaler.refused()
        scaler.decide(standing(warm=warm), period * PERIOD_NS)
    decision = scaler.decision
    assert (decision.reason == "queue_wait") is asks
    assert decision.number == (3 if asks else 2)


def test_memory_about_to_run_out_asks_for_more_whoever_is_warm():
    scaler = Scaler(ScaleLimits(replicas_max=8, warm=1))
    decision = scaler.decide(standing(warm=1, kv=1.9), PERIOD_NS)
    assert (decision.reason, decision.number) == ("kv_pressure", 3)
