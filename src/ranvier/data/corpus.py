"""Corpus: the memory-mapped tokens of a prepared directory, and the windows a run reads from it.

A split of a corpus (train or held out) is its documents concatenated and cut into windows of `seq`
tokens; the last one is padded. Nothing is dropped: over all windows every token predicts its
successor in the same document exactly once. Whether a document is held out depends only on its
tokens, so that duplicates are never in both splits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ranvier.data.batch import Batch, Ints, Window, read_windows
from ranvier.data.chat.template import load_chat_template
from ranvier.data.chat.tokenize import ChatEncoder, LossOn
from ranvier.data.checksums import file_size
from ranvier.data.indexed_dataset import IndexedDataset, pair_file
from ranvier.data.manifest import CORPUS_MANIFEST, MASK_SUFFIX, CorpusManifest
from ranvier.data.packing import ConversationStream, Packing, Truncate
from ranvier.data.tokenizer import Tokenizer, fingerprint_of, parse_tokenizer
from ranvier.data.tokenizer_config import TOKENIZER_CONFIG
from ranvier.errors import DataError
from ranvier.nn.cross_entropy import IGNORE_INDEX
from ranvier.system import safe_files

CorpusSplit = Literal["train", "held_out"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of a directory as one range of tokens, shard after shard."""

    folder: Path
    manifest: CorpusManifest
    indexed_datasets: list[IndexedDataset]
    shard_starts: Ints
    """First token of each shard."""
    document_starts: Ints
    """First token of each document."""
    document_lengths: Ints
    document_hashes: NDArray[np.uint64]

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Open a prepared directory; only the numbers of documents and tokens are verified."""
        folder = Path(folder)
        manifest = CorpusManifest.read_from(folder)
        pairs = []
        hashes = []
        for shard in manifest.shards:
            pair = IndexedDataset.open(folder / shard.pair)
            values = _read_hashes(shard.file_path(folder, "hash"))
            found = (pair.num_documents, int(pair.document_bounds[-1]), len(values))
            if found != (shard.documents, shard.tokens, shard.documents):
                raise DataError(
                    f"{pair.prefix} has {found[0]} documents, {found[1]} tokens and {found[2]} "
                    f"hashes. The manifest of {folder} says {shard.documents} documents and "
                    f"{shard.tokens} tokens. Prepare the corpus again."
                )
            pairs.append(pair)
            hashes.append(values)
        offsets = np.cumsum([0, *(pair.document_bounds[-1] for pair in pairs)], dtype=np.int64)[:-1]
        # np.concatenate needs at least one array: a corpus may have no shard.
        empty = [np.zeros(0, np.int64)]
        return cls(
            folder,
            manifest,
            pairs,
            offsets,
            np.concatenate(
                empty
                + [pair.document_bounds[:-1] + at for pair, at in zip(pairs, offsets, strict=True)]
            ),
            np.concatenate(empty + [np.diff(pair.document_bounds) for pair in pairs]),
            np.concatenate([np.zeros(0, np.uint64), *hashes]),
        )

    @property
    def tokenizer_path(self) -> Path | None:
        """The tokenizer.json of the tokens; None if the tokenizer is unknown."""
        if self.manifest.tokenizer:
            return self.folder / "tokenizer.json"
        return None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the directory, verified to be the one that produced the tokens."""
        path = self.tokenizer_path
        manifest = self.manifest
        if path is None:
            return None
        rule = f"{self.folder / CORPUS_MANIFEST} names the tokenizer {manifest.tokenizer}"
        remedy = "Restore it, or remove the folder and prepare the corpus again."
        try:
            text = safe_files.read_text(path)
            found = fingerprint_of(text)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}. {rule}. {remedy}") from None
        except (ValueError, RecursionError) as error:
            found = f"unknown, {type(error).__name__}: {error}"
        if found != manifest.tokenizer:
            raise DataError(
                f"{path} is changed or damaged: its fingerprint is {found}. {rule}. {remedy}"
            )
        assert manifest.end is not None, manifest
        # The end token from the manifest, not from the tokenizer_config.json, which may have
        # changed since.
        known = parse_tokenizer(text, str(path), end=manifest.end)
        if (known.vocab_size, known.eos_token_id) != (manifest.vocab, manifest.end):
            raise DataError(
                f"{path} has {known.vocab_size} ids and the end token {known.eos_token_id}. {rule} "
                f"with {manifest.vocab} ids and the end token {manifest.end}. {remedy}"
            )
        return known

    @cached_property
    def chat_encoder(self) -> ChatEncoder | None:
        """The chat template with its tokenizer; None if the corpus holds plain text."""
        if not self.manifest.template or self.tokenizer is None:
            return None
        found = load_chat_template(self.tokenizer, self.folder)
        if found.fingerprint != self.manifest.template:
            raise DataError(
                f"{self.folder / TOKENIZER_CONFIG} is changed or damaged: its template has the "
                f"fingerprint {found.fingerprint}. {self.folder / CORPUS_MANIFEST} names "
                f"{self.manifest.template}. Restore it, or remove the folder and prepare the "
                "corpus again."
            )
        return ChatEncoder(found, self.tokenizer)

    @cached_property
    def loss_masks(self) -> list[NDArray[np.uint8]]:
        """The memory-mapped loss masks of the shards of conversations."""
        return [
            _map_mask(s.file_path(self.folder, MASK_SUFFIX), s.tokens) for s in self.manifest.shards
        ]

    def read_tokens(self, places: Ints) -> Ints:
        """The tokens at increasing positions."""
        return self._gather_places([pair.tokens for pair in self.indexed_datasets], places)

    def read_with_mask(self, places: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """The tokens of conversations at increasing positions, and which are learned."""
        return self.read_tokens(places), self._gather_places(self.loss_masks, places) > 0

    def count_learned(self, starts: Ints, lengths: Ints, *, learn_all: bool) -> Ints:
        """Number of learned tokens in each range; a range must not cross a shard."""
        if learn_all:
            return lengths
        counts = np.zeros(len(starts), np.int64)
        shards = np.searchsorted(self.shard_starts, starts, "right") - 1
        for shard in np.unique(shards):
            mine = shards == shard
            # Prefix sums: the count of a range is a difference of two of them.
            sums = np.concatenate(
                [np.zeros(1, np.int64), np.cumsum(self.loss_masks[shard], dtype=np.int64)]
            )
            first = starts[mine] - self.shard_starts[shard]
            counts[mine] = sums[np.minimum(first + lengths[mine], len(sums) - 1)] - sums[first]
        return counts

    def _gather_places(self, shards: Sequence[NDArray[Any]], places: Ints) -> Ints:
        owners = np.searchsorted(self.shard_starts, places, "right") - 1
        out = np.empty(len(places), np.int64)
        for shard in np.unique(owners):
            mine = owners == shard
            out[mine] = shards[shard][places[mine] - self.shard_starts[shard]]
        return out

    def select_documents(self, held_out: float = 0.0, part: CorpusSplit = "train") -> Ints:
        """Indices of the non-empty documents of a split; held_out: see `open_stream`."""
        assert 0.0 <= held_out < 1.0, held_out
        there = self.document_lengths > 0
        # Hashes are uniform in 64 bits: documents with a hash below the fraction are held out,
        # independent of their order and of other documents.
        aside = there & (self.document_hashes < np.uint64(int(held_out * 2**64)))
        # Never hold out everything: a tiny corpus is used for training instead.
        if np.array_equal(aside, there):
            aside[:] = False
        return np.flatnonzero(aside if part == "held_out" else there & ~aside)

    def open_stream(
        self,
        seq: int,
        held_out: float = 0.0,
        part: CorpusSplit = "train",
        *,
        packed: bool = True,
        truncate: Truncate = "right",
        loss_on: LossOn = "assistant",
        packing: Packing = "full",
    ) -> DocumentStream | ConversationStream | None:
        """The documents of a split; None if it has none.

        held_out: fraction of documents that are held out; zero if nothing would be left to train
        on. truncate, loss_on, packing: for conversations.
        """
        assert seq >= 1, seq
        chosen = self.select_documents(held_out, part)
        if len(chosen) == 0:
            return None
        if self.manifest.template:
            # A corpus prepared with loss_on=all has no mask of answers.
            options = {"packed": packed, "learn_all": "all" in (loss_on, self.manifest.learn)}
            chats = ConversationStream(
                self, chosen, seq, truncate=truncate, packing=packing, **options
            )
            if chats.num_windows:
                return chats
            return None
        lengths = self.document_lengths[chosen]
        ends = np.cumsum(lengths)
        # Offset of a document: its place in the corpus minus its place in the stream.
        return DocumentStream(
            self, seq, packed, ends, self.document_starts[chosen] - (ends - lengths)
        )

    def check_vocab(self, vocab: int) -> None:
        """Refuse tokens outside of a model's vocabulary."""
        if self.manifest.largest < vocab:
            return
        for pair in self.indexed_datasets:
            # Scan in slices to bound the memory; this only runs to report an error.
            for start in range(0, len(pair.tokens), 1 << 24):
                over = np.flatnonzero(pair.tokens[start : start + (1 << 24)] >= vocab)
                if len(over):
                    raise self._vocab_error(pair, start + int(over[0]), vocab)

    def _vocab_error(self, pair: IndexedDataset, place: int, vocab: int) -> DataError:
        document = int(np.searchsorted(pair.document_bounds, place, "right")) - 1
        need = max(self.manifest.largest + 1, self.manifest.vocab)
        return DataError(
            f"{pair_file(pair.prefix, 'bin')}: document {document} has token {pair.tokens[place]} "
            f"at offset {place - pair.document_bounds[document]}. A vocabulary of {vocab} has "
            f"tokens below {vocab}. Use model.vocab={need} or more, or the tokenizer of the model."
        )


@dataclass(frozen=True, eq=False)
class DocumentStream:
    """The documents of a split, concatenated."""

    corpus: Corpus
    seq: int
    document_mask: bool
    """Whether targets, positions and attention stay within a document."""
    document_ends: Ints
    """End of each document in the stream."""
    corpus_offsets: Ints
    """Difference between a position in the corpus and in the stream, per document."""

    @property
    def num_documents(self) -> int:
        """Number of non-empty documents."""
        return len(self.document_ends)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self.document_ends[-1])

    @property
    def num_windows(self) -> int:
        """Number of windows; the last one is padded."""
        return -(-self.num_tokens // self.seq)

    def read_sample(self, number: int) -> Window:
        """The window with this number."""
        return self.read_window(number)

    def read_batch(self, numbers: Sequence[int], end: int | None = None) -> Batch:
        """The windows with these numbers; windows from `end` on have no targets."""
        return read_windows(self, numbers, end)

    def window_lengths(self, number: int) -> tuple[int, ...]:
        """Number of tokens of each document of a window, from the index; padding is a document."""
        if not self.document_mask:
            return (self.seq,)
        first = number * self.seq
        last = min(first + self.seq, self.num_tokens)
        low, high = np.searchsorted(self.document_ends, [first, last], "right")
        ends = self.document_ends[low:high]
        cuts = np.unique(np.array([first, *ends[ends < last], last, first + self.seq]))
        return tuple(np.diff(cuts).tolist())

    def window_padding(self, number: int) -> int:
        """Number of tokens of padding of a window."""
        return max((number + 1) * self.seq - self.num_tokens, 0)

    def read_window(self, number: int) -> Window:
        """The window of tokens from `number * seq` on."""
        assert 0 <= number < self.num_windows, (number, self.num_windows)
        first = number * self.seq
        count = min(self.seq, self.num_tokens - first)
        # One more token than the window holds: it is the last target.
        places = np.arange(first, min(first + count + 1, self.num_tokens))
        # Search the few documents of this window only, not the whole list per token.
        low, high = np.searchsorted(self.document_ends, [places[0], places[-1]], "right")
        owners = low + np.searchsorted(self.document_ends[low : high + 1], places, "right")
        read = self.corpus.read_tokens(places + self.corpus_offsets[owners])
        owners = owners[:count]
        tokens = np.zeros(self.seq, np.int64)
        tokens[:count] = read[:count]
        targets = np.full(self.seq, IGNORE_INDEX, np.int64)
        targets[: len(read) - 1] = read[1:]
        index = np.arange(self.seq)
        # Padding is a separate document, so that nothing attends to it.
        documents = np.full(self.seq, owners[-1] - low + 1)
        documents[:count] = owners - low
        if not self.document_mask:
            return Window(tokens, targets, index, documents)
        # The last token of a document has no target.
        targets[:count][places[:count] == self.document_ends[owners] - 1] = IGNORE_INDEX
        # Positions restart at 0 with each document.
        begins = np.where(np.diff(documents, prepend=-1) > 0, index, 0)
        return Window(tokens, targets, index - np.maximum.accumulate(begins), documents)


def _read_hashes(path: Path) -> NDArray[np.uint64]:
    try:
        file_size(path)
        return np.fromfile(path, "<u8")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. It defines which documents are held out. "
            "Prepare the corpus again."
        ) from None


def _map_mask(path: Path, tokens: int) -> NDArray[np.uint8]:
    try:
        if file_size(path) != tokens:
            raise ValueError(f"it has {file_size(path)} bytes for {tokens} tokens")
        if tokens:
            return np.memmap(path, np.uint8, "r").view(np.ndarray)
        return np.zeros(0, np.uint8)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. It marks the tokens that are learned. Prepare the "
            "corpus again."
        ) from None


def count_document_lengths(folders: Iterable[str | Path]) -> Counter[int]:
    """Counts the documents of each length in prepared directories; samples have no empty ones."""
    found: Counter[int] = Counter()
    for folder in folders:
        every = Corpus.open(folder).document_lengths
        lengths, counts = np.unique(every[every > 0], return_counts=True)
        found.update(dict(zip(lengths.tolist(), counts.tolist(), strict=True)))
    return found
