"""The embedded store: what is cut, stored, found and removed, in any script and at any size."""

import asyncio
import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from sluice.retrieval.documents import (
    PASSAGE_CHARS,
    Document,
    Unreadable,
    _pieces,
    files_below,
    passages_of,
    read_document,
)
from sluice.retrieval.embedded import EmbeddedRetriever
from sluice.retrieval.passages import RetrievalFailed, RetrievalLate
from sluice.retrieval.store import DocumentStore, collections_in, path_of
from sluice.retrieval.terms import TERMS_MAX, asked

DOCUMENTS = [
    Document("reset.md", "Passwords", ("Open Settings and press Reset to set a new password.",)),
    Document("billing.md", "Billing", ("Invoices are sent monthly.", "Refunds take five days.")),
    Document("de.md", "Passwörter", ("Zum Zurücksetzen öffnen Sie die Einstellungen.",)),
    Document("ja.txt", "東京", ("東京は日本の首都です。人口は約千四百万人。",)),
    Document("ar.txt", "القاهرة", ("القاهرة هي عاصمة مصر.",)),
]


@pytest.fixture
def store(tmp_path):
    made = DocumentStore.create(tmp_path, "default")
    for document in DOCUMENTS:
        assert made.add(document)
    yield made
    made.close()


def found(store, question, passages_max=3):
    return [one.id for one in store.search(question, passages_max, 10.0)]


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("How do I reset my password?", "reset.md#1"),
        ("refunds", "billing.md#2"),
        ("REFUNDS!", "billing.md#2"),
        ("zurucksetzen", "de.md#1"),
        ("日本の首都はどこですか", "ja.txt#1"),
        ("首", "ja.txt#1"),
        ("ما هي عاصمة مصر", "ar.txt#1"),
        ('reset" OR * NEAR( AND text:x -- ;', "reset.md#1"),
    ],
)
def test_the_best_passage_comes_first_in_any_language(store, question, first):
    assert found(store, question)[0] == first


@pytest.mark.parametrize(
    "question", ["", "   ", "?!.,;", "\x01\x02", "🙂🙂", "(((", "qwertyuiop", "\ud800"]
)
def test_questions_that_hold_nothing_to_look_for_find_nothing(store, question):
    assert found(store, question) == []


def test_binary_looking_and_huge_questions_are_bounded(store):
    noise = bytes(range(256)).decode("latin-1") * 40
    assert found(store, noise + " password ") == found(store, "password") == ["reset.md#1"]
    many = " ".join(f"word{number}" for number in range(50_000)) + " password"
    assert asked(many).count(" OR ") == TERMS_MAX - 1
    assert len(asked("x" * 100_000)) <= 100_002


def test_the_number_of_passages_is_bounded_and_scores_fall(store):
    passages = store.search("password reset refunds invoices settings", 2, 10.0)
    assert len(passages) == 2
    assert passages[0].score >= passages[1].score > 0
    assert passages[0].title == "Passwords"


def test_a_document_replaces_its_earlier_form_and_an_equal_one_changes_nothing(store):
    assert not store.add(DOCUMENTS[0])
    assert store.add(Document("reset.md", "Passwords", ("Ask the help desk.", "Or wait.")))
    assert found(store, "settings new") == []
    assert found(store, "help desk") == ["reset.md#1"]
    assert [(one.id, one.passages) for one in store.documents()][-1] == ("reset.md", 2)


def test_a_removed_document_is_found_no_more(store):
    assert store.remove("reset.md")
    assert not store.remove("reset.md")
    assert found(store, "password") == []
    assert [one.id for one in store.documents()] == ["ar.txt", "billing.md", "de.md", "ja.txt"]


def test_a_search_is_stopped_at_its_deadline(tmp_path):
    store = DocumentStore.create(tmp_path, "large")
    store.add(Document("d", "t", tuple("common words here " * 40 for _ in range(400))))
    times = iter(range(10_000_000))
    with pytest.raises(RetrievalLate):
        store.search("common words here", 5, 1.0, clock_s=lambda: float(next(times)))
    assert store.search("common", 5, 10.0)
    store.close()


def test_documents_can_be_removed_and_added_under_queries(tmp_path):
    """Readers see whole documents or none, and never an error."""
    writer = DocumentStore.create(tmp_path, "busy")
    for number in range(20):
        writer.add(Document(f"d{number}", "t", tuple(f"alpha {number} {n}" for n in range(5))))
    over = threading.Event()
    seen: list[set[int]] = []

    def read() -> None:
        reader = DocumentStore.open(tmp_path, "busy")
        while not over.is_set():
            counts: dict[str, int] = {}
            for one in reader.search("alpha", 200, 10.0):
                counts[one.document] = counts.get(one.document, 0) + 1
            seen.append(set(counts.values()))
        reader.close()

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(20):
        writer.remove(f"d{number}")
        writer.add(Document(f"n{number}", "t", tuple(f"alpha {n}" for n in range(5))))
    over.set()
    thread.join()
    writer.close()
    assert seen
    assert set().union(*seen) == {5}


