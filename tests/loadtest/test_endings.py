"""What each kind of bad answer is called, and that none of them counts as a good one."""

import pytest
import uvloop

from sluice.loadtest.crew import LagRule, void_of
from sluice.loadtest.document import trial_document
from sluice.loadtest.measures import figures
from sluice.loadtest.trial import Ending, Metric, Objective, VoidCause
from sluice.testing.engine_answers import DONE, delta, error_body, event
from sluice.testing.upstream import (
    Close,
    Hold,
    Received,
    Reset,
    Script,
    Send,
    cut,
    head,
    stream,
    whole,
)
from tests.loadtest.rig import (
    answer,
    asks_at,
    events_of,
    later,
    plan_of,
    play,
    played,
    unended,
    usage_of,
)

ONE = plan_of(asks_at([0.0]), patience_s=0.4)
SLO = (Objective(Metric.TTFT, 1.0), Objective(Metric.TPOT, 0.1))
_REASONING = [
    delta({"role": "assistant", "content": ""}),
    delta({"reasoning_content": "hm"}),
    delta({"reasoning": "hm"}),
    delta({"content": "yes"}),
    delta({}, "stop"),
    event(
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 5,
                "completion_tokens": 3,
                "completion_tokens_details": {"reasoning_tokens": 2},
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        }
    ),
    DONE,
]
REFUSED: Script = whole(error_body("busy", "x", "overloaded"), 429, ("retry-after", "3"))


def refused(request: Received) -> Script:
    return REFUSED


def refused_plainly(request: Received) -> Script:
    return whole(b"", 429)


