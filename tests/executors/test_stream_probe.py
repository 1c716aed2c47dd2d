"""Health and load of an upstream: read by dialect, with an age, and never believed for too long."""

import pytest

from sluice.executors.dialects import DIALECTS, VLLM
from sluice.executors.scrape import read_gauges
from sluice.executors.stream import Health
from sluice.testing.engine_answers import ENGINE_ANSWERS
from sluice.testing.upstream import Close, Hold, Send, whole
from tests.executors.stream_rig import rig, run

METRICS = "text/plain; version=0.0.4"


def probe(route, name="vllm"):
    async def check():
        async with rig(route, name) as (_, engine):
            return await engine.probe()

    return run(check)


@pytest.mark.parametrize("name", ["vllm", "sglang", "tgi", "llama-server"])
def test_load_is_read_in_each_engines_own_names(name):
    found = probe(ENGINE_ANSWERS[name].route(), name)
    assert (found.health, found.fault) == (Health.READY, "")
    assert (found.gauges.waiting, found.gauges.running) == (3, 7)
    assert found.gauges.kv_use == (0.25 if name in {"vllm", "sglang"} else None)
    assert found.gauges.counters["prefix_hits"] == 400


def test_a_vendor_has_health_and_no_gauges():
    found = probe(ENGINE_ANSWERS["openai"].route(), "openai")
    assert (found.health, found.gauges, found.fault) == (Health.READY, None, "")
    limited = probe(lambda _: ENGINE_ANSWERS["openai"].overloaded, "openai")
    assert limited.health is Health.READY
    keyless = probe(lambda _: whole(b"{}", 401), "openai")
    assert (keyless.health, keyless.fault) == (Health.DOWN, "status 401")


def test_names_of_older_versions_are_understood_and_the_newer_one_wins():
    old = 'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
    assert read_gauges(VLLM, old).kv_use == 0.5
    assert read_gauges(VLLM, old + "vllm:kv_cache_usage_perc 0.75\n").kv_use == 0.75


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm:num_requests_waiting 3", 3),
        ("vllm:num_requests_waiting 3.0 1796055633000", 3),
        ('vllm:num_requests_waiting{a="}",b="x \\" y"} 1e1', 10),
        ('vllm:num_requests_waiting{engine="0"} 1\nvllm:num_requests_waiting{engine="1"} 2', 3),
        ("vllm:num_requests_waiting_by_reason 9", None),
        ("# vllm:num_requests_waiting 9", None),
        ("vllm:num_requests_waiting NaN", None),
        ("vllm:num_requests_waiting +Inf", None),
        ("vllm:num_requests_waiting many", None),
        ('vllm:num_requests_waiting{engine="0 1', None),
        ("", None),
        ("\x00\xff garbage {{{", None),
    ],
)
def test_samples_are_read_as_the_format_says(text, expected):
    assert read_gauges(VLLM, text).waiting == expected


def test_the_fullest_rank_counts_for_kv():
    text = 'vllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:kv_cache_usage_perc{engine="1"} 0.9\n'
    assert read_gauges(VLLM, text).kv_use == 0.9


def test_seconds_in_each_stage_are_read_as_sum_and_count():
    text = (
        'vllm:request_queue_time_seconds_bucket{le="0.3"} 7\n'
        'vllm:request_queue_time_seconds_sum{engine="0"} 1.5\n'
        'vllm:request_queue_time_seconds_sum{engine="1"} 2.5\n'
        'vllm:request_queue_time_seconds_count{engine="0"} 8\n'
        "vllm:request_decode_time_seconds_sum 9\n"
    )
    counters = read_gauges(VLLM, text).counters
    assert counters == {"queue_s": 4.0, "queue_count": 8.0, "decode_s": 9.0}


def metrics_route(script):
    return lambda received: script if received.path == "/metrics" else whole(b"{}")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (whole(b"", 404), "status 404"),
        (whole(b"<html>", kind="text/html"), "no vllm metrics"),
        ((Close(),), "connection closed"),
        (ENGINE_ANSWERS["vllm"].overloaded, "busy"),
        ((Send(b"\x00\x01\r\n\r\n"),), "not an HTTP answer"),
    ],
)
def test_a_failing_scrape_is_said_and_leaves_health_alone(script, words):
    found = probe(metrics_route(script))
    assert (found.health, found.gauges) == (Health.READY, None)
    assert words in found.fault


def test_an_upstream_that_hangs_is_down_within_the_deadline(monkeypatch):
    monkeypatch.setattr("sluice.executors.remote._SIDE_DEADLINE_S", 0.05)
    found = probe(lambda _: (Hold(),))
    assert (found.health, found.gauges) == (Health.DOWN, None)
    assert "no output within 0.05 s" in found.fault
    scrape = probe(metrics_route((Hold(),)))
    assert (scrape.health, scrape.gauges) == (Health.READY, None)


@pytest.mark.parametrize("name", DIALECTS)
def test_an_engine_that_says_it_fails_is_down(name):
    assert probe(lambda _: whole(b"", 500), name).health is Health.DOWN


def test_a_model_that_is_being_loaded_is_neither_ready_nor_down():
    found = probe(lambda _: ENGINE_ANSWERS["llama-server"].loading, "llama-server")
    assert (found.health, found.gauges) == (Health.LOADING, None)
