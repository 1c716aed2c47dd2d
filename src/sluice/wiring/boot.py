"""What the gateway process tells a replica process at its start."""

from pathlib import Path

import msgspec

from sluice.config.sections import JournalSection, ModelSection


class ReplicaBoot(msgspec.Struct, frozen=True):
    """What a replica process is told at its start. Nothing secret: it stands on a command line.

    ``folder`` is ``None`` where the model is simulated.
    """

    replica_id: str
    model: str
    folder: Path | None
    threads: int | None
    section: ModelSection
    journal: JournalSection

    def to_json(self) -> str:
        """The boot as one argument of a command line."""
        return msgspec.json.encode(self, enc_hook=_path_to_text).decode()

    @classmethod
    def from_json(cls, text: str) -> "ReplicaBoot":
        """Read what ``to_json`` gave."""
        return msgspec.json.decode(text, type=cls, dec_hook=_path_from_text)


def _path_to_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in a boot")


def _path_from_text(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{kind.__name__} has no form in a boot")
