"""Manifest: what a prepared corpus is, in `corpus.json` beside its shards.

It is written last, so a folder that holds one is whole. A shard is a Megatron pair and the hashes
of its documents (u64, little-endian). Pairs of others stay where they are: only hashes and manifest
are made for them, and the manifest names the pair by its absolute path.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from ranvier.data.files import Stamp, stamp_of
from ranvier.data.pairs import part
from ranvier.errors import DataError

NAME = "corpus.json"
FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """A pair, its hashes, and their stamps by suffix."""

    pair: str
    """Prefix of .bin and .idx: in the folder, or absolute."""
    hash: str
    """Prefix of .hash, in the folder."""
    documents: int
    tokens: int
    files: dict[str, Stamp]

    def path(self, folder: Path, suffix: str) -> Path:
        """One of the three files."""
        return part(folder / (self.hash if suffix == "hash" else self.pair), suffix)


@dataclass(frozen=True)
class Manifest:
    """A corpus."""

    source: str
    """What it was made from, for people."""
    fingerprint: str
    """Digest of the tokenizer's fingerprint and of length and hash of every document, in order."""
    tokenizer: str
    """Fingerprint of the tokenizer, empty if it is unknown."""
    vocab: int
    """Ids of the tokenizer; if it is unknown, the largest token and one."""
    end: int | None
    """Token that ends a document, None if it is unknown."""
    documents: int
    tokens: int
    largest: int
    """The largest token."""
    shards: list[Shard]
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write corpus.json."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder."""
        path = folder / NAME
        remedy = "Prepare the corpus again."
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise DataError(
                    f"{path} has format {content['format']}. This version reads format {FORMAT}. "
                    f"{remedy}"
                )
            shards = [
                Shard(**one | {"files": {k: Stamp(**v) for k, v in one["files"].items()}})
                for one in content["shards"]
            ]
            made = cls(**content | {"shards": shards})
            _check_types(made)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}. A prepared corpus holds it. {remedy}"
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path} is broken: {type(error).__name__}: {error}. It describes the shards "
                f"beside it. {remedy}"
            ) from None
        return made

    def check(self, folder: Path, *, verify: bool) -> None:
        """Refuse missing files and wrong sizes; with `verify` also other contents."""
        for shard in self.shards:
            for suffix, stamp in shard.files.items():
                _check(shard.path(folder, suffix), stamp, folder, verify)


def _check_types(made: Manifest) -> None:
    for thing in (made, *made.shards):
        for name in ("documents", "tokens", "vocab", "largest"):
            value = getattr(thing, name, 0)
            if not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}, not a number")


def _check(path: Path, stamp: Stamp, folder: Path, verify: bool) -> None:
    try:
        size = path.stat().st_size
        digest = stamp_of(path).digest if verify and size == stamp.size else stamp.digest
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. {folder / NAME} names it as a part of the "
            "corpus. Restore it, or remove the folder and prepare the corpus again."
        ) from None
    shown = f", digest {digest}" if verify and size == stamp.size else ""
    if (size, digest) != (stamp.size, stamp.digest):
        raise DataError(
            f"{path} is changed or damaged: {size} bytes{shown}. {folder / NAME} says "
            f"{stamp.size} bytes, digest {stamp.digest}. Restore it, or remove the folder and "
            "prepare the corpus again."
        )
