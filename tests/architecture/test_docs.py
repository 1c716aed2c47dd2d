"""Documents say what the code says: paths exist, references are current, commands run."""

import inspect
import re
from pathlib import Path

import pytest

from sluice.cli.main import COMMANDS
from sluice.config.explain import sections
from sluice.config.schema import keys_of
from sluice.core import errors
from sluice.server.problems import TABLE
from sluice.server.wire import ChatRequest, CompletionRequest, ResponsesRequest
from sluice.telemetry.metric_table import METRICS
from sluice.telemetry.metrics import REFUSAL_REASONS
from tools.http_reference import CODES, NOTES
from tools.reference import FOLDER, PAGES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

READING_PATH_FILES_MAX = 8
READING_PATH_LINES_MAX = 1500

# Every command that a document shows, and the test that runs it or what it does.
SHOWN_COMMANDS = {
    "sluice serve sim:": "tests/e2e/test_simulated.py",
    "pip install -e . && sluice serve": "tests/e2e/test_readme.py",
    "pip install -e '.[dev]' && ./check": ".ci/run",
    "curl http://127.0.0.1:8000/v1/chat/completions": "tests/e2e/test_readme.py",
    "export ACME_KEYS=": "tests/e2e/test_overload_page.py",
    "sluice deploy ray ": "tests/cluster/placement/test_ray_cluster.py",
    "sluice deploy ": "tests/cli/test_deploy.py",
    "sluice simulate ": "tests/cli/test_simulating_page.py",
    "sluice replay ": "tests/cli/test_simulating_page.py",
    "sluice bench ": "tests/cli/test_measuring_page.py",
    "sluice route ": "tests/cli/test_routing_page.py",
    "sluice doctor ": "tests/cli/test_doctor_page.py",
    "sluice config check -c auto.toml": "tests/e2e/test_routes.py",
    "sluice serve -c auto.toml": "tests/e2e/test_routes.py",
    "curl -si http://127.0.0.1:8000/v1/chat/completions": "tests/e2e/test_routes.py",
    "curl -s http://127.0.0.1:8000/v1/feedback": "tests/e2e/test_routes.py",
    "sluice config check -c overload.toml": "tests/e2e/test_overload_page.py",
    "sluice serve -c overload.toml": "tests/e2e/test_overload_page.py",
    "curl -i http://127.0.0.1:8000/v1/chat/completions": "tests/e2e/test_overload_page.py",
    "for i in $(seq 12); do curl": "tests/e2e/test_overload_page.py",
    "curl -s http://127.0.0.1:8000/metrics": "tests/e2e/test_overload_page.py",
    "umask 077; head -c 24 /dev/urandom": "tests/e2e/test_security_page.py",
    "tr -d '\\n' < acme.key | sha256sum": "tests/e2e/test_security_page.py",
    "mkdir -p handbook": "tests/e2e/test_pipelines_page.py",
    "printf '# ": "tests/e2e/test_pipelines_page.py",
    "sluice docs ": "tests/e2e/test_pipelines_page.py",
    "sluice config check -c pipelines.toml": "tests/e2e/test_pipelines_page.py",
    "sluice serve -c pipelines.toml": "tests/e2e/test_pipelines_page.py",
    "sluice trace ID": "tests/e2e/test_pipelines_page.py",
    "sluice plan --model llama-3.1-8b --gpu h100 --rps 10": "tests/e2e/test_pipelines_page.py",
    "sluice config check -c security.toml": "tests/e2e/test_security_page.py",
    "sluice serve -c security.toml": "tests/e2e/test_security_page.py",
    "curl http://127.0.0.1:8000/v1/models": "tests/e2e/test_security_page.py",
    "curl http://127.0.0.1:8000/admin/config": "tests/e2e/test_security_page.py",
    "curl http://127.0.0.1:8000/admin/scaling": "tests/e2e/test_scaling.py",
    "curl -X POST http://127.0.0.1:8000/admin/": "tests/e2e/test_security_page.py",
}


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_current(name):
    page = (FOLDER / name).read_text(encoding="utf-8")
    assert page == PAGES[name](), "run `python -m tools.reference`"


