"""Settings to Kubernetes manifests: the gateway, the engines that it passes requests to, and what
scales them.

Pure functions from settings to documents; ``cli.deploy`` writes them as YAML. Nothing secret gets
in: keys come from a Secret that the operator makes. Engines are those of remote models whose
address is the bare name of a Service; addresses elsewhere are left to who runs them.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sluice.config.sections import ModelSection, ReplicaNeeds
from sluice.config.settings import Settings
from sluice.core.errors import ConfigError
from sluice.wiring.scaling import scales

Document = dict[str, Any]

_API_PORT, _SCALER_PORT = 8000, 6000
_ALL = "0.0.0.0"  # noqa: S104 - inside a pod, whose network is the cluster's
# From the decision to end a pod to the end of traffic to it: endpoints and DNS follow late.
_WITHDRAWN_S = 5
# What engines get for what they run, before they are killed.
_ENGINE_GRACE_S = 120
# How long an engine may take to load its model before it is started again: ten seconds each.
_LOAD_PROBES = 180
# An image and the arguments of its engine; the model and the port are filled in.
_ENGINES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "vllm": ("vllm/vllm-openai:latest", ("--model", "{model}", "--port", "{port}")),
    "sglang": (
        "lmsysorg/sglang:latest",
        ("python3", "-m", "sglang.launch_server", "--model-path", "{model}", "--host", _ALL,
         "--port", "{port}", "--enable-metrics"),
    ),
    "tgi": (
        "ghcr.io/huggingface/text-generation-inference:latest",
        ("--model-id", "{model}", "--port", "{port}"),
    ),
    "llama-server": (
        "ghcr.io/ggml-org/llama.cpp:server",
        ("-hf", "{model}", "--host", _ALL, "--port", "{port}", "--metrics"),
    ),
}  # fmt: skip


# Names that hold for objects of any kind, with what is added to them.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,46}[a-z0-9])?")
_NAMED_BY = "up to 48 lower-case letters, digits and -, a letter first"


@dataclass(frozen=True, slots=True)
class Cluster:
    """What settings do not say: names and images on the cluster.

    ``engine_images`` replace the usual ones, by model; ``sets`` are what ``--set`` says beside the
    file, as KEY=VALUE.
    """

    image: str
    namespace: str = "default"
    name: str = "sluice"
    engine_images: Mapping[str, str] = field(default_factory=dict)
    sets: Sequence[str] = ()


def manifests(settings: Settings, toml: str, cluster: Cluster) -> list[Document]:
    """All documents, in an order in which they can be applied.

    ``toml`` is the text that the settings were read from. Raises ``ConfigError`` with all that does
    not fit.
    """
    engines = {
        name: found
        for name, section in settings.models.items()
        if (found := _service_of(section)) is not None
    }
    _check(settings, cluster, engines)
    documents = [
        _document("v1", "ConfigMap", cluster.name, cluster, data={"sluice.toml": toml}),
        *_gateway(settings, toml, cluster),
    ]
    for model, (service, port) in engines.items():
        documents += _engine(settings.models[model], model, service, port, cluster)
    scaled = [model for model in engines if scales(settings.models[model])]
    if scaled:
        documents += _scaler(cluster)
        documents += [
            _scaled_object(settings.models[model], model, engines[model][0], cluster)
            for model in scaled
        ]
    return documents


def _service_of(section: ModelSection) -> tuple[str, int] | None:
    """Name and port of the Service that the model's only address names, if it does."""
    if section.engine not in _ENGINES or len(section.urls) != 1:
        return None
    parts = urlsplit(section.urls[0].url)
    host = parts.hostname or ""
    if "." in host or host == "localhost" or parts.scheme not in {"http", "dns+http"}:
        return None
    return host, parts.port or 80


def _check(settings: Settings, cluster: Cluster, engines: Mapping[str, tuple[str, int]]) -> None:
    known = ", ".join(engines) or "none"
    problems = [
        f'--engine-image: there is no engine here for a model "{model}"; those with an address '
        f"such as dns+http://NAME:8000: {known}"
        for model in cluster.engine_images
        if model not in engines
    ]
    for option, name in (("--name", cluster.name), ("--namespace", cluster.namespace)):
        if not _NAME.fullmatch(name):
            problems.append(f"{option}: {name!r} cannot be the name of an object: {_NAMED_BY}")
    ours = {cluster.name: "the gateway", f"{cluster.name}-keda": "the scaler"}
    for model, (service, _) in engines.items():
        here = f"models.{model}.urls"
        if not _NAME.fullmatch(service):
            problems.append(f"{here}: {service!r} cannot be the name of a Service: {_NAMED_BY}")
        elif service in ours:
            problems.append(f"{here}: {service} is the name of {ours[service]} too; use another")
        ours.setdefault(service, f"models.{model}")
    if settings.placement.kind == "ray":
        problems.append(
            "placement.kind: on Kubernetes replicas run in the gateway's pod or as engines of "
            'their own; leave "ray" out, or run the gateway beside a Ray cluster'
        )
    if problems:
        raise ConfigError(tuple(problems))


