"""The real model for the tests that need it, shared by the session."""

from pathlib import Path

import pytest

from sluice.catalog.catalogue import Catalogue
from sluice.config.sections import CatalogueSection
from sluice.core.errors import ModelLoadError
from sluice.runtime.gguf import read_gguf
from sluice.runtime.model_folder import ModelFolder
from sluice.runtime.prepare import write_text_side
from sluice.runtime.tokenizing import Tokenizer


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's file, fetched once into the user's cache."""
    try:
        return Catalogue(CatalogueSection()).fetch("smollm2-135m-instruct").path
    except ModelLoadError as error:
        pytest.skip(f"the default model is not here and cannot be fetched: {error}")


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The default model's tokenizer, made from its GGUF."""
    folder = tmp_path_factory.mktemp("smollm2")
    facts = write_text_side(read_gguf(smollm2_gguf), "", folder)
    return Tokenizer.load(ModelFolder(folder, facts))
