"""One frozen dataclass per component: what can be set, its default, its range and its reason.

Components take their own section, never the whole tree (``settings.Settings``, which only wiring
and the command line see). Nothing here reads files or the environment.

A field's name is its key in the configuration file, with one exception: durations are written with
their unit in the value, so their key drops the ``_s`` (``queue_wait_s_max`` is set by
``queue_wait_max = "60s"``). The text under each field is its entry in the reference and in
``sluice config default``. Fields marked ``_RESOLVED`` cannot be set: the loader fills them in from
the environment variable or file that another field names. A field marked ``_TABLE_NAME`` that is
not given has the name of its table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from sluice.core.request import TIER_DEFAULT, TIER_MAX


class Unit(Enum):
    """How the text of a setting becomes the number in its field."""

    DURATION = "duration"
    SIZE = "size"


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a number; ``None`` leaves a side open.

    ``low_excluded`` makes the lower bound itself unacceptable.
    """

    low: float | None = None
    high: float | None = None
    low_excluded: bool = False


@dataclass(frozen=True, slots=True)
class Without:
    """``word`` written for the value of an optional setting says that it has none."""

    word: str


Seconds = Annotated[float, Unit.DURATION, Range(low=0, low_excluded=True)]
Bytes = Annotated[int, Unit.SIZE, Range(low=1)]
Count = Annotated[int, Range(low=0)]
Positive = Annotated[int, Range(low=1)]
Tier = Annotated[int, Range(low=0, high=TIER_MAX)]

# Each replica of a range has a place in the fleet from the start.
REPLICAS_MAX = 10_000

_RESOLVED: Mapping[str, Any] = {"resolved": True}
_TABLE_NAME: Mapping[str, Any] = {"table_name": True}


