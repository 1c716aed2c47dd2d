"""The vocabulary of the core is closed and made of values; the package exports what it says."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import typing
from pathlib import Path
from typing import Any

import pytest

import sluice
from sluice.config import explain, sections, settings
from sluice.config.schema import keys_of
from sluice.core import events, request, sampling, step
from sluice.executors import base
from sluice.runtime import generation

VALUE_MODULES = [request, step, sampling, events, base, generation, sections, settings]


@pytest.mark.parametrize("module", VALUE_MODULES, ids=lambda module: module.__name__)
def test_values_are_frozen_and_slotted(module):
    kinds: list[Any] = [kind for kind in vars(module).values() if dataclasses.is_dataclass(kind)]
    assert kinds
    loose = [
        kind.__name__
        for kind in kinds
        if not kind.__dataclass_params__.frozen or not hasattr(kind, "__slots__")
    ]
    assert not loose


def test_every_event_and_effect_is_in_a_union_or_part_of_another():
    unions = events.ReplicaEvent | events.ReplicaEffect | events.FleetEvent | events.FleetEffect
    members = set(typing.get_args(unions))
    parts = {
        part
        for kind in members
        for hint in typing.get_type_hints(kind).values()
        for part in (hint, *typing.get_args(hint))
    }
    own = {
        kind
        for kind in vars(events).values()
        if inspect.isclass(kind) and kind.__module__ == events.__name__
    }
    assert own - members - parts == set()


def test_every_setting_is_read_by_something(modules):
    """A setting that nothing reads would be accepted and ignored."""
    readers = [m for m in modules if not m.name.startswith("config/") or m.name == "config/load.py"]
    read = {
        node.attr
        for module in readers
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
    }
    # Checked where settings are checked against each other: they only allow or refuse.
    read |= {"allow_unauthenticated", "max", "warm"}
    # One engine computes steps, so nothing has to choose yet.
    read |= {"engine"}
    unread = [
        f"{kind.__name__}.{key.field}"
        for _, kind, _ in [*explain.sections(), (None, sections.ReplicaRange, None)]
        for key in keys_of(kind).values()
        if key.field not in read
    ]
    assert not unread


def test_the_package_exports_its_version_and_nothing_else():
    public = {name for name, value in vars(sluice).items() if not inspect.ismodule(value)}
    assert {name for name in public if not name.startswith("_")} == set()
    assert sluice.__version__.count(".") == 2


def test_the_package_ships_its_types():
    assert (Path(sluice.__file__).parent / "py.typed").is_file()


def test_every_module_imports_without_doing_anything(capfd):
    names = [found.name for found in pkgutil.walk_packages(sluice.__path__, "sluice.")]
    for name in names:
        if name != "sluice.__main__":
            importlib.import_module(name)
    assert capfd.readouterr() == ("", "")
