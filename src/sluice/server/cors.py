"""Web pages of other origins: which may call the API, and what of an answer they may read.

Called by ``app`` where the settings name origins.
"""

from collections.abc import Sequence

from sluice.server.exchange import AsgiApp

EXPOSED_HEADERS = (
    "x-request-id", "x-sluice-model", "x-sluice-degraded", "x-sluice-reason", "retry-after",
    "retry-after-ms", "x-should-retry",
    *(f"x-sluice-route{part}" for part in ("", "-way", "-reason", "-score", "-threshold")),
    *(
        f"x-ratelimit-{part}-{what}"
        for what in ("requests", "tokens")
        for part in ("limit", "remaining", "reset")
    ),
)  # fmt: skip


def open_to(origins: Sequence[str], app: AsgiApp) -> AsgiApp:
    """The app, open to pages of these origins; the app itself where there is none."""
    if not origins:
        return app
    # Only servers that web pages may call pay for this import.
    from starlette.middleware.cors import CORSMiddleware  # noqa: PLC0415

    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),  # clients send headers of their own; the origins are what is trusted
        expose_headers=EXPOSED_HEADERS,
    )