@dataclass(frozen=True, slots=True)
class ServerSection:
    """The HTTP server: where it listens, what it accepts, who may call it."""

    listen: str = "127.0.0.1:8000"
    """Address and port of the API, ``HOST:PORT``; IPv6 as ``[::1]:8000``; port 0 lets the system
    choose. The default is reachable from this machine only. An address that others can reach needs
    API keys, or ``allow_unauthenticated``."""

    body_bytes_max: Bytes = 10 * 1024**2
    """Largest request body; a larger one is refused with 413 before it is read. 10 MiB holds any
    prompt that fits a context of a million tokens."""

    bodies_bytes_max: Bytes = 256 * 1024**2
    """Memory for all request bodies that are being received or decoded; beyond it a body is refused
    with 503. Bodies up to 64 KiB are not counted, so that large ones cannot keep them out."""

    header_bytes_max: Bytes = 64 * 1024
    """Largest request head (request line and headers). Raise it where a proxy adds long headers."""

    connections_max: Positive = 10_000
    """Connections that are open at the same time; further ones are refused with 503. Each may hold
    a body of 64 KiB that is not counted elsewhere. Never more than the limit of open files
    allows."""

    request_s_max: Seconds = 600.0
    """Longest life of one request, from its first byte to its ending. Ten minutes is the time-out
    of the usual OpenAI clients; a longer answer would be generated for nobody."""

    grace_s: Seconds = 30.0
    """How long a shutdown waits for running requests before it ends them. Keep it under the time
    that the service manager waits before it kills (30 s in Kubernetes, so set 25 s there)."""

    api_keys_env: str = "SLUICE_API_KEYS"
    """Name of the environment variable with the accepted API keys, separated by commas. With no key
    there and no ``api_key_file``, calls need no key. Only digests are kept."""

    api_key_file: Path | None = None
    """File with accepted API keys, one per line, ``#`` starts a comment. Read at start and again
    with the settings. Only digests are kept."""

    admin_key_env: str = "SLUICE_ADMIN_KEY"
    """Name of the environment variable with the key of ``/admin``. With no key there and no
    ``admin_key_file``, ``/admin`` is closed."""

    admin_key_file: Path | None = None
    """File with the key of ``/admin`` on a line of its own; ``#`` starts a comment. Several lines
    are several keys."""

    metrics_open: bool = True
    """Whether ``/metrics`` answers without an API key. Metrics hold model names and counts, no
    text; switch it off where those must not be read."""

    allow_unauthenticated: bool = False
    """Whether the server may listen beyond this machine with no API key. Off, because an open
    endpoint lets strangers use the hardware."""

    tls_cert_file: Path | None = None
    """PEM file with the server's certificate and those between it and the authority. With it and
    ``tls_key_file`` the API is served over HTTPS, TLS 1.2 or later, and not over HTTP. Both files
    are read again with the settings, so that a renewed certificate needs no restart."""

    tls_key_file: Path | None = None
    """PEM file with the key of the certificate, not encrypted."""

    trust_tenant_header: bool = False
    """Whether ``x-sluice-tenant`` names the tenant of a request. Only for servers that nobody but a
    proxy can reach which sets the header itself: whoever sends it is served on that tenant's
    account. A request with the key of a tenant belongs to that tenant whatever the header says."""

    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API from a browser, for example
    ``["https://chat.example.com"]``. Empty: none."""

    api_key_digests: tuple[str, ...] = field(default=(), metadata=_RESOLVED)
    """SHA-256 digests (hex) of the accepted API keys."""

    admin_key_digests: tuple[str, ...] = field(default=(), metadata=_RESOLVED)
    """SHA-256 digests (hex) of the admin keys."""

    tenant_key_digests: tuple[tuple[str, str], ...] = field(default=(), metadata=_RESOLVED)
    """SHA-256 digests (hex) of the keys of tenants, each with the name of its tenant."""


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """How many replicas a model has."""

    min: Annotated[int, Range(low=0, high=REPLICAS_MAX)] = 1
    """Replicas that always serve. Each is a process with its own copy of the model, and they share
    the processors; more than one pays on machines with several memory nodes. With 0, which needs
    ``max``, the last one stops where nobody asks, and the first request waits for a start."""

    max: Annotated[int | None, Range(low=1, high=REPLICAS_MAX)] = None
    """Replicas that may run at once. Unset: as many as ``min``. Between ``min`` and ``max`` their
    number follows the load, as ``[autoscale]`` says."""

    warm: Annotated[int, Range(low=0, high=REPLICAS_MAX)] = 0
    """Replicas kept loaded beyond those that serve, as far as ``max`` leaves room: one of them
    serves within a moment where a cold one has to load the model. They cost memory, not time of the
    processors."""


@dataclass(frozen=True, slots=True)
class ReplicaNeeds:
    """What one replica takes of the machine that it runs on."""

    cpus: Annotated[float, Range(low=0)] | None = None
    """Processors that one replica is promised. A machine or a node is given no more replicas than
    it has processors for. Unset: on this machine replicas share all processors and none is counted;
    on a Ray cluster each counts one."""

    gpus: Annotated[float, Range(low=0)] = 0.0
    """GPUs that one replica is promised. Of a remote model, what ``sluice deploy k8s`` asks for in
    the pods of its engines."""

    memory_bytes: Bytes | None = None
    """Memory that one replica takes once its model is loaded; where less is free it is not started.
    Unset: the size of its weights and of ``kv_bytes``."""


@dataclass(frozen=True, slots=True)
class UpstreamUrl:
    """One engine of a remote model. Its address alone may be written for the whole table."""

    url: str
    """Address, ``http://HOST:PORT`` or ``https://HOST``, with what stands before ``/v1`` behind
    it."""

    weight: Annotated[float, Range(low=0.01, high=100)] = 1.0
    """Its share of the work against the other engines of the model: one of weight 2 gets twice the
    requests of one of weight 1."""


# Of a model whose section names no other bounds.
SEQUENCES_MAX_DEFAULT = 32
CHUNK_TOKENS_MAX_DEFAULT = 256


@dataclass(frozen=True, slots=True)
class ModelSection:
    """One model that clients can ask for, by the name of its table: ``[models.NAME]``."""

    source: str = field(metadata=_TABLE_NAME)
    """Where the model comes from: a catalogue name (``sluice models list``), the path of a GGUF
    file or of a folder with OpenVINO IR, or ``hf:ORG/REPO/FILE.gguf``. Unset: the catalogue model
    with the name of the table. ``sim:MODEL@GPUxN`` (``sim:llama-3.1-70b@h100x4``) simulates the
    model on so many GPUs: answers are made up and come when such hardware would give them."""

    engine: Literal["openvino", "vllm", "sglang", "tgi", "llama-server", "openai"] = "openvino"
    """What computes the answers. ``openvino`` runs here, in processes of this server. The others
    run elsewhere, at the addresses in ``urls``: requests wait here and are passed on to them.
    ``openai`` is any other server or vendor with that API."""

    urls: tuple[UpstreamUrl, ...] = ()
    """Where the engines of a remote model are, for example ``["http://gpu-1:8000",
    { url = "http://gpu-2:8000", weight = 2 }]``; each is one replica. What stands before ``/v1``
    belongs to the address. ``dns+http://NAME:8000`` is one replica for each address that the name
    has, looked up every five seconds."""

    start: tuple[str, ...] = ()
    """Command that starts an engine, in place of ``urls``, for example ``["vllm", "serve",
    "meta-llama/Llama-3.1-8B-Instruct", "--port", "{port}"]``. It is run for each of
    ``replicas.min``, where ``[placement]`` says and where ``needs`` fit, with a free port for
    ``{port}``; it is started again when it ends, and ended with the server."""

    key_env: str | None = None
    """Name of the environment variable with the key that remote engines ask for. It is sent to
    them as bearer token and shown nowhere. Keys of clients are never passed on."""

    key_file: Path | None = None
    """File with that key on a line of its own, in place of ``key_env``. It is read again with the
    settings, so that a key can be exchanged without a restart."""

    upstream_model: str | None = None
    """Name that remote engines know the model by. Unset: the one that they serve, where it is one,
    else the name of the table."""

    in_flight_max: Positive | None = None
    """Most requests that one remote engine is given at a time; others wait here, where they can
    still be ordered, refused or given to another engine. Unset: the number that the engine tells,
    else 256."""

    engine_priorities: bool = False
    """Whether remote engines are told the tier of a request as its priority. Only for engines that
    were started with priority scheduling: others refuse such requests."""

    connect_s_max: Seconds = 5.0
    """Longest wait for a connection to a remote engine, name look-up and TLS included."""

    first_token_s_max: Seconds = 120.0
    """Longest time from sending a request to a remote engine to its first output, where the answer
    is streamed. A long prompt takes its time, so keep it above the longest prefill."""

    whole_s_max: Seconds = 600.0
    """Longest time from sending a request to a remote engine to its whole answer, where that is not
    streamed. Nothing comes before its end, so a hung engine cannot be told from a busy one."""

    retries: Annotated[int, Range(low=0, high=5)] = 1
    """How often a request that a remote engine failed is sent again, to another one first. Only
    requests of which the client has seen nothing, and together at most a tenth of all requests, so
    that an outage is not multiplied."""

    probe_s: Seconds | None = None
    """Time between two looks at the health and load of a remote engine. Unset: one second, and half
    a minute for ``openai``, which tells no load."""

    sleep: bool = False
    """Whether warm replicas of a remote vLLM sleep: they free the memory of their GPU and wake
    within seconds. For servers that were started with ``--enable-sleep-mode`` and
    ``VLLM_SERVER_DEV_MODE=1``."""

    numerics: Literal["fast", "exact"] = "fast"
    """``fast`` quantises activations and lets a result depend on what else is in the batch: it
    shifts log-probabilities by a few hundredths to tenths, so that tokens of nearly equal
    probability can come out either way. ``exact`` gives the same output at temperature 0 whatever
    shares the batch (sampled output differs only where the last bits decide) and is slower, in
    prefill most of all; use it to reproduce or to compare."""

    context_tokens_max: Positive | None = None
    """Longest prompt plus output, in tokens. Unset: what the model was trained for. Lower it to let
    more requests share the memory."""

    kv_bytes: Bytes | None = None
    """Memory for the KV pool of one replica. Unset: sized at load from free memory,
    ``sequences_max`` and the context. Set it where other programs need the rest."""

    sequences_max: Positive | None = None
    """Sequences that generate at the same time on one replica. More raise throughput, slow each one
    down and need more memory for the KV pool. Unset: 32, and 1024 of a simulated model."""

    threads: Positive | None = None
    """Processor threads of one replica. Unset: the engine's own choice for a single replica, an
    equal share of the processors for several."""

    replicas: ReplicaRange = field(default_factory=ReplicaRange)
    """Number of replicas, for example ``{ min = 2 }``, or ``{ min = 1, max = 4, warm = 1 }`` to
    follow the load."""

    needs: ReplicaNeeds = field(default_factory=ReplicaNeeds)
    """What one replica takes of its machine, for example ``{ cpus = 4, memory_bytes = "8GiB" }``.
    What does not fit is not started, and the server says why."""

    policy: Literal["slo", "fcfs", "static"] = "slo"
    """Order of work. ``slo`` keeps every running sequence inside its target and orders prompts by
    deadline; ``fcfs`` is continuous batching in order of arrival; ``static`` waits for
    ``static_batch`` requests and finishes them together. The last two exist for comparison."""

    static_batch: Positive = 8
    """Requests that ``policy = "static"`` waits for."""

    prefix_cache: bool = True
    """Whether the KV of a prompt's beginning is kept for later prompts that begin alike. Costs no
    memory that a running request needs."""

    prefill_chunk_tokens_max: Positive | None = None
    """Most prompt tokens in one step. Larger chunks finish prompts sooner and make running
    sequences wait longer for their next token. Unset: 256, and 8192 of a simulated model."""

    step_s_max: Seconds = 0.08
    """Aim for the longest step. A cancelled request frees its memory between steps, so this bounds
    how long that takes."""

    prefill_share: Annotated[float, Range(low=0.01, high=0.9)] = 0.2
    """Share of the time of steps that is owed to prompts while other sequences generate. A larger
    one brings first tokens sooner and makes running streams wait longer between tokens; a smaller
    one keeps streams even and lets long prompts take longer."""

    kv_headroom: Annotated[float, Range(low=0, high=0.9)] = 0.02
    """Share of the KV pool that admission leaves free for answers that get longer than predicted. A
    larger one makes preemptions, and the work done twice after them, rarer; it lets fewer sequences
    run at the same time."""

    queue_requests_max: Count = 64
    """Places for requests that wait beyond ``sequences_max``; with all taken, further ones are
    refused with 429. A request for n choices takes n places. Two full rounds of 32 sequences keep
    the wait explainable."""

    queue_tokens_max: Positive = 1_000_000
    """Prompt tokens of all requests that wait, for each replica; beyond it further ones are refused
    with 429. It bounds the work that stands in a queue of few, long prompts. Lower it to refuse
    those sooner where short ones should find places."""

    queue_bytes_max: Bytes = 64 * 1024**2
    """Memory for the bodies of all requests of the model that wait; beyond it further ones are
    refused with 429. It bounds what a queue costs the gateway."""

    queue_wait_s_max: Seconds = 60.0
    """Longest wait for a place to run, where the class of a request says nothing else; then the
    request ends with 429. Beyond a minute most clients have gone."""

    slo: str | None = None
    """Class of requests that name none and whose tenant has none: the name of an ``[slo.NAME]``
    table. Unset: no targets, tier 1, and the queue before refusal."""

    smaller: str | None = None
    """Another model of these settings that may answer under overload, for requests whose class has
    ``smaller`` in its ladder. It keeps more requests inside their targets, at the quality of the
    smaller model; every such answer says so."""

    fallback: tuple[str, ...] = ()
    """Other models of these settings that answer where nothing of this one serves, in order: the
    first of them that serves. Also for requests that the engines of this model failed before any
    output, where the other model is a remote one too. Every such answer says so, and a client can
    forbid it as any degrading."""

    utilisation: Annotated[float, Range(low=0.05, high=1)] = 0.75
    """Share of the measured speed that is counted on when it is predicted whether a request that
    waits will be on time. A higher one accepts more and keeps fewer promises; a lower one refuses
    sooner and keeps the slowest answers fast. Requests that can start at once are not affected."""

    headroom: Annotated[float, Range(low=0, high=0.9)] = 0.25
    """Share of the places that run at a time which is kept from tenants that are ahead of their
    share while another tenant is active, and from tiers above 0 while tier 0 is in use. A larger
    one lets the others start at once more often and leaves more places idle. With one tenant and
    one tier nothing is kept back but one place, where more than one would be and another tenant
    asked in the last ten minutes."""

    aging_s: Annotated[Seconds | None, Without("strict")] = 30.0
    """Longest wait behind stricter tiers, as far as it can be foreseen: then the first request of
    the tier goes next. ``"strict"`` lets lower tiers wait as long as stricter ones keep coming,
    which gives the strictest tier the whole machine and can starve the others; the metric
    ``sluice_tier_wait_seconds`` shows it."""

    load_s_max: Seconds = 600.0
    """Longest time from the start of a replica to its being ready; then its process is killed, and
    at the start of the server that is an error. Raise it for a large model on a slow disk."""

    silence_s_max: Seconds = 60.0
    """How long a replica with work may say nothing before its process is killed and started again.
    It speaks after every step, so keep this many times ``step_max``: a step can take several times
    what it aims at. Of a remote engine: the longest pause within a stream, which is ended then."""

    key: str | None = field(default=None, repr=False, metadata=_RESOLVED)
    """The key for remote engines itself."""

    @property
    def is_remote(self) -> bool:
        """Whether its engines run elsewhere."""
        return self.engine != "openvino"


@dataclass(frozen=True, slots=True)
class SloSection:
    """One class of requests, ``[slo.NAME]``: its targets, and what becomes of it under overload.

    Clients pick it by ``x-sluice-slo`` or by ``service_tier``.
    """

    ttft_s: Seconds | None = None
    """Target for the time to the first token. Requests that are predicted to miss it are degraded
    or refused at once; a tighter target means more refusals under load."""

    tpot_s: Seconds | None = None
    """Target for the time per output token after the first. Steps are kept within it, so a tighter
    target lets fewer sequences run together and prompts take longer."""

    e2e_s: Seconds | None = None
    """Time from arrival after which an answer is worthless. A request that is predicted to take
    longer is degraded or refused, and one that does take longer is ended."""

    percentile: Annotated[float, Range(low=50, high=99.9)] = 95.0
    """Share of requests, in percent, that are to meet the targets. A higher one plans with more
    margin and accepts less."""

    tier: Tier = TIER_DEFAULT
    """Urgency from 0 (strictest) to 9; lower goes first everywhere. Requests of a stricter tier are
    served first and take memory from later tiers when it is short. ``priority`` in a request
    overrides it."""

    overload: tuple[Literal["shorten", "smaller", "queue", "refuse"], ...] = ("queue", "refuse")
    """What may become of a request that cannot start at once, tried in order. ``shorten`` limits
    its output to ``shorten_tokens``, ``smaller`` lets the model answer that its model names,
    ``queue`` lets it wait where it is predicted to be on time, ``refuse`` ends it at once with 429.
    Refusing stands at the end of every ladder, written or not. A client forbids the first two with
    ``x-sluice-degrade: never``."""

    shorten_tokens: Positive = 256
    """Output limit of a shortened answer, where the request asked for more. A smaller one serves
    more requests under overload, and cuts more answers."""

    queue_wait_s_max: Seconds | None = None
    """Longest wait of this class for a place to run; then 429. Unset: the model's
    ``queue_wait_max``."""


@dataclass(frozen=True, slots=True)
class TenantSection:
    """One customer, ``[tenants.NAME]``: its keys, its limits and its share.

    Limits and shares hold for the whole server. A tenant that is named nowhere has no limits and
    the weight 1.
    """

    key_sha256_env: str | None = None
    """Name of the environment variable with the SHA-256 digests of the tenant's API keys, in
    hexadecimal, separated by commas (``printf %s KEY | sha256sum``)."""

    key_sha256_file: Path | None = None
    """File with the SHA-256 digests of the tenant's API keys, one per line; ``#`` starts a comment.
    It is read again with the settings, so that keys come and go without a restart. With neither
    this nor ``key_sha256_env`` only ``x-sluice-tenant`` can name the tenant, where
    ``server.trust_tenant_header`` allows it."""

    slo: str | None = None
    """Class of its requests that name none: the name of an ``[slo.NAME]`` table. Unset: the
    model's."""

    requests_per_minute: Positive | None = None
    """Most requests in a minute; more are refused with 429 and the time to wait. Unset: no
    limit."""

    tokens_per_minute: Positive | None = None
    """Most tokens in a minute, of prompts and of outputs. What a request may use is reserved when
    it is accepted and corrected when it ends, so many calls at once cannot overrun it. Unset: no
    limit."""

    concurrency: Positive | None = None
    """Most requests that are accepted and not over. Unset: no limit."""

    weight: Annotated[float, Range(low=0.01, high=1000)] = 1.0
    """Its share against the other tenants that are active: under load a tenant of weight 2 gets
    twice the tokens of one of weight 1. It costs nothing while there is room for all."""


