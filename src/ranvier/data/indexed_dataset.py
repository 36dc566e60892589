r"""Megatron's indexed dataset: tokens of documents in two files, `NAME.bin` and `NAME.idx`.

`.bin` holds tokens only. `.idx`, little-endian: `MMIDIDX\0\0`, version (u64, 1), type of the tokens
(u8), number of sequences and of document borders (u64 each), lengths (i32) and byte pointers (i64)
of the sequences, borders (i64): document d is sequences border[d] to border[d + 1]. Sequences are
contiguous, so that a document is one range of tokens. Files are memory-mapped, not read. Not
supported: the modes of multimodal pairs, tokens that are floats.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranvier.data.checksums import ChecksumWriter, FileChecksum, file_size
from ranvier.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Token dtypes by their code; 6 and 7 are floats."""
MAX_SEQUENCE_TOKENS = 2**31 - 1
"""Maximum tokens of a sequence (lengths are i32); a longer document has several."""
PAIR_REMEDY = "Copy or create the pair again."


def pair_prefix(path: str | Path) -> Path:
    """The common prefix of a pair, from itself or from one of its files."""
    text = str(path)
    if text.endswith((".bin", ".idx")):
        return Path(text[:-4])
    return Path(text)


def pair_file(prefix: Path, suffix: str) -> Path:
    """A file of a pair (a prefix may contain dots)."""
    return prefix.with_name(f"{prefix.name}.{suffix}")


@dataclass(frozen=True, eq=False)
class IndexedDataset:
    """A validated pair: the document bounds, and the tokens on demand."""

    prefix: Path
    dtype: np.dtype[Any]
    document_bounds: NDArray[np.int64]
    """First token of each document, and the end of the last one `[documents + 1]`."""

    @property
    def num_documents(self) -> int:
        """Number of documents, including empty ones."""
        return len(self.document_bounds) - 1

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """All tokens, memory-mapped."""
        if self.document_bounds[-1] == 0:
            # An empty file cannot be mapped.
            return np.zeros(0, self.dtype)
        path = pair_file(self.prefix, "bin")
        try:
            return np.memmap(path, self.dtype, "r", shape=(int(self.document_bounds[-1]),)).view(
                np.ndarray
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be memory-mapped: {error}. It is read in place. {PAIR_REMEDY}"
            ) from None

    def document_tokens(self, number: int) -> NDArray[Any]:
        """The tokens of a document."""
        return self.tokens[self.document_bounds[number] : self.document_bounds[number + 1]]

    @classmethod
    def open(cls, path: str | Path) -> IndexedDataset:
        """Open the pair of a prefix or of one of its files; the whole index is validated."""
        prefix = pair_prefix(path)
        index = pair_file(prefix, "idx")
        dtype, lengths, pointers, borders = _read_index(index, _file_size(index))
        _check_sequences(index, dtype, lengths, pointers, _file_size(pair_file(prefix, "bin")))
        _check_borders(index, borders, len(lengths))
        # Borders count sequences; prefix sums of the lengths turn them into tokens.
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        return cls(prefix, dtype, ends[borders])


def _file_size(path: Path) -> int:
    try:
        return file_size(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. A Megatron pair is NAME.bin and NAME.idx. "
            "Check the path."
        ) from None


IndexArrays = tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]


def _read_index(path: Path, size: int) -> IndexArrays:
    """Token dtype, lengths, pointers and borders of an index file."""
    try:
        raw = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. It locates the documents. {PAIR_REMEDY}"
        ) from None
    if size < HEADER.size or raw[:9].tobytes() != MAGIC:
        raise DataError(
            f"{path} starts with {raw[:9].tobytes()!r} ({size} bytes). The index of a Megatron "
            f"pair starts with {MAGIC!r} and has at least {HEADER.size} bytes. {PAIR_REMEDY}"
        )
    _, version, code, sequences, borders = HEADER.unpack(raw[: HEADER.size].tobytes())
    if version != VERSION:
        raise DataError(
            f"{path} has version {version}. Only version {VERSION} is supported. {PAIR_REMEDY}"
        )
    if code not in TOKEN_TYPES:
        kind = {6: " (float64)", 7: " (float32)"}.get(code, "")
        raise DataError(
            f"{path} has tokens of type {code}{kind}. The supported types are the integers "
            f"{', '.join(map(str, TOKEN_TYPES))}. {PAIR_REMEDY}"
        )
    # Per sequence 4 bytes of length and 8 of pointer; 8 per border.
    expected = HEADER.size + 12 * sequences + 8 * borders
    if size != expected:
        # Multimodal pairs append one mode byte per sequence.
        if size == expected + sequences:
            why = " (modes of a multimodal pair are not supported)"
        else:
            why = ""
        raise DataError(
            f"{path} has {size} bytes{why}. {sequences} sequences and {borders} document borders "
            f"need {expected} bytes. {PAIR_REMEDY}"
        )
    at = [HEADER.size, HEADER.size + 4 * sequences, HEADER.size + 12 * sequences]
    return (
        np.dtype(TOKEN_TYPES[code]),
        np.frombuffer(raw, "<i4", sequences, at[0]),
        np.frombuffer(raw, "<i8", sequences, at[1]),
        np.frombuffer(raw, "<i8", borders, at[2]),
    )


