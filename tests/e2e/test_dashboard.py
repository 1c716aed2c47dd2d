"""The dashboard in a real Chromium, over a server that simulates its models and is overloaded.

``SLUICE_TEST_SCREENS=docs/screens SLUICE_TEST_LOAD_S=110`` writes the pictures of the docs.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from sluice.config.load import digest
from sluice.config.sections import ServerSection
from sluice.testing.gateway import FakeGateway
from sluice.testing.operations import FakeOperations
from sluice.testing.served import served
from tests.e2e.browser import browser, opened
from tests.e2e.overloaded import SETTINGS, Load
from tests.e2e.processes import ServerProcess

pytestmark = pytest.mark.browser

# What a server tells that has nothing to tell.
NOTHING = {
    "version": "1", "now_s": 1000, "interval_s": 2, "samples_max": 9, "models": [], "model": "",
    "classes": [], "samples": [], "replicas": [], "refused": [], "degraded": [], "changes": [],
    "slowest": {"e2e": [], "ttft": []},
}  # fmt: skip


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("dashboard")
    settings = folder / "sluice.toml"
    settings.write_text(SETTINGS)
    running = ServerProcess(folder, ["-c", str(settings)])
    try:
        running.wait_ready()
        with Load(running.target):
            time.sleep(float(os.environ.get("SLUICE_TEST_LOAD_S", "0")))
            yield running
    finally:
        running.destroy()


@pytest.fixture(scope="module")
def screens(tmp_path_factory) -> Path:
    folder = Path(os.environ.get("SLUICE_TEST_SCREENS") or tmp_path_factory.mktemp("screens"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_laptop_shows_the_server_live(chrome, server, screens):
    with opened(chrome, f"{server.url}/dashboard") as seen:
        page = seen.page
        page.wait_for_selector("#link.good")
        seen.until("document.querySelectorAll('#slowest tr.pick').length > 3")
        seen.until("document.querySelectorAll('#refused tr').length > 2")
        seen.until("document.querySelectorAll('#c-outcomes path')[0].getAttribute('d').length > 60")
        assert "req/s" in seen.text("#tiles")
        seen.until("document.querySelector('#reasons').textContent.includes('refused')")
        assert seen.text("#replicas").count("ready") == 3
        assert "chat" in seen.text("#classes")
        assert "start" in seen.text("#changes")
        for chart in ("ttft", "tpot", "itl", "phases", "batch", "kv", "queue", "tokens"):
            drawn = page.evaluate(
                f"[...document.querySelectorAll('#c-{chart} path')]"
                ".some((one) => one.getAttribute('d').length > 20)"
            )
            assert drawn, chart
        page.select_option("#window", "120")
        page.wait_for_timeout(300)
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=screens / "laptop-light.png")
        assert seen.errors == []
        assert {address.split("/dashboard")[0] for address in seen.addresses} == {server.url}


def test_a_chosen_request_unfolds_into_its_phases(chrome, server, screens):
    with opened(chrome, f"{server.url}/dashboard", scheme="dark") as seen:
        page = seen.page
        page.click("#slowest tr.pick")
        page.wait_for_selector("#slowest .fall")
        assert "decode" in seen.text("#slowest .fall")
        assert "given to" in seen.text("#slowest .facts")
        lanes = page.evaluate(
            "[...document.querySelectorAll('.fall .lane span')]"
            ".map((one) => one.getBoundingClientRect().width)"
        )
        assert len(lanes) >= 2
        assert max(lanes) > 50
        page.locator(".card:has(#slowest)").screenshot(path=screens / "waterfall-dark.png")
        page.click("#by-ttft")
        assert page.get_attribute("#by-ttft", "aria-pressed") == "true"
        page.keyboard.press("Tab")
        page.click("#slowest tr[aria-expanded=true]")
        page.wait_for_selector("#slowest .fall", state="detached")
        assert seen.errors == []


def test_a_phone_shows_all_of_it_without_scrolling_sideways(chrome, server, screens):
    with opened(chrome, f"{server.url}/dashboard", width=390, height=844, scheme="dark") as seen:
        page = seen.page
        page.wait_for_selector("#slowest tr.pick")
        page.select_option("#window", "120")
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("document.querySelector('#c-ttft svg').clientWidth") > 300
        page.click("#slowest tr.pick")
        page.wait_for_selector("#slowest .fall")
        right = "Math.max(...[...document.querySelectorAll('.fall .lane')]"
        assert page.evaluate(f"{right}.map((one) => one.getBoundingClientRect().right))") < 390
        page.evaluate("scrollTo(0, 0)")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.screenshot(path=screens / "phone-dark.png")
        page.select_option("#theme", "light")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        assert seen.errors == []


def test_one_model_is_shown_alone(chrome, server):
    with opened(chrome, f"{server.url}/dashboard") as seen:
        page = seen.page
        seen.until("document.querySelectorAll('#model option').length === 3")
        page.select_option("#model", "qwen")
        seen.until("document.querySelectorAll('#replicas tbody tr').length === 1")
        assert "qwen-0" in seen.text("#replicas")
        page.select_option("#model", "")
        seen.until("document.querySelectorAll('#replicas tbody tr').length === 3")


def test_replicas_that_follow_the_load_are_drawn_by_state(chrome):
    operations = FakeOperations()
    counts = ({"ready": 1}, {"ready": 1, "starting": 1, "warm": 1}, {"ready": 2, "warm": 1})
    samples = [
        {"t_s": 990.0 + 2 * n, "interval_s": 2.0, "replicas": found, "wanted": 2}
        for n, found in enumerate(counts)
    ]
    operations.overview.shown = json.dumps({**NOTHING, "samples": samples}).encode()
    with (
        served(FakeGateway(), None, None, operations) as running,
        opened(chrome, f"{running.url}/dashboard") as seen,
    ):
        seen.until("document.querySelector('#c-replicas .legend').textContent.includes('ready 2')")
        assert seen.text("#c-replicas .legend").split("\n") == [
            "ready 2", "starting 0", "warm 1", "are to serve 2"
        ]  # fmt: skip
        ticks = "[...document.querySelectorAll('#c-replicas .tick')].map((one) => one.textContent)"
        assert seen.page.evaluate(ticks)[:3] == ["0", "2", "4"], "there is no half of a replica"
        assert seen.errors == []


def test_a_server_with_keys_asks_for_the_admin_key(chrome):
    section = ServerSection(listen="127.0.0.1:0", admin_key_digests=(digest("boss"),))
    operations = FakeOperations()
    scaling = {
        "model": "m", "wanted": 1, "most": 1, "short_of": 3, "reason": "queue_wait", "serving": 0,
        "ready_in_s": 12, "requests_held": True, "start_expected_s": 20, "wake_expected_s": 1,
    }  # fmt: skip
    told = {**NOTHING, "version": "<b>1", "scaling": [scaling]}
    operations.overview.shown = json.dumps(told).encode()
    with (
        served(FakeGateway(), section, None, operations) as running,
        opened(chrome, f"{running.url}/dashboard") as seen,
    ):
        page = seen.page
        page.wait_for_selector("#ask:not([hidden])")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        seen.until("document.querySelector('#ask-error').textContent.length > 0")
        assert page.is_hidden("#main")
        page.fill("#key", "boss")
        page.keyboard.press("Enter")
        page.wait_for_selector("#link.good")
        assert page.is_visible("#main")
        assert seen.text("#version") == "<b>1", "what a server tells is text, never markup"
        assert "no replicas" in seen.text("#replicas")
        assert "3 are needed, more than it may have" in seen.text("#scaling")
        assert "one is expected in 12.0 s, requests are held" in seen.text("#scaling")


EVIL = '<img src=x onerror="document.title=1">'


def hostile_document() -> bytes:
    """What a server would tell whose every name is markup, or a word of JavaScript's own."""
    classes = ["constructor", "__proto__", "toString", EVIL]
    sample = {
        "t_s": 999.0, "interval_s": 2.0, "arrived": 4, "met": 2, "refused": 2,
        "classes": {name: [1, 0, 1] for name in classes}, "phases": {EVIL: 1.0},
        "refusals": {EVIL: 1, "constructor": 1}, "degradations": {"__proto__": 1},
    }  # fmt: skip
    replica = {
        "id": EVIL, "model": EVIL, "state": EVIL, "error": EVIL, "requests": 0, "places": 0,
        "seats": 1, "losses": 0, "breaker_open": False,
    }  # fmt: skip
    slow = {
        "id": EVIL, "client_id": EVIL, "model": EVIL, "slo_class": EVIL, "tenant": EVIL,
        "at_s": 998.0, "prompt_tokens": 1, "completion_tokens": 1, "reason": EVIL, "e2e_s": 1.0,
        "ttft_s": None, "tpot_s": None, "phases": {"decode": 1.0, EVIL: 1.0},
    }  # fmt: skip
    refused = {"id": EVIL, "model": EVIL, "at_s": 999.0, "status": 429, "reason": EVIL}
    change = {"at_s": 998.0, "what": EVIL, "details": {EVIL: EVIL}, "changed": {EVIL: [EVIL, ""]}}
    targets = [{"slo_class": name, "seconds": {}, "objective": 0.9} for name in classes[:2]]
    shown = {
        "version": EVIL, "now_s": 1000, "interval_s": 2, "samples_max": 9, "models": [EVIL],
        "model": "", "classes": targets, "samples": [sample], "replicas": [replica],
        "refused": [refused], "slowest": {"e2e": [slow], "ttft": []}, "degraded": [],
        "changes": [change],
    }  # fmt: skip
    return json.dumps(shown).encode()