@dataclass(frozen=True, slots=True)
class PlacementSection:
    """Where replicas run."""

    kind: Literal["local", "ray"] = "local"
    """``local``: as processes of this machine. ``ray``: as actors on the machines of a Ray cluster,
    which needs the extra ``sluice[ray]``, the same sluice on all of them, and the folder of models
    (``catalogue.cache_dir``) on a file system that they share. Remote models stay where they
    are."""

    ray_address: str = "auto"
    """The Ray cluster: ``auto`` for the one that this machine belongs to, or ``HOST:PORT`` of its
    head."""

    name: str = "sluice"
    """Name of this deployment on the cluster. Gateways with different names do not touch each
    other's replicas; one that starts again finds the replicas of its name and takes them over."""

    wait_s_max: Seconds = 60.0
    """Longest wait for a place on the cluster. Keep it above the time in which the cluster adds a
    machine, where it does that by itself."""

    keep_s: Seconds = 60.0
    """How long replicas on the cluster stay when their gateway is gone, loaded, so that one which
    starts again finds them. Then they end."""


@dataclass(frozen=True, slots=True)
class JournalSection:
    """The record of what was decided and why, which traces and replay read."""

    enabled: bool = True
    """Whether a journal is written. Without it ``sluice trace`` has nothing to read."""

    dir: Path = field(default_factory=lambda: Path.home() / ".local/state/sluice/journal")
    """Folder of the journal. The default moves with ``XDG_STATE_HOME``."""

    keep_s: Seconds = 86400.0
    """Age at which parts are deleted. A day covers the usual question, what happened last night."""

    bytes_max: Bytes = 1024**3
    """Disk space of the whole journal; the oldest parts go first."""

    record_text: bool = False
    """Whether prompts and outputs are recorded. Off, because they belong to the users; counts,
    times and decisions are recorded either way."""


