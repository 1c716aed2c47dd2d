"""The settings and facts of model files that matter to how requests are served, for the journal.

Whoever looks back wants to know what was different: each setting in force as text, what it comes to
for each model, and digests in place of what must not be told: paths, addresses, texts of templates.
Called at the start and when settings are read again.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import sluice
from sluice.config.explain import explain
from sluice.config.load import Loaded
from sluice.config.settings import Settings
from sluice.telemetry.deployments import deployment_record
from sluice.telemetry.records import Deployment
from sluice.wiring.defaults import models_of
from sluice.wiring.deployment import PreparedModel

FACTS = "facts."
# Where models come from says nothing that their fingerprints do not.
_TABLES_LEFT_OUT = ("catalogue.",)
_TOLD_AS_DIGEST = ("_file", "_env", "dir", "listen", "url", "urls", "source", "endpoint", "mirrors")


def settings_in_force(settings: Settings) -> dict[str, str]:
    """Every setting that matters as TOML text by its key; secrets masked, places as digests."""
    served = Loaded(replace(settings, models=models_of(settings)), {})
    return {
        one.key: _told(one.key, one.value)
        for one in explain(served)
        if not one.key.startswith(_TABLES_LEFT_OUT)
    }


def facts_of(models: Sequence[PreparedModel]) -> dict[str, str]:
    """What settings come to for each model that runs here: limits that hold, and its files."""
    facts = {"version": sluice.__version__}
    for model in models:
        known = model.folder.facts
        facts |= {
            f"{model.name}.context_tokens_max": str(model.context_tokens_max),
            f"{model.name}.output_tokens_max_default": "the rest of the context",
            f"{model.name}.fingerprint": model.fingerprint,
            f"{model.name}.template": _digest(known.chat_template or ""),
            f"{model.name}.template_tools": _digest(known.chat_template_tools or ""),
        }
    return {FACTS + name: value for name, value in facts.items()}


def started(
    settings: Settings,
    models: Sequence[PreparedModel],
    details: Mapping[str, str],
    before: Mapping[str, str] | None,
) -> Deployment:
    """The deployment that begins, against the settings of the run before."""
    matter = settings_in_force(settings) | facts_of(models)
    return deployment_record("start", sluice.__version__, matter, before, details)


def reloaded(before: Deployment, settings: Settings, details: Mapping[str, str]) -> Deployment:
    """The deployment after its settings were read again. Files of models are still the same."""
    facts = {key: value for key, value in before.settings.items() if key.startswith(FACTS)}
    matter = settings_in_force(settings) | facts
    return deployment_record("reload", sluice.__version__, matter, before.settings, details)


def _told(key: str, value: str) -> str:
    is_place = key.rpartition(".")[2].endswith(_TOLD_AS_DIGEST) and value != "unset"
    return _digest(value) if is_place else value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
