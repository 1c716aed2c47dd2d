"""What is allowed and does nothing is told."""

from dataclasses import replace

import pytest

from sluice.config.cautions import cautions
from sluice.config.sections import (
    ModelSection,
    ServerSection,
    SloSection,
    TenantSection,
    UpstreamUrl,
)
from sluice.config.settings import Settings

PLAIN = ModelSection(source="a")
KEYED = TenantSection(key_sha256_env="X")
USING = SloSection(overload=("smaller", "refuse"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(tenants={"t": TenantSection()}), "tenants.t: nothing makes a request one of"),
        (Settings(slo={"x": USING}, models={"m": PLAIN}), 'slo.x: "smaller" in overload does'),
        (
            Settings(
                slo={"x": SloSection()},
                models={"m": ModelSection(source="a", smaller="s"), "s": PLAIN},
            ),
            "models.m: smaller does nothing",
        ),
        (
            Settings(
                models={"m": ModelSection(source="a", context_tokens_max=500)},
                tenants={"t": TenantSection(key_sha256_env="X", tokens_per_minute=499)},
            ),
            "tenants.t: tokens_per_minute = 499 is below the context of m, 500 tokens",
        ),
    ],
)
def test_what_does_nothing_is_told(settings, words):
    (found,) = cautions(settings)
    assert found.startswith(words)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(tenants={"t": KEYED}, models={"m": PLAIN}),
        Settings(tenants={"t": TenantSection()}, server=ServerSection(trust_tenant_header=True)),
        Settings(
            slo={"x": USING},
            models={"m": ModelSection(source="a", smaller="s"), "s": PLAIN},
        ),
    ],
)
def test_what_does_something_is_not_told(settings):
    assert list(cautions(settings)) == []


def test_the_context_may_be_known_from_the_model():
    settings = Settings(tenants={"t": TenantSection(key_sha256_env="X", tokens_per_minute=900)})
    (found,) = cautions(settings, {"m": 901})
    assert "a call without max_tokens reserves the rest of the context" in found
    assert list(cautions(settings, {"m": 900})) == []


@pytest.mark.parametrize(
    ("url", "is_told"),
    [
        ("http://gpu-1:8000", True),
        ("https://gpu-1", False),
        ("http://127.0.0.1:8000", False),
        ("http://localhost", False),
    ],
)
def test_a_key_that_others_could_read_on_the_way_is_told(url, is_told):
    model = ModelSection(source="m", engine="vllm", urls=(UpstreamUrl(url),), key_env="K")
    found = list(cautions(Settings(models={"m": model})))
    assert [one.startswith("models.m: its key goes to gpu-1 unencrypted") for one in found] == (
        [True] * is_told
    )
    assert list(cautions(Settings(models={"m": replace(model, key_env=None)}))) == []


def test_a_remote_model_reserves_no_whole_context():
    model = ModelSection(source="m", engine="vllm", context_tokens_max=500)
    tenants = {"t": TenantSection(key_sha256_env="X", tokens_per_minute=499)}
    assert list(cautions(Settings(models={"m": model}, tenants=tenants))) == []
