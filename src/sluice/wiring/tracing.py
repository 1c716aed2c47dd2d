"""Starts the process that exports spans and keeps it running, as long as the server does.

The gateway waits for nothing of it: where it is gone or its collector is, spans are missing and
counted, and requests go on.
"""

import asyncio
import contextlib
import importlib.util
import logging
import sys

import msgspec

from sluice.config.sections import JournalSection
from sluice.config.tracing import TracingSection
from sluice.core.errors import ConfigError
from sluice.runtime.clock import wall_ns
from sluice.telemetry.span_export import Counted
from sluice.wiring.span_exporter import SpanExporterBoot

_log = logging.getLogger(__name__)
_RETRY_S_MIN, _RETRY_S_MAX = 1.0, 60.0
_STOP_S_MAX = 6.0


class Tracing:
    """The export of spans of one server, off where ``section`` names no endpoint."""

    def __init__(self, section: TracingSection, journal: JournalSection) -> None:
        self._section = section
        self._journal = journal
        self._before = Counted()
        self._told = Counted()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def share(self) -> float | None:
        """The share of traces that is kept, ``None`` where no spans are made."""
        return self._section.share if self._section.endpoint is not None else None

    @property
    def counted(self) -> Counted:
        """What became of spans since the start of the server."""
        before, now = self._before, self._told
        return Counted(
            before.exported + now.exported, before.dropped + now.dropped, before.kept + now.kept
        )

    async def run(self) -> None:
        """Export until cancelled; start the process again where it ends."""
        retry_s = _RETRY_S_MIN
        since_ns = wall_ns()
        while self._section.endpoint is not None:
            counted_before = self._told.exported
            try:
                self._process = await self._start(since_ns)
                await self._listen(self._process)
                await self._process.wait()
            except OSError as error:  # no process, memory or file descriptor was to be had
                _log.warning("the export of spans cannot be started: %s", error)
            was_good = self._told.exported > counted_before
            retry_s = _RETRY_S_MIN if was_good else min(2 * retry_s, _RETRY_S_MAX)
            self._before, self._told = self.counted, Counted()
            _log.warning("the export of spans ended; it is started again in %g s", retry_s)
            await asyncio.sleep(retry_s)
            since_ns = wall_ns()

    async def stop(self) -> None:
        """Let it send what is left. The journal is to be closed before."""
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S_MAX):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _start(self, since_ns: int) -> asyncio.subprocess.Process:
        section = self._section
        boot = SpanExporterBoot(
            journal=str(self._journal.dir),
            endpoint=section.endpoint or "",
            protocol=section.protocol,
            service=section.service_name,
            share=section.share,
            spans_max=section.queue_spans_max,
            since_ns=since_ns,
        )
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "sluice.wiring.span_exporter",
            msgspec.json.encode(boot).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        lines = process.stdout
        while lines is not None and (line := await lines.readline()):
            with contextlib.suppress(msgspec.DecodeError):
                self._told = msgspec.json.decode(line, type=Counted)


def check_installed(section: TracingSection) -> None:
    """Raises ``ConfigError`` where spans are asked for that nothing here can send."""
    if section.endpoint is not None and importlib.util.find_spec("opentelemetry") is None:
        message = (
            "tracing.endpoint: spans are sent by OpenTelemetry's packages, which are not "
            "installed: pip install 'sluice[otlp]'."
        )
        raise ConfigError((message,))
