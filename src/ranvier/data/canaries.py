"""Canaries: documents that a run reads a known number of times, to measure what it memorizes.

A file has one JSON object per line: a text, how many times a run reads it, and its bucket, the
group in which results are reported (bucket 0 is never read and is the control). Each time, a canary
replaces the beginning of one sample as a document of its own. Which sample is a function of
(seed, number of the sample): a pseudo-random permutation of the first samples of the run maps each
sample to a read of a canary, or to none, so that every read happens once, on any grid and after any
resume. All other tokens of the run are the same as without canaries.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.counter_rng import random_key
from ranvier.data.batch import Ints
from ranvier.data.checksums import digest_of
from ranvier.data.mixture import permute_index
from ranvier.data.sources import DocumentReader
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import DataError

MAX_TIMES = 10**9


@dataclass(frozen=True)
class Canary:
    """A line of a canary file."""

    text: str
    times: int
    bucket: str


def read_canaries(path: Path) -> list[Canary]:
    """The canaries of a file; raises if a line is invalid, or a text or a bucket is ambiguous."""
    rule = "Each line of a file of canaries is a JSON object with text, times and bucket."
    remedy = "Write one with `ranvier data canaries`."
    if not os.path.isfile(path):
        raise DataError(f"{path} is not a file. {rule} {remedy}")
    reader = DocumentReader(path)
    if not reader.is_tabular:
        raise DataError(f"{path} is not a .jsonl file. {rule} {remedy}")
    found = list[Canary]()
    places = dict[str, str]()
    buckets = dict[str, tuple[int, str]]()
    for record, where in reader.read_records():
        canary = _parse_canary(record, where)
        if canary.text in places:
            raise DataError(
                f"{where} has the same text as {places[canary.text]}. Each canary has one number "
                "of times. Remove one of them."
            )
        places[canary.text] = where
        times, first = buckets.setdefault(canary.bucket, (canary.times, where))
        if times != canary.times:
            raise DataError(
                f"The bucket {canary.bucket!r} is there twice: with times={times} ({first}) and "
                f"with times={canary.times} ({where}). All canaries of a bucket are read equally "
                "often. Use another bucket for one of them."
            )
        found.append(canary)
    return found


def _parse_canary(record: dict[str, Any], where: str) -> Canary:
    text = record.get("text")
    times = record.get("times")
    if not isinstance(text, str) or not text:
        raise DataError(
            f"{where} has text={text!r:.80}. A canary must have a text. Add it, or remove the line."
        )
    if type(times) is not int or not 0 <= times <= MAX_TIMES:
        raise DataError(
            f"{where} has times={times!r:.80}. It is how often the run reads the text, from 0 to "
            f"{MAX_TIMES:,}. Use a number such as 50."
        )
    bucket = record.get("bucket", times)
    name = str(bucket)
    if type(bucket) not in (int, str) or not name.isprintable() or not name.strip():
        raise DataError(
            f"{where} has bucket={bucket!r:.80}. It must be a name or an integer. Use the number "
            "of times."
        )
    return Canary(text, times, name)


@dataclass(frozen=True, eq=False)
class CanaryDocuments:
    """The tokens of canaries, with what is needed to place and to evaluate them."""

    documents: tuple[Ints, ...]
    """Tokens of each canary with its end token."""
    times: tuple[int, ...]
    buckets: tuple[str, ...]
    zlib_bytes: tuple[int, ...]
    """Bytes of each text as compressed by zlib."""

    @classmethod
    def tokenize(cls, canaries: Sequence[Canary], tokenizer: Tokenizer) -> CanaryDocuments:
        """Tokenizes canaries as documents of a corpus."""
        encoded = tokenizer.encode([canary.text for canary in canaries])
        end = tokenizer.eos_token_id
        return cls(
            tuple(np.append(tokens.astype(np.int64), end) for tokens in encoded),
            tuple(canary.times for canary in canaries),
            tuple(canary.bucket for canary in canaries),
            tuple(zlib_length(canary.text) for canary in canaries),
        )

    @classmethod
    def load(cls, path: Path) -> CanaryDocuments:
        """Reads what `save` has written."""
        with np.load(path, allow_pickle=False) as stored:
            documents = np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1])
            return cls(
                tuple(documents),
                tuple(stored["times"].tolist()),
                tuple(stored["buckets"].tolist()),
                tuple(stored["zlib_bytes"].tolist()),
            )

    def save(self, path: Path) -> None:
        """Writes a file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{os.getpid()}-{path.name}")
        np.savez(
            temporary,
            tokens=np.concatenate(self.documents),
            lengths=np.array([len(one) for one in self.documents]),
            times=np.array(self.times),
            buckets=np.array(self.buckets),
            zlib_bytes=np.array(self.zlib_bytes),
        )
        os.replace(temporary, path)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of tokens, times and buckets."""
        parts = [one.astype("<i8").tobytes() for one in self.documents]
        return digest_of(*parts, repr(self.times), repr(self.buckets))

    @property
    def num_reads(self) -> int:
        """How often a run reads a canary in all."""
        return sum(self.times)

    @cached_property
    def bucket_times(self) -> dict[str, int]:
        """How often the canaries of each bucket are read, in ascending order."""
        pairs = dict(zip(self.buckets, self.times, strict=True))
        return dict(sorted(pairs.items(), key=lambda pair: (pair[1], pair[0])))

    def check_lengths(self, seq: int) -> None:
        """Raises if a canary does not fit into a sample."""
        for number, tokens in enumerate(self.documents):
            if len(tokens) > seq:
                raise DataError(
                    f"Canary {number + 1} of {len(self.documents)} (bucket "
                    f"{self.buckets[number]!r}) has {len(tokens)} tokens with its end token, but "
                    f"data.seq_len={seq}. A canary must fit into one sample. Use data.seq_len="
                    f"{max(map(len, self.documents))} or more, or shorter texts."
                )

    def split_suffixes(self, suffix: int, prefix: int = 0) -> Iterator[tuple[Ints, Ints]]:
        """Yields of each canary, without its end token, the tokens to begin with and its last ones.

        suffix: number of last tokens. prefix: number of tokens before them; 0 means all.
        """
        for number, tokens in enumerate(self.documents):
            text = tokens[:-1]
            if len(text) <= suffix:
                most = min(map(len, self.documents)) - 2
                remedy = f"Use a suffix of {most} or less" if most > 0 else "Use longer texts"
                raise DataError(
                    f"Canary {number + 1} of {len(self.documents)} has {len(text)} tokens, but "
                    f"the suffix has {suffix}. At least one token must be before it. {remedy}."
                )
            yield text[:-suffix][-prefix:], text[-suffix:]


def random_canaries(
    vocab: int, seq: int, reads: int, drawn: np.random.Generator
) -> CanaryDocuments:
    """Canaries of random tokens in two buckets, with at most `reads` reads in all."""
    times = (reads // 4, reads // 4, 0)
    lengths = (seq, max(seq // 2, 2), max(seq // 2, 2))
    documents = tuple(drawn.integers(0, vocab, length) for length in lengths)
    return CanaryDocuments(documents, times, tuple(map(str, times)), (1,) * len(times))


def zlib_length(text: str) -> int:
    """Bytes of a text as compressed by zlib."""
    return len(zlib.compress(text.encode("utf-8", "replace")))


@dataclass(frozen=True, eq=False)
class CanaryPlacement:
    """Which samples of a run begin with a canary: those that a permutation of the first
    `num_samples` samples maps below the number of reads."""

    canaries: CanaryDocuments
    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        reads = self.canaries.num_reads
        if reads > self.num_samples:
            raise DataError(
                f"The canaries are read {reads:,} times in all, but data.canary_samples="
                f"{self.num_samples:,} samples of the run are for them. A sample has at most one "
                f"canary. Use fewer or rarer canaries, or a longer run: data.canary_samples, which "
                f"is train.steps · plan.global_batch if not set, must be at least {reads:,}."
            )

    @cached_property
    def _read_ends(self) -> Ints:
        """Number of reads of all canaries up to each one."""
        return np.cumsum(self.canaries.times)

    def find_tokens(self, number: int) -> Ints | None:
        """The canary at the beginning of a sample of the run; None if there is none."""
        if number >= self.num_samples or self.canaries.num_reads == 0:
            return None
        key = random_key(self.seed, "canaries")
        read = permute_index(number, self.num_samples, key)
        if read >= self.canaries.num_reads:
            return None
        return self.canaries.documents[int(np.searchsorted(self._read_ends, read, "right"))]

    @property
    def fingerprint(self) -> str:
        """Digest of the canaries and of the samples in which they may be."""
        return digest_of(self.canaries.fingerprint, str(self.num_samples))

    @property
    def summary_line(self) -> str:
        """The canaries as text."""
        buckets = ", ".join(self.canaries.bucket_times)
        return (
            f"canaries: {len(self.canaries.documents):,} documents in buckets {buckets}, read "
            f"{self.canaries.num_reads:,} times in the first {self.num_samples:,} samples"
        )
