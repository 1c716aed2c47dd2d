"""The identity of an answer."""

from sluice.server.stamp import Stamp


def test_the_fingerprint_follows_software_model_and_what_the_model_says_of_itself():
    stamp = Stamp("id", 0, "m", "1", {"m": "fast"})
    others = [
        Stamp("id", 0, "m", "2", {"m": "fast"}),
        Stamp("id", 0, "m", "1", {"m": "exact"}),
        stamp.with_model("n"),
        Stamp("id", 0, "m", "1"),
    ]
    assert len({stamp.fingerprint, *(one.fingerprint for one in others)}) == 5
    assert Stamp("other", 9, "m", "1", {"m": "fast"}).fingerprint == stamp.fingerprint
