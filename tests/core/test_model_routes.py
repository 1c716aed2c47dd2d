"""Which model of a route a request goes to."""

from dataclasses import replace

import pytest

from sluice.core.events import Reconfigured, ReplicaReady, StartReplica, Tick
from sluice.core.limits import PoolLimits, RouteLimits, ScaleLimits, Sticky, Way
from sluice.core.model_routes import CONVERSATIONS_MAX, Choice, Question, Why
from tests.core.fleet_rig import LIMITS, Driver, rejects, request

# What a calibration on scores i/1000 gives: the cuts for 1, 2, … 100 %.
CUTS = tuple((1000 - 10 * percent) / 1000 for percent in range(1, 101))
ROUTE = RouteLimits("auto", "small", "large", CUTS, share=0.3, rules=("tools", "images"))
POOLS = (
    PoolLimits("small", ("small-0",), queue_places_max=8),
    PoolLimits("large", ("large-0",), queue_places_max=4),
)


class Routed(Driver):
    """A fleet of two models and a route over them."""

    def __init__(self, route: RouteLimits = ROUTE, *, ready: tuple[str, ...] = ("small", "large")):
        super().__init__(*POOLS)
        limits = {
            "small": replace(LIMITS, sequences_max=8, context_tokens_max=1024),
            "large": replace(LIMITS, sequences_max=4),
        }
        self.at(0, *(ReplicaReady(f"{model}-0", limits[model]) for model in ready))
        self.configure(route)

    def configure(self, route: RouteLimits) -> None:
        self.at(0, Reconfigured(POOLS, (), (route,)))

    def ask(self, score: float | None, **fields: object) -> Choice:
        return self.fleet.choose(Question("auto", score, **fields), self.now_ns)  # type: ignore[arg-type]

    def serve(self, count: int) -> None:
        """Let requests run, and then wait, at the large model."""
        self.arrive(0, *(request(f"r{number}") for number in range(count)), model="large")


def test_d19_a_share_of_30_percent_gives_the_threshold_that_calibration_gave():
    assert Routed().fleet.routes["auto"].threshold == 0.70


def test_d19_a_score_equal_to_the_threshold_goes_to_the_complex_model():
    routed = Routed()
    assert routed.ask(0.70).model == "large"
    assert routed.ask(0.6999999).model == "small"
    given = Routed(replace(ROUTE, share=None, threshold=0.25))
    assert given.ask(0.25).model == "large"
    assert given.ask(0.2499999).model == "small"


def test_d19_the_live_share_is_told_and_found_to_have_drifted_after_200_requests():
    routed = Routed(replace(ROUTE, follow=False))
    scores = [0.5 + i / 2000 for i in range(1000)]
    drifted_after = None
    # In an order that mixes low and high scores.
    for number, i in enumerate((i * 387) % 1000 for i in range(1000)):
        routed.ask(scores[i])
        if drifted_after is None and routed.fleet.routes["auto"].view().drifted:
            drifted_after = number + 1
    view = routed.fleet.routes["auto"].view()
    assert (round(view.share, 3), view.share_meant, view.drifted) == (0.6, 0.3, True)
    assert drifted_after == 200


def test_d19_a_threshold_that_was_given_is_held_against_the_share_it_had_in_training():
    routed = Routed(replace(ROUTE, share=None, threshold=0.70))
    for i in range(300):
        routed.ask(0.5 + i / 600)
    view = routed.fleet.routes["auto"].view()
    assert (view.share, view.share_meant, view.drifted) == (0.6, 0.3, True)
    assert view.threshold == 0.70


def test_d19_a_threshold_that_follows_keeps_the_share():
    routed = Routed()
    for i in range(3000):
        routed.ask(0.5 + (i * 387 % 1000) / 2000)
    view = routed.fleet.routes["auto"].view()
    assert view.threshold == pytest.approx(0.85, abs=0.005)
    assert view.share == pytest.approx(0.30, abs=0.01)
    assert not view.drifted


