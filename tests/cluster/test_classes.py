"""The class of a call, from what it, its tenant and its model name; and what the class means."""

from dataclasses import replace

import pytest

from sluice.cluster.classes import ServiceClasses
from sluice.config.sections import SloSection, TenantSection
from sluice.core.errors import InvalidRequest
from sluice.core.request import LADDER_DEFAULT, TIER_DEFAULT, Rung
from sluice.runtime.generation import Call, TextPrompt

S = 1_000_000_000
SLO = {
    "gold": SloSection(
        ttft_s=0.5,
        tpot_s=0.05,
        e2e_s=20.0,
        percentile=99.0,
        tier=0,
        overload=("shorten", "smaller", "queue"),
        shorten_tokens=64,
        queue_wait_s_max=2.0,
    ),
    "batch": SloSection(tier=9),
}
CLASSES = ServiceClasses(
    SLO, {"acme": TenantSection(slo="batch", weight=3.0), "plain": TenantSection()}, "gold"
)
CALL = Call("c", "m", 5 * S, TextPrompt("x"), body_bytes=77)


@pytest.mark.parametrize(
    ("header", "service_tier", "tenant", "expected"),
    [
        ("batch", "", "", "batch"),
        ("batch", "gold", "", "batch"),  # the header wins
        ("", "batch", "", "batch"),
        ("", "", "", "gold"),  # of the model
        ("", "auto", "", "gold"),
        ("", "default", "acme", "batch"),  # of the tenant
        ("", "flex", "acme", "batch"),  # sold by OpenAI, not configured here
        ("", "priority", "plain", "gold"),
        ("gold", "", "acme", "gold"),
        ("", "", "nobody", "gold"),
    ],
)
def test_the_nearest_one_that_names_a_class_decides(header, service_tier, tenant, expected):
    call = replace(CALL, slo_class=header, service_tier=service_tier, tenant=tenant)
    assert CLASSES.named(call).slo_class == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"slo_class": "quick"}, "x-sluice-slo"), ({"service_tier": "turbo"}, "service_tier")],
)
def test_an_unknown_class_is_refused_with_those_that_exist(fields, param):
    with pytest.raises(InvalidRequest, match="configured: batch, gold") as refused:
        CLASSES.named(replace(CALL, **fields))
    assert refused.value.param == param


def test_a_name_of_openai_that_is_configured_is_that_class():
    classes = ServiceClasses({"flex": SloSection(tier=5)})
    assert classes.named(replace(CALL, service_tier="flex")).slo_class == "flex"


def test_a_class_becomes_times_and_a_ladder():
    call = replace(CALL, slo_class="gold", deadline_ns=100 * S)
    request = CLASSES.request(call, (1, 2), 300)
    assert (request.ttft_due_ns, request.tpot_ns) == (5 * S + S // 2, S // 20)
    assert request.deadline_ns == 25 * S  # of the class, before the caller's own
    assert request.queue_due_ns == 7 * S
    assert (request.tier, request.quantile, request.slo_class) == (0, 0.99, "gold")
    assert request.overload == (Rung.SHORTEN, Rung.SMALLER, Rung.QUEUE)
    assert request.shorten_tokens == 64
    assert (request.body_bytes, request.weight, request.degraded) == (77, 1.0, ())


def test_the_callers_deadline_counts_where_it_comes_first():
    call = replace(CALL, slo_class="gold", deadline_ns=6 * S)
    assert CLASSES.request(call, (1,), 1).deadline_ns == 6 * S


def test_a_call_of_no_class_has_no_targets_and_may_wait():
    request = ServiceClasses({}).request(CALL, (1,), 1)
    assert (request.ttft_due_ns, request.tpot_ns, request.deadline_ns) == (None, None, None)
    assert (request.tier, request.overload) == (TIER_DEFAULT, LADDER_DEFAULT)
    assert (request.queue_due_ns, request.shorten_tokens) == (None, None)


def test_a_client_that_forbids_degrading_keeps_only_waiting_and_refusal():
    call = replace(CALL, slo_class="gold", may_degrade=False)
    request = CLASSES.request(call, (1,), 1)
    assert (request.overload, request.shorten_tokens) == ((Rung.QUEUE,), None)


def test_priority_replaces_the_tier_of_the_class():
    for priority in (0, 9):
        request = CLASSES.request(replace(CALL, slo_class="gold", priority=priority), (1,), 1)
        assert request.tier == priority


def test_the_weight_is_that_of_the_tenant():
    assert CLASSES.request(replace(CALL, tenant="acme"), (1,), 1).weight == 3.0
    assert CLASSES.request(replace(CALL, tenant="nobody"), (1,), 1).weight == 1.0
