"""What a process can see of the processors that it gets."""

from sluice.runtime.processors import ProcessorTimes, processor_times


def thread(folder, name, text):
    (folder / name).mkdir()
    (folder / name / "schedstat").write_text(text)


def test_times_of_all_threads_are_added(tmp_path):
    thread(tmp_path, "1", "700 100 9\n")
    thread(tmp_path, "2", "300 50 3\n")
    (tmp_path / "3").mkdir()  # a thread that has just ended
    assert processor_times(tmp_path) == ProcessorTimes(1000, 150)


def test_where_the_system_does_not_tell_there_is_nothing(tmp_path):
    assert processor_times(tmp_path / "none") is None
    thread(tmp_path, "1", "words\n")
    assert processor_times(tmp_path) is None
