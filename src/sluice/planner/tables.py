"""The tables of models and accelerators, ours and the user's.

A table of the user is a TOML file with ``[models.NAME]`` (keys of a ``config.json``),
``[hardware.NAME]`` (fields of ``Accelerator``) and ``[prices.NAME]`` (dated prices of an
accelerator that has an entry); its entries come before ours of the same name.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from sluice.planner.hardware import Accelerator
from sluice.planner.model_config import shape_from_config
from sluice.planner.names import CannotPlan, chosen
from sluice.planner.shapes import ModelShape

_FIELDS = {field.name for field in fields(Accelerator)} - {"name"}
_TEXTS = {"architecture", "link", "price_date", "vendor", "verified", "price_source"}
_PRICES = ("usd_per_hour_low", "usd_per_hour_high", "price_date", "price_source")
_PRICES_NEEDED = ("usd_per_hour_low", "price_date")
_NEEDED = ("architecture", "memory_gib", "bandwidth_gb_s", "bf16_tflops")


@dataclass(frozen=True, slots=True)
class Tables:
    """Entries by name, before they are made into shapes and accelerators."""

    models: Mapping[str, Mapping[str, Any]]
    hardware: Mapping[str, Mapping[str, Any]]

    def model(self, name: str) -> ModelShape:
        """The model of that name or alias, or the one that a ``config.json`` at this path has.

        Raises ``CannotPlan`` where there is none, with the nearest names.
        """
        path = Path(name)
        if path.suffix == ".json" or path.is_dir():
            return _model_of_file(path)
        found = chosen("model", name.rsplit("/", maxsplit=1)[-1], _names(self.models))
        key = _names(self.models)[found]
        return shape_from_config(key, self.models[key])

    def accelerator(self, name: str) -> Accelerator:
        """The accelerator of that name or alias; raises ``CannotPlan`` with the nearest names."""
        found = chosen("accelerator", name, _names(self.hardware))
        key = _names(self.hardware)[found]
        return _accelerator(key, self.hardware[key])


@cache
def own_tables() -> Tables:
    """The tables that come with the package."""
    folder = files("sluice.planner") / "tables"
    models, hardware = (
        tomllib.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("models.toml", "hardware.toml")
    )
    return Tables(models, hardware)


def with_user_table(tables: Tables, path: Path) -> Tables:
    """``tables`` with the entries of a file of the user before them.

    Raises ``CannotPlan`` where the file cannot be read as one.
    """
    try:
        added = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CannotPlan(f"cannot read the table {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CannotPlan(f"the table {path} is not TOML: {error}") from None
    for key in added:
        chosen(f"section of {path}", key, ("models", "hardware", "prices"))
        section = added[key]
        if not isinstance(section, dict) or not all(
            isinstance(entry, dict) for entry in section.values()
        ):
            raise CannotPlan(f"{key} in {path} is not made of tables [{key}.NAME]")
    models, hardware = added.get("models", {}), added.get("hardware", {})
    both = Tables({**tables.models, **models}, {**tables.hardware, **hardware})
    return _priced(both, added.get("prices", {}), path)


def _priced(tables: Tables, prices: Mapping[str, Mapping[str, Any]], path: Path) -> Tables:
    """The tables with these prices; a price without a date is refused, because it is stale soon."""
    hardware = dict(tables.hardware)
    for name, price in prices.items():
        known = _names(hardware)
        key = known[chosen(f"accelerator in prices of {path}", name, known)]
        for field in price:
            chosen(f"field of the price of {name}", field, _PRICES)
        missing = [field for field in _PRICES_NEEDED if field not in price]
        if missing:
            raise CannotPlan(f"the price of {name} in {path} has no {', '.join(missing)}")
        kept = {field: value for field, value in hardware[key].items() if field not in _PRICES}
        hardware[key] = {**kept, "price_source": str(path), **price}
    return Tables(tables.models, hardware)


def _names(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    names = {alias: key for key, entry in entries.items() for alias in entry.get("aliases", ())}
    return names | {key: key for key in entries}


def _model_of_file(path: Path) -> ModelShape:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CannotPlan(f"cannot read the model configuration {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CannotPlan(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CannotPlan(f"{file} is not a model configuration: it holds no keys")
    name = config.get("_name_or_path") or file.resolve().parent.name
    return shape_from_config(str(name), config)


def _accelerator(name: str, entry: Mapping[str, Any]) -> Accelerator:
    values = {key: value for key, value in entry.items() if key != "aliases"}
    for key in values:
        chosen(f"field of accelerator {name}", key, _FIELDS)
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise CannotPlan(f"accelerator {name} has no {', '.join(missing)}")
    for key, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key not in _TEXTS and not (number and isfinite(value) and value > 0):
            raise CannotPlan(f"{key} of accelerator {name} is {value!r}, not a positive number")
    return Accelerator(name=name, **values)
