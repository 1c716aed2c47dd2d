"""Settings of remote models to what serves them: no process, only connections that open later."""

import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sluice.cluster.classes import ServiceClasses
from sluice.cluster.placement.engine import PlaceEngine, StartedEngine
from sluice.cluster.remote import RemoteListener, RemoteReplica, RemoteTerms
from sluice.cluster.remote_model import CONTEXT_TOKENS_UNKNOWN, RemoteModel
from sluice.config.sections import ModelSection
from sluice.config.settings import Settings
from sluice.config.upstreams import upstream_address
from sluice.core.limits import RemoteLimits, RetryLimits
from sluice.executors.dialects import DIALECTS
from sluice.executors.http_pool import Address
from sluice.executors.remote import RemoteEngine, Upstream
from sluice.executors.stream import Deadlines
from sluice.runtime.clock import monotonic_ns, wall_s
from sluice.runtime.generation import ModelCard, Relaying
from sluice.wiring.addresses import Addresses
from sluice.wiring.placing import Placing, needs_of
from sluice.wiring.scaling import replica_names

# Between two looks at an engine that tells its load, and at one that does not.
_PROBE_S, _PROBE_S_BLIND = 1.0, 30.0

# What a replica is launched with, beside its address.
_TERMS = (
    "engine", "start", "key", "upstream_model", "in_flight_max", "engine_priorities",
    "connect_s_max", "first_token_s_max", "silence_s_max", "whole_s_max", "probe_s",
    "context_tokens_max", "sleep",
)  # fmt: skip

RemoteLaunch = Callable[[str, RemoteListener], RemoteReplica]


def remote_model(name: str, section: ModelSection, settings: Settings) -> RemoteModel:
    """The model as the gateway counts its calls."""
    given = section.context_tokens_max
    context = given or CONTEXT_TOKENS_UNKNOWN
    card = ModelCard(name, int(wall_s()), context, context_known=given is not None)
    model = RemoteModel(card, ServiceClasses(settings.slo, settings.tenants, section.slo))
    model.traced_share = None if settings.tracing.endpoint is None else settings.tracing.share
    return model


class RemoteIds:
    """Names of the replicas of remote models while their settings and addresses change.

    A replica is one engine on the terms that it was met on: where an address or a term changes, it
    is another one, with a name that none had before.
    """

    def __init__(self) -> None:
        self.addresses = Addresses()
        self._known: dict[str, dict[tuple[object, ...], str]] = {}
        self._made: Counter[str] = Counter()

    def of(self, name: str, section: ModelSection) -> tuple[str, ...]:
        """The replicas of a model, in the order of its addresses."""
        known, wanted = self._known.get(name, {}), dict[tuple[object, ...], str]()
        if section.start:
            return tuple(replica_names(name, section))
        terms = tuple(getattr(section, field) for field in _TERMS)
        for number, one in enumerate(section.urls):
            repeated = sum(earlier.url == one.url for earlier in section.urls[:number])
            key = (one.url, repeated, *terms)
            if key not in known:
                wanted[key] = f"{name}-{self._made[name]}"
                self._made[name] += 1
            else:
                wanted[key] = known[key]
        self._known[name] = wanted
        return tuple(wanted.values())


def remote_launches(
    ids: Sequence[str],
    section: ModelSection,
    model: RemoteModel,
    placing: Placing | None = None,
) -> dict[str, RemoteLaunch]:
    """What makes the replicas of a remote model, by id; ``ids`` are in the order of its urls.

    ``placing`` is for engines that are started here, which do not change while the server runs.
    """
    if not section.start:
        return {
            replica_id: _launch(one.url, section, model)
            for replica_id, one in zip(ids, section.urls, strict=True)
        }
    if placing is None:
        return {}
    place = placing.engine(section.start, needs_of(section, None))
    return dict.fromkeys(ids, _launch_started(place, section, model))


def remote_limits(section: ModelSection) -> RemoteLimits:
    """How the replicas of a remote model are treated."""
    return RemoteLimits(RetryLimits(per_request=section.retries))


def relaying(models: Mapping[str, ModelSection]) -> Relaying:
    """Which models remote engines answer for, always or under overload."""
    always = frozenset(name for name, section in models.items() if section.is_remote)
    degraded = (
        name
        for name, section in models.items()
        if not always.isdisjoint((section.smaller, *section.fallback))
    )
    return Relaying(always, frozenset(degraded) - always)


def remote_deployment(models: Mapping[str, ModelSection]) -> dict[str, str]:
    """Each remote model in words for the journal; no key, and no address of its engines."""
    return {
        f"model {name}": f"remote, engine {section.engine}, "
        f"{len(section.urls) or section.replicas.min} replicas"
        for name, section in models.items()
        if section.is_remote
    }


def _launch(url: str, section: ModelSection, model: RemoteModel) -> RemoteLaunch:
    address = upstream_address(url)
    terms = _terms(section, model)

    def launch(replica_id: str, listener: RemoteListener) -> RemoteReplica:
        tls = ssl.create_default_context() if address.tls else None
        engine = _engine(
            replica_id, Address(address.host, address.port, tls), section, address.path
        )
        return RemoteReplica(replica_id, engine, terms, model, listener, monotonic_ns)

    return launch


def _launch_started(place: PlaceEngine, section: ModelSection, model: RemoteModel) -> RemoteLaunch:
    terms = _terms(section, model)

    def launch(replica_id: str, listener: RemoteListener) -> RemoteReplica:
        def reach(address: tuple[str, int]) -> RemoteEngine:
            return _engine(replica_id, Address(*address, None), section, "")

        engine = StartedEngine(replica_id, place, reach, monotonic_ns, section.load_s_max)
        return RemoteReplica(replica_id, engine, terms, model, listener, monotonic_ns)

    return launch


def _engine(replica_id: str, address: Address, section: ModelSection, path: str) -> RemoteEngine:
    dialect = DIALECTS[section.engine]
    return RemoteEngine(Upstream(replica_id, address, dialect, path=path, key=section.key or ""))


def _terms(section: ModelSection, model: RemoteModel) -> RemoteTerms:
    dialect = DIALECTS[section.engine]
    return RemoteTerms(
        dialect=dialect,
        name=model.card.id,
        deadlines=Deadlines(
            connect_s=section.connect_s_max,
            first_token_s=section.first_token_s_max,
            silence_s=section.silence_s_max,
            whole_s=section.whole_s_max,
        ),
        model=section.upstream_model,
        context_tokens_max=section.context_tokens_max,
        in_flight_max=section.in_flight_max,
        priority=section.engine_priorities,
        probe_s=section.probe_s or (_PROBE_S if dialect.metrics_path else _PROBE_S_BLIND),
        sleep=section.sleep,
    )
