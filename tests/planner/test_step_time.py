"""The formula never falls with work and never rises with a faster device."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.planner.coefficients import Coefficients
from sluice.planner.formats import precision_named
from sluice.planner.hardware import Accelerator
from sluice.planner.predict import own_fit
from sluice.planner.steady import Lengths, steady_state
from sluice.planner.tables import own_tables
from sluice.planner.work import Batch, Deployment, Layout, touched, work_of

MODELS = ("llama-3.1-70b", "gpt-oss-120b", "deepseek-r1", "qwen3.5-397b-a17b")
models = st.sampled_from(MODELS)
levels = st.sampled_from(sorted(own_fit("closed_loop").levels.levels.items()))


def deployment(name, gpu="h200", precision="fp8", tensor=4):
    tables = own_tables()
    return Deployment(
        tables.model(name), tables.accelerator(gpu), precision_named(precision), Layout(tensor)
    )


@pytest.mark.parametrize("kind", ["closed_loop", "capacity"])
def test_no_fitted_coefficient_is_negative(kind):
    for level in own_fit(kind).levels.levels.values():
        assert all(getattr(level, field.name) >= 0 for field in fields(Coefficients))


@given(models, levels, st.floats(1, 2000), st.floats(1, 50000), st.floats(1.0, 3.0))
@settings(max_examples=60, deadline=None)
def test_more_rows_context_or_prefill_never_take_less_time(name, level, rows, context, factor):
    step_s = level[1].step_duration_s
    one = deployment(name)
    base = step_s(work_of(one, Batch(rows, context, 512, 2048)))
    slack = 1 - 1e-9
    assert step_s(work_of(one, Batch(rows * factor, context, 512, 2048))) >= base * slack
    assert step_s(work_of(one, Batch(rows, context * factor, 512, 2048))) >= base * slack
    assert step_s(work_of(one, Batch(rows, context, 512 * factor, 2048))) >= base * slack


@given(
    models,
    levels,
    st.sampled_from(["bandwidth_gb_s", "bf16_tflops", "fp8_tflops", "link_gb_s"]),
    st.floats(1.0, 4.0),
    st.floats(1, 1000),
)
@settings(max_examples=60, deadline=None)
def test_a_faster_device_is_never_slower(name, level, field, factor, rows):
    slow = deployment(name)
    gpu = slow.accelerator
    fast = replace(slow, accelerator=replace(gpu, **{field: getattr(gpu, field) * factor}))
    lengths = Lengths(2000, 300)
    times = [steady_state(each, lengths, rows).step_s(level[1]) for each in (slow, fast)]
    assert times[1] <= times[0] * (1 + 1e-9)


def test_the_parts_of_a_step_are_its_whole():
    work = work_of(deployment("deepseek-r1"), Batch(64, 2000, 2048, 1000))
    level = Coefficients()
    assert sum(level.parts_s(work).values()) == pytest.approx(level.step_duration_s(work))
    assert min(level.parts_s(work).values()) >= 0


def test_a_lone_token_reaches_the_experts_of_one_token_and_many_reach_all():
    shape = own_tables().model("gpt-oss-120b")
    assert touched(shape, 1) == pytest.approx(4 / 128)
    assert touched(shape, 2000) == pytest.approx(1.0)


def test_weight_only_formats_multiply_at_the_peak_of_16_bits():
    gpu = Accelerator("g", "hopper", 80, 3000, 1000, 2000)
    assert gpu.peak_flops_s(precision_named("int4").activations) == 1000e12
    assert gpu.peak_flops_s(precision_named("fp8").activations) == 2000e12


def test_a_device_without_the_format_multiplies_in_the_next_wider():
    assert own_tables().accelerator("a100").peak_flops_s("fp4") == 312e12
    assert own_tables().accelerator("h100").peak_flops_s("fp4") == 1979e12


def test_mxfp4_multiplies_in_8_bits_only_where_there_are_units_for_blocks():
    activations = precision_named("mxfp4").activations
    b200, h100 = map(own_tables().accelerator, ("b200", "h100"))
    assert b200.peak_flops_s(activations) == b200.peak_flops_s("fp8")
    assert h100.peak_flops_s(activations) == h100.bf16_tflops * 1e12


def test_a_cached_prompt_takes_no_prefill():
    one = deployment("llama-3.1-70b")
    whole = steady_state(one, Lengths(4000, 200), 32)
    cached = steady_state(one, Lengths(4000, 200, 0.999999), 32)
    level = Coefficients()
    assert cached.step_s(level) < 1.01 * level.step_duration_s(cached.decode)
    assert whole.step_s(level) > 1.01 * level.step_duration_s(whole.decode)
    assert cached.decode == whole.decode
