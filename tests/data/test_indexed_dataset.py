"""Megatron's pairs: read from bytes written by hand, written and read again, every defect named."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpora import write_pair

from ranvier.data import indexed_dataset
from ranvier.data.checksums import file_checksum
from ranvier.data.indexed_dataset import IndexedDataset
from ranvier.errors import DataError

CODES = {1: "<B", 2: "<b", 3: "<h", 4: "<i", 5: "<q", 8: "<H"}
DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8]]


def by_hand(
    prefix: Path, *, code: int = 4, magic: bytes = b"MMIDIDX\0\0", version: int = 1
) -> None:
    """Three documents, the second of two sequences, one of them empty."""
    letter = CODES.get(code, "<i")
    size = struct.calcsize(letter)
    lengths, borders = [2, 3, 0, 1], [0, 1, 3, 4]
    pointers = [size * n for n in (0, 2, 5, 5)]
    raw = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    raw += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(borders))
    raw += b"".join(struct.pack("<i", n) for n in lengths)
    raw += b"".join(struct.pack("<q", n) for n in pointers)
    raw += b"".join(struct.pack("<q", n) for n in borders)
    prefix.with_suffix(".idx").write_bytes(raw)
    tokens = b"".join(struct.pack(letter, n) for n in (10, 11, 12, 13, 14, 15))
    prefix.with_suffix(".bin").write_bytes(tokens)


@pytest.mark.parametrize("code", CODES)
def test_a_pair_written_by_hand_is_read(tmp_path: Path, code: int) -> None:
    by_hand(tmp_path / "x", code=code)
    for name in ("x", "x.bin", "x.idx"):
        pair = IndexedDataset.open(tmp_path / name)
        found = [pair.document_tokens(i).tolist() for i in range(pair.num_documents)]
        assert found == [[10, 11], [12, 13, 14], [15]]


@pytest.mark.parametrize("dtype", indexed_dataset.TOKEN_TYPES.values())
def test_what_is_written_is_read(tmp_path: Path, dtype: str) -> None:
    prefix = write_pair(tmp_path / "x.1.y", DOCUMENTS, dtype)
    pair = IndexedDataset.open(prefix)
    assert [pair.document_tokens(i).tolist() for i in range(pair.num_documents)] == DOCUMENTS
    assert pair.dtype == np.dtype(dtype)


def test_the_writer_writes_what_the_hand_writes(tmp_path: Path) -> None:
    by_hand(tmp_path / "hand", code=8)
    index = (tmp_path / "hand.idx").read_bytes()
    writer = indexed_dataset.IndexedDatasetBuilder(tmp_path / "ours", "<u2")
    for document in ([10, 11], [12, 13, 14], [15]):
        writer.add_document(np.array(document))
    stamps = writer.close()
    ours = (tmp_path / "ours.idx").read_bytes()
    assert ours[:18] == index[:18]
    assert ours[18:] == struct.pack("<QQ3i3q4q", 3, 4, 2, 3, 1, 0, 4, 10, 0, 1, 2, 3)
    assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "hand.bin").read_bytes()
    for suffix, stamp in stamps.items():
        assert stamp == file_checksum(tmp_path / f"ours.{suffix}")


def test_a_long_document_has_several_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_dataset, "MAX_SEQUENCE_TOKENS", 2)
    write_pair(tmp_path / "x", DOCUMENTS)
    pair = IndexedDataset.open(tmp_path / "x")
    assert [pair.document_tokens(i).tolist() for i in range(pair.num_documents)] == DOCUMENTS
    assert struct.unpack_from("<Q", (tmp_path / "x.idx").read_bytes(), 18) == (6,)


def test_empty_pairs_are_read(tmp_path: Path) -> None:
    for documents in ([], [[], []]):
        prefix = write_pair(tmp_path / f"x{len(documents)}", documents)
        pair = IndexedDataset.open(prefix)
        assert pair.num_documents == len(documents) and len(pair.tokens) == 0


def patched(offset: int, form: str, value: int) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        by_hand(prefix)
        raw = bytearray(prefix.with_suffix(".idx").read_bytes())
        struct.pack_into(form, raw, offset, value)
        prefix.with_suffix(".idx").write_bytes(raw)

    return change


def resized(suffix: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def act(prefix: Path) -> None:
        by_hand(prefix)
        path = prefix.with_suffix(suffix)
        path.write_bytes(change(path.read_bytes()))

    return act


def without(suffix: str) -> Callable[[Path], None]:
    def act(prefix: Path) -> None:
        by_hand(prefix)
        prefix.with_suffix(suffix).unlink()

    return act


# lengths at 34, pointers at 50, borders at 82
BAD: list[tuple[Callable[[Path], None], str]] = [
    (without(".bin"), r"x\.bin cannot be read: No such file"),
    (without(".idx"), r"x\.idx cannot be read: No such file"),
    (patched(0, "<B", 65), r"x\.idx starts with b'AMIDIDX.*114 bytes"),
    (resized(".idx", lambda raw: b""), r"x\.idx starts with b'' \(0 bytes\)"),
    (patched(9, "<Q", 2), r"x\.idx has version 2\. Only version 1"),
    (patched(17, "<B", 7), r"tokens of type 7 \(float32\)"),
    (
        patched(17, "<B", 99),
        r"tokens of type 99\. The supported types are the integers 1, 2, 3, 4, 5, 8",
    ),
    (patched(18, "<Q", 2**60), rf"{2**60} sequences and 4 document borders"),
    (resized(".idx", lambda raw: raw[:-1]), r"x\.idx has 113 bytes\. 4 sequences.* need 114 bytes"),
    (resized(".idx", lambda raw: raw + b"1234"), r"118 bytes \(modes of a multimodal pair"),
    (resized(".bin", lambda raw: raw[:-4]), r"x\.bin has 20 bytes\. Its index needs 24 bytes"),
    (resized(".bin", lambda raw: raw + b"1"), r"x\.bin has 25 bytes\. .* 6 tokens of 4 bytes"),
    (patched(38, "<i", -1), r"sequence 1 has length -1"),
    (patched(58, "<q", 4), r"sequence 1 starts at byte 4\. .* must start at byte 8"),
    (patched(66, "<q", 10**6), r"sequence 2 starts at byte 1000000"),
    (patched(82, "<q", 1), r"borders are 1 to 4\. They must start at 0"),
    (patched(106, "<q", 3), r"borders are 0 to 3\. .* sequences, 4"),
    (patched(98, "<q", 0), r"document border 2 is 0 after 1\. Borders must not decrease"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_every_defect_is_named(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    make(tmp_path / "x")
    with pytest.raises(DataError, match=message):
        IndexedDataset.open(tmp_path / "x")
