"""What is allowed and does nothing is told."""

import pytest

from sluice.config.cautions import cautions
from sluice.config.sections import ModelSection, ServerSection, SloSection, TenantSection
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
