"""Manifests are what Kubernetes takes, belong together, and let pods end as sluice does."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from sluice.config.sections import (
    ModelSection,
    PlacementSection,
    ReplicaNeeds,
    ReplicaRange,
    ServerSection,
    UpstreamUrl,
)
from sluice.config.settings import Settings
from sluice.core.errors import ConfigError
from sluice.wiring.manifests import Cluster, Document, manifests

KUBERNETES = "1.33"
LARGE = ModelSection(
    source="large",
    engine="vllm",
    urls=(UpstreamUrl("http://large:8000"),),
    upstream_model="meta-llama/Llama-3.1-70B-Instruct",
    replicas=ReplicaRange(min=1, max=8),
    needs=ReplicaNeeds(cpus=8, gpus=4, memory_bytes=64 * 2**30),
)
SETTINGS = Settings(
    server=ServerSection(grace_s=25),
    models={
        "small": ModelSection(source="smollm2-135m-instruct", needs=ReplicaNeeds(cpus=2)),
        "large": LARGE,
        "vendor": replace(LARGE, engine="openai", urls=(UpstreamUrl("https://api.example.com"),)),
    },
)
SCALED = Cluster("sluice:0.1", "llm")

# The parts that we write of resources whose definitions do not come with Kubernetes, as KEDA and
# the Prometheus operator publish them.
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
RULES = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "stabilizationWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600}
    },
}


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": required.split(),
    }


def listed(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


RULES = closed(stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600})
CUSTOM = {
    "ScaledObject": closed(
        "scaleTargetRef triggers",
        scaleTargetRef=closed("name", name={"type": "string", "minLength": 1}),
        minReplicaCount=COUNT,
        maxReplicaCount={"type": "integer", "minimum": 1},
        pollingInterval={"type": "integer", "minimum": 1},
        cooldownPeriod=COUNT,
        fallback=closed(
            "failureThreshold replicas",
            failureThreshold=COUNT,
            replicas=COUNT,
            behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher"]},
        ),
        advanced=closed(
            horizontalPodAutoscalerConfig=closed(behavior=closed(scaleUp=RULES, scaleDown=RULES))
        ),
        triggers=listed(closed("type metadata", type={"type": "string"}, metadata=TEXTS)),
    ),
    "ServiceMonitor": closed(
        "selector endpoints",
        selector=closed(matchLabels=TEXTS),
        endpoints=listed(
            closed(port={"type": "string"}, path={"type": "string"}, interval={"type": "string"})
        ),
    ),
}


def rendered(settings: Settings = SETTINGS, cluster: Cluster = SCALED) -> list[Document]:
    return manifests(settings, "[server]\n", cluster)


def one(documents: list[Document], kind: str, name: str) -> Any:
    (found,) = [d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


def container(deployment: Document) -> Any:
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tgi", "llama-server"])
def test_every_document_is_one_that_kubernetes_takes(engine):
    models = {**SETTINGS.models, "large": replace(LARGE, engine=engine)}
    documents = rendered(replace(SETTINGS, models=models))
    for document in documents:
        if document["kind"] in CUSTOM:
            jsonschema.validate(document["spec"], CUSTOM[document["kind"]])
        else:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
    assert {d["metadata"]["namespace"] for d in documents} == {"llm"}
    names = [(d["kind"], d["metadata"]["name"]) for d in documents]
    assert len(set(names)) == len(names)


def test_a_wrong_document_would_be_found():
    document = one(rendered(), "Deployment", "sluice")
    document["spec"]["template"]["spec"]["containers"][0]["startUpProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    scaled = one(rendered(), "ScaledObject", "large")
    scaled["spec"]["minReplicas"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(scaled["spec"], CUSTOM["ScaledObject"])


def test_services_monitors_and_budgets_select_pods_that_there_are():
    documents = rendered()
    pods = [
        d["spec"]["template"]["metadata"]["labels"] for d in documents if d["kind"] == "Deployment"
    ]
    services = [d["metadata"]["labels"] for d in documents if d["kind"] == "Service"]
    for document in documents:
        selector = document.get("spec", {}).get("selector")
        if selector is None:
            continue
        wanted = selector.get("matchLabels", selector)
        among = services if document["kind"] == "ServiceMonitor" else pods
        assert sum(wanted.items() <= labels.items() for labels in among) == 1, document["kind"]


@pytest.mark.parametrize("name", ["sluice", "large"])
def test_d18_a_pod_that_ends_is_not_killed_before_its_requests_have_had_their_grace(name):
    deployment = one(rendered(), "Deployment", name)
    pod = deployment["spec"]["template"]["spec"]
    told = container(deployment)["lifecycle"]["preStop"]["exec"]["command"]
    grace_s = 25 if name == "sluice" else 0
    assert told[0] == "sleep"
    assert pod["terminationGracePeriodSeconds"] > int(told[1]) + grace_s


def test_readiness_is_what_says_that_a_gateway_serves_and_liveness_is_not():
    gateway = container(one(rendered(), "Deployment", "sluice"))
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert gateway["livenessProbe"]["httpGet"]["path"] == "/health"


def test_an_engine_that_is_scaled_has_no_number_of_its_own():
    deployment = one(rendered(), "Deployment", "large")
    assert "replicas" not in deployment["spec"], "applying the file again would set it back"
    spec = one(rendered(), "ScaledObject", "large")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 8)
    (trigger,) = spec["triggers"]
    assert trigger["metadata"] == {"scalerAddress": "sluice-keda.llm.svc:6000", "model": "large"}
    service = one(rendered(), "Service", "sluice-keda")
    assert service["spec"]["ports"][0]["port"] == 6000


def test_without_a_range_nothing_is_scaled_and_keda_is_not_needed():
    fixed = {**SETTINGS.models, "large": replace(LARGE, replicas=ReplicaRange(min=2))}
    documents = rendered(replace(SETTINGS, models=fixed))
    assert one(documents, "Deployment", "large")["spec"]["replicas"] == 2
    assert {d["kind"] for d in documents}.isdisjoint({"ScaledObject"})
    assert not [d for d in documents if d["metadata"]["name"].endswith("-keda")]


def test_engines_get_what_they_need_and_the_gateway_looks_at_each_by_itself():
    engine = container(one(rendered(), "Deployment", "large"))
    assert engine["args"] == [
        "--model", "meta-llama/Llama-3.1-70B-Instruct", "--port", "8000",
    ]  # fmt: skip
    assert engine["resources"]["limits"] == {
        "memory": str(64 * 2**30), "nvidia.com/gpu": "4",
    }  # fmt: skip
    assert one(rendered(), "Service", "large")["spec"]["clusterIP"] == "None"


def test_what_is_served_elsewhere_is_left_alone():
    names = {d["metadata"]["name"] for d in rendered()}
    assert names == {"sluice", "large", "sluice-keda"}


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (Cluster("i", engine_images={"vendor": "x"}), 'no engine here for a model "vendor"'),
        (Cluster("i", engine_images={"small": "x"}), "--engine-image"),
    ],
)
def test_what_cannot_be_rendered_is_said(cluster, words):
    with pytest.raises(ConfigError) as wrong:
        rendered(cluster=cluster)
    assert words in str(wrong.value)


def test_replicas_on_ray_are_not_rendered():
    with pytest.raises(ConfigError, match="beside a Ray cluster"):
        rendered(replace(SETTINGS, placement=PlacementSection(kind="ray")))


def engine_at(url: str, **more: Any) -> ModelSection:
    return replace(LARGE, urls=(UpstreamUrl(url),), **more)


def test_a_model_whose_name_no_label_can_have_is_rendered():
    models = {"meta-llama/Llama-3.1-8B": engine_at("http://llama:8000")}
    for document in rendered(replace(SETTINGS, models=models)):
        for label in labels_in(document):
            assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", label), label


def labels_in(value: Any, *, inside: bool = False) -> Iterator[str]:
    """The values of all labels of a document."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from labels_in(one, inside=inside or key in {"labels", "matchLabels"})
    elif isinstance(value, list):
        for one in value:
            yield from labels_in(one, inside=inside)
    elif inside:
        yield value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "Bad Name"}, "--name: 'Bad Name' cannot be the name"),
        ({"name": ""}, "--name"),
        ({"name": "x" * 49}, "up to 48"),
        ({"namespace": "-a"}, "--namespace"),
        ({"namespace": "a\nb"}, "--namespace"),
    ],
)
def test_a_name_that_kubernetes_does_not_take_is_told(changes, words):
    with pytest.raises(ConfigError) as wrong:
        rendered(cluster=replace(SCALED, **changes))
    assert words in str(wrong.value)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({"a": engine_at("http://x_y:8000")}, "models.a.urls: 'x_y' cannot be the name"),
        (
            {"a": engine_at("http://one:8000"), "b": engine_at("http://one:8001")},
            "models.b.urls: one is the name of models.a too",
        ),
        ({"a": engine_at("http://sluice:8000")}, "sluice is the name of the gateway too"),
        ({"a": engine_at("http://sluice-keda:8000")}, "sluice-keda is the name of the scaler too"),
    ],
)
def test_services_that_cannot_be_or_share_a_name_are_told(models, words):
    with pytest.raises(ConfigError) as wrong:
        rendered(replace(SETTINGS, models=models))
    assert words in str(wrong.value)


def test_other_settings_are_another_pod():
    def pod(toml: str) -> Any:
        found = (one for one in manifests(SETTINGS, toml, SCALED) if one["kind"] == "Deployment")
        return next(found)["spec"]["template"]["metadata"]

    assert pod("a = 1") == pod("a = 1")
    assert pod("a = 1") != pod("a = 2")
