"""Windows: nothing lost, targets and positions inside documents, held-out documents apart."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from corpora import corpus_of
from hypothesis import given
from hypothesis import strategies as st

from ranvier.data.corpus import Corpus, DocumentStream, Window, count_document_lengths
from ranvier.data.prepare import document_hash
from ranvier.errors import DataError
from ranvier.nn.cross_entropy import IGNORE_INDEX

Documents = list[list[int]]
documents = st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=12)


def opened(shards: list[Documents]) -> Corpus:
    """A corpus in a folder that is gone when the test ends; the mapped files stay readable."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpus_of(Path(folder), *shards)
        for pair in corpus.indexed_datasets:
            assert pair.tokens is not None
        return corpus


def rebuilt(stream: DocumentStream) -> Documents:
    """The documents of a packed stream from its windows alone."""
    found: Documents = [[]]
    for number in range(stream.num_windows):
        window = stream.read_window(number)
        for i in range(stream.seq):
            where = number * stream.seq + i
            token, target = int(window.tokens[i]), int(window.targets[i])
            if where >= stream.num_tokens:
                assert (token, target) == (0, IGNORE_INDEX)
                continue
            found[-1].append(token)
            if target == IGNORE_INDEX:
                found.append([])
    assert found.pop() == []
    return found


def check_targets(stream: DocumentStream, kept: Documents) -> None:
    """Every pair of a token and its next in the same document occurs once."""
    pairs = [(a, b) for one in kept for a, b in zip(one, [*one[1:], IGNORE_INDEX], strict=True)]
    windows = [stream.read_window(k) for k in range(stream.num_windows)]
    seen = [(int(a), int(b)) for w in windows for a, b in zip(w.tokens, w.targets, strict=True)]
    assert seen[: len(pairs)] == pairs
    assert set(seen[len(pairs) :]) <= {(0, IGNORE_INDEX)} and len(seen) - len(pairs) < stream.seq


def check_places(stream: DocumentStream, kept: Documents) -> None:
    """Documents are numbered from 0 in a window, positions count from their first token there."""
    owners = [number for number, one in enumerate(kept) for _ in one]
    for number in range(stream.num_windows):
        window = stream.read_window(number)
        mine = owners[number * stream.seq : (number + 1) * stream.seq]
        mine += [len(kept)] * (stream.seq - len(mine))
        assert (window.documents + mine[0]).tolist() == mine
        starts = [mine.index(owner) for owner in mine]
        assert window.positions.tolist() == [i - start for i, start in enumerate(starts)]


@given(st.lists(documents, min_size=1, max_size=3), st.integers(1, 13))
def test_windows_hold_every_document_and_every_target(shards: list[Documents], seq: int) -> None:
    kept = [one for shard in shards for one in shard if one]
    if not kept:
        return
    stream = opened(shards).open_stream(seq)
    assert stream is not None and stream.num_documents == len(kept)
    assert stream.num_tokens == sum(map(len, kept))
    assert rebuilt(stream) == kept
    check_targets(stream, kept)
    check_places(stream, kept)
    for name in ("tokens", "targets", "positions", "documents"):
        array = getattr(stream.read_window(0), name)
        assert array.dtype == np.int64 and array.shape == (seq,)


@given(documents, st.integers(1, 13))
def test_without_packing_all_is_one_text(one: Documents, seq: int) -> None:
    tokens = [token for document in one for token in document]
    if not tokens:
        return
    stream = opened([one]).open_stream(seq, packed=False)
    assert stream is not None
    windows = [stream.read_window(k) for k in range(stream.num_windows)]
    padding = [0] * (seq * stream.num_windows - len(tokens))
    assert [int(x) for w in windows for x in w.tokens] == tokens + padding
    targets = [int(x) for w in windows for x in w.targets]
    assert targets == [*tokens[1:], IGNORE_INDEX, *(IGNORE_INDEX for _ in padding)]
    # Documents are known, even though nothing attends by them.
    ends = np.cumsum([len(document) for document in one if document])
    for number, window in enumerate(windows):
        owners = np.searchsorted(ends, number * seq + np.arange(seq), "right")
        assert window.positions.tolist() == list(range(seq))
        assert window.documents.tolist() == (owners - owners[0]).tolist()


@given(documents, st.sampled_from([0.0, 0.1, 0.5, 0.9]))
def test_held_out_documents_are_apart_and_copies_together(one: Documents, share: float) -> None:
    kept = [x for x in one if x]
    aside = [x for x in kept if document_hash(np.array(x)) < share * 2**64]
    if aside == kept:
        aside = []
    if not kept:
        return
    corpus = opened([one + one])
    train, held_out = (corpus.open_stream(4, share, part) for part in ("train", "held_out"))
    assert train is not None
    assert rebuilt(train) == [x for x in kept if x not in aside] * 2
    assert (rebuilt(held_out) if held_out else []) == aside * 2


def test_about_the_share_is_held_out(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [[i, i + 1] for i in range(2000)])
    held_out = corpus.open_stream(8, 0.1, "held_out")
    assert held_out is not None and 150 < held_out.num_documents < 250


def test_only_what_lies_apart_from_the_rest_can_be_trained_on(tmp_path: Path) -> None:
    """A single document is trained on, whatever its hash."""
    corpus = corpus_of(tmp_path, [[1, 2, 3], []])
    assert corpus.open_stream(8, 0.999, "held_out") is None
    train = corpus.open_stream(8, 0.999)
    assert train is not None and rebuilt(train) == [[1, 2, 3]]


def test_many_tiny_documents_fill_a_window(tmp_path: Path) -> None:
    stream = corpus_of(tmp_path, [[i % 7] for i in range(10_000)]).open_stream(4096)
    assert stream is not None and stream.num_windows == 3
    window = stream.read_window(1)
    assert (window.targets == IGNORE_INDEX).all() and not window.positions.any()
    assert window.documents.tolist() == list(range(4096))


def test_a_blank_window_has_no_target() -> None:
    window = Window.without_targets(3)
    assert window.tokens.tolist() == [0, 0, 0] and (window.targets == IGNORE_INDEX).all()


def test_a_token_beyond_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [[1, 2]], [[3], [], [4, 5, 60, 7], [90]])
    corpus.check_vocab(91)
    message = (
        r"part1\.bin: document 2 has token 60 at offset 2\. A vocabulary of 50 "
        r".*Use model\.vocab=91 or more"
    )
    with pytest.raises(DataError, match=message):
        corpus.check_vocab(50)


def test_a_missing_hash_file_is_named(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [[1, 2]])
    (corpus.folder / "shard-00000.hash").unlink()
    with pytest.raises(DataError, match=r"shard-00000\.hash cannot be read: No such file"):
        Corpus.open(corpus.folder)


def test_lengths_are_counted_without_empty_documents(tmp_path: Path) -> None:
    """The planner fills samples with them."""
    corpus = corpus_of(tmp_path, [[1, 2], [], [3, 4]], [[5]])
    assert count_document_lengths([corpus.folder]) == {2: 2, 1: 1}
