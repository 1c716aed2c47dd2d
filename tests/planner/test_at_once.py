"""Works at the same time: answers in their order, what went wrong, and how far all are."""

import os
import time
from functools import partial
from typing import Any

import pytest

from sluice.planner.at_once import at_once
from sluice.planner.names import NoFleet


def counted(upto, told):
    for done in range(1, upto + 1):
        told(done, upto)
    return upto, os.getpid()


def refused(told):
    told(1, 2)
    raise NoFleet("none does it")


def gone(_told):
    os._exit(3)


def patient(_told):
    time.sleep(60)


@pytest.fixture(params=[1, 2], ids=["one core", "two cores"])
def cores(request, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: request.param)
    return request.param


def test_answers_come_in_the_order_of_the_works_and_refusals_among_them(cores):
    works: list[Any] = [partial(counted, 3), refused, partial(counted, 2)]
    answers: list[Any] = at_once(works, lambda *_far: None)
    first, second, third = answers
    assert (first[0], third[0]) == (3, 2)
    assert isinstance(second, NoFleet)
    assert str(second) == "none does it"
    assert (first[1] == os.getpid()) == (cores == 1)


def test_how_far_they_are_is_added_up_and_ends_at_all(cores):
    far = []
    at_once([partial(counted, 30), partial(counted, 10)], lambda *now: far.append(now))
    assert far[-1] == (40, 40)
    assert [done for done, _ in far] == list(range(1, 41))
    assert all(total >= done for done, total in far)


def test_what_is_not_begun_is_taken_to_be_like_the_others(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    far = []
    at_once([partial(counted, 30)] * 3, lambda *now: far.append(now))
    assert far[0] == (1, 90)


def test_a_process_that_ends_without_an_answer_is_an_error_and_ends_the_others(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="without an answer"):
        at_once([gone, patient], lambda *_far: None)
    assert time.monotonic() - began_s < 30
