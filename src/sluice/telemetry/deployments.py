"""What a deployment consists of, and what changed since the one before, across restarts.

``wiring`` says which settings and facts matter; here they are compared and digested. The last ones
of a journal folder stand in a small file beside its segments, so that a start need not read the
journal to tell what is different from the last time. Reads and writes that file and nothing else.
"""

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sluice.telemetry.records import Change, Deployment

_FILE = "deployment.json"


def deployment_record(
    what: str,
    version: str,
    settings: Mapping[str, str],
    before: Mapping[str, str] | None,
    details: Mapping[str, str],
) -> Deployment:
    """A record at time 0, for ``Observer`` to stamp.

    ``before`` are the settings of the deployment before, ``None`` where none is known: then nothing
    is told as changed.
    """
    changed = {} if before is None else differences(before, settings)
    return Deployment(0, what, dict(details), version, digest_of(settings), dict(settings), changed)


def digest_of(settings: Mapping[str, str]) -> str:
    """The same for the same settings whatever their order."""
    plain = msgspec.json.encode(dict(settings), order="sorted")
    return hashlib.sha256(plain).hexdigest()[:12]


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Change]:
    """What is not the same, by key; a value is empty where the setting does not exist."""
    return {
        key: Change(before.get(key, ""), after.get(key, ""))
        for key in sorted({*before, *after})
        if before.get(key, "") != after.get(key, "")
    }


def last_deployment(folder: Path) -> dict[str, str] | None:
    """The settings that were kept last, ``None`` where there are none that can be read."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None


def keep_deployment(folder: Path, settings: Mapping[str, str]) -> None:
    """Keep the settings for the next start; where that fails, the next start tells no changes."""
    path = folder / _FILE
    partial = path.with_suffix(".partial")
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(dict(settings)))
        partial.chmod(0o600)
        partial.replace(path)