@dataclass(frozen=True, slots=True)
class MetricsSection:
    """Prometheus metrics."""

    vllm_aliases: bool = False
    """Whether the metrics also appear under vLLM's names, for dashboards made for it."""

    buckets: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Upper bounds of histogram buckets by metric name, in the metric's unit, for example
    ``{ sluice_ttft_seconds = [0.1, 0.25, 0.5, 1, 2] }``. A bound at each target makes the share of
    requests inside it exact."""


@dataclass(frozen=True, slots=True)
class CatalogueSection:
    """Where models are fetched from and kept."""

    cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache/sluice")
    """Folder for downloaded and converted models. The default moves with ``XDG_CACHE_HOME``."""

    mirrors: tuple[str, ...] = ()
    """Address prefixes tried before the catalogue's own, each followed by the file name, for
    example ``["https://models.example.com/gguf"]``. What they send must have the catalogue's
    checksum."""

    offline: bool = False
    """Never fetch: what is not in the cache is an error at once."""

    hf_endpoint: str = "https://huggingface.co"
    """Address that serves ``hf:`` sources. The variable ``HF_ENDPOINT`` sets it too."""

    hf_token_env: str = "HF_TOKEN"
    """Name of the environment variable with the token for ``hf:`` sources that need one."""

    stall_s_max: Seconds = 15.0
    """Time without a byte after which a download is given up and the next mirror is tried."""

    hf_token: str | None = field(default=None, repr=False, metadata=_RESOLVED)
    """The token itself."""

    @property
    def downloads_dir(self) -> Path:
        """Where files are kept as they were fetched."""
        return self.cache_dir / "downloads"

    @property
    def prepared_dir(self) -> Path:
        """Where models are kept in the form that replicas load."""
        return self.cache_dir / "prepared"
