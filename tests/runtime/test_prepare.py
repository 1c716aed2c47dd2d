"""Turning sources into model folders, once."""

import threading

import pytest

from sluice.core.errors import ModelLoadError
from sluice.runtime.model_folder import read_model_folder
from sluice.runtime.prepare import hold, prepare_model, remove_prepared
from sluice.runtime.tokenizing import Tokenizer
from tests.runtime.gguf_files import byte_level_values, gguf_bytes, sentencepiece_values


class Engine:
    """Writes the graph that a real engine would convert."""

    def __init__(self) -> None:
        self.runs = 0
        self.error: Exception | None = None
        self.started = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def write_graph(self, gguf, folder) -> None:
        self.runs += 1
        self.started.set()
        assert self.go_on.wait(10)
        (folder / "openvino_model.xml").write_text("<net/>")
        if self.error is not None:
            raise self.error
        (folder / "openvino_model.bin").write_bytes(b"w")


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(byte_level_values()))
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def quiet(text: str) -> None:
    pass


def test_a_gguf_becomes_a_model_folder(gguf, cache, engine):
    folder = read_model_folder(prepare_model(gguf, cache, engine.write_graph, quiet))
    assert folder.facts.name == "tiny"
    assert folder.facts.context_tokens_max == 512
    assert len(folder.facts.source_sha256) == 64
    assert Tokenizer.load(folder).encode_text("hello") == (259,)


def test_a_prepared_model_is_used_again(gguf, cache, engine):
    first = prepare_model(gguf, cache, engine.write_graph, quiet)
    told: list[str] = []
    assert prepare_model(gguf, cache, engine.write_graph, told.append) == first
    assert engine.runs == 1
    assert told == []


def test_the_same_content_elsewhere_is_not_converted_again(gguf, cache, engine, tmp_path):
    first = prepare_model(gguf, cache, engine.write_graph, quiet)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(gguf.read_bytes())
    assert prepare_model(copy, cache, engine.write_graph, quiet) == first
    assert engine.runs == 1


def test_changed_content_under_the_same_name_is_converted_again(gguf, cache, engine):
    first = prepare_model(gguf, cache, engine.write_graph, quiet)
    gguf.write_bytes(gguf_bytes(byte_level_values(**{"general.name": "other model"})))
    assert prepare_model(gguf, cache, engine.write_graph, quiet) != first


def test_a_failed_conversion_leaves_nothing_behind(gguf, cache, engine):
    engine.error = ModelLoadError("the engine does not know this architecture")
    with pytest.raises(ModelLoadError, match="does not know"):
        prepare_model(gguf, cache, engine.write_graph, quiet)
    assert [p for p in cache.iterdir() if p.is_dir() and p.name != "hashes"] == []
    engine.error = None
    prepare_model(gguf, cache, engine.write_graph, quiet)


def test_what_a_killed_process_left_is_removed(gguf, cache, engine):
    folder = prepare_model(gguf, cache, engine.write_graph, quiet)
    leftover = cache / f".{folder.name}-abc"
    folder.rename(leftover)
    assert prepare_model(gguf, cache, engine.write_graph, quiet) == folder
    assert not leftover.exists()


def test_of_two_starters_one_converts_and_both_get_the_folder(gguf, cache, engine):
    engine.go_on.clear()
    waits = threading.Event()
    folders = []

    def start(progress):
        folders.append(prepare_model(gguf, cache, engine.write_graph, progress))

    first = threading.Thread(target=start, args=(quiet,))
    first.start()
    assert engine.started.wait(10)
    second = threading.Thread(target=start, args=(lambda t: waits.set() if "wait" in t else None,))
    second.start()
    assert waits.wait(10)
    engine.go_on.set()
    first.join(10)
    second.join(10)
    assert engine.runs == 1
    assert len(folders) == 2
    assert folders[0] == folders[1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (byte_level_values(pre="brand-new"), "pre-tokenizer 'brand-new'.*smollm"),
        (byte_level_values(**{"tokenizer.ggml.model": "t5"}), "tokenizer of kind 't5'"),
        ({"general.architecture": "llama"}, "context_length"),
        ({"general.name": "x"}, "architecture"),
        ({**byte_level_values(), "split.count": 3}, "split GGUF"),
        (sentencepiece_values(**{"tokenizer.ggml.scores": [1.0]}), "score for each token"),
    ],
)
def test_a_gguf_that_cannot_be_served_says_why(tmp_path, cache, engine, values, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(gguf_bytes(values))
    with pytest.raises(ModelLoadError, match=message):
        prepare_model(path, cache, engine.write_graph, quiet)
    assert engine.runs == 0


def test_a_truncated_gguf_is_refused_before_the_engine_is_asked(gguf, cache, engine):
    gguf.write_bytes(gguf.read_bytes()[:-10])
    with pytest.raises(ModelLoadError, match="truncated"):
        prepare_model(gguf, cache, engine.write_graph, quiet)
    assert engine.runs == 0


def test_a_model_folder_is_used_as_it_is(gguf, cache, engine):
    folder = prepare_model(gguf, cache, engine.write_graph, quiet)
    assert prepare_model(folder, cache / "other", engine.write_graph, quiet) == folder


def test_a_missing_source_and_an_unusable_cache_are_load_errors(gguf, tmp_path, engine):
    with pytest.raises(ModelLoadError, match="does not exist"):
        prepare_model(tmp_path / "none.gguf", tmp_path, engine.write_graph, quiet)
    with pytest.raises(ModelLoadError, match="cache"):
        prepare_model(gguf, gguf / "cache", engine.write_graph, quiet)


def test_a_folder_that_is_held_is_not_removed(gguf, cache, engine):
    folder = prepare_model(gguf, cache, engine.write_graph, quiet)
    with hold(folder), hold(folder):
        assert remove_prepared(gguf, cache) is None
        assert folder.is_dir()
    assert remove_prepared(gguf, cache)
    assert not folder.exists()


def test_a_folder_that_was_not_prepared_here_is_held_without_a_lock(tmp_path):
    with hold(tmp_path / "mine"):
        assert list(tmp_path.iterdir()) == []
