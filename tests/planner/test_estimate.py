"""Capacity and SLO rate: what must hold whatever the coefficients are."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.planner.estimate import (
    Load,
    Targets,
    _place_s,
    _ttft_s,
    capacity_rps,
    estimate,
    places,
    slo_moment,
)
from sluice.planner.floors import check_floors
from sluice.planner.formats import precision_named
from sluice.planner.names import CannotPlan, NoFleet
from sluice.planner.predict import Point, StepModel, own_fit, snapped
from sluice.planner.residual import Field, Part, Row
from sluice.planner.steady import Lengths
from sluice.planner.tables import own_tables
from sluice.planner.work import Deployment, Layout

TARGETS = Targets(2.0, 0.06)


def model(name="llama-3.1-70b", gpu="h100", tensor=4, engine="vllm", kind="closed_loop"):
    tables = own_tables()
    shape, device = tables.model(name), tables.accelerator(gpu)
    deployment = Deployment(shape, device, precision_named("fp8"), Layout(tensor))
    return StepModel(deployment, engine, "fp8", own_fit(kind))


def load(prompt=1000.0, output=300.0):
    return Load(Lengths(prompt, output))


@given(st.floats(32, 60000), st.floats(1.0001, 3.0), st.sampled_from(["h100", "b200", "a100"]))
@settings(max_examples=12, deadline=None)
def test_longer_prompts_never_raise_capacity(prompt, factor, gpu):
    one = model(gpu=gpu)
    rates = [capacity_rps(one, load(length)) for length in (prompt, prompt * factor)]
    for side in ("estimate", "low", "high"):
        assert getattr(rates[1], side) <= getattr(rates[0], side) * (1 + 1e-9)


def test_neighbours_that_say_longer_prompts_are_faster_do_not_raise_capacity():
    plain = model()
    slow, fast = (
        Row(plain.case(Lengths(prompt, 300), 200.0), residual)
        for prompt, residual in ((1024, 0.6), (4096, -0.6))
    )
    field = Field((Part((0,), 0.5, 2.0),), 0.02, (slow, fast))
    misled = replace(plain, fit=replace(plain.fit, field=field))
    rates = [capacity_rps(misled, load(prompt)).estimate for prompt in (1100, 2000, 2200, 4200)]
    assert rates == sorted(rates, reverse=True)


@given(st.floats(0.3, 5.0), st.floats(0.03, 0.2), st.floats(1.0, 2.0), st.floats(1.0, 2.0))
@settings(max_examples=8, deadline=None)
def test_a_tighter_slo_never_raises_the_slo_rate(ttft_s, tpot_s, looser_ttft, looser_tpot):
    def rate(targets):
        found = slo_moment(model(), load(), targets)
        return 0.0 if found is None else found.rate_rps

    tight = rate(Targets(ttft_s, tpot_s))
    # The search ends at a sixty-fourth of a grid step.
    assert tight <= rate(Targets(ttft_s * looser_ttft, tpot_s * looser_tpot)) * 1.01
    assert rate(Targets(ttft_s, tpot_s, 99.0)) <= tight * 1.01


@pytest.mark.parametrize("field", ["bandwidth_gb_s", "bf16_tflops", "fp8_tflops", "link_gb_s"])
def test_a_faster_device_never_lowers_a_rate(field):
    slow = model()
    gpu = slow.deployment.accelerator
    device = replace(gpu, **{field: 2 * getattr(gpu, field)})
    fast = replace(slow, deployment=replace(slow.deployment, accelerator=device))
    rates = [estimate(each, load(), TARGETS) for each in (slow, fast)]
    assert rates[1].capacity_rps.estimate >= rates[0].capacity_rps.estimate
    assert rates[1].slo_rps.estimate >= rates[0].slo_rps.estimate


def test_the_slo_rate_is_below_capacity_and_both_are_inside_their_bands():
    found = estimate(model(), load(), TARGETS)
    assert found.slo_rps.estimate <= found.capacity_rps.estimate
    for band in (found.slo_rps, found.capacity_rps):
        assert band.low <= band.estimate <= band.high


@pytest.mark.parametrize(
    ("targets", "binding"),
    [(Targets(20.0, 0.025), "tpot"), (Targets(0.12, 1.0), "ttft")],
)
def test_what_binds_is_the_target_that_is_tight(targets, binding):
    assert estimate(model(), load(), targets).binding == binding


def test_with_loose_targets_memory_binds():
    found = estimate(model(tensor=2), load(8000), Targets(600.0, 3.0))
    assert found.binding in {"kv memory", "capacity"}
    assert found.slo_rps.estimate > 0.8 * found.capacity_rps.estimate


def test_the_example_of_the_reference_holds():
    """Llama-3.1-70B in FP8 on two H100 with 4096/256: 112 places, 2.7 requests per second."""
    one = model(tensor=2, engine="trtllm-0.14", kind="capacity")
    held, _ = places(one, load(4096, 256))
    assert held == pytest.approx(112, rel=0.15)
    assert capacity_rps(one, load(4096, 256)).estimate == pytest.approx(2.7, rel=0.2)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (Targets(5.0, 0.0005), "TPOT 0.5 ms is below one step"),
        (Targets(0.0005, 0.05), "TTFT 0.5 ms is below the prefill"),
    ],
)
def test_targets_below_the_floor_are_refused_with_the_nearest_possible(targets, words):
    with pytest.raises(NoFleet, match=words) as refused:
        check_floors(model(), load(), targets)
    assert "a lone request takes about" in str(refused.value)


def test_a_model_that_does_not_fit_is_refused_with_the_devices_that_it_needs():
    with pytest.raises(CannotPlan, match=r"weights 379\.\d GiB.*it fits with --tp 8"):
        places(model("llama-3.1-405b", tensor=1), load())


def test_calibration_goes_through_the_points_and_overrides_the_neighbours():
    points = [Point(8.0, 0.030), Point(128.0, 0.090)]
    lengths = Lengths(1000, 300)
    calibrated = model().calibrated(lengths, points)
    for point in points:
        band = calibrated.step(lengths, point.concurrency)
        assert band.estimate == pytest.approx(point.step_s)
        assert band.high / band.low < 1.11
    assert calibrated.residual(lengths, 8.0).leaned_on == ("your calibration",)


def test_beyond_its_points_a_calibration_stays_as_at_the_nearest():
    lengths = Lengths(1000, 300)
    plain = model()
    points = [
        Point(each, by * plain.step(lengths, each).estimate) for each, by in ((8.0, 1.0), (32, 1.4))
    ]
    turned = plain.calibrated(lengths, points)
    for concurrency, by in ((1.0, 1.0), (8.0, 1.0), (32.0, 1.4), (512.0, 1.4)):
        ratio = (
            turned.step(lengths, concurrency).estimate / plain.step(lengths, concurrency).estimate
        )
        assert ratio == pytest.approx(by)
    widths = [turned.residual(lengths, concurrency).half_width for concurrency in (32.0, 128.0)]
    assert widths[0] < widths[1]


def test_one_point_moves_the_whole_curve_by_its_ratio():
    lengths = Lengths(1000, 300)
    plain = model()
    moved = plain.calibrated(lengths, [Point(8.0, 2 * plain.step(lengths, 8.0).estimate)])
    ratio = moved.step(lengths, 64.0).estimate / plain.step(lengths, 64.0).estimate
    assert ratio == pytest.approx(2.0)


def test_a_calibrated_band_is_narrower_and_widens_away_from_the_point_to_the_plain_one():
    lengths = Lengths(1000, 300)
    plain = model("yi-34b", "mi300x", 1)
    point = Point(16.0, 1.1 * plain.step(lengths, 16.0).estimate)
    moved = plain.calibrated(lengths, [point])
    widths = [moved.residual(lengths, 16.0 * 2**step).half_width for step in range(3)]
    assert widths == sorted(widths)
    for step, width in enumerate(widths):
        assert width < 0.8 * plain.residual(lengths, 16.0 * 2**step).half_width


def test_a_point_far_from_the_prediction_leaves_a_wide_band_away_from_it():
    lengths = Lengths(1000, 300)
    plain = model()
    expected_s = plain.step(lengths, 8.0).estimate
    near, far = (plain.calibrated(lengths, [Point(8.0, expected_s * by)]) for by in (1.1, 9.0))
    assert near.residual(lengths, 8.0).half_width == far.residual(lengths, 8.0).half_width
    widths = [each.residual(lengths, 64.0).half_width for each in (near, far)]
    assert widths[1] > 3 * widths[0]


def test_an_unknown_model_and_device_get_a_wider_band_and_say_what_they_leaned_on():
    lengths = Lengths(1000, 300)
    known = model().step(lengths, 16.0)
    unknown = model("yi-34b", "mi300x", 1)
    band = unknown.step(lengths, 16.0)
    assert band.high / band.low > 1.3 * known.high / known.low
    assert any("rows" in words for words in unknown.residual(lengths, 16.0).leaned_on)


def test_snapping_takes_the_half_doubling_below():
    assert [snapped(value) for value in (1.0, 1.5, 4.0, 5.0)] == pytest.approx(
        [1.0, 2**0.5, 4.0, 4.0]
    )


def test_outputs_that_vary_make_steps_longer_as_long_ones_are_seen_more_often():
    plain, varied = (Lengths(500, 2000, 0.0, variation) for variation in (0.0, 1.0))
    assert varied.resident_tokens == 500 + 2000
    steps = [model().step(lengths, 64.0).estimate for lengths in (plain, varied)]
    assert steps[1] > 1.01 * steps[0]
    rates = [
        estimate(model(), Load(lengths), TARGETS).slo_rps.estimate for lengths in (plain, varied)
    ]
    assert rates[1] < rates[0]


def test_a_cached_prefix_is_attended_to():
    alone, behind = Lengths(1000, 300), Lengths(64_000, 300, 63 / 64)
    assert alone.computed == behind.computed
    one = model()
    moments = [_ttft_s(one, Load(lengths), 1.0, (0.5, 1.0, 0.1)) for lengths in (alone, behind)]
    read_s = one.calculated_s(behind, 1.0) - one.calculated_s(alone, 1.0)
    assert moments[1] - moments[0] > 3 * read_s


def test_one_token_more_than_a_chunk_costs_a_step_and_not_a_second_chunk():
    one = replace(model(), chunk_tokens=4096.0)
    at, above, twice = (
        _ttft_s(one, load(prompt), 4.0, (0.5, 1.0, 0.1)) for prompt in (4096.0, 4097.0, 8192.0)
    )
    assert at < above < at + 0.3 * (twice - at)


def test_kv_tokens_are_those_of_the_requests_that_fit():
    for name in ("llama-3.1-70b", "qwen3.5-27b"):
        found = estimate(model(name), load(), TARGETS)
        held = load().lengths.resident_tokens * found.sequences_max
        if found.sequences_max < load().batch_max:
            assert found.kv_tokens_max == pytest.approx(held, rel=0.01)
        else:
            assert found.kv_tokens_max > held
        each = model(name).deployment.kv_bytes(load().lengths.resident_tokens)
        pool = found.budget.pool_bytes
        assert found.kv_tokens_max / load().lengths.resident_tokens * each == pytest.approx(
            pool, rel=0.01
        )


def test_a_replica_that_is_full_makes_newcomers_wait_for_ever():
    assert _place_s(10.0, 10.0, 1.0, 0.95) == inf
    assert _place_s(10.0, 1000.0, 1.0, 0.95) == 0.0