@pytest.mark.parametrize(
    ("fields", "model", "why"),
    [
        ({"wanted": Way.SIMPLE}, "small", Why.ASKED),
        ({"carries": (Why.TOOLS,)}, "large", Why.TOOLS),
        ({"carries": (Why.IMAGES,)}, "large", Why.IMAGES),
        ({"tokens": 1500}, "large", Why.CONTEXT),
        ({"tokens": 1500, "carries": (Why.TOOLS,)}, "large", Why.CONTEXT),
        ({"tokens": 9000}, "small", Why.SCORE),
        ({"carries": (Why.TOOLS,), "wanted": Way.SIMPLE}, "small", Why.ASKED),
    ],
)
def test_rules_and_the_clients_own_word_come_before_the_score(fields, model, why):
    choice = Routed().ask(0.1, **fields)
    assert (choice.model, choice.why) == (model, why)


def test_a_rule_that_is_not_configured_leaves_it_to_the_score():
    assert Routed(replace(ROUTE, rules=())).ask(0.1, carries=(Why.TOOLS,)).why is Why.SCORE


@pytest.mark.parametrize("why", [Why.FAILED, Why.UNFAMILIAR, Why.NO_TEXT])
@pytest.mark.parametrize("default", Way)
def test_without_a_score_the_default_answers_and_the_share_is_as_it_was(why, default):
    routed = Routed(replace(ROUTE, default=default))
    choice = routed.ask(None, unscored=why)
    assert (choice.way, choice.why, choice.score) == (default, why, None)
    assert routed.fleet.routes["auto"].view().scores == 0


@pytest.mark.parametrize(
    ("sticky", "first", "then"),
    [
        (Sticky.UPWARD, 0.9, ("large", Why.CONVERSATION)),
        (Sticky.UPWARD, 0.1, ("small", Why.SCORE)),
        (Sticky.BOTH, 0.9, ("large", Why.CONVERSATION)),
        (Sticky.BOTH, 0.1, ("small", Why.CONVERSATION)),
        (Sticky.OFF, 0.9, ("small", Why.SCORE)),
    ],
)
def test_a_conversation_stays_as_configured(sticky, first, then):
    routed = Routed(replace(ROUTE, sticky=sticky))
    routed.ask(first, conversation=1)
    choice = routed.ask(0.2, earlier=1, conversation=2)
    assert (choice.model, choice.why) == then
    assert routed.ask(0.2, earlier=77).why is Why.SCORE


def test_a_conversation_that_went_up_stays_there_for_good():
    routed = Routed()
    assert routed.ask(0.1, conversation=1).model == "small"
    assert routed.ask(0.9, earlier=1, conversation=2).model == "large"
    assert routed.ask(0.1, earlier=2, conversation=3).model == "large"


def test_what_was_of_one_turn_alone_is_not_remembered():
    routed = Routed()
    routed.ask(0.1, conversation=1, carries=(Why.TOOLS,))
    assert routed.ask(0.1, earlier=1).why is Why.SCORE
    routed.ask(None, conversation=2, unscored=Why.UNFAMILIAR)
    assert routed.ask(0.1, earlier=2).why is Why.SCORE
    routed.ask(0.1, conversation=3, wanted=Way.COMPLEX)
    assert routed.ask(0.1, earlier=3).why is Why.CONVERSATION


def test_conversations_are_bounded_and_the_oldest_is_forgotten():
    routed = Routed()
    for number in range(CONVERSATIONS_MAX + 1):
        routed.ask(0.9, conversation=number)
    assert routed.ask(0.1, earlier=0).why is Why.SCORE
    assert routed.ask(0.1, earlier=1).why is Why.CONVERSATION


def test_load_raises_the_threshold_before_anything_is_refused():
    routed = Routed()
    assert routed.ask(0.75).model == "large"
    routed.serve(6)  # four run, two of four places to wait are taken
    choice = routed.ask(0.75)
    assert (choice.model, choice.why) == ("small", Why.LOAD)
    assert choice.threshold == 0.85  # half of the 30 %
    assert not rejects(routed.arrive(0, request("one more"), model="large"))


def test_under_load_no_more_than_the_part_that_is_allowed_goes_down():
    routed = Routed(replace(ROUTE, spill=0.2))
    routed.serve(8)
    assert rejects(routed.arrive(0, request("one more"), model="large"))
    assert routed.ask(0.76).model == "large"
    assert routed.ask(0.755).threshold == 0.76
    assert Routed(replace(ROUTE, spill=0.0)).ask(0.7).model == "large"