# ------------------------------------------------------------------------------------ the gateway


def _gateway(settings: Settings, toml: str, cluster: Cluster) -> Iterator[Document]:
    name = cluster.name
    sets = [word for text in cluster.sets for word in ("--set", text)]
    grace_s = round(settings.server.grace_s)
    container = {
        "name": "gateway",
        "image": cluster.image,
        "command": ["sluice"],
        "args": [
            "serve",
            "-c", "/etc/sluice/sluice.toml",
            *sets,
            "--listen", f"{_ALL}:{_API_PORT}",
            "--set", "journal.dir=/var/lib/sluice/journal",
            "--set", "catalogue.cache_dir=/var/lib/sluice/models",
        ],
        "ports": [{"name": "http", "containerPort": _API_PORT}],
        "envFrom": [{"secretRef": {"name": f"{name}-keys", "optional": True}}],
        "startupProbe": _probe("/health", period_s=2, failures=30),
        "readinessProbe": _probe("/ready", period_s=2, failures=1),
        "livenessProbe": _probe("/health", period_s=10, failures=3),
        "lifecycle": _sleep(_WITHDRAWN_S),
        "resources": _resources(_gateway_needs(settings)),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "settings", "mountPath": "/etc/sluice", "readOnly": True},
            {"name": "state", "mountPath": "/var/lib/sluice"},
        ],
    }  # fmt: skip
    pod = {
        "terminationGracePeriodSeconds": _WITHDRAWN_S + grace_s + 5,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [container],
        "volumes": [
            {"name": "settings", "configMap": {"name": name}},
            {"name": "state", "emptyDir": {}},
        ],
    }
    gateway = _deployment(name, "gateway", pod, cluster)
    # A pod reads its settings when it starts: other settings have to be another pod.
    digest = hashlib.sha256(toml.encode()).hexdigest()[:16]
    gateway["spec"]["template"]["metadata"]["annotations"] = {"sluice/settings": digest}
    yield gateway
    ports = [{"name": "http", "port": _API_PORT, "targetPort": "http"}]
    yield _service(name, "gateway", {"ports": ports}, cluster)
    yield _budget(name, "gateway", cluster)
    monitor = {
        "selector": {"matchLabels": _labels(cluster, "gateway")},
        "endpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
    }
    yield _document("monitoring.coreos.com/v1", "ServiceMonitor", name, cluster, spec=monitor)


def _gateway_needs(settings: Settings) -> ReplicaNeeds:
    """The gateway's own, and those of the replicas that run in its pod."""
    cpus, gpus, memory_bytes = 1.0, 0.0, 2**30
    for section in settings.models.values():
        if not section.is_remote:
            count = section.replicas.min
            cpus += count * (section.needs.cpus or 1.0)
            gpus += count * section.needs.gpus
            memory_bytes += count * (section.needs.memory_bytes or 2 * 2**30)
    return ReplicaNeeds(cpus, gpus, memory_bytes)


# ---------------------------------------------------------------------------------------- engines


def _engine(
    section: ModelSection, model: str, service: str, port: int, cluster: Cluster
) -> Iterator[Document]:
    image, arguments = _ENGINES[section.engine]
    filled = [one.format(model=section.upstream_model or model, port=port) for one in arguments]
    container = {
        "name": "engine",
        "image": cluster.engine_images.get(model, image),
        "args": filled,
        "ports": [{"name": "http", "containerPort": port}],
        "envFrom": [{"secretRef": {"name": f"{cluster.name}-engine-keys", "optional": True}}],
        "startupProbe": _probe("/health", period_s=10, failures=_LOAD_PROBES),
        "readinessProbe": _probe("/health", period_s=2, failures=2),
        "livenessProbe": _probe("/health", period_s=20, failures=6),
        "lifecycle": _sleep(_ENGINE_GRACE_S),
        "resources": _resources(section.needs),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - not ours
    }
    pod = {
        "terminationGracePeriodSeconds": _ENGINE_GRACE_S + 30,
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    role = f"engine-{service}"  # models have names that no label can have
    count = None if scales(section) else section.replicas.min
    yield _deployment(service, role, pod, cluster, replicas=count)
    ports = [{"name": "http", "port": port, "targetPort": "http"}]
    # Headless: the gateway looks at each engine by itself, a balancer between would hide them.
    yield _service(service, role, {"clusterIP": "None", "ports": ports}, cluster)
    yield _budget(service, role, cluster)


def _scaled_object(section: ModelSection, model: str, service: str, cluster: Cluster) -> Document:
    low = section.replicas.min
    trigger = {
        "type": "external-push",
        "metadata": {
            "scalerAddress": f"{cluster.name}-keda.{cluster.namespace}.svc:{_SCALER_PORT}",
            "model": model,
        },
    }
    # The gateway has decided already, slowly downwards: the HPA only follows.
    follow = {"stabilizationWindowSeconds": 0}
    spec = {
        "scaleTargetRef": {"name": service},
        "minReplicaCount": low,
        "maxReplicaCount": section.replicas.max,
        "pollingInterval": 5,
        "cooldownPeriod": 30,
        "fallback": {
            "failureThreshold": 3,
            "replicas": max(1, low),
            "behavior": "currentReplicasIfHigher",
        },
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {
            "scaleUp": follow, "scaleDown": follow,
        }}},
        "triggers": [trigger],
    }  # fmt: skip
    return _document("keda.sh/v1alpha1", "ScaledObject", service, cluster, spec=spec)


