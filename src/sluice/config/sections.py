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


Seconds = Annotated[float, Unit.DURATION, Range(low=0, low_excluded=True)]
Bytes = Annotated[int, Unit.SIZE, Range(low=1)]
Count = Annotated[int, Range(low=0)]
Positive = Annotated[int, Range(low=1)]

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
    """File with accepted API keys, one per line, ``#`` starts a comment. Read at start. Only
    digests are kept."""

    admin_key_env: str = "SLUICE_ADMIN_KEY"
    """Name of the environment variable with the key of ``/admin``. Without one, ``/admin`` is
    closed."""

    metrics_open: bool = True
    """Whether ``/metrics`` answers without an API key. Metrics hold model names and counts, no
    text; switch it off where those must not be read."""

    allow_unauthenticated: bool = False
    """Whether the server may listen beyond this machine with no API key. Off, because an open
    endpoint lets strangers use the hardware."""

    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API from a browser, for example
    ``["https://chat.example.com"]``. Empty: none."""

    api_key_digests: tuple[str, ...] = field(default=(), metadata=_RESOLVED)
    """SHA-256 digests (hex) of the accepted API keys."""

    admin_key_digest: str | None = field(default=None, metadata=_RESOLVED)
    """SHA-256 digest (hex) of the admin key."""


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """How many replicas a model has."""

    min: Positive = 1
    """Replicas that always run. Each is a process with its own copy of the model, and they share
    the processors; more than one pays on machines with several memory nodes."""

    max: Positive | None = None
    """Replicas that may run at once. Unset: as many as ``min``. More than ``min`` needs
    autoscaling, which does not exist, so it is refused."""

    warm: Count = 0
    """Replicas kept loaded beyond those that serve. Needs autoscaling too; only 0 is accepted."""


@dataclass(frozen=True, slots=True)
class ModelSection:
    """One model that clients can ask for, by the name of its table: ``[models.NAME]``."""

    source: str = field(metadata=_TABLE_NAME)
    """Where the model comes from: a catalogue name (``sluice models list``), the path of a GGUF
    file or of a folder with OpenVINO IR, or ``hf:ORG/REPO/FILE.gguf``. Unset: the catalogue model
    with the name of the table."""

    engine: Literal["openvino"] = "openvino"
    """What computes the steps."""

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

    sequences_max: Positive = 32
    """Sequences that generate at the same time on one replica. More raise throughput, slow each one
    down and need more memory for the KV pool."""

    threads: Positive | None = None
    """Processor threads of one replica. Unset: the engine's own choice for a single replica, an
    equal share of the processors for several."""

    replicas: ReplicaRange = field(default_factory=ReplicaRange)
    """Number of replicas, for example ``{ min = 2 }``."""

    policy: Literal["slo", "fcfs", "static"] = "slo"
    """Order of work. ``slo`` keeps every running sequence inside its target and orders prompts by
    deadline; ``fcfs`` is continuous batching in order of arrival; ``static`` waits for
    ``static_batch`` requests and finishes them together. The last two exist for comparison."""

    static_batch: Positive = 8
    """Requests that ``policy = "static"`` waits for."""

    prefix_cache: bool = True
    """Whether the KV of a prompt's beginning is kept for later prompts that begin alike. Costs no
    memory that a running request needs."""

    prefill_chunk_tokens_max: Positive = 256
    """Most prompt tokens in one step. Larger chunks finish prompts sooner and make running
    sequences wait longer for their next token."""

    step_s_max: Seconds = 0.08
    """Aim for the longest step. A cancelled request frees its memory between steps, so this bounds
    how long that takes."""

    queue_requests_max: Count = 64
    """Places for requests that wait beyond ``sequences_max``; with all taken, further ones are
    refused with 429. A request for n choices takes n places. Two full rounds of 32 sequences keep
    the wait explainable."""

    queue_wait_s_max: Seconds = 60.0
    """Longest wait for a place to run; then the request ends with 429. Beyond a minute most clients
    have gone."""

    load_s_max: Seconds = 600.0
    """Longest time from the start of a replica to its being ready; then its process is killed, and
    at the start of the server that is an error. Raise it for a large model on a slow disk."""

    silence_s_max: Seconds = 60.0
    """How long a replica with work may say nothing before its process is killed and started again.
    It speaks after every step, so keep this many times ``step_max``: a step can take several times
    what it aims at."""


@dataclass(frozen=True, slots=True)
class SloSection:
    """Latency targets of one class of requests, ``[slo.NAME]``; clients pick it by
    ``x-sluice-slo``."""

    ttft_s: Seconds | None = None
    """Target for the time to the first token."""

    tpot_s: Seconds | None = None
    """Target for the time per output token after the first."""


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
