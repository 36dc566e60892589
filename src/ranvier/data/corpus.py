"""Corpus: the tokens of a prepared folder, mapped, and the windows a run reads of them.

A part of a corpus (train or held out) is its documents laid one after the other and cut into
windows of `seq` tokens; the last one is filled up. Nothing is left out: over all windows every
token meets its successor in the same document exactly once. Whether a document is held out depends
on its tokens only, so copies never stand on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ranvier.data.chat.template import template_of
from ranvier.data.chat.tokenize import Chat, Learn
from ranvier.data.checksums import size_of
from ranvier.data.indexed_dataset import Pair, part
from ranvier.data.manifest import MASK, NAME, Manifest
from ranvier.data.packing import Chats, Truncate
from ranvier.data.tokenizer import Tokenizer, fingerprint_of, parsed
from ranvier.data.tokenizer_config import CONFIG
from ranvier.data.window import Ints, Window
from ranvier.errors import DataError
from ranvier.nn.cross_entropy import IGNORE
from ranvier.system import safe_files

Part = Literal["train", "held_out"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of a folder as one range of tokens, shard after shard."""

    folder: Path
    manifest: Manifest
    pairs: list[Pair]
    offsets: Ints
    """Where each shard begins, in tokens."""
    starts: Ints
    """Where each document begins."""
    lengths: Ints
    hashes: NDArray[np.uint64]

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """The corpus of a prepared folder; nothing is compared but numbers of documents."""
        folder = Path(folder)
        manifest = Manifest.read(folder)
        pairs, hashes = [], []
        for shard in manifest.shards:
            pair = Pair.open(folder / shard.pair)
            values = _hashes(shard.path(folder, "hash"))
            found = (pair.documents, int(pair.bounds[-1]), len(values))
            if found != (shard.documents, shard.tokens, shard.documents):
                raise DataError(
                    f"{pair.prefix} has {found[0]} documents, {found[1]} tokens and {found[2]} "
                    f"hashes. The manifest of {folder} says {shard.documents} documents and "
                    f"{shard.tokens} tokens. Prepare the corpus again."
                )
            pairs.append(pair)
            hashes.append(values)
        offsets = np.cumsum([0, *(pair.bounds[-1] for pair in pairs)], dtype=np.int64)[:-1]
        empty = [np.zeros(0, np.int64)]
        return cls(
            folder,
            manifest,
            pairs,
            offsets,
            np.concatenate(
                empty + [pair.bounds[:-1] + at for pair, at in zip(pairs, offsets, strict=True)]
            ),
            np.concatenate(empty + [np.diff(pair.bounds) for pair in pairs]),
            np.concatenate([np.zeros(0, np.uint64), *hashes]),
        )

    @property
    def words(self) -> Path | None:
        """The tokenizer.json that made the tokens, None if the tokenizer is unknown."""
        return self.folder / "tokenizer.json" if self.manifest.tokenizer else None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the folder, if it is the one that made the tokens."""
        path, said = self.words, self.manifest
        if path is None:
            return None
        rule = f"{self.folder / NAME} names the tokenizer {said.tokenizer}"
        remedy = "Restore it, or remove the folder and prepare the corpus again."
        try:
            text = safe_files.read_text(path)
            found = fingerprint_of(text)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}. {rule}. {remedy}") from None
        except (ValueError, RecursionError) as error:
            found = f"unknown, {type(error).__name__}: {error}"
        if found != said.tokenizer:
            raise DataError(
                f"{path} is changed or damaged: its fingerprint is {found}. {rule}. {remedy}"
            )
        assert said.end is not None, said
        # As it was when the tokens were made, whatever lies beside it now.
        known = parsed(text, str(path), end=said.end)
        if (known.vocab, known.end) != (said.vocab, said.end):
            raise DataError(
                f"{path} has {known.vocab} ids and the end {known.end}. {rule} with {said.vocab} "
                f"ids and the end {said.end}. {remedy}"
            )
        return known

    @cached_property
    def chat(self) -> Chat | None:
        """The chat template of the folder with its tokenizer; None if it holds texts."""
        if not self.manifest.template or self.tokenizer is None:
            return None
        found = template_of(self.tokenizer, self.folder)
        if found.fingerprint != self.manifest.template:
            raise DataError(
                f"{self.folder / CONFIG} is changed or damaged: its template has the fingerprint "
                f"{found.fingerprint}. {self.folder / NAME} names {self.manifest.template}. "
                "Restore it, or remove the folder and prepare the corpus again."
            )
        return Chat(found, self.tokenizer)

    @cached_property
    def masks(self) -> list[NDArray[np.uint8]]:
        """The masks of the shards of conversations, mapped."""
        return [_mask(s.path(self.folder, MASK), s.tokens) for s in self.manifest.shards]

    def read(self, places: Ints) -> Ints:
        """The tokens at increasing places."""
        return self._gathered([pair.tokens for pair in self.pairs], places)

    def learned(self, places: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """The tokens of conversations at increasing places, and which are to be learnt."""
        return self.read(places), self._gathered(self.masks, places) > 0

    def marked(self, starts: Ints, lengths: Ints, *, learn_all: bool) -> Ints:
        """How many tokens of each of some ranges are to be learnt; none reaches over a shard."""
        if learn_all:
            return lengths
        counts = np.zeros(len(starts), np.int64)
        shards = np.searchsorted(self.offsets, starts, "right") - 1
        for shard in np.unique(shards):
            mine = shards == shard
            sums = np.concatenate(
                [np.zeros(1, np.int64), np.cumsum(self.masks[shard], dtype=np.int64)]
            )
            first = starts[mine] - self.offsets[shard]
            counts[mine] = sums[np.minimum(first + lengths[mine], len(sums) - 1)] - sums[first]
        return counts

    def _gathered(self, shards: Sequence[NDArray[Any]], places: Ints) -> Ints:
        owners = np.searchsorted(self.offsets, places, "right") - 1
        out = np.empty(len(places), np.int64)
        for shard in np.unique(owners):
            mine = owners == shard
            out[mine] = shards[shard][places[mine] - self.offsets[shard]]
        return out

    def chosen(self, held_out: float = 0.0, part: Part = "train") -> Ints:
        """Numbers of the documents of a part that are not empty; held_out: see `stream`."""
        assert 0.0 <= held_out < 1.0, held_out
        there = self.lengths > 0
        aside = there & (self.hashes < np.uint64(int(held_out * 2**64)))
        if np.array_equal(aside, there):
            aside[:] = False
        return np.flatnonzero(aside if part == "held_out" else there & ~aside)

    def stream(
        self,
        seq: int,
        held_out: float = 0.0,
        part: Part = "train",
        *,
        packed: bool = True,
        truncate: Truncate = "right",
        learn: Learn = "answers",
    ) -> Stream | Chats | None:
        """The documents of a part, None if it has none.

        held_out: share of the documents that are; none if nothing were left to train on. truncate,
        learn: of conversations.
        """
        assert seq >= 1, seq
        chosen = self.chosen(held_out, part)
        if len(chosen) == 0:
            return None
        if self.manifest.template:
            options = {"packed": packed, "learn_all": "all" in (learn, self.manifest.learn)}
            chats = Chats(self, chosen, seq, truncate=truncate, **options)
            return chats if chats.windows else None
        lengths = self.lengths[chosen]
        ends = np.cumsum(lengths)
        return Stream(self, seq, packed, ends, self.starts[chosen] - (ends - lengths))

    def check(self, vocab: int) -> None:
        """Refuse tokens that a vocabulary cannot name."""
        if self.manifest.largest < vocab:
            return
        for pair in self.pairs:
            for start in range(0, len(pair.tokens), 1 << 24):
                over = np.flatnonzero(pair.tokens[start : start + (1 << 24)] >= vocab)
                if len(over):
                    raise self._beyond(pair, start + int(over[0]), vocab)

    def _beyond(self, pair: Pair, place: int, vocab: int) -> DataError:
        document = int(np.searchsorted(pair.bounds, place, "right")) - 1
        need = max(self.manifest.largest + 1, self.manifest.vocab)
        return DataError(
            f"{part(pair.prefix, 'bin')}: document {document} has token {pair.tokens[place]} at "
            f"offset {place - pair.bounds[document]}. A vocabulary of {vocab} names tokens below "
            f"{vocab}. Use {need} or more, or the tokenizer of the model."
        )


@dataclass(frozen=True, eq=False)
class Stream:
    """The documents of a part of a corpus, one after the other."""

    corpus: Corpus
    seq: int
    packed: bool
    """Targets, positions and documents keep to a document; else all is one text."""
    ends: Ints
    """Where each document ends in the stream."""
    shifts: Ints
    """What leads from a place in the stream to that in the corpus, for each document."""

    @property
    def documents(self) -> int:
        """Documents that are not empty."""
        return len(self.ends)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.ends[-1])

    @property
    def windows(self) -> int:
        """Windows, the last one filled up."""
        return -(-self.tokens // self.seq)

    def sample(self, number: int) -> Window:
        """The window of this number."""
        return self.window(number)

    def window(self, number: int) -> Window:
        """Tokens `number * seq` and following of the stream."""
        assert 0 <= number < self.windows, (number, self.windows)
        first = number * self.seq
        count = min(self.seq, self.tokens - first)
        # One more than the window holds: the last target may lie in the next one.
        places = np.arange(first, min(first + count + 1, self.tokens))
        low, high = np.searchsorted(self.ends, [places[0], places[-1]], "right")
        owners = low + np.searchsorted(self.ends[low : high + 1], places, "right")
        read = self.corpus.read(places + self.shifts[owners])
        owners = owners[:count]
        tokens = np.zeros(self.seq, np.int64)
        tokens[:count] = read[:count]
        targets = np.full(self.seq, IGNORE, np.int64)
        targets[: len(read) - 1] = read[1:]
        index = np.arange(self.seq)
        if not self.packed:
            return Window(tokens, targets, index, np.zeros(self.seq, np.int64))
        targets[:count][places[:count] == self.ends[owners] - 1] = IGNORE
        documents = np.full(self.seq, owners[-1] - low + 1)
        documents[:count] = owners - low
        begins = np.where(np.diff(documents, prepend=-1) > 0, index, 0)
        return Window(tokens, targets, index - np.maximum.accumulate(begins), documents)


def _hashes(path: Path) -> NDArray[np.uint64]:
    try:
        size_of(path)
        return np.fromfile(path, "<u8")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. It says which documents are held out. "
            "Prepare the corpus again."
        ) from None


def _mask(path: Path, tokens: int) -> NDArray[np.uint8]:
    try:
        if size_of(path) != tokens:
            raise ValueError(f"it has {size_of(path)} bytes for {tokens} tokens")
        return np.memmap(path, np.uint8, "r").view(np.ndarray) if tokens else np.zeros(0, np.uint8)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. It says which tokens are learnt. Prepare the corpus "
            "again."
        ) from None
