"""Fleets: how many replicas, what would help, and what is refused."""

from dataclasses import replace
from math import ceil, inf, nan

import pytest

from sluice.planner.estimate import Load, Targets
from sluice.planner.knobs import knobs, smaller_model
from sluice.planner.names import CannotPlan, NoFleet
from sluice.planner.plan import plan
from sluice.planner.question import Question
from sluice.planner.steady import Lengths
from sluice.planner.tables import own_tables, with_user_table


def question(model="llama-3.1-70b", gpu="h100", **changes):
    tables = own_tables()
    asked = Question(
        shape=tables.model(model),
        accelerator=tables.accelerator(gpu),
        rate_rps=100.0,
        load=Load(Lengths(1000, 300)),
        targets=Targets(1.0, 0.05),
        tensor=4,
    )
    return replace(asked, **changes)


def test_replicas_are_demand_with_headroom_over_the_planned_share_of_the_slo_rate():
    found = plan(question())
    assert found.replicas == ceil(100 * 1.3 / (0.75 * found.replica.slo_rps.estimate))
    assert found.devices == 4 * found.replicas
    assert found.planned_share == 100 / (found.replicas * found.replica.slo_rps.estimate)
    assert found.planned_share <= 0.75 / 1.3


def test_the_share_in_use_counts_whole_replicas_and_those_that_may_fail():
    one = plan(question(rate_rps=0.1))
    assert one.replicas == 1
    assert one.planned_share == pytest.approx(0.1 / one.replica.slo_rps.estimate)
    spared = plan(question(rate_rps=0.1, spare=3))
    assert spared.planned_share == pytest.approx(one.planned_share / 4)
    assert spared.share_without_spare == pytest.approx(one.planned_share)


def test_spare_replicas_are_added():
    assert plan(question(spare=2)).replicas == plan(question()).replicas + 2


@pytest.mark.parametrize("gpu", ["h100", "a100"])
@pytest.mark.parametrize("precision", ["fp4", "nvfp4"])
def test_fp4_on_a_gpu_without_it_is_refused_with_the_reason(gpu, precision):
    with pytest.raises(NoFleet, match=f"{gpu}.* has no FP4 units.*int4"):
        plan(question(gpu=gpu, precision=precision))


def test_fp8_on_a_gpu_without_it_is_multiplied_in_16_bits_and_says_so():
    loose = Targets(5.0, 0.2)
    notes = plan(question("llama-3.1-8b", "a100", precision="fp8", targets=loose)).notes
    assert any("has no FP8 units" in note for note in notes)


def test_why_nothing_fits_is_said_and_not_that_the_model_cannot_be_divided_further():
    shape = replace(own_tables().model("llama-3.1-405b"), hidden=16388)
    with pytest.raises(NoFleet, match="does not fit on 4 x a10g"):
        plan(question(gpu="a10g", shape=shape, tensor=None))


def test_a_higher_rate_never_needs_fewer_replicas():
    counts = [plan(question(rate_rps=rate)).replicas for rate in (1, 10, 100, 1000)]
    assert counts == sorted(counts)


def test_without_parallelism_the_fewest_devices_are_taken():
    free = plan(question(tensor=None))
    each = [plan(question(tensor=tensor)).devices for tensor in (2, 4, 8)]
    assert free.devices == min(each)


def test_a_plan_for_an_unknown_device_is_made_with_a_note():
    found = plan(question(gpu="mi300x", tensor=1))
    assert any("no rows on mi300x" in words for words in found.replica.residual.leaned_on)


def test_an_architecture_with_capacity_rows_only_says_so():
    found = plan(question("llama-3.1-8b", "a100", tensor=1, targets=Targets(5.0, 0.2)))
    assert any("no published latencies on ampere" in note for note in found.notes)


def test_a_model_that_is_published_in_one_format_is_planned_in_it():
    found = plan(question("gpt-oss-120b", "b200", tensor=2, precision="bf16"))
    assert found.model.precision == "fp4"
    assert found.model.deployment.precision.weights == "mxfp4"
    assert not any("weights in" in knob.change for knob in knobs(found))
    assert any("gpt-oss-120b on b200" in words for words in found.replica.residual.leaned_on)


def test_four_bit_weights_without_four_bit_units_are_flagged():
    plans = [plan(question("gpt-oss-120b", gpu, tensor=2)) for gpu in ("h100", "b200")]
    flagged = [any("has no FP4 units" in note for note in found.notes) for found in plans]
    assert flagged == [True, False]


def test_a_starved_pool_is_flagged():
    asked = question("qwen3-32b", tensor=1, precision="bf16", targets=Targets(20.0, 0.5))
    assert any("starved of memory" in note for note in plan(asked).notes)


