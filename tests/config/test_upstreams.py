"""Settings of remote models: addresses, what goes together, and keys."""

from types import MappingProxyType

import pytest

from sluice.config.load import load_settings
from sluice.config.sections import UpstreamUrl
from sluice.config.upstreams import UpstreamAddress, upstream_address
from sluice.core.errors import ConfigError


def load(tmp_path, text, environment=MappingProxyType({})):
    file = tmp_path / "sluice.toml"
    file.write_text(text)
    return load_settings(file, environment=environment).settings.models["big"]


def problems(tmp_path, text, environment=MappingProxyType({})):
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text, environment)
    return [line.partition("sluice.toml:")[2] for line in refused.value.problems]


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://gpu-1:8000", ("gpu-1", 8000, False, "")),
        ("https://api.example.com", ("api.example.com", 443, True, "")),
        ("http://[::1]:8000/a/b/", ("::1", 8000, False, "/a/b")),
        ("http://gpu", ("gpu", 80, False, "")),
    ],
)
def test_an_address_is_taken_apart(url, address):
    assert upstream_address(url) == UpstreamAddress(*address)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gpu-1:8000", "must be an address such as"),
        ("ftp://gpu-1", "must be an address such as"),
        ("http://u:p@gpu-1", "must not hold a password"),
        ("http://gpu-1?x=1", "must end with its path"),
        ("http://gpu-1/v1/", 'write "http://gpu-1"'),
        ("http://gpu-1:99999", "[Pp]ort"),
    ],
)
def test_what_is_no_address_is_told(url, words):
    with pytest.raises(ValueError, match=words):
        upstream_address(url)


def test_an_address_alone_and_a_table_with_a_weight(tmp_path):
    text = '[models.big]\nengine = "vllm"\nurls = ["http://a", { url = "http://b", weight = 2 }]'
    assert load(tmp_path, text).urls == (UpstreamUrl("http://a"), UpstreamUrl("http://b", 2.0))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('["http://a", "http://a/"]', "stands twice"),
        ("[{ weight = 2 }]", "url is missing"),
        ('[{ url = "http://a", wait = 2 }]', "there is no wait"),
        ('[{ url = "http://a", weight = 0 }]', "weight must be a number from"),
        ("[5]", "must be"),
        ("[]", "is missing"),
        ('["http://u:secret@a"]', "***@"),
    ],
)
def test_lists_with_mistakes_are_told(tmp_path, given, words):
    (only,) = problems(tmp_path, f'[models.big]\nengine = "vllm"\nurls = {given}')
    assert only.startswith("3: models.big.urls: ")
    assert words in only
    assert "secret" not in only


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('engine = "vllm"\nurls = ["http://a"]\nsource = "x"', "source"),
        ('engine = "vllm"\nurls = ["http://a"]\nkv_bytes = "1GiB"', "kv_bytes"),
        ('engine = "vllm"\nurls = ["http://a"]\nthreads = 2', "threads"),
        ('engine = "vllm"\nurls = ["http://a"]\nload_max = "5s"', "load_max"),
        ('source = "x"\nurls = ["http://a"]', "urls"),
        ('source = "x"\nin_flight_max = 3', "in_flight_max"),
        ('source = "x"\nconnect_max = "1s"', "connect_max"),
    ],
)
def test_settings_of_the_other_kind_are_refused(tmp_path, text, key):
    (only,) = problems(tmp_path, f"[models.big]\n{text}")
    assert f"models.big.{key}: " in only


def test_the_key_comes_from_the_environment_and_is_not_shown(tmp_path):
    text = '[models.big]\nengine = "openai"\nurls = ["https://a"]\nkey_env = "BIG_KEY"'
    model = load(tmp_path, text, {"BIG_KEY": " sk-1 "})
    assert model.key == "sk-1"
    assert "sk-1" not in repr(model)
    assert "$BIG_KEY is not set or empty" in problems(tmp_path, text)[0]
    assert "no header can carry" in problems(tmp_path, text, {"BIG_KEY": "sk\n1"})[0]
    (only,) = problems(tmp_path, text.replace("BIG_KEY", "sk-12"))
    assert "sk-12" not in only


def test_the_key_may_be_in_a_file(tmp_path):
    (tmp_path / "key").write_text("# of the vendor\nsk-1,2\n")
    text = f'[models.big]\nengine = "openai"\nurls = ["https://a"]\nkey_file = "{tmp_path}/key"'
    assert load(tmp_path, text).key == "sk-1,2"
    both = text + '\nkey_env = "BIG_KEY"'
    assert "more than one key" in problems(tmp_path, both, {"BIG_KEY": "sk-3"})[0]
    (tmp_path / "key").write_text("sk-1\nsk-2\n")
    (only,) = problems(tmp_path, text)
    assert "more than one key" in only
    assert "sk-" not in only
