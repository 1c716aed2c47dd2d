"""Traces: every published format, times scaled to a rate, and what is wrong told by line."""

import gzip
import json
from collections import Counter
from itertools import islice, pairwise

import pytest

from sluice.workload.asks import BadWorkload
from sluice.workload.mixes import Mix, shares_of
from sluice.workload.trace_rows import columns_of, trace_rows
from sluice.workload.traces import OWN, Trace, facts_of, trace_path

OURS = "t_s,input_tokens,output_tokens\n0.5,10,3\n1.5,20,4\n1.5,30,5\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,10,3\n2023-11-16 18:15:47.6805900,20,4\n"
    "2023-11-16 18:15:47.6805900,30,5\n"
)
AZURE_2024 = AZURE.replace("2023-11-16", "2024-05-10").replace("05900,", "059+00:00,")
MOONCAKE = "\n".join(
    json.dumps({"timestamp": at, "input_length": n, "output_length": m, "hash_ids": [1]})
    for at, n, m in ((500, 10, 3), (1500, 20, 4), (1500, 30, 5))
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,10,3,13,Conversation log\n6,ChatGPT,99,0,99,Conversation log\n"
    "6,GPT-4,20,4,24,API log\n6,ChatGPT,30,5,35,Conversation log\n"
)
OTHER = """{"when": 500, "in": 10, "out": 3}

{"when": 1500, "in": 20, "out": 4}
{"when": 1500, "in": 30, "out": 5}
"""


def written(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (OURS, ()),
        (AZURE, ()),
        (AZURE_2024, ()),
        (MOONCAKE, ()),
        (BURST, ()),
        (OTHER, ("t=when:ms", "input=in", "output=out")),
        ("\ufeff" + OURS, ()),
    ],
    ids=["ours", "azure 2023", "azure 2024", "mooncake", "burstgpt", "own columns", "with a mark"],
)
def test_every_format_gives_the_same_requests(tmp_path, text, columns):
    rows = list(trace_rows(written(tmp_path, text), columns_of(columns)))
    assert [row.at_s for row in rows] == pytest.approx([0.0, 1.0, 1.0])
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(10, 3), (20, 4), (30, 5)]


def test_a_gzipped_trace_is_read_as_it_is(tmp_path):
    path = tmp_path / "trace.anything"
    path.write_bytes(gzip.compress(OURS.encode()))
    assert len(list(trace_rows(path))) == 3


def test_names_come_from_columns(tmp_path):
    text = "when,in,out,who,kind,llm\n1,2,3,acme,chat,small\n2,2,3,,,\n"
    columns = columns_of(
        ["t=when", "input=in", "output=out", "tenant=who", "class=kind", "model=llm"]
    )
    rows = list(trace_rows(written(tmp_path, text), columns))
    assert (rows[0].tenant, rows[0].slo_class, rows[0].model) == ("acme", "chat", "small")
    assert (rows[1].tenant, rows[1].slo_class, rows[1].model) == ("", "", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("t_s,input_tokens,output_tokens\n", "is empty"),
        (OURS.replace("1.5,20", "0.2,20"), r":3: the time goes back by 0.3 s: sort the trace"),
        (OURS.replace("20,4", "nan,4"), r":3: input_tokens is 'nan', not a number"),
        (OURS.replace("20,4", "20,-4"), r":3: output_tokens is -4; it must be"),
        (OURS.replace("20,4", "20.5,4"), r":3: input_tokens is 20.5; it must be a whole"),
        (OURS.replace("20,4", "20,0"), r":3: output_tokens is 0; it must be"),
        (OURS.replace("1.5,20,4", "1.5,20"), r":3: output_tokens is missing|is empty"),
        (OURS.replace("1.5,20,4", "1.5,20,4,7"), r":3: more fields than the header"),
        (OURS.replace("0.5", "-0.5"), r":2: t_s is -0.5 s; times must not be negative"),
        (OURS.replace("0.5", "1e12"), r":2: t_s is 1e\+12 s; .* nor above 1e\+11 s"),
        (OURS.replace("0.5", "inf"), r":2: t_s is 'inf', not a number"),
        (AZURE.replace("2023-11-16 18:15:47", "yesterday", 1), r":3: .* not a date and time"),
        (MOONCAKE + "\n{", r":4: not JSON"),
        (MOONCAKE.replace("[1]", '["a"]'), r":1: hash_ids is not a list of numbers"),
        (MOONCAKE.replace("[1]", "[Infinity]"), r":1: hash_ids is not a list of numbers"),
        (MOONCAKE.replace("[1]", "[" * 100_000), r":1: not JSON"),
        ('{"t_s": 1' + "0" * 400 + ', "input_tokens": 1, "output_tokens": 1}', "not a number"),
        ("a,b,c\n1,2,3\n", r"It has: a, b, c\. Known: .*--column t=NAME"),
        (BURST.replace("3,13", "0,13").replace("4,24", "0,24").replace("5,35", "0,35"), "answer"),
    ],
)
def test_what_is_wrong_is_told_with_its_line_and_what_to_change(tmp_path, text, words):
    with pytest.raises(BadWorkload, match=words):
        list(trace_rows(written(tmp_path, text)))