def test_load_moves_nothing_where_the_simple_model_is_as_loaded():
    routed = Routed()
    routed.serve(8)
    routed.arrive(0, *(request(f"s{number}") for number in range(16)), model="small")
    assert routed.ask(0.70).model == "large"


def test_nothing_goes_to_a_model_of_which_nothing_serves():
    down = Routed(ready=("small",))
    choice = down.ask(0.99)
    assert (choice.model, choice.why) == ("small", Why.NOT_SERVING)
    assert Routed(ready=("large",)).ask(0.0).model == "large"
    assert Routed(ready=()).ask(0.0).model == "small"
    assert down.ask(0.0, wanted=Way.COMPLEX).model == "large"


def test_a_model_that_nobody_asked_for_is_started_for_what_goes_to_the_other_one():
    idle = replace(POOLS[1], scale=ScaleLimits(replicas_min=0))
    driver = Driver(POOLS[0], idle)
    driver.at(0, ReplicaReady("small-0", LIMITS), Reconfigured((POOLS[0], idle), (), (ROUTE,)))
    assert StartReplica("large-0", "asked") not in driver.at(20, Tick())
    choice = driver.fleet.choose(Question("auto", 0.9), driver.now_ns)
    assert (choice.model, choice.why) == ("small", Why.NOT_SERVING)
    assert StartReplica("large-0", "asked") in driver.at(40, Tick())


def test_a_shadow_records_and_changes_nothing():
    routed = Routed(replace(ROUTE, shadow=True, default=Way.COMPLEX))
    choice = routed.ask(0.1)
    assert (choice.model, choice.would, choice.why) == ("large", Way.SIMPLE, Why.SCORE)
    assert routed.ask(0.1, wanted=Way.SIMPLE).model == "small"
    assert routed.fleet.routes["auto"].view().scores == 1


def test_a_shadow_remembers_conversations_as_they_would_have_gone():
    routed = Routed(replace(ROUTE, shadow=True, default=Way.COMPLEX))
    routed.ask(0.1, conversation=1)
    later = routed.ask(0.1, earlier=1, conversation=2)
    assert (later.model, later.would, later.why) == ("large", Way.SIMPLE, Why.SCORE)
    routed.ask(0.9, conversation=3)
    assert routed.ask(0.1, earlier=3).why is Why.CONVERSATION


def test_load_takes_its_part_of_the_share_that_there_is_where_that_has_moved():
    routed = Routed(replace(ROUTE, follow=False))
    for i in range(1000):
        routed.ask(0.5 + (i * 387 % 1000) / 2000)  # 60 % are above the threshold for 30 %
    routed.serve(6)
    assert routed.ask(0.75).threshold == pytest.approx(0.85)  # half of the 60 %


def test_what_was_learned_of_the_traffic_stays_while_the_classifier_is_the_same():
    routed = Routed()
    for i in range(1000):
        routed.ask(0.5 + i / 2000)  # all are above most scores of training
    learned = routed.fleet.routes["auto"].threshold
    assert learned == pytest.approx(0.85, abs=0.01)
    changes = (
        (replace(ROUTE, spill=0.25, shadow=True), learned, 0.3),
        (replace(ROUTE, share=0.1), 0.95, 0.1),
        (replace(ROUTE, follow=False), 0.70, 0.6),  # the threshold of training, held by its share
        (replace(ROUTE, share=None, threshold=0.75), 0.75, 0.5),
        (ROUTE, learned, 0.3),
    )
    for limits, threshold, share in changes:
        routed.configure(limits)
        view = routed.fleet.routes["auto"].view()
        assert view.threshold == pytest.approx(threshold, abs=0.01)
        assert view.scores == 1000
        assert view.share == pytest.approx(share, abs=0.01)
    routed.configure(replace(ROUTE, cuts=tuple(cut / 2 for cut in ROUTE.cuts)))
    view = routed.fleet.routes["auto"].view()
    assert (view.threshold, view.scores, view.share) == (0.35, 0, 0.0)


def test_other_settings_hold_at_once_and_the_same_ones_forget_nothing():
    routed = Routed()
    routed.ask(0.1)
    routed.configure(ROUTE)
    assert routed.fleet.routes["auto"].view().scores == 1
    routed.configure(replace(ROUTE, share=0.1))
    assert routed.ask(0.75).model == "small"
    routed.at(0, Reconfigured(POOLS, ()))
    assert not routed.fleet.routes
