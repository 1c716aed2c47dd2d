"""The sweep gives places, blocks and prefill time to the waiting in their order."""

import pytest

from sluice.core.accepted import Rank, Work
from sluice.core.feasibility import Pace, Release, Sweep, Track

NOW = 1_000
RANK: Rank = (1, False)


def track(
    places: int = 1,
    blocks: int = 100,
    releases: tuple[Release, ...] = (),
    backlog: tuple[tuple[Rank, int], ...] = (),
) -> Track:
    """A replica that computes a prompt token in 1 ns and gives every sequence one in 10."""
    return Track(
        NOW,
        places=places,
        blocks=blocks,
        releases=releases,
        backlog=backlog,
        pace=Pace(1.0, 10),
    )


def work(prefill: int = 50, output: int = 11, places: int = 1, blocks: int = 1) -> Work:
    return Work(places, prefill, output, blocks)


def test_a_free_place_is_taken_at_once() -> None:
    assert Sweep([track()]).place(work(), RANK) == (NOW, NOW + 60, NOW + 160)


def test_the_next_waits_for_the_one_before_it_to_end() -> None:
    sweep = Sweep([track()])
    sweep.place(work(), RANK)
    assert sweep.place(work(), RANK).start_ns == NOW + 160


def test_running_requests_free_their_places_one_after_another() -> None:
    releases = (Release(NOW + 5, 1, 1), Release(NOW + 7, 1, 1))
    sweep = Sweep([track(places=0, releases=releases)])
    assert [sweep.place(work(), RANK).start_ns - NOW for _ in range(2)] == [5, 7]


def test_more_on_board_than_seats_must_leave_first() -> None:
    releases = tuple(Release(NOW + n, 1, 1) for n in (5, 7, 9))
    assert Sweep([track(places=-2, releases=releases)]).place(work(), RANK).start_ns == NOW + 9


def test_choices_and_blocks_are_waited_for_as_well() -> None:
    releases = (Release(NOW + 5, 1, 2), Release(NOW + 9, 2, 3))
    lacking = track(places=1, blocks=1, releases=releases)
    assert lacking.place(work(blocks=4), RANK).start_ns == NOW + 9
    lacking = track(places=1, blocks=100, releases=releases)
    assert lacking.place(work(places=2), RANK).start_ns == NOW + 5


def test_prompts_of_one_replica_are_computed_one_after_another() -> None:
    sweep = Sweep([track(places=3)])
    firsts = [sweep.place(work(prefill=n), RANK).first_ns - NOW for n in (50, 30, 20)]
    assert firsts == [60, 90, 110]


def test_prompts_of_larger_ranks_do_not_stand_before_a_first_token() -> None:
    backlog = (((0, False), 100), ((1, False), 200), ((1, True), 400))
    firsts = {}
    for rank in ((0, False), (1, False), (1, True)):
        firsts[rank] = track(backlog=backlog).place(work(prefill=0), rank).first_ns - NOW
    assert firsts == {(0, False): 110, (1, False): 310, (1, True): 710}


def test_work_goes_where_a_place_is_free_first() -> None:
    busy = track(places=0, releases=(Release(NOW + 5, 1, 1),))
    later = track(places=0, releases=(Release(NOW + 3, 1, 1),))
    sweep = Sweep([busy, later, track()])
    assert [sweep.place(work(), RANK).start_ns - NOW for _ in range(3)] == [0, 3, 5]


def test_kept_places_are_gone_for_those_that_follow() -> None:
    sweep = Sweep([track(places=2, releases=(Release(NOW + 5, 1, 1),))])
    sweep.place(work(), RANK)
    sweep.keep(1)
    assert sweep.place(work(), RANK).start_ns == NOW + 5


@pytest.mark.parametrize("places", [0, -3])
def test_more_than_there_ever_is_starts_when_everything_has_ended(places: int) -> None:
    lacking = track(places=places, releases=(Release(NOW + 5, 1, 1),))
    assert lacking.place(work(places=9, blocks=900), RANK).start_ns == NOW + 5


def test_without_a_replica_there_is_no_future() -> None:
    with pytest.raises(IndexError):
        Sweep([]).place(work(), RANK)
