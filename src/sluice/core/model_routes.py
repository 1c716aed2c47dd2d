"""Which of its two models a request for a route goes to: rules, conversation, score, load.

Asked by ``core/fleet.py`` for each request that names a route, before it is read for a model. The
score is found elsewhere: text is not known here. A score at or above the threshold goes to the
complex model. The threshold is a cut through scores, chosen for the share of requests above it;
under load it rises by a bounded part of that share, before anything is refused. What becomes of the
request at its model is the door's business, and the ladder's.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sluice.core.holding import unserved
from sluice.core.limits import RouteLimits, Sticky, Way
from sluice.core.pools import Pool

# So many scores are remembered, and so many are needed before anything is concluded from them.
SCORES_MAX, SCORES_MIN = 1000, 200
# After so many further scores the cuts are made again.
SCORES_ANEW = 100
# A share that is this far from the intended one is told.
DRIFT = 0.1
CONVERSATIONS_MAX = 10_000
# From this part of the places that run at a time on, a pool counts as loaded.
BUSY = 0.8


class Why(StrEnum):
    """What decided."""

    ASKED = "asked"  # the client named the way
    CONTEXT = "context"  # only one of the models holds so long a prompt
    TOOLS = "tools"  # a rule: the request has tools
    IMAGES = "images"  # a rule: the request has images
    CONVERSATION = "conversation"  # an earlier turn went there
    SCORE = "score"  # the score against the threshold
    LOAD = "load"  # the score is above the threshold and below the one that load has raised
    NOT_SERVING = "not_serving"  # nothing of the other model serves
    UNFAMILIAR = "unfamiliar"  # the text is unlike what the classifier knows
    NO_TEXT = "no_text"  # there is nothing to score
    FAILED = "classifier_failed"  # the classifier gave no score


# What says something of the conversation, and not of this one turn or moment.
_REMEMBERED = frozenset({Why.ASKED, Why.SCORE, Why.CONVERSATION})


@dataclass(frozen=True, slots=True)
class Question:
    """What is known of a request for a route.

    ``score`` is ``None`` where there is none, and ``unscored`` says why. ``wanted`` is the way that
    the client names; ``carries`` are the rules that apply to it. ``tokens`` are about as many as it
    takes, prompt and output. ``conversation`` stands for it with all that was said before, and
    ``earlier`` for the turn before it.
    """

    route: str
    score: float | None
    unscored: Why = Why.NO_TEXT
    wanted: Way | None = None
    carries: tuple[Why, ...] = ()
    tokens: int = 0
    earlier: int | None = None
    conversation: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The model that a request goes to, and why.

    ``threshold`` is the one that held at that moment. ``would`` is the way that was found where the
    route only records, and so all go to its default.
    """

    route: str
    model: str
    way: Way
    why: Why
    score: float | None
    threshold: float
    would: Way | None = None


@dataclass(frozen=True, slots=True)
class RouteView:
    """A route as operators see it. ``share`` is that of the latest ``scores`` at or above the
    threshold, ``share_meant`` the intended one; ``drifted`` says that they are far apart."""

    route: str
    threshold: float
    scores: int
    share: float
    share_meant: float
    drifted: bool


