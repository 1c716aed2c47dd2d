"""What one request may take and how long each wait may last. Values only."""

from dataclasses import dataclass

from sluice.config.sections import ServerSection


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one request and, in ``bodies_bytes_max``, of the bodies of all together.

    ``body_s_max`` is the time for the whole body after its first byte. ``send_s_max`` is how long a
    client may leave its end of the stream unread before its request is cancelled; ``ping_s`` the
    silence after which a stream gets a comment, short enough for proxies that cut idle connections
    at 30 s. ``request_s_max`` bounds a request's life. ``choices_max`` bounds ``n`` and, for
    several prompts in one call, prompts times ``n``.
    """

    body_bytes_max: int = 10 * 1024**2
    bodies_bytes_max: int = 256 * 1024**2
    body_s_max: float = 30.0
    send_s_max: float = 30.0
    ping_s: float = 15.0
    request_s_max: float = 600.0
    choices_max: int = 128

    @classmethod
    def of(cls, section: ServerSection) -> "Limits":
        """The limits that the settings ask for."""
        return cls(
            body_bytes_max=section.body_bytes_max,
            bodies_bytes_max=section.bodies_bytes_max,
            request_s_max=section.request_s_max,
        )