def _scaler(cluster: Cluster) -> Iterator[Document]:
    name = f"{cluster.name}-keda"
    container = {
        "name": "scaler",
        "image": cluster.image,
        "command": ["sluice"],
        "args": [
            "deploy", "keda-scaler",
            "--gateway", f"http://{cluster.name}.{cluster.namespace}.svc:{_API_PORT}",
            "--listen", f"{_ALL}:{_SCALER_PORT}",
        ],
        "ports": [{"name": "grpc", "containerPort": _SCALER_PORT}],
        "readinessProbe": {"tcpSocket": {"port": "grpc"}, "periodSeconds": 5},
        "resources": _resources(ReplicaNeeds(0.1, 0.0, 128 * 2**20)),
    }  # fmt: skip
    yield _deployment(name, "keda", {"containers": [container]}, cluster)
    ports = [{"name": "grpc", "port": _SCALER_PORT, "targetPort": "grpc"}]
    yield _service(name, "keda", {"ports": ports}, cluster)


# ------------------------------------------------------------------------------------------ parts


def _document(version: str, kind: str, name: str, cluster: Cluster, **rest: Any) -> Document:
    metadata = {"name": name, "namespace": cluster.namespace, "labels": _labels(cluster)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _labels(cluster: Cluster, role: str | None = None) -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "sluice", "app.kubernetes.io/instance": cluster.name}
    return labels if role is None else {**labels, "app.kubernetes.io/component": role}


def _deployment(
    name: str, role: str, pod: Document, cluster: Cluster, replicas: int | None = 1
) -> Document:
    """A Deployment; without ``replicas`` their number is left to what scales it."""
    labels = _labels(cluster, role)
    spec: Document = {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    if replicas is not None:
        spec["replicas"] = replicas
    return _document("apps/v1", "Deployment", name, cluster, spec=spec)


def _service(name: str, role: str, spec: Document, cluster: Cluster) -> Document:
    document = _document("v1", "Service", name, cluster)
    document["metadata"]["labels"] = _labels(cluster, role)  # what a ServiceMonitor looks for
    return document | {"spec": {"selector": _labels(cluster, role), **spec}}


def _budget(name: str, role: str, cluster: Cluster) -> Document:
    """Let a drain of machines end one pod at a time."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": _labels(cluster, role)}}
    return _document("policy/v1", "PodDisruptionBudget", name, cluster, spec=spec)


def _probe(path: str, *, period_s: int, failures: int) -> Document:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": 2,
    }


def _sleep(seconds: int) -> Document:
    """Go on serving for a while after the end was decided."""
    return {"preStop": {"exec": {"command": ["sleep", str(seconds)]}}}


def _resources(needs: ReplicaNeeds) -> Document:
    requests: Document = {}
    if needs.cpus:
        requests["cpu"] = f"{round(needs.cpus * 1000)}m"
    if needs.memory_bytes:
        requests["memory"] = str(needs.memory_bytes)
    resources: Document = {"requests": requests} if requests else {}
    limits: Document = {}
    if needs.memory_bytes:
        limits["memory"] = str(needs.memory_bytes)
    if needs.gpus:
        limits["nvidia.com/gpu"] = str(round(needs.gpus))
    return resources | ({"limits": limits} if limits else {})


def kinds(documents: Sequence[Document]) -> list[str]:
    """What the documents are, for people: kind and name."""
    return [f"{one['kind']} {one['metadata']['name']}" for one in documents]
