"""What is served where the settings name no model.

Apart from ``gateway``, so that ``sluice config explain`` can tell it without loading a server.
"""

from collections.abc import Mapping

from sluice.catalog.models import DEFAULT_MODEL
from sluice.config.sections import ModelSection
from sluice.config.settings import Settings


def models_of(settings: Settings) -> Mapping[str, ModelSection]:
    """The models to serve: those of the settings, or the catalogue's default model."""
    return settings.models or {DEFAULT_MODEL: ModelSection(source=DEFAULT_MODEL)}