def test_each_knob_has_the_gain_that_a_plan_with_the_change_has():
    found = plan(question(smaller=own_tables().model("llama-3.1-8b")))
    gains = {knob.change: knob.gain for knob in knobs(found)}
    assert list(gains.values()) == sorted(gains.values(), reverse=True)
    for words in ("batch", "chunk", "utilisation", "smaller model", "max_tokens", "prefix cache"):
        assert any(words in change for change in gains)
    other = plan(question(targets=replace(question().targets, tpot_s=0.075)))
    ratio = other.planned_rps_per_device / found.planned_rps_per_device
    assert gains["TPOT target half as long again"] == pytest.approx(ratio)
    assert gains["utilisation 0.85, with less room for bursts"] == pytest.approx(0.85 / 0.75)
    assert gains["a smaller model: llama-3.1-8b"] > 2


def test_the_smaller_model_is_of_the_same_family_and_half_as_large_at_most():
    tables = own_tables()
    smaller = smaller_model(tables.model("llama-3.1-70b"), tables)
    assert smaller is not None
    assert smaller.name == "llama-3.1-8b"
    assert smaller_model(tables.model("mixtral-8x7b"), tables) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rate_rps": 0.0}, "rate must be above 0"),
        ({"rate_rps": nan}, "rate must be above 0"),
        ({"rate_rps": inf}, "rate must be above 0"),
        ({"rate_rps": 1e9}, "at most 1e\\+07"),
        ({"load": Load(Lengths(-5, 300))}, "input must be above 0"),
        ({"load": Load(Lengths(1000, nan))}, "output must be above 0"),
        ({"load": Load(Lengths(1000, 300, 1.0))}, "cached share"),
        ({"load": Load(Lengths(140000, 300))}, "takes 131,072"),
        ({"targets": Targets(0.0, 0.05)}, "TTFT must be above 0"),
        ({"targets": Targets(1.0, 0.05, 100.0)}, "percentile"),
        ({"utilisation": 0.0}, "utilisation"),
        ({"headroom": -0.1}, "headroom"),
        ({"spare": -1}, "spare"),
        ({"tensor": 3}, "nearest below is 2"),
        ({"tensor": 0}, "tensor parallelism must be 1 to 1024"),
        ({"engine_name": "vlm"}, "did you mean vllm"),
        ({"precision": "fp9"}, "did you mean fp"),
        ({"kv_format": "fp99"}, "unknown KV format"),
        ({"tensor": 1, "precision": "bf16"}, r"does not fit.*--tp 4"),
    ],
)
def test_impossible_questions_are_refused_with_the_reason(changes, words):
    with pytest.raises(CannotPlan, match=words):
        plan(question(**changes))


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(CannotPlan, match=r"did you mean .*llama-3\.1-70b"):
        own_tables().model("lama-3.1-70b")
    with pytest.raises(CannotPlan, match="did you mean h100"):
        own_tables().accelerator("h1000")


def test_every_entry_of_our_tables_can_be_used():
    tables = own_tables()
    assert len([tables.model(name) for name in tables.models]) >= 35
    assert len([tables.accelerator(name) for name in tables.hardware]) >= 35


def test_a_users_table_comes_before_ours(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[hardware.h100]\narchitecture = "hopper"\nmemory_gib = 79.6\nbandwidth_gb_s = 3350.0\n'
        "bf16_tflops = 989.0\nfp8_tflops = 1979.0\nusd_per_hour_low = 2.5\n"
        '[hardware."my chip"]\narchitecture = "new"\nmemory_gib = 64\nbandwidth_gb_s = 2000\n'
        "bf16_tflops = 300\n"
    )
    tables = with_user_table(own_tables(), file)
    assert tables.accelerator("h100").usd_per_hour_low == 2.5
    found = plan(question("llama-3.1-8b", accelerator=tables.accelerator("My Chip"), tensor=1))
    assert found.replicas >= 1
    assert found.cost_usd_per_hour is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[hardwear.x]\n", "did you mean hardware"),
        ("[hardware.x]\nmemory_gib = 1\n", "has no architecture, bandwidth_gb_s, bf16_tflops"),
        ('[hardware.x]\narchitecture = "a"\nmemory_gb = 80\n', "did you mean memory_gib"),
        (
            (
                '[hardware.x]\narchitecture = "a"\nmemory_gib = -1\nbandwidth_gb_s = 1\n'
                "bf16_tflops = 1\n"
            ),
            "not a positive number",
        ),
        ("[[", "is not TOML"),
        ("[hardware]\nmemory_gib = 1\n", r"not made of tables \[hardware\.NAME\]"),
    ],
)
def test_mistakes_in_a_users_table_are_named(tmp_path, text, words):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(CannotPlan, match=words):
        with_user_table(own_tables(), file).accelerator("x")


def test_a_missing_table_or_configuration_is_said(tmp_path):
    with pytest.raises(CannotPlan, match="cannot read the table"):
        with_user_table(own_tables(), tmp_path / "none.toml")
    with pytest.raises(CannotPlan, match="cannot read the model configuration"):
        own_tables().model(str(tmp_path / "config.json"))
