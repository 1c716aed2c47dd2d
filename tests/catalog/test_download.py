"""One file over HTTP: whole and right, or not there at all."""

import hashlib
import shutil
from types import SimpleNamespace

import pytest

from sluice.catalog.download import (
    DownloadFailed,
    Expected,
    StorageFailed,
    Transfer,
    download,
    part_of,
)
from tests.catalog.sites import ranged, redirect, whole

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()
EXPECTED = Expected(SHA256, len(CONTENT))


@pytest.fixture
def target(tmp_path):
    return tmp_path / "cache" / "model.gguf"


@pytest.fixture
def fetch(target):
    """Fetch to the target; returns what progress was told."""

    def run(url, expected=EXPECTED, stall_s_max=5.0, **headers):
        told = []
        download(url, target, expected, Transfer(stall_s_max, headers, lambda *a: told.append(a)))
        return told

    return run


def leftovers(target):
    return sorted(path.name for path in target.parent.iterdir())


def test_a_file_arrives_whole_and_alone(site, fetch, target):
    site.answers["/f"] = whole(CONTENT)
    told = fetch(site.url("/f"))
    assert target.read_bytes() == CONTENT
    assert leftovers(target) == ["model.gguf"]
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_broken_download_is_continued_in_the_same_run(site, fetch, target):
    site.answers["/f"] = ranged(CONTENT, cut=300_000)
    fetch(site.url("/f"))
    assert target.read_bytes() == CONTENT
    asked = [headers.get("Range") for _, headers in site.requests]
    assert asked == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_later_run_continues_where_an_earlier_one_broke_off(site, fetch, target):
    site.answers["/f"] = ranged(CONTENT, cut=0)
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT[:1000])
    with pytest.raises(DownloadFailed, match="the connection ended after 1000 bytes"):
        fetch(site.url("/f"))
    assert part_of(target).read_bytes() == CONTENT[:1000]
    assert not target.exists()
    site.answers["/f"] = ranged(CONTENT)
    told = fetch(site.url("/f"))
    assert target.read_bytes() == CONTENT
    assert told[0][0] > 1000


def test_a_server_that_ignores_ranges_sends_the_file_from_the_start(site, fetch, target):
    site.answers["/f"] = whole(CONTENT)
    target.parent.mkdir()
    part_of(target).write_bytes(b"x" * 1000)
    fetch(site.url("/f"))
    assert target.read_bytes() == CONTENT


def test_all_bytes_kept_from_before_need_no_second_transfer(site, fetch, target):
    site.answers["/f"] = ranged(CONTENT)
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT)
    assert fetch(site.url("/f")) == []
    assert target.read_bytes() == CONTENT


def test_bytes_of_another_file_kept_from_before_are_dropped(site, fetch, target):
    site.answers["/f"] = ranged(CONTENT)
    target.parent.mkdir()
    part_of(target).write_bytes(b"x" * 1000)
    fetch(site.url("/f"))
    assert target.read_bytes() == CONTENT
    assert [headers.get("Range") for _, headers in site.requests] == ["bytes=1000-", None]


def test_too_many_bytes_kept_from_before_are_dropped(site, fetch, target):
    site.answers["/f"] = ranged(CONTENT)
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT + b"more")
    fetch(site.url("/f"))
    assert target.read_bytes() == CONTENT


def test_without_checksum_only_bytes_of_the_same_version_are_continued(site, fetch, target):
    site.answers["/f"] = ranged(b"old" * 1000, etag='"v1"', cut=100)
    fetch(site.url("/f"), Expected())
    assert target.read_bytes() == b"old" * 1000
    target.unlink()
    part_of(target).write_bytes(b"old" * 100)
    (target.parent / "model.gguf.part.etag").write_text('"v1"')
    site.answers["/f"] = ranged(CONTENT, etag='"v2"')
    fetch(site.url("/f"), Expected())
    assert target.read_bytes() == CONTENT


def test_a_wrong_checksum_deletes_what_was_fetched(site, fetch, target):
    site.answers["/f"] = whole(CONTENT[::-1])
    with pytest.raises(DownloadFailed, match=f"sha256 is [0-9a-f]{{64}}, expected {SHA256}"):
        fetch(site.url("/f"))
    assert not target.exists()
    assert not part_of(target).exists()


