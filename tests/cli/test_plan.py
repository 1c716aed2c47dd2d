"""``sluice plan`` on the command line."""

import json
import re
from html.parser import HTMLParser
from math import ceil, exp, log

import pytest

from sluice.cli.main import run

ASKED = [
    "plan", "--model", "llama-3.1-70b", "--gpu", "h100", "--tp", "4", "--rps", "100",
    "--input", "1000", "--output", "300", "--ttft", "1s", "--tpot", "50ms",
]  # fmt: skip


def test_json_has_the_fields_that_scripts_rely_on(capsys):
    assert run([*ASKED, "--percentile", "95", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for rate in ("capacity_rps", "slo_rps"):
        band = document["per_replica"][rate]
        assert 0 < band["low"] <= band["estimate"] <= band["high"]
    assert document["gpus"] == 4 * document["replicas"]
    assert set(document["kv"]) == {"bytes_per_token", "tokens_max", "sequences_max"}
    assert document["kv"]["bytes_per_token"] == 163_840
    assert document["binding"] in {"tpot", "ttft", "e2e", "kv memory", "batch limit", "capacity"}
    assert 0 < document["prefill_share"] < 1
    assert document["cost_usd_per_hour"]["low"] > 0
    assert document["leaned_on"]
    assert re.fullmatch(r"vllm 0\.\d+\.\d+ to 0\.\d+\.\d+, fit of 20.*", document["measured_with"])
    assert "explain" not in document


def numbers(value, path=""):
    """Paths of all numbers in a document."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from numbers(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def test_explain_covers_every_number_of_the_document_with_formula_and_source(capsys):
    assert run([*ASKED, "--json", "--explain", "--spare", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    explained = document.pop("explain")
    paths = set(numbers(document))
    assert len(paths) > 20
    left = {
        path
        for path in paths
        if not any(path == key or path.startswith(f"{key}.") for key in explained)
    }
    assert left == set()
    assert all(each["formula"] and each["source"] for each in explained.values())


def test_an_explanation_gives_the_number_again(capsys):
    assert run([*ASKED, "--json", "--explain", "--spare", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    explained = document["explain"]
    given = explained["replicas"]["inputs"]
    demand = given["rate_rps"] * (1 + given["headroom"]) / given["utilisation"]
    assert document["replicas"] == ceil(demand / given["slo_rps"]) + given["spare"]
    given = explained["per_replica.capacity_rps"]["inputs"]
    rate = given["requests_held"] / (given["output_tokens"] * given["step_s"])
    assert document["per_replica"]["capacity_rps"]["estimate"] == pytest.approx(rate)
    assert explained["memory_gib.device"]["value"] == 79.6
    assert "vllm/hopper" in explained["coefficients.layer_s"]["source"]
    price = explained["cost_usd_per_hour"]
    assert (
        document["cost_usd_per_hour"]["high"] == price["inputs"]["gpus"] * price["inputs"]["high"]
    )
    assert "2026-05" in price["source"]
    decode_s, mixed_s = (
        sum(each["value"] for key, each in explained.items() if f".{kind}." in key)
        for kind in ("decode_step_s", "prefill_step_s")
    )
    share = explained["steps.prefill_step_share"]["value"]
    step_s = decode_s + share * (mixed_s - decode_s)
    step_s *= exp(explained["steps.measured_over_calculated_log"]["value"])
    given = explained["per_replica.slo_rps"]["inputs"]
    rate = given["requests"] / (given["output_tokens"] * step_s)
    assert document["per_replica"]["slo_rps"]["estimate"] == pytest.approx(rate)


def test_the_report_names_replicas_bands_margins_and_what_binds(capsys):
    assert run([*ASKED, "--explain"]) == 0
    out = capsys.readouterr().out
    for words in (
        "replicas",
        "SLO rate per replica",
        "what binds",
        "80 % band",
        "four times of five",
        "at any latency",
        "nearest published measurements",
        "lowest and the highest price",
        "What would help",
        "What would not",
        "What each number is",
        "fitted to",
    ):
        assert words in out


def test_one_replica_is_not_said_to_be_busier_than_it_is(capsys):
    asked = [*ASKED, "--rps", "0.1"]
    assert run([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    share = 0.1 / document["per_replica"]["slo_rps"]["estimate"]
    assert document["planned_share_of_slo_rate"] == pytest.approx(share)
    assert run(asked) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 replica, 4 x h100 for 0.1 req/s")
    assert f"{100 * share:.2g}% of the SLO rate in use at 0.1 req/s" in out


def test_spare_replicas_are_part_of_the_share_in_use(capsys):
    assert run([*ASKED, "--spare", "2"]) == 0
    assert "when 2 replicas failed" in capsys.readouterr().out


def test_numbers_are_written_without_exponents(capsys):
    asked = [*ASKED, "--rps", "1000000", "--input", "1", "--output", "10"]
    assert run(asked) == 0
    out = capsys.readouterr().out
    assert "1,000,000 req/s" in out
    assert "e+0" not in out
    assert run([*ASKED, "--input", "60000", "--ttft", "0.2s"]) == 1
    assert "ms" not in capsys.readouterr().err.split("takes about")[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--tp", "3"], "nearest below is 2"),
        (["--tpot", "10us"], "below one step"),
        (["--tp", "1", "--precision", "bf16"], "does not fit"),
        (["--precision", "fp4"], "h100 has no FP4 units"),
        (["--input", "140000"], "takes 131,072"),
        (["--retrieval", "2s"], "nothing is left for the engine"),
        (["--e2e", "1100ms"], "output tokens"),
        (["--tp", "2", "--ttft", "60ms"], "with --tp 8 it can be done"),
    ],
)
def test_that_no_fleet_can_do_it_is_a_finding_and_exits_1(change, words, capsys):
    assert run([*ASKED, *change]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("order", [1, -1])
def test_list_shows_what_can_be_named_and_needs_no_question(order, tmp_path, capsys):
    assert run(["plan", "--list"]) == 0
    out = capsys.readouterr().out
    for words in ("llama-3.1-70b", "also llama-3.3-70b", "h100", "Precisions: bf16", "vllm"):
        assert words in out
    file = tmp_path / "mine.toml"
    file.write_text(
        '[hardware.mine]\narchitecture = "new"\nmemory_gib = 64\nbandwidth_gb_s = 2000\n'
        "bf16_tflops = 300\n"
    )
    options = [["--list"], ["--json"], ["--tables", str(file)]][::order]
    assert run(["plan", *(word for option in options for word in option)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["gpus"][-1]["name"] == "mine"
    assert not document["gpus"][-1]["fp8"]


def test_a_table_that_cannot_be_listed_is_bad_input(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text("[hardware.mine]\nmemory_gib = 64\n")
    assert run(["plan", "--list", "--tables", str(file)]) == 2
    assert "mine has no architecture" in capsys.readouterr().err


def test_a_percentile_that_retrieval_cannot_have_is_bad_input(capsys):
    assert run([*ASKED, "--retrieval", "80ms", "--percentile", "100"]) == 2
    assert "percentile must be 50 to below 100" in capsys.readouterr().err


def test_a_plan_without_a_model_is_bad_input(capsys):
    assert run(["plan", "--gpu", "h100"]) == 2
    assert "Missing --model, --rps, --input" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--model", "lama-3.1-70b"], "did you mean"),
        (["--gpu", "h1000"], "did you mean h100"),
        (["--ttft", "1"], "has no unit"),
        (["--tpot", "-5ms"], "duration"),
        (["--rps", "nan"], "rate must be above 0"),
        (["--rps", "many"], "is not a valid float"),
        (["--precision", "fp9"], "did you mean fp"),
        (["--beside", "encoder"], "NAME=SIZE"),
        (["--beside", "encoder=9QB"], "unknown unit"),
        (["--tables", "/nonexistent.toml"], "cannot read the table"),
        (["--model", ","], "unknown model"),
        (["--e2e", "500ms"], "shorter than the TTFT target"),
        (["--context", "4096"], "belong to --slots"),
        (["--slots", "4"], "about a rate"),
        (["--dp", "2"], "leave it out"),
        (["--calibrate", "rate=2"], "needs tpot"),
        (["--calibrate", "rate=2,tpot=30ms", "--gpu", "h100,b200"], "name one --gpu"),
        (["--batch", "0"], "batch must be above 0"),
        (["--chunk", "8"], "chunk must be at least 16"),
        (["--zones", "0"], "zones must be 1"),
        (["--memory-share", "nan"], "memory share must be above 0"),
        (["--output-variation", "-1"], "output variation must be 0"),
        (["--spare", "-1"], "spare replicas must be 0"),
        (["--html", "/nonexistent/plan.html"], "cannot write"),
    ],
)
def test_bad_input_exits_2_with_what_to_change(change, words, capsys):
    assert run([*ASKED, *change]) == 2
    assert words in capsys.readouterr().err


def test_other_weights_on_the_device_take_from_the_pool(capsys):
    counts = []
    for extra in ([], ["--beside", "encoder=10GiB"]):
        assert run([*ASKED, *extra, "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["kv"]["sequences_max"])
    assert counts[1] < counts[0]


SLOTS = ["plan", "--model", "llama-3.1-8b", "--gpu", "l4", "--precision", "bf16"]


def test_d26_slots_that_do_not_fit_are_a_finding_with_the_nearest(capsys):
    asked = [*SLOTS, "--tp", "2", "--slots", "8", "--context", "32768"]
    assert run(asked) == 1
    out = capsys.readouterr().out
    for words in ("do not fit", "margin", "weights", "buffers", "131,072 bytes per token"):
        assert words in out
    assert run([*asked, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is False
    assert document["memory_gib"]["KV"] == 16.0
    assert f"{document['slots_max']} slots at 32,768 tokens" in out
    assert f"8 slots at {document['request_tokens_max']:,}" in out
    fewer = ["--slots", str(document["slots_max"]), "--context", "32768"]
    assert run([*SLOTS, "--tp", "2", *fewer]) == 0
    shorter = ["--slots", "8", "--context", str(document["request_tokens_max"])]
    assert run([*SLOTS, "--tp", "2", *shorter]) == 0


def test_d26_in_divided_mode_the_context_of_one_request_is_stated(capsys):
    asked = ["--tp", "2", "--slots", "4", "--context", "32768", "--divided"]
    assert run([*SLOTS, *asked]) == 0
    assert "each request has a context of 8,192" in capsys.readouterr().out


def test_d25_a_narrower_kv_format_leaves_the_weights_as_they_are(capsys):
    found = []
    for kv in ("bf16", "fp8", "q8_0", "q4_0"):
        asked = ["--kv", kv, "--tp", "2", "--slots", "16", "--context", "8192", "--json"]
        run([*SLOTS, *asked])
        found.append(json.loads(capsys.readouterr().out))
    assert [each["kv_bytes_per_token"] for each in found] == [131072, 65536, 69632, 36864]
    assert [2 * each["memory_gib"]["KV"] for each in found] == [16.0, 8.0, 8.5, 4.5]
    assert len({each["memory_gib"]["weights"] for each in found}) == 1


def test_slots_need_a_context_and_one_deployment(capsys):
    assert run([*SLOTS, "--slots", "4"]) == 2
    assert "needs --context" in capsys.readouterr().err
    assert run([*SLOTS, "--gpu", "h100", "--slots", "4", "--context", "10"]) == 2
    assert "name one --gpu" in capsys.readouterr().err


def test_a_measured_point_moves_the_rate_and_narrows_its_band(capsys):
    def slo(*extra):
        assert run([*ASKED, *extra, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    plain = slo()
    slow = slo("--calibrate", "concurrency=32,tpot=45ms")
    band, wide = slow["per_replica"]["slo_rps"], plain["per_replica"]["slo_rps"]
    assert band["estimate"] < 0.8 * wide["estimate"]
    assert log(band["high"] / band["low"]) < 0.7 * log(wide["high"] / wide["low"])
    assert slow["leaned_on"] == ["your calibration (concurrency=32,tpot=45ms)"]
    assert run([*ASKED, "--calibrate", "concurrency=32,tpot=150ms", "--tpot", "2s"]) == 0
    assert "check its units" in capsys.readouterr().out


def test_of_several_gpus_the_cheapest_is_planned_and_what_is_faster_is_named(capsys):
    assert run([*ASKED, "--gpu", "b200", "--tp", "8", "--gpu", "h200,l4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    costs = [document["cost_usd_per_hour"]["low"]]
    speeds = [document["at_rate"]["tpot_s"]]
    for each in document["alternatives"]:
        costs.append(each["cost_usd_per_hour"]["low"])
        speeds.append(each["at_rate"]["tpot_s"])
    assert costs == sorted(costs)
    assert speeds == sorted(speeds, reverse=True)
    assert len(costs) > 1
    assert all("l4" in words for words in document["refused"])


def test_prices_are_dated_inputs(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text('[prices.h100]\nusd_per_hour_low = 1.5\nprice_date = "2026-11"\n')
    assert run([*ASKED, "--tables", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    gpus = document["gpus"]
    assert document["cost_usd_per_hour"] == {
        "low": 1.5 * gpus,
        "high": 1.5 * gpus,
        "date": "2026-11",
    }
    file.write_text("[prices.h100]\nusd_per_hour_low = 1.5\n")
    assert run([*ASKED, "--tables", str(file)]) == 2
    assert "has no price_date" in capsys.readouterr().err
    file.write_text('[prices.h1000]\nusd_per_hour_low = 1.5\nprice_date = "2026-11"\n')
    assert run([*ASKED, "--tables", str(file)]) == 2
    assert "did you mean h100" in capsys.readouterr().err


def test_retrieval_is_part_of_ttft_and_of_the_whole(capsys):
    def asked(*extra):
        assert run([*ASKED, *extra, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    slow = asked("--retrieval", "850ms", "--e2e", "15s")
    assert slow["binding"] == "ttft"
    assert slow["at_slo_rate"]["ttft_s"] <= 1.0
    assert (
        slow["per_replica"]["slo_rps"]["estimate"] < asked()["per_replica"]["slo_rps"]["estimate"]
    )
    short = asked("--e2e", "9s")
    assert short["binding"] == "e2e"
    assert short["at_slo_rate"]["e2e_s"] <= 9.0


def test_a_zone_that_fails_leaves_what_the_margins_need(capsys):
    assert run([*ASKED, "--zones", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["replicas"] % 3 == 0
    assert document["planned_share_without_spare"] <= 0.75 / 1.3


class Page(HTMLParser):
    """Tags and texts of a page, and what it would load."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in {"src", "href"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_has_its_plots_and_loads_nothing(tmp_path, capsys):
    file = tmp_path / "plan.html"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL | {"_name_or_path": "<b>mine</b>"}))
    assert run([*ASKED, "--model", str(config), "--tp", "1", "--html", str(file)]) == 0
    capsys.readouterr()
    html = file.read_text(encoding="utf-8")
    page = Page()
    page.feed(html)
    assert page.open == []
    assert page.loads == []
    assert html.count("<svg") == 5
    latency_ticks = re.findall(r'text-anchor="end"[^>]*>([\d.,]+)<', html.split("<svg")[1])
    assert max(float(tick.replace(",", "")) for tick in latency_ticks) <= 5.0, "of a target of 1 s"
    assert "<b>mine" not in html
    assert "<b>mine</b>" in page.text
    for words in (
        "Time to first token against load",
        "Throughput against speed",
        "Memory of one GPU",
        "KV free",
        "Where the time goes",
        "per_replica.slo_rps",
    ):
        assert words in page.text


