"""Retrieval before requests: times as asked for, requests in order, the same for the same seed."""

import itertools
from statistics import quantiles

import pytest

from sluice.cli.retrieval_options import retrieval_time
from sluice.workload.arrivals import Poisson
from sluice.workload.asks import BadWorkload
from sluice.workload.lengths import lengths_of
from sluice.workload.mixes import Mix
from sluice.workload.retrieval import RetrievalTime, Retrieving, passages_of
from sluice.workload.synthetic import Sessions, Synthetic

TAILED = RetrievalTime(0.06, 0.8)


def made(time, tokens=0, count=4000):
    plain = Synthetic(20.0, lengths_of(100.0, 10.0, 0.0), Poisson(), Mix(), Sessions())
    asks = Retrieving(plain, time, tokens).asks(3)
    return [next(asks) for _ in range(count)]


def test_times_have_the_percentiles_that_were_asked_for():
    cuts = quantiles([one.read_ns / 1e9 for one in made(TAILED)], n=100)
    assert cuts[49] == pytest.approx(0.06, rel=0.1)
    assert cuts[98] == pytest.approx(0.8, rel=0.25)
    assert TAILED.quantile_s(0.5) == pytest.approx(0.06)
    assert TAILED.quantile_s(0.99) == pytest.approx(0.8)


def test_requests_come_in_order_of_time_and_number_with_their_passages():
    asks = made(TAILED, tokens=300)
    assert [one.number for one in asks] == list(range(len(asks)))
    assert all(a.at_ns <= b.at_ns for a, b in itertools.pairwise(asks))
    assert {one.prompt_tokens for one in asks} == {400}
    assert asks == made(TAILED, tokens=300)


def test_what_takes_too_long_is_given_up_without_passages():
    asks = made(RetrievalTime(0.06, 0.8, within_s=0.2), tokens=300)
    assert max(one.read_ns for one in asks) == 200_000_000
    given_up = [one for one in asks if one.read_ns == 200_000_000]
    assert {one.prompt_tokens for one in given_up} == {100}
    assert 0.05 < len(given_up) / len(asks) < 0.25


def test_options_are_read_or_refused_in_words():
    assert retrieval_time("80ms") == RetrievalTime(0.08, 0.08)
    assert retrieval_time("p50=80ms,p99=400ms") == RetrievalTime(0.08, 0.4)
    assert retrieval_time("p50=80ms, p99=400ms, within=1s").within_s == 1.0
    assert passages_of("8x300") == 2400
    for text in ("", "p99=1s", "p50=1s,p99=10ms", "p50=x", "p95=1s", "-1s", "p50=0s,p99=1s"):
        with pytest.raises(ValueError, match=r"\w"):
            retrieval_time(text)
    for text in ("8", "x", "8x", "1000001x1", "-1x3", "8x1e9"):
        with pytest.raises(BadWorkload):
            passages_of(text)
