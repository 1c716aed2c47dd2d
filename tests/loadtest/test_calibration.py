"""What is found out about a server before it is measured."""

import msgspec
import pytest

from sluice.loadtest.calibration import calibrated
from sluice.loadtest.signals import page_of, watched
from sluice.loadtest.wire import Target
from sluice.testing.engine_answers import ENGINE_ANSWERS, error_body
from sluice.testing.upstream import whole
from tests.loadtest.rig import answer, upstream_in_thread, usage_of


def calibration_of(route):
    with upstream_in_thread(route) as upstream:
        return calibrated(Target("127.0.0.1", upstream.port, "m"))


def test_the_frame_of_the_template_is_found_and_all_words_kept():
    found = calibration_of(answer)
    assert found.vocabulary.frame_tokens == 7
    assert len(found.vocabulary.words) > 90
    assert (found.usage, found.full_length, found.notes) == (True, True, ())


def test_words_of_several_tokens_are_left_out():
    """A vocabulary with two tokens for words of more than eight letters."""

    def route(request):
        script = answer(request)
        if not request.path.endswith("completions"):
            return script
        body = msgspec.json.decode(request.body)
        words = body["messages"][0]["content"].split()
        usage = usage_of(request, body["max_tokens"])
        usage["prompt_tokens"] += sum(len(word) > 8 for word in words)
        message = {"role": "assistant", "content": "x"}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        return whole(msgspec.json.encode({"choices": [choice], "usage": usage}))

    found = calibration_of(route)
    assert all(len(word) <= 8 for word in found.vocabulary.words)
    assert len(found.vocabulary.words) > 70


def test_a_vendor_that_refuses_unknown_members_is_asked_without_them():
    def route(request):
        if b"ignore_eos" in request.body:
            return whole(error_body("unknown member ignore_eos", "x", None), 400)
        return answer(request)

    assert "ignore_eos" not in calibration_of(route).target.extra


def test_answers_of_another_length_are_told():
    found = calibration_of(lambda request: answer(request, tokens=3))
    assert found.full_length is False
    assert "asked for 16 output tokens the server gave 3" in found.notes[0]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama-server", "tgi"])
def test_the_metrics_of_engines_are_joined(engine):
    text = ENGINE_ANSWERS[engine].metrics.encode()
    with upstream_in_thread(lambda request: whole(text, kind="text/plain")) as upstream:
        page = page_of(Target("127.0.0.1", upstream.port, "m"))
        assert page is not None
        assert page.dialect.name == engine
        with watched(page) as seen:
            pass
    assert seen.figures()["waiting_mean"] == 3.0


def test_sluice_tells_what_held_requests_back():
    page_text = """\
# TYPE sluice_requests_running gauge
sluice_requests_running{model="m"} 4
# TYPE sluice_requests_waiting gauge
sluice_requests_waiting{model="m"} 2
# TYPE sluice_refusals counter
sluice_refusals_total{model="m",reason="predicted_late"} %d
# TYPE sluice_phase_seconds counter
sluice_phase_seconds_total{model="m",phase="queue"} %d
"""
    looks = iter(range(1, 100))

    def route(request):
        number = next(looks)
        return whole((page_text % (10 * number, 5 * number)).encode(), kind="text/plain")

    with upstream_in_thread(route) as upstream:
        page = page_of(Target("127.0.0.1", upstream.port, "m"))
        assert page is not None
        with watched(page) as seen:
            pass
    assert page.dialect.name == "sluice"
    assert seen.figures()["refused.predicted_late"] == 10.0
    assert seen.figures()["phase_s.queue"] == 5.0