def test_names_are_text_whatever_they_are(chrome):
    operations = FakeOperations()
    operations.overview.shown = hostile_document()
    operations.overview.requests[EVIL] = json.dumps(
        {
            "id": EVIL, "phases": [{"phase": EVIL, "start_ns": 0, "duration_ns": 10}],
            "ttft_ns": None, "ending": None,
            "decisions": [{"at_ns": 1, "route": EVIL, "model": EVIL, "reason": EVIL}],
        }
    ).encode()  # fmt: skip
    with (
        served(FakeGateway(), None, None, operations) as running,
        opened(chrome, f"{running.url}/dashboard") as seen,
    ):
        seen.page.wait_for_selector("#link.good")
        seen.page.click("#slowest tr.pick")
        seen.page.wait_for_selector("#slowest .fall")
        assert seen.page.evaluate("document.querySelectorAll('img').length") == 0
        for place in ("#replicas", "#refused", "#reasons", "#changes", "#slowest", "#classes"):
            assert "onerror" in seen.text(place), place
        shares = seen.text("#classes")
        assert all(f"{name}" in shares for name in ("constructor", "__proto__", "toString"))
        assert "1 met, 0 missed, 1 refused" in shares
        assert "constructor refused" in seen.text("#reasons").replace("\n", " ")
        assert seen.errors == []


def test_a_server_that_is_gone_is_said_to_be(chrome):
    with (
        served(FakeGateway(), None, None, FakeOperations()) as running,
        opened(chrome, f"{running.url}/dashboard") as seen,
    ):
        seen.page.route("**/dashboard/data*", lambda route: route.abort())
        seen.page.wait_for_selector("#link.bad")
