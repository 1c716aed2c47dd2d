"""One file from one address to disk: resumed, verified, and put in place in one move.

Knows nothing of models or mirrors. What arrives goes to ``NAME.part`` beside the target and stays
there when a download breaks off, so that the next one goes on; the target appears only when it is
whole and its checksum is right. Every network wait is bounded.
"""

import errno
import hashlib
import http.client
import os
import shutil
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import IO

Progress = Callable[[int, int | None], None]
"""Called with the bytes that are there and the bytes of the whole, ``None`` while unknown."""

_CHUNK_BYTES = 1 << 18
# A connection that breaks is opened again while each one brings bytes; then the address is given
# up.
_FRUITLESS_ATTEMPTS_MAX = 2


class DownloadFailed(Exception):
    """The file could not be had from this address; the message says why, for the operator."""


class WrongFile(DownloadFailed):
    """What was sent is not the file that was expected."""


class StorageFailed(Exception):
    """The file cannot be kept on this disk, wherever it comes from."""


def no_progress(_done_bytes: int, _total_bytes: int | None) -> None:
    """Show nothing."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of the file beforehand."""

    sha256: str | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """How to fetch: request headers, the longest wait for a byte, and whom to tell of progress.

    An ``Authorization`` header is sent to the first host only, not to those it redirects to.
    """

    stall_s_max: float
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    progress: Progress = no_progress


def download(url: str, target: Path, expected: Expected, transfer: Transfer) -> None:
    """Fetch ``url`` to ``target``.

    Raises ``DownloadFailed`` where another address may do better, ``StorageFailed`` where none can.
    The caller sees to it that nobody else downloads the same target (see ``file_lock``).
    """
    if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
        raise DownloadFailed("not an http or https address")
    with storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        continued = part_of(target).exists()
        try:
            _fetch(url, target, expected, transfer)
        except WrongFile:
            # The bytes kept from before may be at fault: they are gone now.
            if not continued:
                raise
            _fetch(url, target, expected, transfer)


def _fetch(url: str, target: Path, expected: Expected, transfer: Transfer) -> None:
    found = _Attempts(url, target, expected, transfer).run()
    put_in_place(part_of(target), target, found)
    etag_of(target).unlink(missing_ok=True)


def part_of(target: Path) -> Path:
    """Where the bytes of an unfinished download are."""
    return target.with_name(target.name + ".part")


def etag_of(target: Path) -> Path:
    """Which version of the file the unfinished bytes belong to."""
    return target.with_name(target.name + ".part.etag")


def put_in_place(part: Path, target: Path, expected: Expected) -> None:
    """Verify ``part`` and move it to ``target``; deletes it and raises ``WrongFile`` otherwise."""
    size_bytes = part.stat().st_size
    if expected.size_bytes not in {None, size_bytes}:
        part.unlink()
        raise WrongFile(f"sent {size_bytes} bytes, expected {expected.size_bytes}")
    with storage_errors(target), part.open("r+b") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    if expected.sha256 not in {None, found}:
        part.unlink()
        raise WrongFile(f"its sha256 is {found}, expected {expected.sha256}")
    with storage_errors(target):
        part.replace(target)


