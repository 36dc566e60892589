"""Corpus manifest: the description of a prepared corpus in `corpus.json`, next to its shards.

It is written last, so that a directory with a manifest is complete. A shard is a Megatron pair and
the hashes of its documents (u64, little-endian); for conversations also a mask, one byte per token:
1 if it is learned. Existing pairs stay in place: only hashes and manifest are written for them, and
the manifest refers to the pair by its absolute path.

Format 2 has a digest over all other fields, as canonical JSON, so that no value changes unnoticed.
Format 1 is the same without the digest and is still read: only its `tokens` and `documents` are
compared with the shards.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranvier.data.checksums import FileChecksum, digest_of, file_checksum, file_size
from ranvier.data.indexed_dataset import pair_file
from ranvier.errors import DataError

CORPUS_MANIFEST = "corpus.json"
SHARD_SUFFIXES = ("bin", "idx", "hash")
"""Suffixes of the files of a shard."""
MASK_SUFFIX = "mask"
"""Suffix of the loss mask of a shard of conversations."""
TOKEN_LIMIT = 2**31
"""Tokens are below this limit."""
CORPUS_FORMAT = 2
FIRST_CORPUS_FORMAT = 1
"""The format without a digest; also part of cache keys, as its tokens are the same."""
LEARN_VALUES = {"assistant": "answers", "all": "all"}
"""`data.loss_on` -> what the manifest of a prepared corpus calls it."""


@dataclass(frozen=True)
class CorpusShard:
    """A pair, its hashes, and the checksums of its files by suffix."""

    pair: str
    """Prefix of .bin and .idx: relative to the directory, or absolute."""
    hash: str
    """Prefix of .hash, relative to the directory."""
    documents: int
    tokens: int
    files: dict[str, FileChecksum]

    def file_path(self, folder: Path, suffix: str) -> Path:
        """Path of one of its files."""
        return pair_file(
            folder / (self.hash if suffix in ("hash", MASK_SUFFIX) else self.pair), suffix
        )


@dataclass(frozen=True)
class CorpusManifest:
    """Description of a corpus."""

    source: str
    """What it was made from, as text for users."""
    fingerprint: str
    """Digest of the tokenizer's fingerprint and of length and hash of every document, in order."""
    tokenizer: str
    """Fingerprint of the tokenizer; empty if it is unknown."""
    vocab: int
    """Vocabulary size of the tokenizer; if it is unknown, the largest token plus 1."""
    end: int | None
    """End-of-document token; None if it is unknown."""
    documents: int
    tokens: int
    largest: int
    """The largest token id."""
    shards: list[CorpusShard]
    format: int = CORPUS_FORMAT
    template: str = ""
    """Fingerprint of the chat template; empty if the documents are plain text."""
    learn: str = "all"
    """What the masks of conversations mark; one of the values of `LEARN_VALUES`."""

    def write_to(self, folder: Path) -> None:
        """Write corpus.json."""
        fields = dataclasses.asdict(self)
        text = json.dumps({**fields, "digest": manifest_digest(fields)}, indent=1)
        (folder / CORPUS_MANIFEST).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read_from(cls, folder: Path) -> CorpusManifest:
        """Read and validate the manifest of a directory."""
        path = folder / CORPUS_MANIFEST
        remedy = "Prepare the corpus again."
        try:
            # Raises for anything but a regular file, before it is opened.
            file_size(path)
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["format"]
            if type(version) is not int or version not in (FIRST_CORPUS_FORMAT, CORPUS_FORMAT):
                raise DataError(
                    f"{path} has format {version!r:.80}. This version of Ranvier reads formats "
                    f"{FIRST_CORPUS_FORMAT} and {CORPUS_FORMAT}. {remedy}"
                )
            if version == CORPUS_FORMAT:
                # Removed from the content, as it covers all other fields.
                digest = _check_text(content.pop("digest"), "digest")
            else:
                digest = None
            shards = [
                CorpusShard(
                    **one | {"files": {k: FileChecksum(**v) for k, v in one["files"].items()}}
                )
                for one in _check_type(content["shards"], list, "shards")
            ]
            # An unknown or missing field raises TypeError here and is reported as a broken
            # manifest.
            made = cls(**content | {"shards": shards})
            for number, shard in enumerate(shards):
                _check_shard(shard, f"shard {number}: ", masked=bool(made.template))
            _check_numbers(made)
            if digest is not None and digest != manifest_digest(content):
                raise ValueError("its digest does not match: a field was changed")
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}. A prepared corpus must have it. Pass "
                "the output of `ranvier data prepare`."
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path} is broken: {type(error).__name__}: {error}. It describes the shards next "
                f"to it. {remedy}"
            ) from None
        return made

    def check_files(self, folder: Path, *, verify: bool) -> None:
        """Refuse missing files and wrong sizes; with `verify` also changed contents."""
        for shard in self.shards:
            for suffix, stamp in shard.files.items():
                _check_file(shard.file_path(folder, suffix), stamp, folder, verify)


