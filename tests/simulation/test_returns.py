"""Refused clients that come back as told, that never do, that ask all the time, of two tenants."""

from functools import partial

import pytest

from tests.simulation.overload import GPU, MS, Overload, S

SHORT = 20
NO_TARGET = {"ttft_due_ns": None, "tpot_ns": None}


def ask(run, at_s, length=SHORT, *, limit=64, **fields):
    return run.call(round(at_s * S), 50, length, limit=limit, **NO_TARGET, **fields)


def small_pool():
    """Two seats and four places to wait in; what is known of lengths are short answers."""
    run = Overload(1, sequences=2, queue_places_max=4)
    for number in range(8):
        ask(run, 1 + number, limit=SHORT)
    return run


def test_clients_refused_beside_answers_longer_than_usual_are_not_told_to_come_at_once():
    run = small_pool()
    for _ in range(6):
        ask(run, 10, 250, limit=250)
    refused = [ask(run, 10.5, retries=1000) for _ in range(3)]
    run.run()
    first_end_ns = min(call.ended_ns for call in run.calls.values() if call.length == 250)
    assert first_end_ns > 13 * S
    assert all(call.first_ns is not None for call in refused)
    assert max(len(call.told_s) for call in refused) <= 8
    assert min(told_s for call in refused for told_s in call.told_s) > 0.4


def flood_that_never_returns(run):
    for number in range(4000):
        ask(run, 10 + number / 400)
    return 20


def flood_that_resends(run):
    calls = [ask(run, 10) for _ in range(20)]
    for call in calls:
        for number in range(1, 131):
            run.fleet.driver.call_at(10 * S + number * 100 * MS, partial(run.ask, call))
    return 23


@pytest.mark.parametrize("flood", [flood_that_never_returns, flood_that_resends])
def test_refused_clients_that_stay_away_do_not_close_an_idle_pool(flood):
    run = small_pool()
    end_s = flood(run) + 5
    run.run(end_s)
    assert len(run.refused_ns) > 1000
    burst = [ask(run, end_s, retries=3) for _ in range(6)]
    beyond = [ask(run, end_s + 0.01) for _ in range(3)]
    run.run(end_s + 5)
    assert sum(not call.told_s for call in burst) >= 5
    assert all(call.first_ns is not None for call in burst)
    told_s = [told for call in (*burst, *beyond) for told in call.told_s]
    assert len(told_s) >= 3
    assert max(told_s) < 5


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize(("sequences", "places", "rate"), [(4, 8, 1.5), (32, 64, 8.0)])
def test_two_tenants_that_come_back_as_told_are_served_at_the_first_retry(
    sequences, places, rate, weight
):
    """Both over capacity, however their tokens compare at the moment."""
    options = {} if sequences == 4 else {"coefficients": GPU, "blocks": 4096}
    run = Overload(5, sequences=sequences, queue_places_max=places, **options)
    for tenant, share in (("heavy", weight), ("light", 1.0)):
        run.poisson(rate, 1, 90, tenant=tenant, weight=share, retries=9, **NO_TARGET)
    run.run()
    told = [call for call in run.calls.values() if call.tries > 1]
    assert served_at_first(told) >= 0.9
    for tenant in ("heavy", "light"):
        own = [call for call in told if call.request.tenant == tenant]
        assert len(own) > 30
        assert served_at_first(own) >= 0.85, tenant


def served_at_first(told):
    return sum(call.tries == 2 and call.first_ns is not None for call in told) / len(told)


def test_bookings_lapse_while_nothing_happens():
    run = small_pool()
    for _ in range(12):
        ask(run, 10)
    run.run(10.1)
    assert run.core.pools(11 * S)[0].bookings > 3
    assert run.core.pools(200 * S)[0].bookings == 0
