"""The running server under its operator's hand: settings that change while requests run.

``RunningServer`` holds the settings in force and all that follows from them: the app, the bounds of
the transport, the fleet's limits. It implements ``server.ports.Operations``. What can change
without a restart is decided in ``config.changes``.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from sluice import __version__
from sluice.cluster.gateway import LocalGateway
from sluice.cluster.overview import Clocks as OverviewClocks
from sluice.config.cautions import cautions
from sluice.config.changes import Merged, merged, told
from sluice.config.explain import explain
from sluice.config.load import Loaded
from sluice.config.sections import ServerSection
from sluice.config.settings import conflicts
from sluice.config.sources import dotted
from sluice.core.errors import ConfigError, InvalidRequest
from sluice.runtime.clock import monotonic_ns, wall_ns, wall_s
from sluice.server.app import create_app
from sluice.server.bodies import Bodies
from sluice.server.current_app import CurrentApp
from sluice.server.exchange import AsgiApp
from sluice.server.ports import OperatorEvent, Reloaded, Setting
from sluice.server.stamp import Sources
from sluice.server.transport import Transport
from sluice.telemetry.records import Deployment
from sluice.wiring.addresses import LOOK_S
from sluice.wiring.defaults import models_of
from sluice.wiring.gateway import reconfigure
from sluice.wiring.pipelines import pipeline_gateway
from sluice.wiring.remote import RemoteIds
from sluice.wiring.routes import LoadedRoutes, load_routes
from sluice.wiring.scaling import scales
from sluice.wiring.tracing import Tracing

_log = logging.getLogger(__name__)


class RunningServer:
    """One server and the settings that it runs under.

    ``read`` reads the settings from where ``loaded`` came from; it raises ``ConfigError``. ``ids``
    are those that the gateway was made with.
    """

    def __init__(
        self,
        gateway: LocalGateway,
        loaded: Loaded,
        read: Callable[[], Loaded],
        transport: Transport,
        ids: RemoteIds,
    ) -> None:
        self.gateway = gateway
        self.front = pipeline_gateway(gateway, loaded.settings)
        self.transport = transport
        self._loaded = loaded
        self._read = read
        self._one_at_a_time = asyncio.Lock()
        self._remote_ids = ids
        chance = random.Random()  # noqa: S311 - ids need to differ, not to be secret
        self._sources = Sources(
            wall_s, monotonic_ns, lambda: f"{chance.getrandbits(128):032x}", __version__
        )
        self.tracing = Tracing(loaded.settings.tracing, loaded.settings.journal)
        gateway.operated.count_spans(self._spans)
        self.overview = gateway.operated.overview(OverviewClocks(monotonic_ns, wall_ns))
        self.app = CurrentApp(self.section, self._make_app)

    @property
    def section(self) -> ServerSection:
        """The settings of the server that hold now."""
        return self._loaded.settings.server

    def settings(self) -> Sequence[Setting]:
        """Every setting in force. Secrets are masked."""
        settings = self._loaded.settings
        served = replace(settings, models=models_of(settings))
        entries = explain(replace(self._loaded, settings=served))
        return [Setting(one.key, one.plain, one.origin) for one in entries]

    async def reload(self) -> Reloaded:
        """Read the settings again; see ``server.ports.Operations``."""
        async with self._one_at_a_time:
            try:
                after = await asyncio.to_thread(self._read)
                change = merged(self._loaded.settings, after.settings)
                _check(change)
                routes = await asyncio.to_thread(load_routes, change.settings)
                return self._apply(after, change, routes)
            except ConfigError as error:
                for problem in error.problems:
                    _log.error("settings were not changed: %s", problem)
                raise

    async def follow_addresses(self) -> None:
        """Let engines come and go with the addresses of the names that settings give for them."""
        addresses = self._remote_ids.addresses
        while True:
            await asyncio.sleep(LOOK_S)
            if not await asyncio.to_thread(addresses.look, self._loaded.settings):
                continue
            async with self._one_at_a_time:
                settings = self._loaded.settings
                told = {"addresses": "names of engines have other addresses"}
                reconfigure(self.gateway, settings, None, self._remote_ids, told)

    def drain_replica(self, replica_id: str, *, on: bool) -> None:
        """Give a replica nothing more, or use it again."""
        self.gateway.operated.drain_replica(replica_id, on=on)
        _log.info("replica %s %s", replica_id, "gets no more requests" if on else "is used again")

    def pin_replicas(self, model: str, number: int | None) -> None:
        """Let so many replicas serve; see ``server.ports.Operations``."""
        models = models_of(self._loaded.settings)
        ranged = sorted(name for name, section in models.items() if scales(section))
        if model not in ranged:
            there = ", ".join(ranged) or "none"
            raise InvalidRequest(
                f"The number of replicas of {model[:64]!r} does not follow its load; models "
                f"of which it does (replicas with min below max, or warm): {there}.",
                param="model",
            )
        bounds = models[model].replicas
        if number is not None and not bounds.min <= number <= (bounds.max or 0):
            raise InvalidRequest(
                f"replicas is {number}; {model} may have {bounds.min} to {bounds.max} "
                f"(models.{model}.replicas).",
                param="replicas",
            )
        self.gateway.operated.pin_replicas(model, number)
        told = "follow the load again" if number is None else f"are to be {number}"
        _log.info("replicas of %s that serve %s", model, told)

    def note(self, event: OperatorEvent) -> None:
        """Put an event into the journal; see ``server.ports.Operations``."""
        told = Deployment(0, event.what, dict(event.details), source="operator")
        self.gateway.operated.note(told)
        _log.info("event %s noted", event.what)

    def _apply(self, after: Loaded, change: Merged, routes: LoadedRoutes) -> Reloaded:
        """Let the settings hold. What can fail comes before anything is changed."""
        settings = change.settings
        self.transport.reconfigure(settings.server)
        kept = {path: self._loaded.origin(path) for path in change.waiting}
        self._loaded = Loaded(settings, {**after.origins, **kept})
        self.app.reconfigure(settings.server)
        told_again = {
            "applied": ", ".join(told(change.applied)),
            "needs_restart": ", ".join(told(change.waiting)),
        }
        reconfigure(self.gateway, settings, routes, self._remote_ids, told_again)
        applied = told_again["applied"] or "nothing has changed"
        later = told_again["needs_restart"]
        as_before = f"; until a restart as before: {later}" if later else ""
        _log.info("settings read again; applied: %s%s", applied, as_before)
        warnings = tuple(cautions(settings))
        return Reloaded(told(change.applied), told(change.waiting), warnings)

    def _spans(self) -> tuple[int, int]:
        counted = self.tracing.counted
        return counted.exported, counted.dropped

    def _make_app(self, section: ServerSection, bodies: Bodies) -> AsgiApp:
        return create_app(self.front, section, self._sources, operations=self, bodies=bodies)


def _check(change: Merged) -> None:
    """Check what would hold. Raises ``ConfigError``."""
    wrong = [f"{dotted(one.keys[0])}: {one.message}" for one in conflicts(change.settings)]
    if wrong:
        rest = "of what was read, only part can hold before a restart, and that is wrong: "
        raise ConfigError(tuple(rest + problem for problem in wrong))
