"""Deployments are compared with the one before, also across runs, and say nothing secret."""

from sluice.telemetry.deployments import (
    deployment_record,
    differences,
    digest_of,
    keep_deployment,
    last_deployment,
)
from sluice.telemetry.records import Change


def test_differences_tell_what_came_went_and_changed():
    assert differences({"a": "1", "b": "2", "same": "x"}, {"b": "3", "c": "4", "same": "x"}) == {
        "a": Change("1", ""),
        "b": Change("2", "3"),
        "c": Change("", "4"),
    }


def test_a_digest_depends_on_values_and_on_no_order():
    assert digest_of({"a": "1", "b": "2"}) == digest_of({"b": "2", "a": "1"})
    assert digest_of({"a": "1"}) != digest_of({"a": "2"})


def test_a_first_deployment_has_changed_nothing():
    first = deployment_record("start", "1.0", {"a": "1"}, None, {})
    assert (first.settings, first.changed) == ({"a": "1"}, {})


def test_what_was_kept_is_found_by_the_next_run(tmp_path):
    folder = tmp_path / "not there yet"
    assert last_deployment(folder) is None
    keep_deployment(folder, {"models.m.context_tokens_max": "2048"})
    assert last_deployment(folder) == {"models.m.context_tokens_max": "2048"}
    assert [path.stat().st_mode & 0o077 for path in folder.iterdir()] == [0]


def test_a_damaged_file_is_as_good_as_none(tmp_path):
    keep_deployment(tmp_path, {"a": "1"})
    (tmp_path / "deployment.json").write_text('{"a": [')
    assert last_deployment(tmp_path) is None


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    keep_deployment(tmp_path / "file", {"a": "1"})
