"""The gateway as the HTTP server sees it: calls become token ids and go to the fleet.

Implements ``server.ports.Gateway``. What a call's text means is ``served``'s business, admission
and replicas are ``fleet_driver``'s, what is measured is ``observer``'s.
"""

from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sluice.cluster.auto_route import AutoRoute
from sluice.cluster.calls import AnyModel
from sluice.cluster.fleet_driver import FleetDriver
from sluice.cluster.forward import Forward
from sluice.cluster.observer import Observer
from sluice.cluster.operated import Operated
from sluice.core.errors import ModelNotFound, Overloaded, RequestError
from sluice.core.pool_view import PoolView
from sluice.core.tenants import Allowance
from sluice.runtime.generation import (
    NOTHING_REMOTE,
    Call,
    ModelCard,
    Readiness,
    Refused,
    Relaying,
)
from sluice.runtime.messages import Submit
from sluice.runtime.streams import PieceStream


class LocalGateway:
    """Serves calls with replica processes on this machine and with engines elsewhere.

    ``relaying`` says which models are whose, ``routes`` are names that stand for two of them.
    """

    def __init__(
        self,
        driver: FleetDriver,
        models: Mapping[str, AnyModel],
        observer: Observer,
        relaying: Relaying = NOTHING_REMOTE,
    ) -> None:
        self.relaying = relaying
        self.routes: Mapping[str, AutoRoute] = {}
        self._driver = driver
        self._models = dict(models)
        self._observer = observer

    # ------------------------------------------------------------------------------------ server

    async def check_together(self, calls: Sequence[Call]) -> None:
        """Check that all can ever be served at once; see ``server.ports.Gateway``."""
        await self.served(calls[0].model).check_together(calls)
        self._driver.check_together(calls)

    async def generate(self, call: Call) -> PieceStream:
        """Admit a call; see ``server.ports.Gateway``."""
        try:
            served = self.served(call.model)
            call = served.named(call)
            least = served.least(call)
            if least is not None:
                self._driver.refuse_before_work(call, least)
            submit = await self._submit(served, call)
        except RequestError as error:
            status = 404 if isinstance(error, ModelNotFound) else 400
            self.refused(Refused(call.id, call.client_id, call.model, status, error.code))
            raise
        return self._driver.admit(call, submit)

    async def _submit(self, served: AnyModel, call: Call) -> Submit | Forward:
        try:
            return await served.submit(call)
        except Overloaded as error:
            early = Refused(call.id, call.client_id, call.model, error.status, error.reason)
            self.refused(early)
            raise
        except CancelledError:
            self._driver.left_early(call, served.classes.request(call, (), 1))
            raise

    def served(self, model: str) -> AnyModel:
        """The model of this name. Raises ``ModelNotFound``."""
        served = self._models.get(model)
        if served is None:
            names = ", ".join(sorted((*self._models, *self.routes)))
            raise ModelNotFound(
                f"The model '{model}' does not exist here; available: {names}.", param="model"
            )
        return served

    def allowance(self, tenant: str) -> Allowance | None:
        """What a tenant may still use, ``None`` where it has no limit per minute."""
        return self._driver.allowance(tenant)

    def models(self) -> Sequence[ModelCard]:
        """The models that clients can ask for."""
        return [one.card for one in (*self._models.values(), *self.routes.values())]

    def readiness(self) -> Readiness:
        """Whether calls are admitted and every model has a replica that serves."""
        return self._driver.readiness()

    def pools(self) -> Sequence[PoolView]:
        """The models and replicas as the fleet sees them at this moment."""
        return self._driver.pools()

    def metrics(self) -> tuple[bytes, str]:
        """Prometheus exposition of all metrics, and its content type."""
        routes = [self._driver.route_view(name) for name in self.routes]
        return self._observer.exposition(self.pools(), routes)

    def refused(self, refused: Refused) -> None:
        """Count and record a request that was refused before it became a call."""
        known = refused.model if refused.model in self._models else ""
        self._observer.refused_early(replace(refused, model=known))

    @property
    def driver(self) -> FleetDriver:
        """What asks the fleet, and performs what it decides."""
        return self._driver

    @property
    def operated(self) -> Operated:
        """What its operator may change while it serves."""
        return Operated(self._driver, self._models, self._observer)

    # ---------------------------------------------------------------------------------- lifetime

    async def start(self) -> None:
        """Start the replicas and wait until each model can be served.

        Raises ``ModelLoadError`` where a model cannot be loaded; the processes are stopped then.
        """
        await self._driver.start()
        self._observer.deployed("start")

    async def drain(self, grace_s: float) -> None:
        """Admit nothing more and wait until every call has ended, at most about ``grace_s``."""
        self._observer.deployed("drain")
        await self._driver.drain(grace_s)

    async def close(self) -> None:
        """Stop the processes. Calls that still live end with ``SHUTDOWN``."""
        await self._driver.close()
        self._observer.close()
