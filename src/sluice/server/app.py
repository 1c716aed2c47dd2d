"""The HTTP surface: who is let in, who answers, and the one place where a request's errors end.

Order of one request: request id, key, route, method, answer, error. ``serve`` runs the app;
``wiring`` makes it. Nothing here knows how calls are served; that is the ``Gateway``.
"""

import asyncio
import logging
import traceback
from functools import partial

from sluice.config.sections import ServerSection
from sluice.core.errors import Overloaded, RequestError, SluiceError
from sluice.runtime.generation import Refused
from sluice.server.allowances import allowance_headers
from sluice.server.auth import Keys
from sluice.server.bodies import Bodies
from sluice.server.cors import open_to
from sluice.server.exchange import AsgiApp, ClientLeft, Ending, Exchange, Receive, Scope, Send
from sluice.server.limits import Limits
from sluice.server.paths import not_found
from sluice.server.ports import Gateway, Operations
from sluice.server.problems import Problem, method_refused, overdue, problem_of
from sluice.server.routes import Routes, routes
from sluice.server.stamp import Sources, Stamp

_log = logging.getLogger("sluice.server")


def create_app(
    gateway: Gateway,
    section: ServerSection,
    sources: Sources,
    *,
    operations: Operations | None = None,
    bodies: Bodies | None = None,
) -> AsgiApp:
    """The ASGI app. ``bodies`` are shared with an app that it replaces, or bounded for a test."""
    bodies = bodies or Bodies(Limits.of(section))
    served = routes(operations, remote=bool(gateway.relaying.always))
    app = App(gateway, Keys.of(section), sources, served, bodies)
    return open_to(section.cors_origins, app)


class App:
    """The ASGI callable."""

    def __init__(
        self, gateway: Gateway, keys: Keys, sources: Sources, routes: Routes, bodies: Bodies
    ) -> None:
        self._gateway = gateway
        self._keys = keys
        self._sources = sources
        self._routes = routes
        self._bodies = bodies
        self._fingerprints = {card.id: card.fingerprint for card in gateway.models()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request. Nothing starts or stops with the app: ``wiring`` does that."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} connections are not served")
        call_id, now_ns = self._sources.new_id(), self._sources.monotonic_ns()
        exchange = Exchange(scope, receive, send, self._bodies, call_id, now_ns)
        try:
            await self._answer_always(exchange)
        except ClientLeft:
            pass
        except asyncio.CancelledError:
            if exchange.cut is None:
                raise  # cancelled from outside
            await _cut_short(exchange)

    async def _answer_always(self, exchange: Exchange) -> None:
        try:
            await self._answer(exchange)
        except ClientLeft:
            raise
        except SluiceError as error:
            await self._refuse(exchange, error)
        except Exception as error:  # noqa: BLE001  boundary of one request: others go on
            _log_bug(exchange, error)
            await exchange.refuse(problem_of(error))

    async def _answer(self, exchange: Exchange) -> None:
        authorization = exchange.header_values(b"authorization")
        named = exchange.header_values(b"x-sluice-tenant")
        exchange.tenant = self._keys.admit(exchange.path, authorization, named)
        route = self._routes.at(exchange.path)
        if route is None:
            await self._turn_away(exchange, not_found(exchange.path, self._routes.methods()))
            return
        allowed = "GET, HEAD, OPTIONS" if route.method == "GET" else f"{route.method}, OPTIONS"
        if exchange.method == "OPTIONS":
            await exchange.reply(200, b"", [(b"allow", allowed.encode())])
        elif exchange.method == route.method or (exchange.method, route.method) == ("HEAD", "GET"):
            exchange.standing = partial(allowance_headers, self._gateway, exchange.tenant)
            await route.answer(exchange, self._gateway, self._stamp(exchange))
        else:
            await self._turn_away(exchange, method_refused(route.method, allowed))

    def _stamp(self, exchange: Exchange) -> Stamp:
        sources = self._sources
        created_s = int(sources.wall_s())
        return Stamp(exchange.call_id, created_s, "", sources.version, self._fingerprints)

    async def _turn_away(self, exchange: Exchange, problem: Problem) -> None:
        self._record(exchange, problem)
        await exchange.refuse(problem)

    async def _refuse(self, exchange: Exchange, error: SluiceError) -> None:
        problem = problem_of(error)
        if problem.status >= 500 and not isinstance(error, Overloaded):
            _log.warning("request %s: %s", exchange.request_id, type(error).__name__)
        if isinstance(error, RequestError) and not exchange.handed_over:
            self._record(exchange, problem)
        await exchange.refuse(problem)

    def _record(self, exchange: Exchange, problem: Problem) -> None:
        # Made-up names must not become metric labels.
        known = any(card.id == exchange.model for card in self._gateway.models())
        model = exchange.model if known else ""
        self._gateway.refused(
            Refused(exchange.call_id, exchange.client_id, model, problem.status, problem.code)
        )


async def _cut_short(exchange: Exchange) -> None:
    """The exchange cancelled its own task: the client left, stalled, or time is up."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
    if exchange.cut is Ending.OVERDUE:
        await exchange.refuse(overdue())


def _log_bug(exchange: Exchange, error: Exception) -> None:
    """Log where it happened. The error's words are left out: they may quote a prompt."""
    frames = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)))
    _log.error("request %s: %s\n%s", exchange.request_id, type(error).__name__, frames)
