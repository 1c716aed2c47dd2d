"""``sluice deploy`` and the commands of ``docs/deploy.md`` that need no cluster."""

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import kubernetes_validate
import pytest
import yaml

from sluice.cli.main import run
from sluice.cluster.placement.keda import SERVICE, messages

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
LOCAL, KUBERNETES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
CHECK, SERVE, RENDER, SCALER = (
    block.strip() for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """A folder with the files that the page has."""
    monkeypatch.chdir(tmp_path)
    Path("sluice.toml").write_text(LOCAL, encoding="utf-8")
    Path("k8s.toml").write_text(KUBERNETES, encoding="utf-8")


def words(command: str) -> list[str]:
    program, *rest = shlex.split(command)
    assert program == "sluice"
    return rest


def test_the_command_of_the_page_writes_manifests_that_kubernetes_takes(capsys):
    assert run(words(RENDER)) == 0
    files = sorted(Path("manifests").iterdir())
    assert f"{len(files)} files in manifests" in capsys.readouterr().err
    found = []
    for file in files:
        (document,) = yaml.safe_load_all(file.read_text(encoding="utf-8"))
        found.append(document["kind"])
        if document["kind"] not in {"ServiceMonitor", "ScaledObject"}:
            kubernetes_validate.validate(document, "1.33", strict=True)
        if document["kind"] == "ConfigMap":
            assert document["data"]["sluice.toml"] == KUBERNETES
    for kind in ("ConfigMap", "Deployment", "Service", "PodDisruptionBudget", "ServiceMonitor"):
        assert kind in found
        assert kind in PAGE
    assert found.count("ScaledObject") == 1


def test_files_of_an_earlier_run_are_told(capsys):
    assert run(words(RENDER)) == 0
    capsys.readouterr()
    fixed = ["--set", "models.large.replicas={ min = 2 }"]
    assert run([*words(RENDER), *fixed]) == 0
    told = capsys.readouterr().err
    assert "takes too: " in told
    assert "scaledobject-large.yaml" in told


def test_a_folder_that_cannot_be_written_is_said_to_be_so(capsys):
    assert run([*words(RENDER), "--out", "sluice.toml/manifests"]) == 2
    assert "cannot write to sluice.toml/manifests" in capsys.readouterr().err


def test_what_set_says_holds_for_the_gateway_too(capsys):
    command = ["deploy", "k8s", "-c", "k8s.toml", "--image", "sluice:1"]
    assert run([*command, "--set", "models.large.replicas.max=3"]) == 0
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    (scaled,) = (one for one in found if one["kind"] == "ScaledObject")
    assert scaled["spec"]["maxReplicaCount"] == 3
    (gateway,) = (
        one for one in found if (one["kind"], one["metadata"]["name"]) == ("Deployment", "sluice")
    )
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    at = container["args"].index("models.large.replicas.max=3")
    assert container["args"][at - 1] == "--set"


def test_manifests_are_printed_as_yaml_or_as_one_json_list(capsys):
    command = ["deploy", "k8s", "-c", "k8s.toml", "--image", "sluice:1"]
    assert run(command) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert run([*command, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["kind"], listed["items"]) == ("List", printed)


def test_rendering_needs_no_key_and_shows_none(capsys, monkeypatch):
    vendor = '[models.vendor]\nengine = "openai"\nurls = ["https://api.example.com"]\n'
    Path("k8s.toml").write_text(KUBERNETES + vendor + 'key_env = "VENDOR_KEY"\n')
    command = ["deploy", "k8s", "-c", "k8s.toml", "--image", "sluice:1"]
    assert run(command) == 0
    without = capsys.readouterr().out
    monkeypatch.setenv("VENDOR_KEY", "sk-very-secret")
    assert run(command) == 0
    assert capsys.readouterr().out == without


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--engine-image", "small=x"], 'no engine here for a model "small"; those'),
        (["--engine-image", "large"], "write MODEL=IMAGE"),
        (["--set", "placement.kind=ray"], "beside a Ray cluster"),
    ],
)
def test_what_cannot_be_rendered_is_bad_input(capsys, more, told):
    assert run(["deploy", "k8s", "-c", "k8s.toml", "--image", "i", *more]) == 2
    assert told in capsys.readouterr().err


def test_manifests_without_a_file_are_bad_input(capsys, monkeypatch):
    monkeypatch.delenv("SLUICE_CONFIG", raising=False)
    assert run(["deploy", "k8s", "--image", "i"]) == 2
    assert "-c FILE" in capsys.readouterr().err


def test_no_cluster_is_told_with_what_to_do(capsys):
    at = ["--address", "127.0.0.1:1", "--set", "placement.wait_max=2s"]
    assert run(["deploy", "ray", "-c", "sluice.toml", "--check", *at]) == 2
    assert "ray start --head" in capsys.readouterr().err


def test_the_scaler_of_the_page_answers_unavailable_while_its_gateway_is_away():
    command = words(SCALER.replace(":6000", ":0").replace(":8000", ":1"))
    scaler = subprocess.Popen(
        [sys.executable, "-m", "sluice", *command], stderr=subprocess.PIPE, text=True
    )
    try:
        assert scaler.stderr is not None
        found = re.search(r"answering KEDA at (\S+)", scaler.stderr.readline())
        assert found is not None
        kinds = messages()
        with grpc.insecure_channel(found[1]) as channel:
            is_active = channel.unary_unary(
                f"/{SERVICE}/IsActive",
                request_serializer=kinds["ScaledObjectRef"].SerializeToString,
                response_deserializer=kinds["IsActiveResponse"].FromString,
            )
            with pytest.raises(grpc.RpcError) as failed:
                is_active(kinds["ScaledObjectRef"](scalerMetadata={"model": "large"}), timeout=10)
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        scaler.send_signal(signal.SIGTERM)
        assert scaler.wait(timeout=10) == 0
    finally:
        scaler.kill()
        scaler.wait()
        if scaler.stderr is not None:
            scaler.stderr.close()
