"""The conformance suite on the embedded engine with the real model, in both numerics."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.executors.openvino import OpenVinoExecutor
from sluice.executors.openvino_settings import EngineSettings
from sluice.testing.conformance import CHECKS, EXACT_CHECKS, Check, Subject

pytestmark = pytest.mark.model

PROMPTS = (tuple(range(1000, 1050)), tuple(range(2000, 2077)), tuple(range(3000, 3021)))


def loaded(folder: Path, numerics: str) -> Iterator[Subject]:
    settings = EngineSettings(
        folder=folder,
        context_tokens_max=256,
        numerics="exact" if numerics == "exact" else "fast",
        kv_bytes=64 * 1024**2,
        sequences_max=4,
        threads=1,
    )
    executor = OpenVinoExecutor(settings)
    yield Subject(executor, executor.load(), PROMPTS)
    executor.close()


@pytest.fixture(scope="module")
def exact(smollm2_folder: Path) -> Iterator[Subject]:
    yield from loaded(smollm2_folder, "exact")


@pytest.fixture(scope="module")
def fast(smollm2_folder: Path) -> Iterator[Subject]:
    yield from loaded(smollm2_folder, "fast")


@pytest.mark.parametrize("check", CHECKS + EXACT_CHECKS, ids=lambda check: check.__name__)
def test_exact_numerics_conform(check: Check, exact: Subject) -> None:
    check(exact)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_fast_numerics_conform(check: Check, fast: Subject) -> None:
    check(fast)