def _check_sequences(
    path: Path,
    dtype: np.dtype[Any],
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    size: int,
) -> None:
    """Refuse sequences that are not contiguous or do not cover the file of tokens."""
    if (lengths < 0).any():
        first = int(np.argmax(lengths < 0))
        raise DataError(
            f"{path}: sequence {first} has length {lengths[first]}. It must be at least 0. "
            f"{PAIR_REMEDY}"
        )
    # In 64 bits, since the lengths are i32 and their sum may overflow.
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    wrong = pointers != ends - lengths.astype(np.int64) * dtype.itemsize
    if wrong.any():
        first = int(np.argmax(wrong))
        start = ends[first] - int(lengths[first]) * dtype.itemsize
        raise DataError(
            f"{path}: sequence {first} starts at byte {pointers[first]}. Sequences must be "
            f"contiguous; this one must start at byte {start}. {PAIR_REMEDY}"
        )
    needed = int(ends[-1]) if len(ends) else 0
    if size != needed:
        raise DataError(
            f"{path.with_suffix('.bin')} has {size} bytes. Its index needs {needed} bytes: "
            f"{needed // dtype.itemsize} tokens of {dtype.itemsize} bytes. {PAIR_REMEDY}"
        )


def _check_borders(path: Path, borders: NDArray[np.int64], sequences: int) -> None:
    """Refuse documents that overlap or omit sequences."""
    if len(borders) == 0 or borders[0] != 0 or borders[-1] != sequences:
        if len(borders):
            ends = f"{borders[0]} to {borders[-1]}"
        else:
            ends = "none"
        raise DataError(
            f"{path}: the document borders are {ends}. They must start at 0 and end at the number "
            f"of sequences, {sequences}. {PAIR_REMEDY}"
        )
    falls = np.diff(borders) < 0
    if falls.any():
        first = int(np.argmax(falls))
        raise DataError(
            f"{path}: document border {first + 1} is {borders[first + 1]} after {borders[first]}. "
            f"Borders must not decrease. {PAIR_REMEDY}"
        )


class IndexedDatasetBuilder:
    """Writes a pair, document by document."""

    def __init__(self, prefix: Path, dtype: str) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self.num_tokens = 0
        self._bin = ChecksumWriter(pair_file(prefix, "bin"))
        self._lengths: list[int] = []
        self._borders = [0]

    @property
    def num_documents(self) -> int:
        """Number of documents so far."""
        return len(self._borders) - 1

    def add_document(self, tokens: NDArray[Any]) -> None:
        """Append a document."""
        self._bin.write(tokens.astype(self.dtype).tobytes())
        whole, rest = divmod(len(tokens), MAX_SEQUENCE_TOKENS)
        # An empty document still has one sequence, of length 0.
        self._lengths += [MAX_SEQUENCE_TOKENS] * whole + [rest] * (rest > 0 or whole == 0)
        self._borders.append(len(self._lengths))
        self.num_tokens += len(tokens)

    def close(self) -> dict[str, FileChecksum]:
        """Write the index; return the checksums of both files by suffix."""
        stamps = {"bin": self._bin.close()}
        lengths = np.array(self._lengths, "<i4")
        sizes = lengths.astype("<i8") * self.dtype.itemsize
        code = next(c for c, name in TOKEN_TYPES.items() if np.dtype(name) == self.dtype)
        with ChecksumWriter(pair_file(self.prefix, "idx")) as index:
            index.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._borders)))
            index.write(lengths.tobytes())
            # Byte pointers: exclusive prefix sums.
            index.write((np.cumsum(sizes) - sizes).astype("<i8").tobytes())
            index.write(np.array(self._borders, "<i8").tobytes())
            stamps["idx"] = index.close()
        return stamps

    def abandon(self) -> None:
        """Close open files without writing an index."""
        self._bin.close()
