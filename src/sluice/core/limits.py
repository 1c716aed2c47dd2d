"""What the operator allows: values that the fleet holds to, made from the settings.

They come with ``Fleet`` and with ``Reconfigured``, which replaces them while requests run. Read by
``core/pools.py`` and ``core/tenants.py``; nothing is decided here.
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When the breaker of a remote replica opens, and for how long.

    It opens on ``in_a_row`` faults, and on a share of ``share`` among the outcomes of the last
    ``window_ns``, of which it counts at most ``outcomes_max`` and needs ``outcomes_min``. The time
    that it stays open doubles from ``open_ns_min`` to ``open_ns_max`` with each failed trial.
    """

    in_a_row: int = 5
    share: float = 0.5
    outcomes_min: int = 10
    outcomes_max: int = 100
    window_ns: int = 30_000_000_000
    open_ns_min: int = 1_000_000_000
    open_ns_max: int = 30_000_000_000


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How often a request is sent again after a failed attempt that its client has not seen.

    At most ``per_request`` times, and together at most one per ``requests_per_retry`` requests,
    beside ``saved_max`` that may be saved up. Where there is no other replica, the wait before the
    same one is asked again doubles from ``wait_ns_min`` to ``wait_ns_max``.
    """

    per_request: int = 1
    requests_per_retry: int = 10
    saved_max: int = 10
    wait_ns_min: int = 50_000_000
    wait_ns_max: int = 2_000_000_000


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """How a model's remote replicas are treated."""

    retries: RetryLimits = RetryLimits()
    breaker: BreakerLimits = BreakerLimits()


@dataclass(frozen=True, slots=True)
class Peak:
    """At least ``replicas`` serve from ``begin_ns`` to ``end_ns``, and again ``every_ns``."""

    begin_ns: int
    end_ns: int
    every_ns: int
    replicas: int


@dataclass(frozen=True, slots=True)
class ScaleLimits:
    """How many replicas a model may have, and how they follow its load; see ``core/scaling.py``.

    ``warm`` are kept loaded beyond those that serve, as far as ``replicas_max`` leaves room.
    ``utilisation`` is the share of a replica's speed that is planned with, ``quantile`` that of the
    forecasts that are to hold. A backlog is to be gone within ``drain_ns``. Where more than 5 % of
    the requests wait longer than ``wait_ns``, more replicas are asked for. ``start_ns`` is the time
    to ready until one was measured. The last replica of a model with ``replicas_min`` 0 goes after
    ``idle_ns`` without a request; while none serves ``hold_places`` requests are held, each for
    ``hold_ns``. A replica that is to go may finish what it has for ``leave_ns``.
    """

    replicas_min: int = 1
    replicas_max: int = 1
    warm: int = 0
    utilisation: float = 0.85
    quantile: float = 0.9
    drain_ns: int = 30_000_000_000
    wait_ns: int = 1_000_000_000
    start_ns: int = 60_000_000_000
    idle_ns: int = 300_000_000_000
    hold_places: int = 64
    hold_ns: int = 60_000_000_000
    leave_ns: int = 600_000_000_000
    peaks: tuple[Peak, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """One model and its replicas, as configured.

    ``queue_places_max`` places may wait per ready replica beyond what it runs, with at most
    ``queue_tokens_max`` prompt tokens per ready replica and ``queue_bytes_max`` bytes in total
    (``None`` for no such bound); none waits longer than ``queue_wait_ns_max``. Of tokens and bytes
    the first to wait may have more.

    ``smaller`` is the model that takes over where a ladder says so, ``fallback`` are those that do,
    the first that serves, where nothing of this one serves. ``utilisation`` is the share of
    the pool's speed that is counted on where a wait is promised: higher accepts more and later.
    ``headroom`` is the share of places kept free of tenants over their share while another one is
    active, and of tiers above 0 while tier 0 is; where that is more than one place, one of them is
    kept for a tenant that was active not long ago. ``aging_ns`` is the wait that lower tiers are
    not to pass, ``None`` for strict order of tiers. ``weights`` are the shares of work that the
    replicas get, in their order; without them all get the same. ``remote`` is set where the
    replicas are engines elsewhere. With ``scale`` the replicas are places for as many as may run;
    without it all run.
    """

    model: str
    replica_ids: tuple[str, ...]
    queue_places_max: int = 64
    queue_wait_ns_max: int = 60_000_000_000
    queue_tokens_max: int | None = None
    queue_bytes_max: int | None = None
    smaller: str | None = None
    utilisation: float = 0.75
    headroom: float = 0.25
    aging_ns: int | None = 30_000_000_000
    weights: tuple[float, ...] = ()
    remote: RemoteLimits | None = None
    fallback: tuple[str, ...] = ()
    scale: ScaleLimits | None = None


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may use, as configured; ``None`` is no limit.

    ``weight`` is its share against the other tenants' where they contend.
    """

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    weight: float = 1.0


class Way(StrEnum):
    """One of the two models of a route."""

    SIMPLE = "simple"
    COMPLEX = "complex"


class Sticky(StrEnum):
    """What an earlier turn of a conversation decides for the next."""

    UPWARD = "upward"  # once at the complex model, it stays there
    BOTH = "both"  # it stays where it began
    OFF = "off"  # nothing


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """A name that stands for two models, as configured; see ``core/model_routes.py``.

    Requests without a score go to ``default``. ``cuts`` are scores that the classifier gave to
    prompts that it did not know. The threshold is the cut for ``share`` (0 to 1), which
    with ``follow`` moves with the scores of traffic; without a share it is ``threshold``. Under
    load at most the part ``spill`` of the share goes to the simple model, all of it where the
    complex one makes newcomers wait for ``spill_wait_ns``. ``rules`` are those that send to the
    complex model, by the names of ``model_routes.Why``. With ``shadow`` all go to ``default``.
    """

    route: str
    simple: str
    complex: str
    cuts: tuple[float, ...]
    share: float | None = None
    threshold: float = 0.0
    follow: bool = True
    default: Way = Way.COMPLEX
    spill: float = 0.5
    spill_wait_ns: int = 1_000_000_000
    sticky: Sticky = Sticky.UPWARD
    rules: tuple[str, ...] = ()
    shadow: bool = False
