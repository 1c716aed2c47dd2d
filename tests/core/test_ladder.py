"""The rungs are walked in the order of the class, and the first that holds decides."""

from dataclasses import dataclass, field

import pytest

from sluice.core.admission import Refusal
from sluice.core.ladder import Leaves, Stays, shortened, walk
from sluice.core.request import Request, Rung

BUSY = Refusal(429, "queue_full", 5, 4, 10)
LATE = Refusal(429, "predicted_late", 2.0, 1.0, 10)


@dataclass
class FakeDoor:
    """Starts or lets wait what asks for no more than so many tokens; notes what it was asked."""

    starts_max: int = 0
    waits_max: int = 0
    model: str | None = None
    asked: list[str] = field(default_factory=list)

    def starts(self, request: Request) -> Refusal | None:
        self.asked.append(f"starts {request.output_tokens_max}")
        return None if request.output_tokens_max <= self.starts_max else BUSY

    def waits(self, request: Request) -> Refusal | None:
        self.asked.append(f"waits {request.output_tokens_max}")
        return None if request.output_tokens_max <= self.waits_max else LATE

    def smaller(self, request: Request) -> str | None:
        self.asked.append(f"smaller {request.output_tokens_max}")
        return self.model


def asking(*overload: Rung, shorten_tokens: int | None = 50) -> Request:
    return Request("r", 0, (1,), 100, overload=overload, shorten_tokens=shorten_tokens)


def test_what_starts_at_once_is_left_as_it_is() -> None:
    request = asking(Rung.SHORTEN, Rung.SMALLER)
    assert walk(request, FakeDoor(starts_max=100)) == Stays(request)


def test_a_shorter_answer_that_starts_at_once_ends_the_walk() -> None:
    door = FakeDoor(starts_max=50, model="small")
    answer = walk(asking(Rung.SHORTEN, Rung.SMALLER, Rung.QUEUE), door)
    assert isinstance(answer, Stays)
    assert answer.request.output_tokens_max == 50
    assert answer.request.degraded == (Rung.SHORTEN,)
    assert door.asked == ["starts 100", "starts 50"]


def test_after_shortening_the_further_rungs_see_the_smaller_work() -> None:
    door = FakeDoor(waits_max=50)
    answer = walk(asking(Rung.SHORTEN, Rung.SMALLER, Rung.QUEUE, Rung.REFUSE), door)
    assert isinstance(answer, Stays)
    assert door.asked == ["starts 100", "starts 50", "smaller 50", "waits 50"]


def test_the_smaller_model_takes_what_it_accepts_and_says_what_was_spared() -> None:
    assert walk(asking(Rung.SMALLER, Rung.QUEUE), FakeDoor(model="small")) == Leaves("small", BUSY)


def test_the_order_of_the_rungs_is_the_request_s_own() -> None:
    door = FakeDoor(waits_max=100, model="small")
    request = asking(Rung.QUEUE, Rung.SMALLER)
    assert walk(request, door) == Stays(request)


def test_without_a_rung_that_holds_the_last_refusal_is_told() -> None:
    assert walk(asking(Rung.QUEUE), FakeDoor()) == LATE
    assert walk(asking(Rung.QUEUE, Rung.REFUSE, Rung.SMALLER), FakeDoor(model="small")) == LATE
    assert walk(asking(Rung.REFUSE), FakeDoor()) == BUSY
    assert walk(asking(), FakeDoor()) == BUSY


@pytest.mark.parametrize("tokens", [None, 100, 200])
def test_a_limit_that_is_no_smaller_than_what_is_asked_shortens_nothing(tokens: int | None) -> None:
    assert shortened(asking(shorten_tokens=tokens)) is None