def test_files_that_are_no_text_are_told_apart(tmp_path):
    binary, torn, gone = tmp_path / "b", tmp_path / "t", tmp_path / "g"
    binary.write_bytes(b"\x00\xff\xfe")
    whole = gzip.compress(OURS.encode() * 1000)
    torn.write_bytes(whole[:60])
    rotten = tmp_path / "r"
    rotten.write_bytes(whole[:12] + bytes(byte ^ 0xFF for byte in whole[12:40]) + whole[40:])
    for path, words in (
        (binary, "not UTF-8"),
        (torn, "damaged"),
        (rotten, "damaged"),
        (gone, "cannot read"),
    ):
        with pytest.raises(BadWorkload, match=words):
            list(trace_rows(path))
    with pytest.raises(BadWorkload, match="azure-conv, azure-code"):
        trace_path("azure")


@pytest.mark.parametrize("texts", [["t=a"], ["t"], ["when=a"], ["t=a", "input=b"]])
def test_columns_that_do_not_name_all_are_refused(texts):
    with pytest.raises(BadWorkload, match="column"):
        columns_of(texts)


@pytest.mark.parametrize("text", [OURS.split("\n1.5", maxsplit=1)[0], OURS.replace("1.5", "0.5")])
def test_a_trace_without_a_rate_is_refused(tmp_path, text):
    with pytest.raises(BadWorkload, match="a rate needs two at different times"):
        facts_of(written(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "requests", "rate"), [("azure-conv", 12340, 5.87), ("azure-code", 6521, 3.17)]
)
def test_our_own_traces_are_there_and_whole(name, requests, rate):
    facts = facts_of(trace_path(name))
    assert name in OWN
    assert facts.requests == requests
    assert facts.rate_rps == pytest.approx(rate, rel=0.01)


def test_a_trace_is_scaled_to_a_rate_and_begins_again(tmp_path):
    facts = facts_of(written(tmp_path, OURS))
    assert facts.rate_rps == pytest.approx(2.0)
    asks = list(islice(Trace(facts, 20.0).asks(1), 9000))
    assert len(asks) / asks[-1].at_ns * 1e9 == pytest.approx(20.0, rel=0.001)
    assert all(a.at_ns <= b.at_ns for a, b in pairwise(asks))
    assert asks[0].prompt_tokens == asks[3].prompt_tokens == 10
    assert asks[0].prompt != asks[3].prompt
    kept = list(islice(Trace(facts).asks(1), 3))
    assert [ask.at_ns for ask in kept] == [0, 10**9, 10**9]


def test_names_of_rows_count_before_the_mix(tmp_path):
    text = "when,in,out,who\n1,2,3,acme\n2,2,3,\n"
    facts = facts_of(
        written(tmp_path, text), columns_of(["t=when", "input=in", "output=out", "tenant=who"])
    )
    mix = Mix(tenants=shares_of("tenant", ["other"]))
    assert [ask.tenant for ask in islice(Trace(facts, mix=mix).asks(1), 2)] == ["acme", "other"]


def test_blocks_become_shared_parts_and_rounded_times_are_spread(tmp_path):
    rows = [
        {"timestamp": at, "input_length": 1100, "output_length": 1, "hash_ids": ids}
        for at, ids in ((0, [7, 8, 9]), (0, [7, 8, 10]), (3000, [1, 2, 3]), (6000, [4, 5, 6]))
    ]
    facts = facts_of(written(tmp_path, "\n".join(map(json.dumps, rows)), "m.jsonl"))
    asks = list(islice(Trace(facts).asks(1), 8))
    assert [ask.at_ns / 1e9 for ask in asks[:4]] == [0.0, 1.5, 3.0, 6.0]
    assert all(a.at_ns <= b.at_ns for a, b in pairwise(asks))
    assert asks[0].prompt[:2] == asks[1].prompt[:2]
    assert asks[0].prompt[2] != asks[1].prompt[2]
    assert Counter(ask.prompt_tokens for ask in asks) == {1100: 8}