class ModelRoute:
    """One route with what it learned of its traffic."""

    def __init__(self, limits: RouteLimits) -> None:
        self._recent: deque[tuple[float, bool]] = deque(maxlen=SCORES_MAX)
        self._above = self._scored = 0
        self._ways: OrderedDict[int, Way] = OrderedDict()
        self._trained: tuple[float, ...] = ()
        self.set_limits(limits)

    def set_limits(self, limits: RouteLimits) -> None:
        """Hold to other limits. Only scores of another classifier say nothing any more."""
        self.limits = limits
        trained = tuple(sorted(limits.cuts))
        if trained != self._trained:
            self._trained = self._cuts = trained
            self._recent.clear()
        if limits.share is None:
            self.threshold = limits.threshold
            above = len(trained) - bisect_left(trained, limits.threshold)
            self.share_meant = above / len(trained)
        else:
            cuts = self._cuts if limits.follow else trained
            self.threshold = _cut(cuts, limits.share)
            self.share_meant = limits.share
        scores = [score for score, _ in self._recent]
        self._recent.clear()
        self._recent.extend((score, score >= self.threshold) for score in scores)
        self._above = sum(above for _, above in self._recent)

    def choose(self, asked: Question, pools: Mapping[str, Pool], now_ns: int) -> Choice:
        """The model for a request; its score and its conversation are remembered."""
        limits = self.limits
        models = {Way.SIMPLE: pools[limits.simple], Way.COMPLEX: pools[limits.complex]}
        threshold = self.threshold
        way, why = self._ruled(asked, models)
        if way is None and asked.score is None:
            way, why = limits.default, asked.unscored
        elif way is None and asked.score is not None:
            threshold = self._raised(models, now_ns)
            above = asked.score >= self.threshold
            way = Way.COMPLEX if asked.score >= threshold else Way.SIMPLE
            why = Why.LOAD if above and way is Way.SIMPLE else Why.SCORE
            self._note(asked.score, above=above)
        assert way is not None
        would, way = (
            (way, limits.default) if limits.shadow and why is not Why.ASKED else (None, way)
        )
        other = Way.SIMPLE if way is Way.COMPLEX else Way.COMPLEX
        if (
            why not in {Why.ASKED, Why.CONTEXT}
            and not models[way].ready()
            and models[other].ready()
        ):
            unserved(models[way], now_ns)  # so that one is started where none was asked for
            way, why = other, Why.NOT_SERVING
        if asked.conversation is not None and why in _REMEMBERED:
            self._remember(asked.conversation, would or way)
        model = models[way].limits.model
        return Choice(limits.route, model, way, why, asked.score, threshold, would)

    def _ruled(self, asked: Question, models: Mapping[Way, Pool]) -> tuple[Way | None, Why]:
        """The way that is not the score's to decide."""
        if asked.wanted is not None:
            return asked.wanted, Why.ASKED
        widest = {way: pool.widest() for way, pool in models.items()}
        held = {
            way: one is None or asked.tokens <= one.context_tokens_max
            for way, one in widest.items()
        }
        if held[Way.SIMPLE] != held[Way.COMPLEX]:
            return (Way.COMPLEX if held[Way.COMPLEX] else Way.SIMPLE), Why.CONTEXT
        for rule in asked.carries:
            if rule in self.limits.rules:
                return Way.COMPLEX, rule
        before = None if asked.earlier is None else self._ways.get(asked.earlier)
        if before is Way.COMPLEX and self.limits.sticky is not Sticky.OFF:
            return before, Why.CONVERSATION
        if before is Way.SIMPLE and self.limits.sticky is Sticky.BOTH:
            return before, Why.CONVERSATION
        return None, Why.SCORE

    def _raised(self, models: Mapping[Way, Pool], now_ns: int) -> float:
        """The threshold under the load of this moment: never below the one without."""
        load = pressure(models[Way.COMPLEX], self.limits.spill_wait_ns, now_ns)
        if load:
            load *= 1.0 - pressure(models[Way.SIMPLE], self.limits.spill_wait_ns, now_ns)
        cuts = self._cuts
        share = (len(cuts) - bisect_left(cuts, self.threshold)) / len(cuts)
        left = share * (1.0 - self.limits.spill * load)
        return max(self.threshold, _cut(cuts, left)) if load else self.threshold

    def _note(self, score: float, *, above: bool) -> None:
        if len(self._recent) == SCORES_MAX:
            self._above -= self._recent[0][1]
        self._recent.append((score, above))
        self._above += above
        self._scored += 1
        if len(self._recent) >= SCORES_MIN and self._scored % SCORES_ANEW == 0:
            self._cuts = tuple(sorted(score for score, _ in self._recent))
            if self.limits.follow and self.limits.share is not None:
                self.threshold = _cut(self._cuts, self.limits.share)

    def _remember(self, conversation: int, way: Way) -> None:
        self._ways[conversation] = way
        self._ways.move_to_end(conversation)
        if len(self._ways) > CONVERSATIONS_MAX:
            self._ways.popitem(last=False)

    def view(self) -> RouteView:
        """What others may know of it."""
        count = len(self._recent)
        share = self._above / count if count else 0.0
        drifted = count >= SCORES_MIN and abs(share - self.share_meant) > DRIFT
        return RouteView(self.limits.route, self.threshold, count, share, self.share_meant, drifted)


def _cut(cuts: Sequence[float], share: float) -> float:
    """The score at or above which this share of the sorted scores lies."""
    return cuts[len(cuts) - max(1, round(share * len(cuts)))]


def pressure(pool: Pool, wait_ns_max: int, now_ns: int) -> float:
    """How near a pool is to making newcomers wait too long or to refusing them, 0 to 1.

    It is 1 at a wait of ``wait_ns_max``, and when half of what may wait does, which is before
    anything is refused for want of room.
    """
    seats, places = pool.seats(), pool.places()
    busy = BUSY * seats
    if not seats or places <= busy:
        return 0.0
    half_full = (seats + max(seats, pool.places_max())) / 2
    filled = (places - busy) / (half_full - busy)
    return min(1.0, max(filled, pool.wait_ns(now_ns) / wait_ns_max))


def set_routes(routes: dict[str, ModelRoute], limits: Sequence[RouteLimits]) -> None:
    """Let these routes hold, and keep what is known of the traffic of those that stay."""
    wanted = {one.route: one for one in limits}
    for name in [name for name in routes if name not in wanted]:
        del routes[name]
    for name, one in wanted.items():
        if name not in routes:
            routes[name] = ModelRoute(one)
        elif routes[name].limits != one:
            routes[name].set_limits(one)