class storage_errors:  # noqa: N801 - used as a statement
    """Turns what goes wrong on the disk under ``target`` into ``StorageFailed``."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, urllib.error.URLError):
            return
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            free_bytes = shutil.disk_usage(self._target.parent).free
            raise StorageFailed(
                f"no space left for {self._target} ({free_bytes} bytes free); free some, or set "
                "catalogue.cache_dir to another disk"
            ) from error
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}:
            raise StorageFailed(
                f"cannot write {self._target}: {error.strerror}; set catalogue.cache_dir to a "
                "folder that this user can write"
            ) from error


class _Attempts:
    """The connections of one download."""

    def __init__(self, url: str, target: Path, expected: Expected, transfer: Transfer) -> None:
        self._url = url
        self._target = target
        self._part = part_of(target)
        self._expected = expected
        self._transfer = transfer

    def run(self) -> Expected:
        """Connect until the file is whole; returns what it must be, as far as that is known."""
        fruitless = 0
        while True:
            before = self._have()
            try:
                return self._connect()
            except _Broken as error:
                broken = str(error)
            fruitless = fruitless + 1 if self._have() <= before else 0
            if fruitless >= _FRUITLESS_ATTEMPTS_MAX:
                raise DownloadFailed(f"{broken} after {self._have()} bytes")

    def _have(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def _connect(self) -> Expected:
        have, headers = self._have(), dict(self._transfer.headers)
        etag = etag_of(self._target)
        known = etag.read_text() if etag.exists() else ""
        if have and (known or self._expected.sha256):
            headers["Range"] = f"bytes={have}-"
            # With a checksum it does not matter which address the first bytes came from.
            if not self._expected.sha256:
                headers["If-Range"] = known
        redirects = _Redirects()
        opener = urllib.request.build_opener(redirects)
        request = urllib.request.Request(self._url, headers=headers)  # noqa: S310 - checked above
        try:
            answer = opener.open(request, timeout=self._transfer.stall_s_max)
        except urllib.error.HTTPError as error:
            with error:
                return self._refused(error)
        except urllib.error.URLError as error:
            raise DownloadFailed(self._in_words(error.reason)) from error
        except (OSError, http.client.HTTPException) as error:
            raise _Broken(self._in_words(error)) from error
        with answer:
            etag.write_text(answer.headers.get("ETag", ""))
            return self._receive(answer, redirects.sha256)

    def _refused(self, error: urllib.error.HTTPError) -> Expected:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and self._have():
            # All bytes are here already, or more than there should be.
            if self._have() == self._expected.size_bytes:
                return self._expected
            self._part.unlink()
            raise _Broken("the bytes kept from before do not fit the file")
        hints = {
            401: "; it needs a token (HF_TOKEN for hf: sources)",
            403: "; the token, if one was sent, does not open it",
        }
        raise DownloadFailed(f"HTTP {error.code} {error.reason}{hints.get(error.code, '')}")

    def _receive(self, answer: http.client.HTTPResponse, sha256: str | None) -> Expected:
        start = self._have() if answer.status == http.client.PARTIAL_CONTENT else 0
        if start and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            self._part.unlink()
            raise _Broken("it sent another part of the file than asked for")
        length = answer.headers.get("Content-Length", "")
        total = start + int(length) if length.isdigit() else self._expected.size_bytes
        if self._expected.size_bytes is not None and total != self._expected.size_bytes:
            raise DownloadFailed(
                f"the file there has {total} bytes, expected {self._expected.size_bytes}"
            )
        if total is not None and shutil.disk_usage(self._part.parent).free < total - start:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with self._part.open("ab" if start else "wb") as file:
            done = self._copy(answer, file, start, total)
        if total is not None and done < total:
            raise _Broken("the connection ended")
        return Expected(self._expected.sha256 or sha256, total)

    def _copy(
        self, answer: http.client.HTTPResponse, file: IO[bytes], start: int, total: int | None
    ) -> int:
        done = start
        while chunk := self._read(answer):
            file.write(chunk)
            done += len(chunk)
            if total is not None and done > total:
                raise DownloadFailed(f"sends more than the {total} bytes expected")
            self._transfer.progress(done, total)
        return done

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        try:
            return answer.read1(_CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _Broken(self._in_words(error)) from error

    def _in_words(self, error: object) -> str:
        match error:
            case TimeoutError():
                return f"no byte for {self._transfer.stall_s_max:g} s"
            case ConnectionRefusedError():
                return "connection refused"
            case socket.gaierror():
                return "the host name cannot be resolved"
            case OSError() if error.strerror:
                return error.strerror
            case _:
                return str(error) or type(error).__name__


class _Broken(Exception):
    """A connection ended before the file was whole; another one may bring the rest."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; notes the checksum that a hub gives on the way, keeps the token home."""

    def __init__(self) -> None:
        self.sha256: str | None = None

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        linked = (headers.get("X-Linked-Etag") or "").strip('"').lower()
        if len(linked) == 64 and not linked.strip("0123456789abcdef"):
            self.sha256 = linked
        if urllib.parse.urlsplit(newurl).scheme not in {"http", "https"}:
            raise DownloadFailed("redirects to an address that is not http or https")
        following = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if following is not None and following.host != req.host:
            following.remove_header("Authorization")
        return following
