"""Who may call what: API keys, the admin key, and the explicit list of routes that need neither.

``app`` asks ``Keys.admit`` before it looks for a route, so a path that nobody listed needs a key
whether or not anything is served there, and no spelling of a path can reach a route around the
check. Keys are known by their SHA-256 digests only. A key also says whose request it is; behind a
proxy that is trusted to, ``x-sluice-tenant`` says it for callers without a tenant's key.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from sluice.config.sections import ServerSection
from sluice.core.errors import Forbidden, InvalidRequest, Unauthorized


class Permission(Enum):
    """What a route asks of its caller."""

    OPEN = "open"
    METRICS = "metrics"  # open, or either key, as the settings say
    DASHBOARD = "dashboard"  # the admin key; open where there are no keys at all
    INFERENCE = "inference"
    ADMIN = "admin"


# Compared with the raw path byte for byte: another spelling of these is not on the list.
PERMISSIONS = {
    b"/health": Permission.OPEN,
    b"/ready": Permission.OPEN,
    b"/metrics": Permission.METRICS,
    # The page itself shows nothing of this server.
    b"/dashboard": Permission.OPEN,
    b"/dashboard/style.css": Permission.OPEN,
    b"/dashboard/app.js": Permission.OPEN,
    b"/dashboard/charts.js": Permission.OPEN,
    b"/dashboard/data": Permission.DASHBOARD,
    b"/dashboard/request": Permission.DASHBOARD,
}
_OPERATORS = (Permission.ADMIN, Permission.DASHBOARD)
ADMIN_PREFIX = b"/admin"
_TENANT = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Keys:
    """Digests of the keys that are accepted. With no API key at all, inference needs none.

    ``tenants`` holds the digests of tenants' keys, each with its tenant; they are API keys too.
    ``header_trusted`` says that ``x-sluice-tenant`` is believed.
    """

    api: tuple[bytes, ...] = ()
    admin: tuple[bytes, ...] = ()
    metrics_open: bool = True
    tenants: tuple[tuple[bytes, str], ...] = ()
    header_trusted: bool = False

    @classmethod
    def of(cls, section: ServerSection) -> "Keys":
        """The keys that the settings name."""
        return cls(
            api=tuple(bytes.fromhex(digest) for digest in section.api_key_digests),
            admin=tuple(bytes.fromhex(digest) for digest in section.admin_key_digests),
            metrics_open=section.metrics_open,
            tenants=tuple((bytes.fromhex(key), name) for key, name in section.tenant_key_digests),
            header_trusted=section.trust_tenant_header,
        )

    def admit(
        self, raw_path: bytes, authorization: Sequence[bytes], named: Sequence[bytes] = ()
    ) -> str:
        """Check a caller and name its tenant, ``""`` where it has none.

        ``named`` are the values of ``x-sluice-tenant``. Raises ``Unauthorized`` without a known
        key, ``Forbidden`` for a known key that does not carry the permission, and
        ``InvalidRequest`` for a name that no tenant can have.
        """
        permission = permission_of(raw_path)
        tenant = self._by_key(permission, authorization)
        is_trusted = self.header_trusted and permission is Permission.INFERENCE
        if named and is_trusted and tenant not in {name for _, name in self.tenants}:
            return _tenant_named(named)
        return tenant

    def _by_key(self, permission: Permission, authorization: Sequence[bytes]) -> str:
        needs_none = not self.api and not self.tenants
        if permission is Permission.OPEN:
            return ""
        if permission is Permission.METRICS and (self.metrics_open or needs_none):
            return ""
        if permission is Permission.INFERENCE and needs_none:
            return ""
        if permission is Permission.DASHBOARD and needs_none and not self.admin:
            return ""
        if permission in _OPERATORS and not self.admin:
            raise Forbidden(
                "/admin and the dashboard are closed: set the admin key (server.admin_key_env or "
                "server.admin_key_file) to open them."
            )
        return self._check(permission, authorization)

    def _check(self, permission: Permission, authorization: Sequence[bytes]) -> str:
        digest = _presented(authorization)
        tenant = _owner(self.tenants, digest)
        if tenant is not None and permission is Permission.INFERENCE:
            return tenant
        is_api = _contains(self.api, digest) or tenant is not None
        is_admin = _contains(self.admin, digest)
        if permission in _OPERATORS and is_admin:
            return ""
        if permission is Permission.METRICS and (is_admin or is_api):
            return ""
        if permission is Permission.INFERENCE and is_api:
            return f"key-{digest.hex()[:12]}"
        if is_api or is_admin:
            raise Forbidden("This key is known and does not carry the permission for this path.")
        raise Unauthorized("This API key is not known here.")


def permission_of(raw_path: bytes) -> Permission:
    """What a path asks for; every path that is not listed asks for an API key or the admin key.

    Anything that any spelling rule could read as ``/admin`` asks for the admin key.
    """
    listed = PERMISSIONS.get(raw_path)
    if listed is not None:
        return listed
    return Permission.ADMIN if raw_path.startswith(ADMIN_PREFIX) else Permission.INFERENCE


def _presented(authorization: Sequence[bytes]) -> bytes:
    """Digest of the key in an ``Authorization: Bearer`` header."""
    if not authorization:
        raise Unauthorized("An API key is needed: send it as 'Authorization: Bearer KEY'.")
    if len(authorization) > 1:
        raise Unauthorized("Several Authorization headers were sent; send one.")
    scheme, _, key = authorization[0].strip().partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        raise Unauthorized("The Authorization header must read 'Bearer KEY'.")
    return hashlib.sha256(key.strip()).digest()


def _contains(digests: tuple[bytes, ...], digest: bytes) -> bool:
    """Whether a digest is known, in a time that does not depend on which one it is."""
    found = False
    for known in digests:
        found |= hmac.compare_digest(known, digest)
    return found


def _owner(tenants: Iterable[tuple[bytes, str]], digest: bytes) -> str | None:
    """The tenant of a digest, in a time that does not depend on which one it is."""
    owner = None
    for known, tenant in tenants:
        owner = tenant if hmac.compare_digest(known, digest) else owner
    return owner


def _tenant_named(values: Sequence[bytes]) -> str:
    name = values[0].decode("latin-1").strip() if len(values) == 1 else ""
    if not _TENANT.fullmatch(name):
        raise InvalidRequest(
            "x-sluice-tenant must be one name of 1 to 128 letters, digits and any of ._:@/-.",
            param="x-sluice-tenant",
        )
    return name
