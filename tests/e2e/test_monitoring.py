"""D-30: the shipped dashboard and alert rules show and say something, at a real Prometheus."""

import json
import math
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grafana_foundation_sdk.cog.plugins as grafana_plugins
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.e2e.overloaded import SETTINGS, Load
from tests.e2e.processes import ServerProcess, eventually
from tests.e2e.programs import PROMETHEUS, PROMTOOL, path_of
from tools import grafana

FOLDER = Path("docs/monitoring")
WINDOW_S = 2
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS = {
    f"{panel['title']} / {target['legendFormat']}": target["expr"]
    for panel in grafana.dashboard()["panels"]
    for target in panel.get("targets", ())
}
EXPRESSIONS = {**PANELS, **{r.get("alert") or r["record"]: r["expr"] for r in RULES}}


def test_the_file_is_the_one_that_is_made():
    assert grafana.PATH.read_text() == grafana.text(), "run python -m tools.grafana"


def test_grafana_reads_the_dashboard_whole():
    """By types made from Grafana's own schema, which leave out what it does not know."""
    grafana_plugins.register_default_plugins()
    given = grafana.dashboard()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    assert list(lost(given, read)) == []
    ids = [panel["id"] for panel in given["panels"]]
    assert len(set(ids)) == len(ids)


def lost(given: Any, read: Any, path: str = "") -> Iterator[str]:
    """What of ``given`` is not in ``read``."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(read, dict) or key not in read:
                yield f"{path}/{key}"
            else:
                yield from lost(value, read[key], f"{path}/{key}")
    elif isinstance(given, list):
        if not isinstance(read, list) or len(read) != len(given):
            yield path
        else:
            for n, (one, other) in enumerate(zip(given, read, strict=True)):
                yield from lost(one, other, f"{path}/{n}")
    elif given != read:
        yield path


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_d30_quantiles_sum_by_bucket_and_nothing_has_a_fixed_name(name):
    expression = EXPRESSIONS[name]
    for inner in re.findall(r"histogram_quantile\([\d.]+, (sum by \([^)]*\))", expression):
        assert re.match(r"sum by \([^)]*\ble\b", inner), expression
    assert expression.count("histogram_quantile") == len(
        re.findall(r"histogram_quantile\([\d.]+, sum by \([^)]*\ble\b", expression)
    )
    assert not re.search(r"""(model|replica|instance|job|slo_class)=~?["'][a-z]""", expression)


@pytest.mark.prometheus
def test_d30_each_alert_fires_on_one_series_and_not_on_another():
    tool = path_of(PROMTOOL)
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [tool, *command], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    tried = (FOLDER / "alerts_test.yml").read_text()
    for rule in RULES:
        if "alert" in rule:
            assert f"alertname: {rule['alert']}" in tried


class Prometheus:
    """One that scrapes a server four times a second."""

    def __init__(self, folder: Path, target: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        scrape = {"job_name": "sluice", "static_configs": [{"targets": [target]}]}
        config = {"global": {"scrape_interval": "250ms"}, "scrape_configs": [scrape]}
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self.process = subprocess.Popen(
            [
                path_of(PROMETHEUS), f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        eventually(self._answers)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def values(self, expression: str) -> list[float]:
        """The value of each series that an expression gives now."""
        for name, value in {
            "$__rate_interval": f"{WINDOW_S}s", "$model": ".*", "$slo_class": ".*",
        }.items():  # fmt: skip
            expression = expression.replace(name, value)
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=5) as answer:
            told = json.load(answer)
        return [float(one["value"][1]) for one in told["data"]["result"]]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.prometheus
def test_d30_each_panel_shows_a_series_after_traffic_and_no_nan_without(tmp_path):
    settings = tmp_path / "sluice.toml"
    settings.write_text(SETTINGS)
    server = ServerProcess(tmp_path / "server", ["-c", str(settings)])
    prometheus = None
    try:
        server.wait_ready()
        prometheus = Prometheus(tmp_path, server.url.removeprefix("http://"))
        with Load(server.target):
            missing = dict(PANELS)

            def all_shown() -> bool:
                assert prometheus is not None
                for name, expression in list(missing.items()):
                    if prometheus.values(expression):
                        del missing[name]
                return not missing

            try:
                eventually(all_shown, 25.0, every_s=0.3)
            except TimeoutError:
                assert list(missing) == []
            known = set(labels_by_name(server))
            used = {m for text in EXPRESSIONS.values() for m in re.findall(r"\bsluice_\w+", text)}
            assert used <= known
            for text in EXPRESSIONS.values():
                check_labels(text, labels_by_name(server))
        arriving = f"sum(rate(sluice_requests_total[{WINDOW_S}s]))"
        eventually(lambda: prometheus.values(arriving) == [0.0], 25.0, every_s=0.3)
        for name, expression in PANELS.items():
            assert not [v for v in prometheus.values(expression) if math.isnan(v)], name
    finally:
        if prometheus is not None:
            prometheus.end()
        server.destroy()


def labels_by_name(server: ServerProcess) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, labels in server.metrics():
        keys = {one.split("=")[0] for one in labels.split(",") if one}
        found.setdefault(name, set()).update(keys)
    return found


def check_labels(expression: str, known: dict[str, set[str]]) -> None:
    """Every label that a selector names is one of its metric."""
    for name, selector in re.findall(r"\b(sluice_\w+)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector):
            assert label in known[name], (name, label)
