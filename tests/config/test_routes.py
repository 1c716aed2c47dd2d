"""What may be written about names that stand for two models."""

import pytest

from sluice.config.load import load_settings
from sluice.core.errors import ConfigError

MODELS = '[models.small]\nsource = "a"\n[models.large]\nsource = "b"\n'
PAIR = 'simple = "small"\ncomplex = "large"\n'


def problems(tmp_path, text: str) -> str:
    file = tmp_path / "sluice.toml"
    file.write_text(MODELS + text)
    try:
        load_settings(file, (), {})
    except ConfigError as error:
        return "\n".join(error.problems)
    return ""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"[routes.auto]\n{PAIR}", "routes.auto.share: is missing"),
        (f"[routes.auto]\n{PAIR}share = 30\nthreshold = 0.5", "leave one out"),
        (f"[routes.auto]\n{PAIR}share = 0", "routes.auto.share"),
        (f"[routes.auto]\n{PAIR}share = 101", "routes.auto.share"),
        (f"[routes.auto]\n{PAIR}threshold = 1.5", "routes.auto.threshold"),
        (
            '[routes.auto]\nsimple = "smal"\ncomplex = "large"\nshare = 30',
            'there is no model "smal"; configured: large, small',
        ),
        (
            '[routes.auto]\nsimple = "small"\ncomplex = "small"\nshare = 30',
            '"small" is the simple model already',
        ),
        (f"[routes.small]\n{PAIR}share = 30", "small is the name of a model too"),
        (f'[routes.auto]\n{PAIR}share = 30\nrules = ["tools", "tools"]', "may stand once"),
        (f'[routes.auto]\n{PAIR}share = 30\nsticky = "on"', '"upward", "both", "off"'),
        (f'[routes."a b"]\n{PAIR}share = 30', "a route's name has at most 128"),
        (
            "".join(f'[routes.{name}]\n{PAIR}share = 30\noutcomes = "x"\n' for name in "ab"),
            "routes.a writes to this file",
        ),
    ],
)
def test_what_cannot_be_is_told_with_what_to_change(tmp_path, text, told):
    assert told in problems(tmp_path, text)


def test_a_share_or_a_threshold_is_enough(tmp_path):
    assert not problems(tmp_path, f"[routes.auto]\n{PAIR}share = 30")
    assert not problems(tmp_path, f"[routes.auto]\n{PAIR}threshold = 0.2")
