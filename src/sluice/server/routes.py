"""Which paths are served, by which method and who answers.

Paths are compared byte for byte as they were sent: another spelling of a path is another path. Who
may call which is decided in ``auth``, before anything is looked up here.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from sluice.server import admin, dashboard, models
from sluice.server.chat import chat
from sluice.server.completions import completions
from sluice.server.exchange import Exchange
from sluice.server.ports import Gateway, Operations
from sluice.server.relay import forward
from sluice.server.responses import responses
from sluice.server.routed import feedback
from sluice.server.stamp import Stamp

Answer = Callable[[Exchange, Gateway, Stamp], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """One path: its method and who answers."""

    method: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class Routes:
    """Routes by their whole path, and routes for all that begins with a path."""

    exact: Mapping[bytes, Route]
    beginning: Mapping[bytes, Route] = field(default_factory=dict)

    def at(self, path: bytes) -> Route | None:
        """Who answers at a path."""
        route = self.exact.get(path)
        if route is None:
            found = (one for prefix, one in self.beginning.items() if path.startswith(prefix))
            route = next(found, None)
        return route

    def methods(self) -> Mapping[str, str]:
        """The method of each whole path, to tell a client which there are."""
        return {path.decode(): route.method for path, route in self.exact.items()}


ROUTES: dict[bytes, Route] = {
    b"/v1/chat/completions": Route("POST", chat),
    b"/v1/completions": Route("POST", completions),
    b"/v1/responses": Route("POST", responses),
    b"/v1/feedback": Route("POST", feedback),
    b"/v1/models": Route("GET", models.list_models),
    b"/health": Route("GET", models.health),
    b"/ready": Route("GET", models.ready),
    b"/metrics": Route("GET", models.metrics),
    b"/admin/replicas": Route("GET", admin.replicas),
}
BEGINNINGS = {models.MODELS_PREFIX: Route("GET", models.one_model)}


# What only engines have that run elsewhere.
FORWARDED: dict[bytes, Route] = {
    path: Route("POST", forward)
    for path in (
        b"/v1/embeddings", b"/v1/rerank", b"/rerank", b"/v1/score", b"/score", b"/tokenize",
        b"/detokenize",
    )
}  # fmt: skip


def routes(operations: Operations | None = None, *, remote: bool = False) -> Routes:
    """All routes; those that change the server where there is something to change it by.

    ``remote`` says that there are models of remote engines, which have further ones.
    """
    here = {**ROUTES, **FORWARDED} if remote else ROUTES
    if operations is None:
        return Routes(here, BEGINNINGS)
    overview = operations.overview
    shown = {
        b"/dashboard": Route("GET", dashboard.page),
        b"/dashboard/style.css": Route("GET", dashboard.style),
        b"/dashboard/app.js": Route("GET", dashboard.script),
        b"/dashboard/charts.js": Route("GET", dashboard.charts),
        b"/dashboard/data": Route("GET", partial(dashboard.document, overview)),
        b"/dashboard/request": Route("GET", partial(dashboard.request, overview)),
    }
    changing = {
        b"/admin/scaling": Route("GET", partial(admin.scaling, operations)),
        b"/admin/scale": Route("POST", partial(admin.scale, operations)),
        b"/admin/config": Route("GET", partial(admin.settings, operations)),
        b"/admin/reload": Route("POST", partial(admin.reload, operations)),
        b"/admin/events": Route("POST", partial(admin.note_event, operations)),
    }
    moving = {admin.REPLICAS_PREFIX: Route("POST", partial(admin.move_replica, operations))}
    return Routes({**here, **shown, **changing}, {**BEGINNINGS, **moving})
