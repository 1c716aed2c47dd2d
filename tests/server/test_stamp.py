"""The identity of an answer, and what it discloses."""

from dataclasses import replace

from sluice.core.request import Rung, Usage
from sluice.runtime.generation import Terms
from sluice.server.stamp import Stamp


def test_the_fingerprint_follows_software_model_and_what_the_model_says_of_itself():
    stamp = Stamp("id", 0, "m", "1", {"m": "fast"})
    others = [
        Stamp("id", 0, "m", "2", {"m": "fast"}),
        Stamp("id", 0, "m", "1", {"m": "exact"}),
        replace(stamp, model="n"),
        Stamp("id", 0, "m", "1"),
    ]
    assert len({stamp.fingerprint, *(one.fingerprint for one in others)}) == 5
    assert Stamp("other", 9, "m", "1", {"m": "fast"}).fingerprint == stamp.fingerprint


def test_token_counts_disclose_what_was_done_to_a_degraded_answer():
    usage = Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=2)
    plain = Stamp("id", 0, "m", "1")
    assert "sluice" not in plain.usage(usage)
    terms = Terms("gold", (Rung.SHORTEN, Rung.SMALLER), 16, "large")
    told = replace(plain, terms=terms).usage(usage)["sluice"]
    assert told == {
        "degraded": ["shorten", "smaller"], "output_tokens_max": 16, "model_asked": "large",
    }  # fmt: skip


def test_the_service_tier_is_the_class_that_was_served():
    plain = Stamp("id", 0, "m", "1")
    assert plain.fields("chat.completion")["service_tier"] == "default"
    gold = replace(plain, terms=Terms("gold"))
    assert gold.fields("chat.completion.chunk")["service_tier"] == "gold"
    assert gold.fields("text_completion")["service_tier"] == "gold"
    assert "service_tier" not in gold.fields("response")