def test_every_setting_command_error_and_metric_is_in_the_reference():
    pages = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    missing = [
        f"{heading}.{name}"
        for _, section, heading in sections()
        for name in keys_of(section)
        if f"### {name}\n" not in pages["settings.md"].partition(f"[{heading}]")[2]
    ]
    missing += [name for name in COMMANDS if f"## sluice {name}\n" not in pages["cli.md"]]
    missing += [
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and f"| {name} |" not in pages["errors.md"]
    ]
    missing += [metric.name for metric in METRICS if f"`{metric.name}`" not in pages["metrics.md"]]
    assert not missing


# How codes are written where they are made, besides the table of errors.
CODE_PLACES = re.compile(
    r'Refusal\(\d+,\s"(\w+)"|\b(?:code|reason)="(\w+)"'
    r'|return _[a-z_]+\(.*?(?:\d|message), "(\w+)"'
)


def test_every_code_that_a_client_can_get_is_in_the_reference():
    made = set(REFUSAL_REASONS)
    made |= {row.code for row in TABLE.values() if row.code}
    made |= {kind.code for kind in vars(errors).values() if hasattr(kind, "code")}
    for folder in ("core", "runtime", "server", "cluster"):
        for path in (ROOT / "src" / "sluice" / folder).rglob("*.py"):
            found = CODE_PLACES.findall(path.read_text(encoding="utf-8"))
            made |= {name for names in found for name in names if name}
    assert made == {code.name for code in CODES}


def test_every_field_that_a_client_can_send_is_in_the_reference():
    page = (FOLDER / "http.md").read_text(encoding="utf-8")
    kinds = (ChatRequest, CompletionRequest, ResponsesRequest)
    names = {name for kind in kinds for name in kind.__struct_fields__}
    assert [name for name in names if f"| `{name}` |" not in page] == []
    assert names == set(NOTES)


def test_the_drawing_of_the_error_tree_is_complete():
    drawing = errors.__doc__ or ""
    kinds = [name for name, kind in vars(errors).items() if inspect.isclass(kind)]
    assert [name for name in kinds if not re.search(rf"\b{name}\b", drawing)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_and_links_in_documents_exist(document):
    text = document.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:src|tests|tools|docs|benchmarks)/[\w./-]+)`", text)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    missing = [path for path in paths if not (ROOT / path).exists()]
    missing += [link for link in links if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_named_in_documents_exist(document):
    """``kv.py`` or ``runtime/messages.py`` in running text is a file of the package."""
    named = re.findall(r"`([\w/]+\.py)`", document.read_text(encoding="utf-8"))
    files = [path.as_posix() for path in (ROOT / "src").rglob("*.py")]
    files += [
        path.as_posix() for folder in ("tests", "tools") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [name for name in named if not any(file.endswith("/" + name) for file in files)] == []


def test_every_shown_command_is_run_by_something():
    """A new command in a ``sh`` block needs an entry above: the test that runs it."""
    shown = [
        f"{document.name}: {line}"
        for document in DOCUMENTS
        for block in re.findall(r"```sh\n(.*?)```", document.read_text(), re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip()
    ]
    unlisted = [line for line in shown if not any(f": {known}" in line for known in SHOWN_COMMANDS)]
    assert shown
    assert not unlisted


def test_what_runs_the_shown_commands_exists():
    assert [where for where in SHOWN_COMMANDS.values() if not (ROOT / where).exists()] == []


def test_ci_runs_the_line_of_the_readme():
    (line,) = re.findall(r"^.*&& \./check$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert line in SHOWN_COMMANDS
    assert 'grep -m 1 -F "&& ./check" README.md' in (ROOT / ".ci" / "run").read_text()


def reading_path():
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return [ROOT / path for path in re.findall(r"^\| \d \| `(src/\S+)` \|", text, re.MULTILINE)]


def test_the_reading_path_of_a_request_stays_short():
    files = reading_path()
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert 0 < len(files) <= READING_PATH_FILES_MAX
    assert sum(lines.values()) <= READING_PATH_LINES_MAX, lines


def test_the_architecture_fits_into_one_sitting():
    assert len((ROOT / "docs" / "ARCHITECTURE.md").read_text().splitlines()) <= 400


def test_the_changelog_has_an_entry_for_this_version():
    from sluice import __version__  # noqa: PLC0415

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