def test_a_collection_may_appear_go_and_be_broken_while_it_is_searched(tmp_path):
    async def run() -> None:
        retriever = EmbeddedRetriever(tmp_path, "default")
        with pytest.raises(RetrievalFailed, match="no collection default"):
            await retriever.find("password", 3, 10.0)
        store = DocumentStore.create(tmp_path, "default")
        store.add(DOCUMENTS[0])
        store.close()
        for _ in range(4):
            assert [one.id for one in await retriever.find("password", 3, 10.0)] == ["reset.md#1"]
        for leftover in tmp_path.iterdir():
            leftover.unlink()
        for _ in range(4):
            with pytest.raises(RetrievalFailed, match="no collection"):
                await retriever.find("password", 3, 10.0)
        path_of(tmp_path, "default").write_bytes(b"<html>no database</html>" * 100)
        for _ in range(4):
            with pytest.raises(RetrievalFailed, match="cannot be used"):
                await retriever.find("password", 3, 10.0)
        with pytest.raises(RetrievalLate):
            await retriever.find("password", 3, -1.0)
        await retriever.close()

    asyncio.run(run())


def test_a_collection_of_a_later_version_is_not_touched(tmp_path):
    connection = sqlite3.connect(path_of(tmp_path, "later"))
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(RetrievalFailed, match="later version"):
        DocumentStore.create(tmp_path, "later")
    assert collections_in(tmp_path) == ["later"]


# ------------------------------------------------------------------------------------ documents


def test_passages_are_runs_of_paragraphs_and_long_ones_are_cut_at_sentences():
    short = [f"Paragraph {number}." for number in range(3)]
    assert list(passages_of("\n\n".join(short))) == ["\n\n".join(short)]
    sentences = " ".join(f"Sentence number {number} is here." for number in range(100))
    cut = list(passages_of(sentences))
    assert all(len(one) <= PASSAGE_CHARS for one in cut)
    assert all(one.endswith(".") for one in cut)
    assert " ".join(cut) == sentences
    assert "".join(passages_of("x" * 2000)) == "x" * 2000
    assert list(passages_of(" \n\n \n")) == []


def test_a_file_of_one_long_paragraph_is_cut_without_copying_what_is_left():
    class Counting(str):  # noqa: SLOT000
        copied = 0

        def __getitem__(self, key):
            piece = str.__getitem__(self, key)
            Counting.copied += len(piece)
            return Counting(piece)

        def strip(self, chars=None):
            return Counting(str.strip(self, chars))

    text = Counting("A sentence of words. " * 20_000)
    pieces = list(_pieces(Counting(text.strip())))
    assert " ".join(pieces) == text.strip()
    assert max(map(len, pieces)) <= PASSAGE_CHARS
    assert Counting.copied < 3 * len(text)


def test_a_name_that_is_not_utf8_is_refused_in_words(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text("A fact.")
    with pytest.raises(Unreadable, match="name"):
        read_document(path)


def test_files_are_read_as_text_with_their_title(tmp_path):
    (tmp_path / "a.md").write_text("\ufeff# The title\r\n\r\nText.", encoding="utf-8")
    (tmp_path / ".hidden").write_text("no")
    page = "<html><head><title>T &amp; U</title><style>p{}</style></head><body><p>One</p><p>Two"
    (tmp_path / "b.html").write_text(page)
    documents = [read_document(path) for path in files_below(tmp_path)]
    assert [(one.title, one.passages) for one in documents] == [
        ("The title", ("# The title\n\nText.",)),
        ("T & U", ("One\n\nTwo",)),
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "no text"), (b"\xff\xfe\x00", "not UTF-8"), (b"a\x00b", "zero bytes"), (b" \n", "no")],
)
def test_files_that_hold_no_text_are_refused_in_words(tmp_path, content, reason):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(Unreadable, match=reason):
        read_document(path)


def test_what_is_no_regular_file_is_passed_over_without_waiting_for_its_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null"), tmp_path):
        with pytest.raises(Unreadable, match="no regular file"):
            read_document(path)


@pytest.mark.parametrize(
    "unit", ["<a ", "<!--", "</", "<!x", "<?", "<![CDATA[", "<script>", '<a b="']
)
def test_a_page_whose_tags_never_end_takes_no_longer_than_another(tmp_path, unit):
    path = tmp_path / "page.html"
    path.write_text("<title>T</title><p>Before it.</p>" + unit * 200_000 + " after all")
    began_s = time.process_time()
    found = read_document(path)
    assert time.process_time() - began_s < 3
    assert (found.title, found.passages[0][:10]) == ("T", "Before it.")