SMALL = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def test_a_failure_is_one_json_document_too(capsys):
    assert run([*ASKED, "--gpu", "h1000", "--json"]) == 2
    assert "h1000" in json.loads(capsys.readouterr().out)["error"]


def test_help_has_examples_explains_the_words_and_shows_the_form_of_tables(capsys):
    assert run(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert "sluice plan --model llama-3.1-70b --gpu h100" in out
    for words in ("80 % band", "capacity", "leaned on", "Exit codes: 0 a plan, 1 no fleet"):
        assert words in out


def test_the_table_that_help_shows_can_be_used(tmp_path, capsys):
    assert run(["plan", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index(next(line for line in lines if line.strip().startswith("[models.")))
    shown = lines[first : lines.index("", first)]
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(shown))
    mine = ["--model", "my-model", "--gpu", "my-gpu", "--tables", str(file)]
    asked = ["plan", *ASKED[5:], *mine, "--tp", "1", "--precision", "bf16"]
    assert run(asked) == 0
    out = capsys.readouterr().out
    assert "my-gpu" in out
    assert "prices 2026-11" not in out


def test_a_list_of_gpus_that_names_none_is_bad_input(capsys):
    assert run(["plan", "--gpu", ",", *ASKED[1:3], *ASKED[5:]]) == 2
    assert "--gpu names no GPU" in capsys.readouterr().err


def test_a_replica_that_takes_one_request_at_a_time_has_a_rate(capsys):
    assert run([*ASKED, "--batch", "1", "--percentile", "99.9", "--ttft", "30s", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["per_replica"]["slo_rps"]["estimate"] > 0
    assert document["kv"]["sequences_max"] == 1


def test_the_explanation_names_the_fit_that_capacity_is_from(capsys):
    for engine, fit in (("trtllm", "capacity fit"), ("vllm", "closed_loop fit")):
        assert run([*ASKED, "--engine", engine, "--explain", "--json"]) == 0
        explained = json.loads(capsys.readouterr().out)["explain"]
        assert fit in explained["per_replica.capacity_rps"]["source"]
        assert "closed_loop fit" in explained["per_replica.slo_rps"]["source"]


def test_the_rate_can_be_found_by_simulation_which_the_explanation_says(capsys):
    asked = ["--input", "200", "--output", "16", "--simulate", "500", "--explain", "--json"]
    assert run([*ASKED, *asked]) == 0
    document = json.loads(capsys.readouterr().out)
    assert any("500 requests a run" in note for note in document["notes"])
    assert "by simulation" in document["explain"]["per_replica.slo_rps"]["formula"]
    band = document["per_replica"]
    assert band["slo_rps"]["estimate"] <= band["capacity_rps"]["estimate"]
    assert run([*ASKED, "--simulate", "10"]) == 2
    assert "--simulate must be 500 to" in capsys.readouterr().err
