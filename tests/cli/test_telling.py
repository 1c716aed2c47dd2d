"""How far a simulation is: lines now and then where standard error is no terminal."""

from sluice.cli.telling import FIRST_LINE_S, LINE_EVERY_S, Told


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def test_a_short_run_says_nothing(capsys):
    clock = Clock()
    with Told(1000, clock=clock) as told:
        for done in range(0, 1001, 100):
            told.at(done)
            clock.now_s += 0.9 * FIRST_LINE_S / 10
    assert capsys.readouterr() == ("", "")


def test_a_long_run_says_on_standard_error_how_far_it_is_and_what_is_left(capsys):
    clock = Clock()
    with Told(1000, clock=clock) as told:
        for done in (0, 100, 101, 200):
            told.at(done)
            clock.now_s += FIRST_LINE_S
        clock.now_s += LINE_EVERY_S
        told.at(500, 2000)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "simulating: 100 of 1,000 requests, about 18 s left",
        "simulating: 500 of 2,000 requests, about 54 s left",
    ]
