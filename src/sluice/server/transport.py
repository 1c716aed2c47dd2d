"""What holds for connections to the server, before there is a request: bounds and TLS.

``serve`` looks here whenever a connection begins, so that settings can change while others are
open. What one request may take is in ``limits``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sluice.config.sections import ServerSection
from sluice.server.tls import Identity


@dataclass(slots=True)
class Transport:
    """Bounds of new connections, and the certificate they are shown, ``None`` for plain HTTP."""

    header_bytes_max: int
    connections_max: int
    identity: Identity | None
    on_drain: Callable[[], None] | None = None

    @classmethod
    def of(cls, section: ServerSection) -> "Transport":
        """What the settings ask for. Raises ``ConfigError`` for files that cannot be used."""
        identity = None
        if section.tls_cert_file is not None and section.tls_key_file is not None:
            identity = Identity(section.tls_cert_file, section.tls_key_file)
        return cls(section.header_bytes_max, section.connections_max, identity)

    @property
    def scheme(self) -> str:
        """How addresses of this server begin."""
        return "http" if self.identity is None else "https"

    def drain(self) -> None:
        """Nothing is begun any more: refuse at once what has not come to its end yet."""
        if self.on_drain is not None:
            self.on_drain()

    def reconfigure(self, section: ServerSection) -> None:
        """Let other settings hold from now on, and read the certificate again.

        Whether there is TLS does not change. Raises ``ConfigError`` and changes nothing.
        """
        cert_file, key_file = section.tls_cert_file, section.tls_key_file
        if self.identity is not None and cert_file is not None and key_file is not None:
            self.identity.renew(cert_file, key_file)
        self.header_bytes_max = section.header_bytes_max
        self.connections_max = section.connections_max
