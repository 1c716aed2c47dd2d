"""Traffic described per client: rates, burstiness, lengths, and files that do not fit."""

import gzip
from itertools import islice, pairwise

import pytest

from sluice.workload.asks import BadWorkload
from sluice.workload.servegen import ServeGen, is_servegen

RATES = "client,t_s,rate_rps,cv,dist,p1,p2\n" + "".join(
    f"{client},{start},{rate},1,{law},1,{1 / rate}\n"
    for client, law, rate in ((0, "Gamma", 4), (1, "Weibull", 2), (7, "Gamma", 2))
    for start in (0, 600, 1200)
)
TOKENS = "client,t_s,field,q0,q50,q100,mean\n" + "".join(
    f"{client},0,{field},{low},{2 * low},{3 * low},{2 * low}\n"
    for client, low in ((0, 10), (1, 100))
    for field in ("input_tokens", "output_tokens")
)


@pytest.fixture
def rates(tmp_path):
    return files(tmp_path)


def files(folder, rates=RATES, tokens=TOKENS):
    path = folder / "x_rates_day0.csv.gz"
    path.write_bytes(gzip.compress(rates.encode()))
    if tokens:
        beside = folder / "x_token_quantiles_day0.csv.gz"
        beside.write_bytes(gzip.compress(tokens.encode()))
    return path


def test_requests_come_at_the_rate_of_all_clients(rates):
    assert is_servegen(rates)
    traffic = ServeGen(rates)
    assert traffic.mean_rate_rps == pytest.approx(8.0)
    asks = list(traffic.asks(1))
    assert all(a.at_ns <= b.at_ns for a, b in pairwise(asks))
    assert len(asks) == pytest.approx(8 * 1800, rel=0.05)
    assert list(islice(traffic.asks(1), 50)) == asks[:50]


@pytest.mark.parametrize("rate", [2.0, 40.0])
def test_another_rate_takes_a_part_or_copies_of_the_clients(rates, rate):
    asks = list(islice(ServeGen(rates, rate).asks(1), 3000))
    assert len(asks) / asks[-1].at_ns * 1e9 == pytest.approx(rate, rel=0.1)


def test_lengths_are_those_of_the_client_or_of_another_one(rates):
    prompts = {ask.prompt_tokens for ask in ServeGen(rates).asks(1)}
    assert min(prompts) >= 10
    assert max(prompts) <= 300
    assert any(length < 50 for length in prompts)
    assert any(length > 100 for length in prompts)
    # 4 of 8 requests are client 0's, the others have the lengths of client 1
    assert ServeGen(rates).mean_tokens()[0] == pytest.approx((4 * 20 + 4 * 200) / 8)


@pytest.mark.parametrize(
    ("rates", "tokens", "words"),
    [
        (RATES, "", "has no lengths: the file with"),
        (RATES.replace("Gamma", "Pareto"), TOKENS, ":2: dist is 'Pareto'"),
        (RATES.replace("0,0,4", "0,0,many"), TOKENS, ":2: .* must be numbers"),
        (RATES.split("\n")[0] + "\n", TOKENS, "has no clients"),
        (RATES, TOKENS.replace("0,0,input_tokens,10", "0,0,input_tokens,x"), ":2: .* numbers"),
        (RATES, TOKENS.replace(",field,", ",measure,"), ":2: .* field"),
        (RATES, TOKENS.replace("output_tokens", "tokens"), "no client with both"),
        (RATES, TOKENS.replace("q0,q50,q100", "a,b,c"), ":2: quantiles"),
        (RATES, TOKENS.replace("tokens,10,", "tokens,inf,"), ":2: quantiles"),
        (RATES.replace("0,0,4", "0,0,nan"), TOKENS, ":2: .*rate_rps nan"),
        (RATES.replace("0,0,4", "0,inf,4"), TOKENS, ":2: t_s is inf"),
        (RATES.replace("Gamma,1,", "Gamma,inf,"), TOKENS, ":2: dist .* p1 inf"),
        (
            RATES.replace(",4,1,", ",0,1,").replace(",2,1,", ",0,1,"),
            TOKENS,
            "no clients with a rate above 0",
        ),
    ],
)
def test_files_that_do_not_fit_are_told(tmp_path, rates, tokens, words):
    with pytest.raises(BadWorkload, match=words):
        list(islice(ServeGen(files(tmp_path, rates, tokens)).asks(1), 5))