def test_a_wrong_size_is_refused_before_the_transfer(site, fetch, target):
    site.answers["/f"] = whole(CONTENT + b"x")
    with pytest.raises(DownloadFailed, match=f"{len(CONTENT) + 1} bytes, expected {len(CONTENT)}"):
        fetch(site.url("/f"))


def test_a_server_that_tells_no_size_cannot_fill_the_disk(site, fetch, target):
    def endless(request):
        request.send_response(200)
        request.end_headers()
        request.wfile.write(CONTENT * 2)

    site.answers["/f"] = endless
    with pytest.raises(DownloadFailed, match="sends more than"):
        fetch(site.url("/f"))


@pytest.mark.parametrize(
    ("status", "words"),
    [(404, "HTTP 404 Not Found"), (401, "needs a token"), (403, "does not open it"), (500, "500")],
)
def test_a_refusal_is_given_with_its_status(site, fetch, status, words):
    site.answers["/f"] = lambda request: request.send_error(status)
    with pytest.raises(DownloadFailed, match=words):
        fetch(site.url("/f"))
    assert len(site.requests) == 1


def test_a_stalled_transfer_is_given_up(site, fetch, target):
    def stall(request):
        request.send_response(200)
        request.send_header("Content-Length", str(len(CONTENT)))
        request.end_headers()
        request.wfile.write(CONTENT[:500])
        request.wfile.flush()
        site.closing.wait(30)

    site.answers["/f"] = stall
    with pytest.raises(DownloadFailed, match=r"no byte for 0\.1 s after 500 bytes"):
        fetch(site.url("/f"), stall_s_max=0.1)
    assert part_of(target).read_bytes() == CONTENT[:500]


def test_a_server_that_never_answers_is_given_up(site, fetch):
    site.answers["/f"] = lambda request: site.closing.wait(30)
    with pytest.raises(DownloadFailed, match=r"no byte for 0\.1 s"):
        fetch(site.url("/f"), stall_s_max=0.1)


def test_a_port_where_nobody_listens_is_named_as_such(fetch):
    with pytest.raises(DownloadFailed, match="connection refused"):
        fetch("http://127.0.0.1:1/f")


def test_redirects_are_followed_and_the_token_stays_with_the_first_host(make_site, fetch, target):
    hub, store = make_site(), make_site()
    store.answers["/blob"] = whole(CONTENT)
    hub.answers["/f"] = redirect(store.url("/blob").replace("127.0.0.1", "localhost"))
    fetch(hub.url("/f"), Authorization="Bearer t")
    assert target.read_bytes() == CONTENT
    assert hub.requests[0][1]["Authorization"] == "Bearer t"
    assert "Authorization" not in store.requests[0][1]


def test_the_checksum_that_a_hub_gives_is_held_against_the_file(site, fetch, target):
    site.answers["/blob"] = whole(CONTENT)
    site.answers["/f"] = redirect(site.url("/blob"), X_Linked_Etag=f'"{"0" * 64}"')
    with pytest.raises(DownloadFailed, match=f"expected {'0' * 64}"):
        fetch(site.url("/f"), Expected())
    site.answers["/f"] = redirect(site.url("/blob"), X_Linked_Etag=f'"{SHA256}"')
    fetch(site.url("/f"), Expected())
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://h/f", "model.gguf"])
def test_only_web_addresses_are_fetched(fetch, url):
    with pytest.raises(DownloadFailed, match="not an http"):
        fetch(url)


def test_a_redirect_to_a_file_is_refused(site, fetch):
    site.answers["/f"] = redirect("ftp://127.0.0.1/x")
    with pytest.raises(DownloadFailed, match="not http"):
        fetch(site.url("/f"))


def test_a_full_disk_is_named_with_the_setting_to_change(site, fetch, monkeypatch):
    site.answers["/f"] = whole(CONTENT)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(StorageFailed, match=r"no space left .*10 bytes free.*cache_dir"):
        fetch(site.url("/f"))


def test_a_folder_that_cannot_be_made_is_named(site, fetch, target):
    target.parent.write_text("a file in the way")
    with pytest.raises(StorageFailed, match=r"cannot write .*model\.gguf"):
        fetch(site.url("/f"))
