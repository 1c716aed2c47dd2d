"""The conformance suite on the executors that need no model."""

import pytest

from sluice.core.costmodel import Coefficients
from sluice.core.events import ReplicaLimits
from sluice.executors.base import StepExecutor
from sluice.executors.simulated import SimulatedExecutor
from sluice.testing.conformance import CHECKS, EXACT_CHECKS, Check, Subject
from sluice.testing.executors import FakeExecutor

LIMITS = ReplicaLimits(context_tokens_max=128, block_size=8, blocks_total=64, sequences_max=4)
PROMPTS = (tuple(range(20, 38)), tuple(range(40, 61)), tuple(range(70, 75)))


@pytest.fixture(params=["fake", "simulated"])
def subject(request: pytest.FixtureRequest) -> Subject:
    executor: StepExecutor = (
        FakeExecutor(LIMITS)
        if request.param == "fake"
        else SimulatedExecutor(LIMITS, Coefficients())
    )
    return Subject(executor, executor.load(), PROMPTS)


@pytest.mark.parametrize("check", CHECKS + EXACT_CHECKS, ids=lambda check: check.__name__)
def test_conforms(check: Check, subject: Subject) -> None:
    check(subject)
    subject.executor.close()
    subject.executor.close()
