"""Profiles and fixtures that the whole suite shares."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sluice.catalog.catalogue import Catalogue
from sluice.catalog.models import DEFAULT_MODEL
from sluice.config.load import load_settings
from sluice.config.sections import CatalogueSection, ModelSection

# Same examples in every run, so that a red test is red for everyone. `nightly` looks further:
# `HYPOTHESIS_PROFILE=nightly ./check`.
settings.register_profile(
    "default",
    derandomize=True,
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("nightly", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs an engine that nobody has started, or programs that nobody wants."""
    without = {
        "vllm": not os.environ.get("SLUICE_TEST_VLLM"),
        "browser": os.environ.get("SLUICE_TEST_BROWSER") == "none",
        "prometheus": os.environ.get("SLUICE_TEST_PROMETHEUS") == "none",
    }
    markers = [name for name, is_out in without.items() if is_out]
    left_out = [item for item in items if any(map(item.get_closest_marker, markers))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def catalogue_section() -> CatalogueSection:
    """The cache that this machine's sluice uses, so that a model is fetched once."""
    return load_settings().settings.catalogue


@pytest.fixture(scope="session")
def smollm2_gguf(catalogue_section: CatalogueSection) -> Path:
    """The catalogue's default model as a GGUF file; ``SLUICE_TEST_MODEL`` names another."""
    given = os.environ.get("SLUICE_TEST_MODEL")
    return Catalogue(catalogue_section).fetch(given or DEFAULT_MODEL).path


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, catalogue_section: CatalogueSection) -> Path:
    """The same model converted, as replicas load it; kept between runs by its content."""
    # Imported late: only tests of the real model need what it imports.
    from sluice.wiring.gateway import prepare  # noqa: PLC0415

    models = {"smollm2": ModelSection(source=str(smollm2_gguf))}
    (prepared,) = prepare(models, catalogue_section, lambda *_: None)
    assert prepared.path is not None
    return prepared.path
