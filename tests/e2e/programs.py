"""Programs that tests drive: found on this machine, or installed where apt-get may."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """``names`` that it may have, the Debian ``package``, the ``variable`` that names it."""

    names: Sequence[str]
    package: str
    variable: str


CHROMIUM = Program(
    ("chromium", "chromium-browser", "google-chrome", "chrome"), "chromium", "SLUICE_TEST_BROWSER"
)
PROMETHEUS = Program(("prometheus",), "prometheus", "SLUICE_TEST_PROMETHEUS")
PROMTOOL = Program(("promtool",), "prometheus", "SLUICE_TEST_PROMTOOL")


def path_of(program: Program) -> str:
    """Its path. Raises ``LookupError`` with what to do where there is none."""
    found = os.environ.get(program.variable) or _found(program)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", program.package]):
            subprocess.run(
                ["apt-get", "-q", *command], env=environment, check=False, capture_output=True
            )
        found = _found(program)
    if found is None:
        raise LookupError(
            f"{program.names[0]} is needed and not on this machine. Install it (apt-get install "
            f"{program.package}), name it in {program.variable}, or set {MARKERS[program.package]}"
            "=none to leave these tests out."
        )
    return found


# Which variable leaves out the tests that need a package.
MARKERS = {"chromium": "SLUICE_TEST_BROWSER", "prometheus": "SLUICE_TEST_PROMETHEUS"}


def _found(program: Program) -> str | None:
    return next(filter(None, map(shutil.which, program.names)), None)
