"""Preparing: shards, fingerprint, nothing left behind, nothing overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ranvier.data import prepare as module
from ranvier.data.checksums import ChecksumWriter
from ranvier.data.corpus import Corpus
from ranvier.data.indexed_dataset import IndexedDataset
from ranvier.data.manifest import CorpusManifest
from ranvier.data.prepare import document_hash, prepare_corpus
from ranvier.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from ranvier.errors import DataError, PlanError

TEXTS = ["alpha", "beta gamma", "alpha", "δ" * 40, "z"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def read(folder: Path) -> list[list[int]]:
    """The documents of a prepared folder, in order."""
    pairs = [
        IndexedDataset.open(folder / shard.pair)
        for shard in CorpusManifest.read_from(folder).shards
    ]
    return [pair.document_tokens(i).tolist() for pair in pairs for i in range(pair.num_documents)]


def test_documents_are_tokens_and_an_end(source: Path, tmp_path: Path) -> None:
    made = prepare_corpus([source], tmp_path / "deep" / "out", ByteTokenizer())
    expected = [[*text.encode(), 256] for text in TEXTS]
    folder = tmp_path / "deep" / "out"
    assert read(folder) == expected
    assert CorpusManifest.read_from(folder) == made
    assert (made.documents, made.tokens, made.largest) == (5, sum(map(len, expected)), 256)
    assert (made.vocab, made.end, made.tokenizer) == (257, 256, ByteTokenizer().fingerprint)
    assert isinstance(load_tokenizer(folder, tmp_path), ByteTokenizer)
    hashes = np.fromfile(folder / "shard-00000.hash", "<u8")
    assert hashes.tolist() == [document_hash(np.array(one)) for one in expected]
    assert hashes[0] == hashes[2] and len(set(hashes.tolist())) == 4
    made.check_files(folder, verify=True)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_shards_hold_the_same_corpus_whatever_their_size(source: Path, tmp_path: Path) -> None:
    one = prepare_corpus([source], tmp_path / "one", ByteTokenizer())
    many = prepare_corpus([source], tmp_path / "many", ByteTokenizer(), shard_tokens=12)
    assert [shard.documents for shard in many.shards] == [1, 1, 1, 1, 1]
    assert [shard.tokens for shard in many.shards] == [6, 11, 6, 81, 2]
    two = prepare_corpus([source], tmp_path / "two", ByteTokenizer(), shard_tokens=17)
    assert [shard.documents for shard in two.shards] == [2, 1, 1, 1]
    assert one.fingerprint == many.fingerprint == two.fingerprint
    assert read(tmp_path / "one") == read(tmp_path / "many") == read(tmp_path / "two")
    assert (
        Corpus.open(tmp_path / "many").document_hashes.tolist()
        == Corpus.open(tmp_path / "one").document_hashes.tolist()
    )


def test_any_change_changes_the_fingerprint(source: Path, tmp_path: Path) -> None:
    prints = {prepare_corpus([source], tmp_path / "0", ByteTokenizer()).fingerprint}
    other = Tokenizer(ByteTokenizer().json_text.replace("<|end|>", "</s>"), 257, 256)
    other.__dict__["encode"] = ByteTokenizer().encode
    prints.add(prepare_corpus([source], tmp_path / "1", other).fingerprint)
    for number, texts in enumerate([TEXTS[::-1], TEXTS[:-1], [*TEXTS[:-1], "y"]], 2):
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prints.add(prepare_corpus([source], tmp_path / str(number), ByteTokenizer()).fingerprint)
    assert len(prints) == 5


def test_large_vocabularies_have_wide_tokens(source: Path, tmp_path: Path) -> None:
    for vocab, size in ((65536, 2), (65537, 4)):
        wide = Tokenizer(ByteTokenizer().json_text, vocab, vocab - 1)
        wide.__dict__["encode"] = ByteTokenizer().encode
        made = prepare_corpus([source], tmp_path / str(vocab), wide)
        assert made.largest == vocab - 1
        assert made.shards[0].files["bin"].size == size * made.tokens
        assert read(tmp_path / str(vocab))[4] == [ord("z"), vocab - 1]


def test_progress_ends_with_everything(source: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, ...]] = []
    second = tmp_path / "b.txt"
    second.write_text("b" * 100)
    made = prepare_corpus(
        [source, second], tmp_path / "out", ByteTokenizer(), progress=lambda *now: calls.append(now)
    )
    total = source.stat().st_size + 100
    assert calls == sorted(calls) and len(calls) == 3
    assert calls[-1] == (total, total, 6, made.tokens)
    assert made.source == f"{source}, {second}"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError(28, "No space left")])
def test_a_cut_off_prepare_leaves_nothing(
    source: Path, tmp_path: Path, error: type[BaseException] | OSError
) -> None:
    def stop(*now: int) -> None:
        raise error

    expected = DataError if isinstance(error, OSError) else error
    with pytest.raises(expected):
        prepare_corpus([source], tmp_path / "out", ByteTokenizer(), progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_folders_above_go_too_unless_they_were_there(
    source: Path, tmp_path: Path, error: type[BaseException]
) -> None:
    def stop(*now: int) -> None:
        raise error

    (tmp_path / "kept").mkdir()
    for out in (tmp_path / "new" / "a" / "out", tmp_path / "kept" / "a" / "out"):
        with pytest.raises(error):
            prepare_corpus([source], out, ByteTokenizer(), progress=stop)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["in.jsonl", "kept"]


def test_folders_above_go_too_when_one_cannot_be_made(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be written: File name too long"):
        prepare_corpus(
            [source], tmp_path / "new" / ("x" * 250) / ("y" * 300) / "out", ByteTokenizer()
        )
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    with pytest.raises(DataError, match=r"cannot be written: .* contains a NUL"):
        prepare_corpus([source], tmp_path / "a\0b", ByteTokenizer())


def test_a_full_disk_is_named_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: ChecksumWriter, raw: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ChecksumWriter, "write", full)
    with pytest.raises(DataError, match=r"out cannot be written: No space left on device"):
        prepare_corpus([source], tmp_path / "out", ByteTokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_bad_line_far_in_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text(source.read_text() + "{\n")
    with pytest.raises(DataError, match=r"in\.jsonl:6: invalid JSON"):
        prepare_corpus([source], tmp_path / "out", ByteTokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_corpus_is_kept_and_never_overwritten(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # empty: as good as none
    first = prepare_corpus([source], out, ByteTokenizer())
    before = (out / "corpus.json").stat().st_mtime_ns
    assert prepare_corpus([source], out, ByteTokenizer(), shard_tokens=12) == first
    assert (out / "corpus.json").stat().st_mtime_ns == before
    source.write_text('{"text": "other"}')
    with pytest.raises(DataError, match=rf"has another corpus: fingerprint {first.fingerprint}"):
        prepare_corpus([source], out, ByteTokenizer())
    assert CorpusManifest.read_from(out) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]


def test_other_folders_and_files_are_refused_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DocumentReader", None)
    for out in (tmp_path, source):
        with pytest.raises(DataError, match=r"exists and is not a prepared corpus"):
            prepare_corpus([source], out, ByteTokenizer())


def test_senseless_numbers_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="shard_tokens=0 is too small"):
        prepare_corpus([source], tmp_path / "out", ByteTokenizer(), shard_tokens=0)
    with pytest.raises(PlanError, match="was given no input"):
        prepare_corpus([], tmp_path / "out", ByteTokenizer())