def manifest_digest(fields: Mapping[str, Any]) -> str:
    """Digest of all fields of a manifest except the digest itself, independent of their layout."""
    return digest_of(json.dumps(fields, sort_keys=True, separators=(",", ":")))


def _check_type(value: Any, kind: type, name: str) -> Any:
    # Not isinstance: a bool must not pass as a number.
    if type(value) is not kind:
        raise TypeError(f"{name} is {value!r:.80}, not a {kind.__name__}")
    return value


def _check_count(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{name} is {value!r:.80}, not an integer of at least 0")
    return value


def _check_text(value: Any, name: str) -> str:
    """A string that can be printed and, apart from NUL, used as a file name."""
    # Raises for lone surrogates.
    os.fsencode(_check_type(value, str, name))
    return str(value)


def _check_shard(shard: CorpusShard, at: str, *, masked: bool) -> None:
    _check_count(shard.documents, at + "documents")
    _check_count(shard.tokens, at + "tokens")
    for name, prefix in (("pair", shard.pair), ("hash", shard.hash)):
        if "\0" in _check_text(prefix, at + name) or not Path(prefix).name:
            raise ValueError(f"{at}{name} is {prefix!r:.80}, not the prefix of a file")
    files = (*SHARD_SUFFIXES, MASK_SUFFIX) if masked else SHARD_SUFFIXES
    if set(shard.files) != set(files):
        raise ValueError(f"{at}files has {sorted(shard.files)}, not {', '.join(files)}")
    for suffix, stamp in shard.files.items():
        _check_count(stamp.size, f"{at}size of {suffix}")
        _check_text(stamp.digest, f"{at}digest of {suffix}")


def _check_numbers(made: CorpusManifest) -> None:
    """Refuse impossible values; the shards are already checked."""
    for name in ("source", "fingerprint", "tokenizer", "template"):
        _check_text(getattr(made, name), name)
    for name in ("format", "vocab", "largest", "documents", "tokens"):
        _check_count(getattr(made, name), name)
    for name in ("documents", "tokens"):
        value = getattr(made, name)
        total = sum(getattr(shard, name) for shard in made.shards)
        if value != total:
            raise ValueError(f"{name} is {value}, but its shards have {total}")
    if made.learn not in LEARN_VALUES.values():
        raise ValueError(f"learn is {made.learn!r:.80}, not answers or all")
    if not made.fingerprint:
        raise ValueError("fingerprint is empty")
    if not made.largest < made.vocab <= TOKEN_LIMIT:
        raise ValueError(
            f"vocab is {made.vocab}, but must be above largest={made.largest} and at most 2^31"
        )
    # The end token is known if and only if the tokenizer is.
    if (made.end is None) == bool(made.tokenizer):
        raise ValueError(f"end is {made.end!r:.80}, but tokenizer is {made.tokenizer!r:.80}")
    if made.end is not None and _check_count(made.end, "end") >= made.vocab:
        raise ValueError(f"end is {made.end}, but must be below vocab={made.vocab}")


def _check_file(path: Path, stamp: FileChecksum, folder: Path, verify: bool) -> None:
    try:
        size = file_size(path)
        # Hashing is slow: it is skipped if the size alone shows a difference.
        if verify and size == stamp.size:
            digest = file_checksum(path).digest
        else:
            digest = stamp.digest
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. {folder / CORPUS_MANIFEST} names it as "
            "a part of the corpus. Restore it, or remove the folder and prepare the corpus again."
        ) from None
    if verify and size == stamp.size:
        shown = f", digest {digest}"
    else:
        shown = ""
    if (size, digest) != (stamp.size, stamp.digest):
        raise DataError(
            f"{path} is changed or damaged: it has {size} bytes{shown}. {folder / CORPUS_MANIFEST} "
            f"expects {stamp.size} bytes, digest {stamp.digest}. Restore it, or remove the folder "
            "and prepare the corpus again."
        )