BAD = {
    "429 with Retry-After": (REFUSED, Ending.REFUSED, 429),
    "429 without": (whole(b"no", 429), Ending.REFUSED, 429),
    "503": (whole(b"", 503), Ending.REFUSED, 503),
    "400": (whole(error_body("no", "x", None), 400), Ending.REJECTED, 400),
    "401": (whole(b"", 401), Ending.REJECTED, 401),
    "500": (whole(b"oops", 500), Ending.FAILED, 500),
    "redirect": (whole(b"", 302, ("location", "/x")), Ending.GARBAGE, 302),
    "error in the stream": (
        stream([delta({"content": "a"}), event({"error": {"message": "died", "code": 500}})]),
        Ending.ERROR_IN_STREAM,
        200,
    ),
    "aborted by the engine": (
        stream([delta({"content": "a"}), delta({}, "abort"), DONE]),
        Ending.ERROR_IN_STREAM,
        200,
    ),
    "no finish": (unended([delta({"content": "a"})]), Ending.TRUNCATED, 200),
    "cut within an event": (cut(stream(events_of(4)), 400), Ending.DISCONNECTED, 200),
    "closed before the head": ((Close(),), Ending.DISCONNECTED, None),
    "reset within the answer": (
        (*stream(events_of(4))[:3], Reset()),
        Ending.DISCONNECTED,
        200,
    ),
    "silent": ((Hold(),), Ending.TIMEOUT, None),
    "silent within the answer": ((*stream(events_of(4))[:3], Hold()), Ending.TIMEOUT, 200),
    "not JSON": (stream([b"data: {nonsense\n\n"]), Ending.GARBAGE, 200),
    "not HTTP": ((Send(b"SSH-2.0-x\r\n"), Close()), Ending.GARBAGE, None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_answer_has_its_name_and_is_never_good(name):
    script, ending, status = BAD[name]
    (one,) = play(lambda _: script, ONE).requests
    assert (one.ending, one.status) == (ending, status)
    found = figures([one], 1.0, SLO)
    assert (found["good_rps"], found["completed_rps"]) == (0.0, 0.0)
    assert all(objective.missed(one) for objective in SLO)


def test_the_time_to_come_back_is_kept_where_the_server_tells_it():
    (told,), (untold,) = (play(route, ONE).requests for route in (refused, refused_plainly))
    assert (told.retry_after_s, untold.retry_after_s) == (3.0, None)
    assert told.reason == "overloaded: busy"


def test_no_connection_is_told_with_its_reason():
    (one,) = uvloop.run(played(9, ONE)).requests
    assert (one.ending, one.sent_s) == (Ending.NOT_CONNECTED, None)
    assert "refused" in one.reason


def test_reasoning_counts_as_output_and_the_first_shown_token_is_known_apart():
    (one,) = play(lambda _: stream(_REASONING, gap_s=0.02), ONE).requests
    assert one.done
    assert one.shown_s - one.first_s == pytest.approx(0.04, abs=0.03)
    assert (one.output_tokens, one.reasoning_tokens, one.cached_tokens) == (3, 2, 4)
    assert one.chunks == 3


def test_empty_chunks_are_no_tokens():
    events = [delta({"content": ""}) for _ in range(5)]
    script = stream([*events, *events_of(2)], gap_s=0.01)
    (one,) = play(lambda _: script, ONE).requests
    assert (one.chunks, one.done) == (2, True)
    assert one.first_s - one.head_s > 0.05


def test_an_answer_without_output_is_an_answer_with_its_end_as_first_token():
    (one,) = play(lambda _: stream(events_of(0)), ONE).requests
    assert (one.done, one.chunks, one.tpot_s) == (True, 0, None)
    assert one.ttft_s is not None


def test_a_server_without_usage_has_latencies_and_no_tokens():
    (one,) = play(lambda _: stream(events_of(5)), ONE).requests
    assert (one.done, one.output_tokens, one.tpot_s) == (True, None, None)
    assert figures([one], 1.0, ())["tokens"]["output"] is None


def test_a_server_that_ignores_max_tokens_is_found_by_its_own_count():
    plan = plan_of(asks_at([0.0, 0.01], output=4))
    outcome = play(lambda request: answer(request, tokens=9), plan)
    lengths = trial_document(outcome, (), 0.01)["lengths"]
    assert (lengths["compared"], lengths["output_share"]) == (2, 1.0)


def test_an_answer_that_is_not_streamed_has_only_its_end():
    (one,) = play(answer, ONE, streamed=False).requests
    assert (one.done, one.ttft_s, one.output_tokens) == (True, None, 4)
    assert one.e2e_s > 0


def test_a_dying_server_fails_what_is_open_and_what_comes():
    dead: list[int] = []

    def route(request):
        if len(dead) > 20:
            return (Reset(),)
        dead.append(1)
        return answer(request)

    outcome = play(route, plan_of(asks_at([n / 100 for n in range(60)])))
    assert sum(one.done for one in outcome.requests) == 21
    assert {one.ending for one in outcome.requests[30:]} == {Ending.DISCONNECTED}
    assert void_of(outcome, [], LagRule(lag_s_max=10.0)) is None


def test_d29_failures_are_apart_from_latencies_and_counted_by_class():
    """Times are a tenth of the case's, so that it lasts seconds."""
    kinds = (["good"] * 7 + ["refused"] * 2 + ["hanging"]) * 100
    kinds += ["error"] * 5 + ["truncated"] * 5

    def route(request):
        kind = kinds.pop()
        if kind == "good":
            return later(stream(events_of(50, usage_of(request, 50))), 0.1)
        if kind == "refused":
            return later(REFUSED, 0.005)
        if kind == "error":
            return stream([delta({"content": "a"}), event({"error": {"message": "x"}})])
        if kind == "truncated":
            return unended([delta({"content": "a"})])
        return (Hold(),)

    plan = plan_of(asks_at([n / 600 for n in range(1010)]), patience_s=1.0)
    outcome = play(route, plan)
    found = trial_document(outcome, SLO, failures_max=0.05)
    assert found["failures"] == {
        "error_in_stream": 5,
        "refused": 200,
        "timeout": 100,
        "truncated": 5,
    }
    assert found["tokens"]["output"] == 35_000
    assert 0.1 <= found["e2e_s"]["p50"] < 0.35
    assert found["e2e_s"]["p99"] < 1.0
    assert found["success_share"] == pytest.approx(700 / 1010)
    assert found["good_rps"] <= found["completed_rps"] < found["sent_rps"]
    assert found["meets_slo"] is False
    assert sum(part["refused_rps"] > 0 for part in found["slices"]) > 10
    assert found["adjusted"]["e2e_s"]["p99"] is None, "a failure took for ever"


def test_d27_a_client_that_is_late_is_told_with_both_rates():
    outcome = play(answer, plan_of(asks_at([n / 100 for n in range(50)])))
    void = void_of(outcome, [], LagRule(lag_s_max=0.0))
    assert void
    assert void.cause is VoidCause.CLIENT_LIMITED
    assert "asked for" in void.detail
    assert "sent" in void.detail


def test_a_server_that_takes_nothing_voids_the_trial():
    outcome = play(lambda _: whole(error_body("bad key", "x", None), 401), ONE)
    void = void_of(outcome, [], LagRule(lag_s_max=10.0))
    assert void
    assert void.cause is VoidCause.NOTHING_ANSWERED
    assert "bad key" in void.detail


def test_a_partial_head_is_garbage():
    (one,) = play(lambda _: (Send(head()[:10]), Close()), ONE).requests
    assert one.ending in {Ending.DISCONNECTED, Ending.GARBAGE}


def test_targets_on_the_pace_of_tokens_allow_a_late_client_a_part_of_the_answer():
    outcome = play(lambda request: answer(request, gap_s=0.08), plan_of(asks_at([0.0, 0.1])))
    paced_s = LagRule(paced=True).allowed_s(outcome.counted)
    assert paced_s > 2 * LagRule().allowed_s(outcome.counted)
    assert LagRule(0.2).allowed_s([]) == 0.002
    assert LagRule(paced=True).allowed_s([]) == 0.001
