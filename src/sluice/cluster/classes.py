"""Which SLO class a call is served in, and what the class means for one request, as numbers.

The class is the one that ``x-sluice-slo`` names, else the one that ``service_tier`` names, else
that of the tenant, else that of the model. Called by ``served``, which makes the request of a call.
What becomes of a request under overload is the fleet's decision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from sluice.config.sections import SloSection, TenantSection
from sluice.core.admission import NS_PER_S
from sluice.core.errors import InvalidRequest
from sluice.core.request import Request, Rung
from sluice.runtime.generation import Call
from sluice.runtime.refusals import too_many_prompts
from sluice.telemetry.metrics import ClassTargets

# ``service_tier`` of clients that leave the choice to the server.
UNNAMED_TIERS = ("", "auto", "default")
# Tiers that OpenAI sells; where no class has that name they are served as the default.
OPENAI_TIERS = ("flex", "priority", "scale")
_DEGRADING = (Rung.SHORTEN, Rung.SMALLER)


def targets_of(slo: Mapping[str, SloSection]) -> list[ClassTargets]:
    """What classes promise."""
    return [
        ClassTargets(
            name,
            {
                target: seconds
                for target, seconds in (
                    ("ttft", section.ttft_s),
                    ("tpot", section.tpot_s),
                    ("e2e", section.e2e_s),
                )
                if seconds is not None
            },
            section.percentile / 100,
        )
        for name, section in slo.items()
    ]


@dataclass(frozen=True, slots=True)
class _Meaning:
    """A class as the policy counts; made once, for all requests. ``ladder_as_asked`` is for clients
    that forbid degrading."""

    tier: int
    quantile: float
    ttft_ns: int | None
    tpot_ns: int | None
    e2e_ns: int | None
    queue_ns: int | None
    ladder: tuple[Rung, ...]
    ladder_as_asked: tuple[Rung, ...]
    shorten_tokens: int | None

    @classmethod
    def of(cls, section: SloSection) -> "_Meaning":
        ladder = tuple(map(Rung, section.overload))
        return cls(
            tier=section.tier,
            quantile=section.percentile / 100,
            ttft_ns=_ns(section.ttft_s),
            tpot_ns=_ns(section.tpot_s),
            e2e_ns=_ns(section.e2e_s),
            queue_ns=_ns(section.queue_wait_s_max),
            ladder=ladder,
            ladder_as_asked=tuple(rung for rung in ladder if rung not in _DEGRADING),
            shorten_tokens=section.shorten_tokens if Rung.SHORTEN in ladder else None,
        )


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * NS_PER_S)


_NO_CLASS = _Meaning.of(SloSection())


class ServiceClasses:
    """The classes that calls for one model can be served in. ``default`` is the model's own."""

    def __init__(
        self,
        slo: Mapping[str, SloSection],
        tenants: Mapping[str, TenantSection] = MappingProxyType({}),
        default: str | None = None,
    ) -> None:
        self._slo = slo
        self._meanings = {name: _Meaning.of(section) for name, section in slo.items()}
        self._tenants = tenants
        self._default = default

    @property
    def targets(self) -> Sequence[ClassTargets]:
        """What the classes promise that a call can name."""
        return targets_of(self._slo)

    def named(self, call: Call) -> Call:
        """The call with the name of its class, empty for none. Raises ``InvalidRequest``."""
        name = self.name_of(call)
        return call if name == call.slo_class else replace(call, slo_class=name)

    def name_of(self, call: Call) -> str:
        """The name of the class of a call, empty for none. Raises ``InvalidRequest``."""
        if call.slo_class:
            self._check(call.slo_class, "x-sluice-slo")
            return call.slo_class
        tier = call.service_tier
        if tier in self._slo:
            return tier
        if tier not in UNNAMED_TIERS and tier not in OPENAI_TIERS:
            self._check(tier, "service_tier")
        tenant = self._tenants.get(call.tenant)
        own = None if tenant is None else tenant.slo
        return own or self._default or ""

    def request(
        self,
        call: Call,
        prompt: tuple[int, ...],
        output_tokens_max: int,
        prompt_estimate: int = 0,
        prefixes: tuple[int, ...] = (),
    ) -> Request:
        """What the policy is told of a call. Raises ``InvalidRequest``."""
        name = self.name_of(call)
        meant = self._meanings.get(name, _NO_CLASS)
        tenant = self._tenants.get(call.tenant)
        deadline_ns, end_ns = call.deadline_ns, _due_ns(call, meant.e2e_ns)
        if deadline_ns is None or (end_ns is not None and end_ns < deadline_ns):
            deadline_ns = end_ns
        return Request(
            id=call.id,
            arrived_ns=call.arrived_ns,
            prompt=prompt,
            output_tokens_max=output_tokens_max,
            choices=call.choices,
            tier=meant.tier if call.priority is None else call.priority,
            tenant=call.tenant,
            weight=1.0 if tenant is None else tenant.weight,
            slo_class=name,
            ttft_due_ns=_due_ns(call, meant.ttft_ns),
            tpot_ns=meant.tpot_ns,
            quantile=meant.quantile,
            deadline_ns=deadline_ns,
            queue_due_ns=_due_ns(call, meant.queue_ns),
            overload=meant.ladder if call.may_degrade else meant.ladder_as_asked,
            shorten_tokens=meant.shorten_tokens if call.may_degrade else None,
            body_bytes=call.body_bytes,
            likeness=call.likeness,
            may_fall_back=call.may_degrade,
            prompt_estimate=prompt_estimate,
            prefixes=prefixes,
        )

    def check_together(self, calls: Sequence[Call]) -> None:
        """Check that the tenant may ever have so many calls at once. Raises ``InvalidRequest``."""
        tenant, count = self._tenants.get(calls[0].tenant, TenantSection()), len(calls)
        if tenant.concurrency is not None and count > tenant.concurrency:
            limit = f"this account may have {tenant.concurrency} at the same time"
            raise too_many_prompts(count, limit)
        if tenant.requests_per_minute is not None and count > tenant.requests_per_minute:
            limit = f"this account may send {tenant.requests_per_minute} in a minute"
            raise too_many_prompts(count, limit)

    def counts_tokens(self, tenant: str) -> bool:
        """Whether the tenant has a limit of tokens per minute."""
        section = self._tenants.get(tenant)
        return section is not None and section.tokens_per_minute is not None

    def check_tokens_together(self, requests: Sequence[Request]) -> None:
        """Check that the tenant may ever have these tokens at once. Raises ``InvalidRequest``.

        Answers that may be shortened count as such.
        """
        limit = self._tenants.get(requests[0].tenant, TenantSection()).tokens_per_minute
        least = sum(_tokens_least(request) for request in requests)
        if limit is not None and least > limit:
            words = f"they reserve {least} tokens, and this account may use {limit} in a minute"
            raise too_many_prompts(len(requests), words)

    def _check(self, name: str, param: str) -> None:
        if name not in self._slo:
            known = ", ".join(sorted(self._slo)) or "none"
            raise InvalidRequest(
                f"The SLO class {name[:64]!r} is not configured; configured: {known}.", param=param
            )


def _tokens_least(request: Request) -> int:
    """Tokens that a request reserves at least of what its tenant may use."""
    output_tokens = request.output_tokens_max
    if request.shorten_tokens is not None:
        output_tokens = min(output_tokens, request.shorten_tokens)
    return len(request.prompt) + request.choices * output_tokens


def _due_ns(call: Call, target_ns: int | None) -> int | None:
    """The instant of a time that runs from the arrival of the call."""
    return None if target_ns is None else call.arrived_ns + target_ns
