"""Settings of routes to what serves them: classifiers read from their files, limits for the fleet.

Called at the start and when settings are read again, before anything is changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.cluster.auto_route import Classifier
from sluice.complexity import classifier as trained
from sluice.complexity.features import capped
from sluice.complexity.model_file import BadModelFile, default_model, read_model
from sluice.complexity.outcome_file import OutcomeFile
from sluice.config.routes import RouteSection
from sluice.config.settings import Settings
from sluice.core.errors import ConfigError
from sluice.core.limits import RouteLimits, Sticky, Way

_SPILL_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class LoadedRoutes:
    """All routes, by name."""

    limits: Mapping[str, RouteLimits]
    classifiers: Mapping[str, Classifier]


def load_routes(settings: Settings) -> LoadedRoutes:
    """Read the classifiers of all routes. Raises ``ConfigError`` with every file that cannot be
    used."""
    limits, classifiers, problems = {}, {}, list[str]()
    for name, section in settings.routes.items():
        try:
            model = _model(section.classifier)
        except BadModelFile as error:
            problems.append(f"routes.{name}.classifier: {error}")
            continue
        limits[name] = _limits(name, section, model.card, settings)
        classifiers[name] = Classifier(model.judged, capped, _outcomes(section))
    if problems:
        raise ConfigError(tuple(problems))
    return LoadedRoutes(limits, classifiers)


def _model(path: Path | None) -> trained.Classifier:
    model = default_model() if path is None else read_model(path)
    if not model.card.thresholds:
        raise BadModelFile(f"{path} has no thresholds: train it again with sluice route train")
    return model


def _limits(
    name: str, section: RouteSection, card: trained.Card, settings: Settings
) -> RouteLimits:
    return RouteLimits(
        route=name,
        simple=section.simple,
        complex=section.complex,
        cuts=card.thresholds,
        share=None if section.share is None else section.share / 100,
        threshold=section.threshold or 0.0,
        follow=section.follow,
        default=Way(section.default),
        spill=section.spill,
        spill_wait_ns=round(_spill_wait_s(section, settings) * 1e9),
        sticky=Sticky(section.sticky),
        rules=section.rules,
        shadow=section.shadow,
    )


def _spill_wait_s(section: RouteSection, settings: Settings) -> float:
    if section.spill_wait_s is not None:
        return section.spill_wait_s
    slo = settings.slo.get(settings.models[section.complex].slo or "")
    return _SPILL_WAIT_S if slo is None or slo.ttft_s is None else slo.ttft_s / 2


def _outcomes(section: RouteSection) -> OutcomeFile | None:
    if section.outcomes is None:
        return None
    return OutcomeFile(section.outcomes, section.outcomes_bytes_max)
