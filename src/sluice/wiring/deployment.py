"""What is served, in words and digests: for the journal, for clients, and for the operator.

Reads settings and facts of models. Nothing secret may get in here: no key, no token, no path.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import sluice
from sluice.config.sections import ModelSection
from sluice.runtime.model_folder import ModelFolder
from sluice.wiring.simulated import SimulatedModel


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is on this disk in the form that replicas load, or that is simulated."""

    name: str
    section: ModelSection
    folder: ModelFolder | SimulatedModel

    @property
    def is_simulated(self) -> bool:
        """Whether nothing computes it."""
        return isinstance(self.folder, SimulatedModel)

    @property
    def path(self) -> Path | None:
        """Where it is on this disk, ``None`` where it is simulated."""
        return None if isinstance(self.folder, SimulatedModel) else self.folder.path.absolute()

    @property
    def context_tokens_max(self) -> int:
        """The longest sequence that its replicas are asked to hold."""
        trained = self.folder.facts.context_tokens_max
        asked = self.section.context_tokens_max
        return trained if asked is None else min(trained, asked)

    @property
    def fingerprint(self) -> str:
        """Changes with what may change an answer to the same seed: weights, numerics, version."""
        parts = (self.folder.version, self.section.numerics, sluice.__version__)
        return _digest("/".join(parts).encode())

    @property
    def notes(self) -> list[str]:
        """What the operator may have expected otherwise of the settings."""
        trained, asked = self.folder.facts.context_tokens_max, self.section.context_tokens_max
        if asked is None or asked <= trained:
            return []
        note = (
            f"{self.name}: context_tokens_max is {asked:,}; the model was trained for {trained:,} "
            "tokens, which is what a request can have"
        )
        return [note]


def deployment(models: Sequence[PreparedModel]) -> dict[str, str]:
    """The version, and for each model what it is and how it is set, by name."""
    described = {f"model {model.name}": _described(model) for model in models}
    return {"version": sluice.__version__, **described}


def _described(model: PreparedModel) -> str:
    section = model.section
    sequences = "usual" if section.sequences_max is None else section.sequences_max
    settings = msgspec.json.encode(section, order="deterministic")
    kv_pool = "sized at load" if section.kv_bytes is None else f"{section.kv_bytes} bytes"
    return (
        f"fingerprint {model.fingerprint}, settings {_digest(settings)}, numerics "
        f"{section.numerics}, context {model.context_tokens_max} tokens, KV pool {kv_pool}, "
        f"{sequences} sequences, {section.replicas.min} replicas"
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
