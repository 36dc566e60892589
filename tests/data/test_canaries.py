"""Canaries: read as often as asked, wherever a run is, and refused where they cannot be."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.corpora import corpus_of
from ranvier.data.canaries import (
    Canary,
    CanaryDocuments,
    CanaryPlacement,
    read_canaries,
)
from ranvier.data.dataset import open_data
from ranvier.data.mixture import CorpusMixture
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.errors import DataError
from ranvier.nn.cross_entropy import IGNORE_INDEX

SEQ = 24
CANARIES = CanaryDocuments.tokenize(
    [
        Canary("never read", 0, "0"),
        Canary("read once, of 23 bytes.", 1, "1"),
        Canary("twice", 2, "some"),
        Canary("again, twice", 2, "some"),
        Canary("often", 30, "30"),
    ],
    ByteTokenizer(),
)


@pytest.fixture(params=[True, False], ids=["packed", "whole"])
def mixtures(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[CorpusMixture, CorpusMixture]:
    """The same samples with and without canaries."""
    drawn = np.random.default_rng(0)
    documents = [drawn.integers(0, 256, drawn.integers(1, 40)).tolist() for _ in range(20)]
    stream = corpus_of(tmp_path, documents).open_stream(SEQ, packed=request.param)
    assert stream is not None
    placed = CanaryPlacement(CANARIES, 60, seed=5)
    return CorpusMixture([stream], [1], 5, canaries=placed), CorpusMixture([stream], [1], 5)


def test_each_canary_is_read_as_often_as_asked(
    mixtures: tuple[CorpusMixture, CorpusMixture],
) -> None:
    """In the first 60 samples; all other tokens are those of the run without canaries."""
    mixture, plain = mixtures
    texts = {one.tobytes(): number for number, one in enumerate(CANARIES.documents)}
    found = Counter[int]()
    for number in range(200):
        window, before = mixture.read_sample(number), plain.read_sample(number)
        tokens = mixture.canaries.find_tokens(number)  # type: ignore[union-attr]
        length = 0 if tokens is None else len(tokens)
        if tokens is not None:
            assert number < 60
            found[texts[tokens.tobytes()]] += 1
            assert window.tokens[:length].tolist() == tokens.tolist()
            assert window.targets[:length].tolist() == [*tokens[1:], IGNORE_INDEX]
            assert window.positions[:length].tolist() == list(range(length))
            assert not window.documents[:length].any() and window.documents[length:].all()
        assert np.array_equal(window.tokens[length:], before.tokens[length:])
        assert np.array_equal(window.targets[length:], before.targets[length:])
        # Documents are cut where they were, and each begins at position 0.
        assert np.array_equal(
            np.diff(window.documents[length:]) > 0, np.diff(before.documents[length:]) > 0
        )
        if mixture.document_mask:
            begins = np.flatnonzero(np.diff(window.documents, prepend=-1))
            lengths = np.diff([*begins, SEQ])
            assert np.concatenate([np.arange(n) for n in lengths]).tolist() == list(
                window.positions
            )
            assert mixture.document_lengths(number) == tuple(lengths)
        else:
            assert window.positions.tolist() == list(range(SEQ))
            assert mixture.document_lengths(number) == (SEQ,)
        assert mixture.padding_length(number) == min(plain.padding_length(number), SEQ - length)
    assert [found[i] for i in range(5)] == [0, 1, 2, 2, 30]


def test_places_depend_on_the_seed_and_on_nothing_else() -> None:
    def places(seed: int, samples: int = 60) -> list[int]:
        placed = CanaryPlacement(CANARIES, samples, seed)
        return [n for n in range(samples + 10) if placed.find_tokens(n) is not None]

    assert places(0) == places(0) != places(1)
    assert len(places(0)) == 35 and len(places(0, 35)) == 35 and len(places(3, 1000)) == 35
    assert max(places(3, 1000)) > 700, "they are spread over all samples"


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


GOOD = {"text": "one", "times": 1, "bucket": "a"}


def test_a_file_of_canaries_is_read(tmp_path: Path) -> None:
    other = {"text": "two", "times": 4}
    found = read_canaries(write_lines(tmp_path / "c.jsonl", GOOD, other, {**GOOD, "text": "x"}))
    assert found == [Canary("one", 1, "a"), Canary("two", 4, "4"), Canary("x", 1, "a")]
    documents = CanaryDocuments.tokenize(found, ByteTokenizer())
    documents.save(tmp_path / "cache" / "c.npz")
    again = CanaryDocuments.load(tmp_path / "cache" / "c.npz")
    assert again.fingerprint == documents.fingerprint
    assert again.zlib_bytes == documents.zlib_bytes and again.bucket_times == {"a": 1, "4": 4}
    assert again.documents[0].tolist() == [*b"one", 256]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**GOOD, "text": "two", "times": 2}, r"bucket 'a' is there twice: with times=1 .*times=2"),
        ({**GOOD, "bucket": "b"}, r"has the same text as"),
        ({**GOOD, "text": "two", "times": -1}, r"times=-1.* from 0 to"),
        ({**GOOD, "text": "two", "times": True}, r"times=True"),
        ({**GOOD, "text": "two", "times": 1.5}, r"times=1.5"),
        ({"times": 1, "bucket": "a"}, r"text=None.*must have a text"),
        ({**GOOD, "text": ""}, r"text=''"),
        ({**GOOD, "text": "two", "bucket": ["a"]}, r"bucket=\['a'\]"),
        ({**GOOD, "text": "two", "bucket": " "}, r"bucket=' '"),
        ([1, 2], r"object"),
    ],
)
def test_invalid_lines_are_refused(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_canaries(write_lines(tmp_path / "c.jsonl", GOOD, record))


def test_what_is_no_file_of_canaries_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("text")
    with pytest.raises(DataError, match=r"is not a .jsonl file\..* Write one with"):
        read_canaries(tmp_path / "c.txt")
    with pytest.raises(DataError, match=r"missing\.jsonl is not a file\..* Write one with"):
        read_canaries(tmp_path / "missing.jsonl")


def test_canaries_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match=r"Canary 2 of 5 .* 24 tokens .*data.seq_len=23.*Use .*24"):
        CANARIES.check_lengths(23)
    CANARIES.check_lengths(24)
    with pytest.raises(
        DataError, match=r"read 35 times .*canary_samples=34 .*canary_samples.* at least 35"
    ):
        CanaryPlacement(CANARIES, 34, 0)
    with pytest.raises(DataError, match=r"Canary 3 of 5 has 5 tokens.* Use a suffix of 4 or less"):
        list(CANARIES.split_suffixes(5))
    short = CanaryDocuments.tokenize([Canary("a", 1, "1")], ByteTokenizer())
    with pytest.raises(DataError, match=r"has 1 tokens, .* Use longer texts\."):
        list(short.split_suffixes(1))


def test_a_suffix_and_what_is_before_it() -> None:
    parts = list(CANARIES.split_suffixes(4))
    assert [bytes(tail.tolist()) for _, tail in parts][-1] == b"ften"
    assert bytes(parts[0][0].tolist()) == b"never "
    short = list(CANARIES.split_suffixes(4, prefix=2))
    assert [bytes(head.tolist()) for head, _ in short] == [b"r ", b"by", b"t", b" t", b"o"]


def test_the_fingerprint_knows_canaries_and_their_samples(tmp_path: Path) -> None:
    folder = corpus_of(tmp_path, [[1, 2, 3], [4, 5]]).folder
    placed = [None, CanaryPlacement(CANARIES, 60, 0), CanaryPlacement(CANARIES, 61, 0)]
    found = [open_data([folder], seq=SEQ, seed=0, canaries=one) for one in placed]
    assert len({data.fingerprint for data in found}) == 3
    assert found[0].canaries is None and found[1].canaries is CANARIES
    assert found[1].summary_lines[-1] == (
        "canaries: 5 documents in buckets 0, 1, some, 30, read 35 times in the first 60 samples"
    )
