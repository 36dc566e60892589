"""Stored corpora: made once, found again, indexed in place, checked."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import write_pair

from ranvier.data import cache as module
from ranvier.data.cache import cache_corpus, index_pairs, pair_prefixes
from ranvier.data.corpus import Corpus
from ranvier.data.manifest import CorpusManifest, manifest_digest
from ranvier.data.prepare import prepare_corpus
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.errors import DataError, UnsafeInputError


def keep(source: str | Path, folder: Path, **options: Any) -> Path:
    return cache_corpus(source, cache=folder / "cache", **{"tokenizer": "bytes", **options})


def test_a_text_is_prepared_once_under_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc", "body": "ABC"}\n')
    first = keep(path, tmp_path, verify=True)
    assert CorpusManifest.read_from(first).source == str(path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "prepare_corpus", None)
        assert keep(path, tmp_path) == keep(str(path), tmp_path, verify=True) == first
        assert keep(path, tmp_path, max_bytes=7) == first, "only of the standard library"
    other = keep(path, tmp_path, field="body")
    path.write_text('{"text": "abx", "body": "ABC"}\n')
    assert len({first, other, keep(path, tmp_path)}) == 3


def test_a_corpus_keeps_the_end_it_was_made_with(tmp_path: Path) -> None:
    words, text = tmp_path / "words", tmp_path / "a.txt"
    words.mkdir()
    text.write_text("ab")
    content = json.loads(ByteTokenizer().json_text)
    one = {**content["added_tokens"][0], "id": 257, "content": "[EOS]"}
    content["added_tokens"].append(one)
    (words / "tokenizer.json").write_text(json.dumps(content))
    pair = write_pair(words / "pair", [[1, 2, 257]])
    old, first = keep(text, tmp_path, tokenizer=str(words)), keep(pair, tmp_path)
    (words / "tokenizer_config.json").write_text('{"eos_token": "[EOS]"}')
    new = keep(text, tmp_path, tokenizer=str(words))
    assert old != new == keep(text, tmp_path, tokenizer=str(new)), "known by its end, too"
    assert CorpusManifest.read_from(first).end == 256
    for folder, end in ((old, 256), (new, 257), (keep(pair, tmp_path), 257)):
        corpus = Corpus.open(folder)
        assert corpus.tokenizer is not None and corpus.tokenizer.eos_token_id == end
        assert corpus.indexed_datasets[0].tokens[-1] == end
    # One from before, with a config that was not asked then.
    shutil.copy(words / "tokenizer_config.json", old)
    again = Corpus.open(old).tokenizer
    assert again is not None and again.eos_token_id == 256


def test_the_standard_library_is_prepared(tmp_path: Path) -> None:
    folders = [keep("stdlib", tmp_path, max_bytes=n) for n in (3000, 3000, 4000)]
    assert folders[0] == folders[1] != folders[2]
    assert CorpusManifest.read_from(folders[0]).source == "stdlib"
    assert CorpusManifest.read_from(folders[0]).tokens > 2900


def test_a_prepared_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    prepare_corpus([tmp_path / "a.txt"], tmp_path / "out", ByteTokenizer())
    assert keep(tmp_path / "out", tmp_path) == tmp_path / "out"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("suffix", ["bin", "idx", "hash"])
def test_changed_missing_and_cut_shards_are_named(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "a.txt").write_text("abc")
    out = tmp_path / "out"
    prepare_corpus([tmp_path / "a.txt"], out, ByteTokenizer())
    path = out / f"shard-00000.{suffix}"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert keep(out, tmp_path) == out, "the size is right"
    with pytest.raises(DataError, match=rf"shard-00000\.{suffix} is changed or damaged: .*digest"):
        keep(out, tmp_path, verify=True)
    path.write_bytes(raw[:-1])
    with pytest.raises(
        DataError, match=rf"{suffix} is changed or damaged: it has {len(raw) - 1} bytes\."
    ):
        keep(out, tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=rf"shard-00000\.{suffix} cannot be read: No such file"):
        keep(out, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], r"corpus\.json is broken: JSONDecodeError"),
        (lambda text: "[]", r"corpus\.json is broken: TypeError"),
        (lambda text: "{}", r"corpus\.json is broken: KeyError: 'format'"),
        (lambda text: text.replace('"tokens"', '"tokes"'), r"is broken: TypeError.*tokes"),
        (
            lambda text: text.replace('"tokens": 4', '"tokens": "4"'),
            r"tokens is '4', not an integer",
        ),
        (lambda text: text.replace('"format": 2', '"format": 9'), r"has format 9\. .* 1 and 2"),
        (lambda text: text.replace('"format": 2', '"format": 1'), r"is broken: TypeError.*digest"),
        (lambda text: text.replace('"digest"', '"other"'), r"is broken: KeyError: 'digest'"),
    ],
)
def test_a_broken_manifest_is_named(tmp_path: Path, change: Any, message: str) -> None:
    (tmp_path / "a.txt").write_text("abc")
    prepare_corpus([tmp_path / "a.txt"], tmp_path / "out", ByteTokenizer())
    path = tmp_path / "out" / "corpus.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(DataError, match=message):
        keep(tmp_path / "out", tmp_path)


HOSTILE: list[tuple[str, Any]] = [
    *((name, value) for name in ("source", "fingerprint", "tokenizer") for value in (None, 3, [])),
    *(("source", value) for value in ("\ud800", {"a": 1})),
    *(("fingerprint", value) for value in ("",)),
    *(("tokenizer", value) for value in ("", True)),
    *(("vocab", value) for value in (-1, 0, 256, 2**31 + 1, 257.0, "257", None, True, math.inf)),
    *(("end", value) for value in (-1, 257, 10**30, 256.0, "256", False, [], None)),
    *((name, value) for name in ("documents", "tokens") for value in (-1, 0, 9, 1.0, True, None)),
    *(("largest", value) for value in (-1, 257, 2**31, 10**30, math.nan, "256", None)),
    *(("format", value) for value in (True, 1.0, None, [], "1")),
    *(("shards", value) for value in ({}, [], "", None, 3, [3], [[]], [{}], ["files"], [None])),
    *(("shards.0.pair", value) for value in ("", ".", "/", "a\0b", "\ud800", None, 3, ["x"])),
    *(("shards.0.hash", value) for value in ("", ".", "/", "a\0b", "\ud800", None, 3, ["x"])),
    *(("shards.0.documents", value) for value in (-1, 2, True, 1.0, "1", None, 10**30)),
    *(("shards.0.tokens", value) for value in (-4, 5, 4.0, "4", None, math.nan)),
    *(("shards.0.files", value) for value in ({}, [], None, 3, "bin", {"bin": {}})),
    *(("shards.0.files.bin", value) for value in ({}, [], None, 3, {"size": 8}, {"digest": ""})),
    *(("shards.0.files.bin.size", value) for value in (-1, 8.0, "8", None, True, math.inf)),
    *(("shards.0.files.idx.digest", value) for value in (None, 3, [], "\ud800")),
    *(("shards.0.files.other", value) for value in ({"size": 0, "digest": ""},)),
    ("other", 3),
    ("shards.0.other", 3),
]


@pytest.mark.parametrize(("name", "value"), HOSTILE)
def test_a_manifest_with_damaged_values_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "a.txt").write_text("abc")
    prepare_corpus([tmp_path / "a.txt"], tmp_path / "out", ByteTokenizer())
    path = tmp_path / "out" / "corpus.json"
    content = place = json.loads(path.read_text())
    *above, last = name.split(".")
    for step in above:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    path.write_text(json.dumps(content))
    for use in (CorpusManifest.read_from, lambda folder: keep(folder, tmp_path)):
        with pytest.raises(DataError, match=r"corpus\.json (is broken: .|has format )"):
            use(tmp_path / "out")


def reseal(path: Path, content: dict[str, Any]) -> None:
    """Write a manifest with the digest of what it says now."""
    del content["digest"]
    path.write_text(json.dumps({**content, "digest": manifest_digest(content)}))


CHANGED: list[tuple[str, Any]] = [
    *(("source", "elsewhere"), ("fingerprint", "0" * 32), ("largest", 99), ("learn", "answers")),
    *(("tokenizer", "0" * 32), ("vocab", 300), ("end", 255), ("template", "x")),
    *(("shards.0.pair", "other"), ("shards.0.files.bin.digest", "0" * 32)),
]
"""Values that a corpus could have, but this one has not."""


@pytest.mark.parametrize(("name", "value"), CHANGED)
def test_every_field_of_a_manifest_is_covered_by_its_digest(
    tmp_path: Path, name: str, value: Any
) -> None:
    (tmp_path / "a.txt").write_text("abc")
    prepare_corpus([tmp_path / "a.txt"], tmp_path / "out", ByteTokenizer())
    path = tmp_path / "out" / "corpus.json"
    content = place = json.loads(path.read_text())
    path.write_text(json.dumps(content))  # laid out otherwise: the same values
    keep(tmp_path / "out", tmp_path)
    *above, last = name.split(".")
    for step in above:
        place = place[int(step) if step.isdigit() else step]
    assert place[last] != value
    place[last] = value
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"corpus\.json is broken: .*Prepare the corpus again"):
        keep(tmp_path / "out", tmp_path)


def test_a_corpus_of_the_first_format_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    made = prepare_corpus([tmp_path / "a.txt"], tmp_path / "out", ByteTokenizer())
    path = tmp_path / "out" / "corpus.json"
    content = json.loads(path.read_text())
    del content["digest"]
    path.write_text(json.dumps({**content, "format": 1}, indent=1) + "\n")
    assert keep(tmp_path / "out", tmp_path) == (tmp_path / "out").resolve()
    assert dataclasses.replace(CorpusManifest.read_from(tmp_path / "out"), format=2) == made
    assert Corpus.open(tmp_path / "out").document_lengths.tolist() == [4]


def test_a_manifest_that_counts_otherwise_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    prepare_corpus([tmp_path / "a.txt"], tmp_path / "out", ByteTokenizer())
    content = json.loads((tmp_path / "out" / "corpus.json").read_text())
    content["documents"] = content["shards"][0]["documents"] = 2
    reseal(tmp_path / "out" / "corpus.json", content)
    with pytest.raises(DataError, match=r"1 documents, 4 tokens and 1 hashes\. .* 2 documents"):
        Corpus.open(tmp_path / "out")


def test_a_pair_is_indexed_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2], [3], [], [1, 2]], "<i4")
    calls: list[tuple[int, ...]] = []
    folder = keep(prefix, tmp_path, progress=lambda *now: calls.append(now))
    assert calls[-1] == (20, 20, 4, 5)
    made = CorpusManifest.read_from(folder)
    assert (made.tokenizer, made.end, made.vocab, made.largest) == ("", None, 4, 3)
    assert (made.documents, made.tokens) == (4, 5)
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.json", "shard-00000.hash"]
    corpus = Corpus.open(folder)
    assert corpus.document_hashes[0] == corpus.document_hashes[3] and corpus.read_tokens(
        np.arange(5)
    ).tolist() == [*(1, 2, 3, 1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(module, "CorpusTally", None)
        for name in ("x", "x.bin", "x.idx"):
            assert keep(tmp_path / name, tmp_path, verify=True) == folder
    raw = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(b"\x07" + raw[1:])
    os.utime(tmp_path / "x.bin", ns=(1, 1))
    changed = keep(prefix, tmp_path)
    assert CorpusManifest.read_from(changed).fingerprint != made.fingerprint


def test_a_folder_of_pairs_is_one_corpus(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "abc"}\n{"text": "d"}\n{"text": "efgh"}\n')
    ours = prepare_corpus(
        [tmp_path / "in.jsonl"], tmp_path / "out", ByteTokenizer(), shard_tokens=6
    )
    theirs = tmp_path / "theirs"
    shutil.copytree(tmp_path / "out", theirs, ignore=shutil.ignore_patterns("*.hash", "corpus.*"))
    folder = keep(theirs, tmp_path, tokenizer="standard", verify=True)
    made = CorpusManifest.read_from(folder)
    assert len(made.shards) == 2 and made.fingerprint == ours.fingerprint
    assert (made.tokenizer, made.end, made.vocab) == (ByteTokenizer().fingerprint, 256, 257)
    (theirs / "shard-00001.idx").unlink()
    with pytest.raises(DataError, match=r"shard-00001\.idx cannot be read"):
        keep(theirs, tmp_path)


def test_a_pair_takes_a_tokenizer_that_is_a_path(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2]])
    ByteTokenizer().save(tmp_path / "mine.json")
    folder = keep(prefix, tmp_path, tokenizer=str(tmp_path / "mine.json"))
    assert CorpusManifest.read_from(folder).tokenizer == ByteTokenizer().fingerprint
    write_pair(tmp_path / "y", [[1, 2, 300]])
    with pytest.raises(DataError, match=r"y contains the token 300, .* only 257 ids"):
        keep(tmp_path / "y", tmp_path, tokenizer=str(tmp_path / "mine.json"))


@pytest.mark.parametrize(
    ("documents", "dtype", "message"),
    [
        ([[1], [5, -3]], "<i4", r"x\.bin: document 1 has tokens from -3 to 5"),
        ([[2**31]], "<i8", r"document 0 has tokens from 2147483648 to"),
        ([[], []], "<u2", r"x has no tokens \(2 documents\)"),
        ([], "<u2", r"x has no tokens \(0 documents\)"),
    ],
)
def test_pairs_without_use_are_refused(
    tmp_path: Path, documents: list[list[int]], dtype: str, message: str
) -> None:
    prefix = write_pair(tmp_path / "x", documents, dtype)
    with pytest.raises(DataError, match=message):
        index_pairs([prefix], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_what_is_a_pair(tmp_path: Path) -> None:
    write_pair(tmp_path / "x", [[1]])
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    assert pair_prefixes(tmp_path) == pair_prefixes(tmp_path / "x") == [tmp_path / "x"]
    for name in ("texts", "texts/a.txt", "y", "y.txt"):
        assert pair_prefixes(tmp_path / name) == []
    with pytest.raises(DataError, match=r"y\.idx cannot be read"):
        keep(tmp_path / "y.bin", tmp_path)
    with pytest.raises(DataError, match=r"y cannot be read: No such file"):
        keep(tmp_path / "y", tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".txt", "x" * 300 + ".bin", "d/" * 3000])
def test_names_too_long_for_the_system_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"cannot be read: File name too long"):
        keep(str(tmp_path / name), tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "a\0b.txt", "a\0b.bin"])
def test_names_with_a_nul_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"cannot be read: embedded null byte"):
        keep(str(tmp_path / name), tmp_path)


def test_texts_beside_pairs_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    write_pair(folder / "x", [[1, 2]])
    ByteTokenizer().save(folder / "tokenizer.json")
    for name in ("README.md", "merges.txt", ".hidden.txt", "x.png"):
        (folder / name).write_text("no text to train on")
    assert CorpusManifest.read_from(keep(folder, tmp_path)).tokens == 2
    (folder / "b.jsonl").write_text('{"text": "abc"}')
    with pytest.raises(
        DataError, match=r"pair \(x\.bin\) and a text file \(b\.jsonl\).*data\.mixture_weights"
    ):
        keep(folder, tmp_path)


def test_fifos_are_refused_not_waited_for(tmp_path: Path) -> None:
    for name in ("x.bin", "y.txt"):
        os.mkfifo(tmp_path / name)
    write_pair(tmp_path / "z", [[1, 2]])
    (tmp_path / "x.idx").write_bytes((tmp_path / "z.idx").read_bytes())
    for name in ("x", "x.bin", "y.txt"):
        with pytest.raises(DataError, match=r"cannot be read: it is not a regular file"):
            keep(tmp_path / name, tmp_path)
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(UnsafeInputError, match=r"tokenizer\.json is a pipe"):
        keep(tmp_path / "z", tmp_path)
