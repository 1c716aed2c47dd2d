"""Turning what an operator points at into a model folder, once.

Decides where a prepared model is cached and when it can be used again: under the hash of the
source's content. A GGUF is converted, its text side here and its graph by the engine, which is
passed in, so that nothing here loads one. Folders that are models already are used as they are. Two
processes may prepare the same model at the same time; one works and the other waits for it.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from sluice.catalog.file_lock import file_lock, free_lock, shared_lock
from sluice.core.errors import ModelLoadError
from sluice.executors.gguf import Gguf, read_gguf
from sluice.runtime.gguf_tokenizer import gguf_facts, tokenizer_json
from sluice.runtime.model_folder import (
    TOKENIZER_FILE,
    ModelFacts,
    read_model_folder,
    write_facts,
)

# Raised when what is written to a folder changes, so that older ones are made again.
_FOLDER_VERSION = 4
# Preparing a model of a few billion parameters takes minutes.
_CONVERT_S_MAX = 1800.0

Progress = Callable[[str], None]
WriteGraph = Callable[[Path, Path], None]  # (GGUF file, folder to write the OpenVINO IR into)


def prepare_model(source: Path, cache: Path, write_graph: WriteGraph, progress: Progress) -> Path:
    """The model folder of ``source``: a GGUF file or a model folder.

    ``progress`` is told in plain words what takes time. Raises ``ModelLoadError`` for a source that
    is missing, damaged or of a kind that is not known, and where the cache cannot be written.
    """
    if source.is_dir():
        return read_model_folder(source).path
    if not source.is_file():
        raise ModelLoadError(f"{source} does not exist; give a GGUF file or a model folder")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        sha256 = _source_sha256(source, cache, progress)
        folder = cache / f"{sha256[:32]}-v{_FOLDER_VERSION}"
        if not folder.is_dir():
            # Only now, since reading a vocabulary takes time and memory.
            gguf = _whole_gguf(source)
            tell_wait = partial(progress, "another process is converting this model; waiting")
            with file_lock(_lock_of(folder), _CONVERT_S_MAX, tell_wait):
                if not folder.is_dir():
                    progress(f"converting {source.name}; this is done once")
                    _make(gguf, sha256, folder, write_graph)
    except OSError as error:
        raise ModelLoadError(f"the model cache {cache} cannot be used: {error}") from error
    return read_model_folder(folder).path


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep a model folder from being removed while it is in use, by a lock that is shared.

    A folder that was not prepared here has no lock and is left alone.
    """
    lock = _lock_of(folder)
    with shared_lock(lock) if lock.is_file() else nullcontext():
        yield


def remove_prepared(source: Path, cache: Path, *, force: bool = False) -> int | None:
    """Delete what was made of the file ``source``; returns the bytes freed.

    ``None`` where a process uses it: then nothing was deleted, unless ``force`` says so.
    """
    if not cache.is_dir():
        return 0
    sha256 = _source_sha256(source, cache, lambda _: None)
    folders = list(cache.glob(f"{sha256[:32]}-v*/"))
    freed_bytes = 0
    with ExitStack() as locks:
        is_free = [locks.enter_context(free_lock(_lock_of(folder))) for folder in folders]
        if not (all(is_free) or force):
            return None
        for folder in folders:
            freed_bytes += _folder_bytes(folder)
            shutil.rmtree(folder)
    return freed_bytes


def prepared_bytes(cache: Path) -> int:
    """Disk space that all prepared models take."""
    return sum(_folder_bytes(folder) for folder in cache.glob("*-v*/"))


def _lock_of(folder: Path) -> Path:
    return folder.with_suffix(".lock")


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def write_text_side(gguf: Gguf, source_sha256: str, folder: Path) -> ModelFacts:
    """Write ``tokenizer.json`` and ``sluice.json`` of a GGUF into ``folder``.

    Raises ``ModelLoadError`` for a tokenizer that is not known and for missing facts.
    """
    facts = gguf_facts(gguf, source_sha256)
    (folder / TOKENIZER_FILE).write_bytes(msgspec.json.encode(tokenizer_json(gguf)))
    write_facts(facts, folder)
    return facts


def _whole_gguf(source: Path) -> Gguf:
    gguf = read_gguf(source)
    if (gguf.number("split.count") or 1) > 1:
        raise ModelLoadError(f"{source} is one part of a split GGUF; join the parts into one file")
    return gguf


def _make(gguf: Gguf, sha256: str, folder: Path, write_graph: WriteGraph) -> None:
    """Write beside ``folder`` and rename, so that a folder under its name is always whole."""
    prefix = f".{folder.name}-"
    for leftover in folder.parent.glob(prefix + "*"):
        # We hold the lock: whoever wrote it is gone.
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        # The text side first: it is quick and finds most of what is wrong with a file.
        write_text_side(gguf, sha256, unfinished)
        write_graph(gguf.path, unfinished)
        read_model_folder(unfinished)
        for file in unfinished.iterdir():
            _sync(file)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sync(file: Path) -> None:
    # Without it a power failure can leave the renamed folder with empty files.
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Hashed:
    """The hash of a file, as long as its size and time of change stay."""

    path: str
    size: int
    mtime_ns: int
    sha256: str


def _source_sha256(source: Path, cache: Path, progress: Progress) -> str:
    path = source.resolve()
    stat = path.stat()
    memory = cache / "hashes" / (hashlib.sha256(os.fsencode(path)).hexdigest()[:32] + ".json")
    try:
        known = msgspec.json.decode(memory.read_bytes(), type=_Hashed)
    except (OSError, msgspec.DecodeError, RecursionError):
        pass  # not hashed before, or half written
    else:
        if (known.path, known.size, known.mtime_ns) == (str(path), stat.st_size, stat.st_mtime_ns):
            return known.sha256
    progress(f"hashing {source.name}")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    memory.parent.mkdir(exist_ok=True)
    memory.write_bytes(
        msgspec.json.encode(_Hashed(str(path), stat.st_size, stat.st_mtime_ns, sha256))
    )
    return sha256
