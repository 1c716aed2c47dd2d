"""The server's certificate: read from files, and replaced without closing a connection.

Made and renewed by ``transport``. Connections that are open keep the certificate they began with.
"""

import ssl
from pathlib import Path

from sluice.core.errors import ConfigError


class Identity:
    """A certificate with its key, as new connections are shown it.

    ``context`` is what the listening socket uses. Raises ``ConfigError`` where the files cannot be
    used.
    """

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        self._current = _loaded(cert_file, key_file)
        self.context = _loaded(cert_file, key_file)
        self.context.sni_callback = self._show

    def renew(self, cert_file: Path, key_file: Path) -> None:
        """Show what the files hold now. Raises ``ConfigError`` and changes nothing."""
        self._current = _loaded(cert_file, key_file)

    def _show(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called during each handshake, with or without a server name."""
        connection.context = self._current


def _loaded(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    told = f"server.tls_cert_file, server.tls_key_file: {cert_file} and {key_file}"
    for file in (cert_file, key_file):
        try:
            file.open("rb").close()
        except OSError as error:
            raise ConfigError((f"{file}: cannot be read: {error.strerror}",)) from error
    try:
        # Without a password OpenSSL would ask at the terminal.
        context.load_cert_chain(cert_file, key_file, password="")
    except (ssl.SSLError, ValueError, OSError) as error:
        words = f"{told} are not a certificate chain and its unencrypted key in PEM"
        raise ConfigError((words,)) from error
    return context
