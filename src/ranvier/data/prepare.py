"""Tokenizes documents once, into a directory that is either complete or absent.

Everything is written to a hidden directory next to the target and renamed at the end. The
fingerprint covers the tokens of every document and the tokenizer, not the division into shards.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranvier.data.chat.conversation import parse_conversation
from ranvier.data.chat.tokenize import ChatEncoder, LossOn
from ranvier.data.checksums import DIGEST_BYTES, ChecksumWriter
from ranvier.data.indexed_dataset import IndexedDatasetBuilder, pair_file
from ranvier.data.manifest import (
    CORPUS_MANIFEST,
    LEARN_VALUES,
    MASK_SUFFIX,
    CorpusManifest,
    CorpusShard,
)
from ranvier.data.sources import DocumentReader
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import DataError, PlanError

PrepareProgress = Callable[[int, int, int, int], None]
"""Called with bytes done, total bytes, documents and tokens so far."""
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 1 << 20
SHARD_TOKENS = 1 << 28


def document_hash(tokens: NDArray[Any]) -> int:
    """64-bit hash of a document's tokens, independent of their dtype."""
    # One fixed width and byte order: the hash must not depend on how tokens are stored.
    raw = tokens.astype("<u4").tobytes()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


class CorpusTally:
    """Running totals and fingerprint of the documents so far."""

    def __init__(self, tokenizer: str) -> None:
        self.num_documents = self.num_tokens = 0
        self.largest_token = -1
        self._state = hashlib.blake2b(tokenizer.encode(), digest_size=DIGEST_BYTES)

    def add_document(self, tokens: NDArray[Any], mask: NDArray[np.bool_] | None = None) -> int:
        """Count a document; return its hash."""
        value = document_hash(tokens)
        if mask is not None:
            self._state.update(np.packbits(mask).tobytes())
        self.num_documents += 1
        self.num_tokens += len(tokens)
        if len(tokens):
            self.largest_token = max(self.largest_token, int(tokens.max()))
        # Length and hash of each document: the fingerprint does not depend on the shards.
        self._state.update(len(tokens).to_bytes(8, "little") + value.to_bytes(8, "little"))
        return value

    @property
    def fingerprint(self) -> str:
        """Digest of the documents so far."""
        return self._state.hexdigest()


class ShardWriter:
    """Writes the shards of a corpus."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int) -> None:
        self.folder = folder
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.finished_shards: list[CorpusShard] = []
        self._builder: IndexedDatasetBuilder | None = None
        self._hashes: list[int] = []
        self._masks: ChecksumWriter | None = None

    def add_document(
        self, tokens: NDArray[Any], value: int, mask: NDArray[np.bool_] | None = None
    ) -> None:
        """Append a document; if the shard would become too large, start a new one."""
        if self._builder is not None and self._builder.num_tokens + len(tokens) > self.shard_tokens:
            self.close()
        if self._builder is None:
            self._builder = IndexedDatasetBuilder(
                self.folder / f"shard-{len(self.finished_shards):05}", self.dtype
            )
        self._builder.add_document(tokens)
        self._hashes.append(value)
        if mask is not None:
            if self._masks is None:
                self._masks = ChecksumWriter(pair_file(self._builder.prefix, MASK_SUFFIX))
            self._masks.write(mask.astype(np.uint8).tobytes())

    def close(self) -> None:
        """Finish the current shard."""
        if self._builder is None:
            return
        # Cleared first, so that `abandon` does not close the files again after an error.
        pair = self._builder
        self._builder = None
        name = pair.prefix.name
        stamps = pair.close()
        with ChecksumWriter(pair_file(pair.prefix, "hash")) as file:
            file.write(np.array(self._hashes, "<u8").tobytes())
            stamps["hash"] = file.close()
        self._hashes = []
        if self._masks is not None:
            stamps[MASK_SUFFIX] = self._masks.close()
            self._masks = None
        self.finished_shards.append(
            CorpusShard(name, name, pair.num_documents, pair.num_tokens, stamps)
        )

    def abandon(self) -> None:
        """Close the files of an unfinished shard."""
        if self._builder is not None:
            self._builder.abandon()
        if self._masks is not None:
            self._masks.close()


def prepare_corpus(
    inputs: Sequence[str | Path],
    out: str | Path,
    tokenizer: Tokenizer,
    *,
    chat: ChatEncoder | None = None,
    loss_on: LossOn = "assistant",
    field: str = "text",
    max_bytes: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: PrepareProgress | None = None,
) -> CorpusManifest:
    """Tokenize files, directories or "stdlib" into a corpus directory; return its manifest.

    chat: for conversations; the tokens that `loss_on` names are marked. max_bytes: how much of
    "stdlib" is read. An `out` that already has the same corpus is left alone.
    """
    if not inputs:
        raise PlanError(
            "`ranvier data prepare` was given no input. It needs at least one file or folder. Pass "
            "one."
        )
    if shard_tokens < 1:
        raise PlanError(
            f"shard_tokens={shard_tokens} is too small. It must be at least 1. Leave it out to use "
            f"{SHARD_TOKENS}."
        )
    out = Path(out)
    # Checked before hours of tokenization, not only at the final rename.
    refuse_other_content(out)
    readers = [DocumentReader(path, field=field, max_bytes=max_bytes) for path in inputs]

    def write(shards: ShardWriter, tally: CorpusTally) -> None:
        if chat is None:
            made_of = _tokenize_texts
        else:
            made_of = partial(_tokenize_conversations, chat=chat, loss_on=loss_on)
        _write_documents(readers, made_of(readers, tokenizer), shards, tally, progress)

    source = ", ".join(reader.name for reader in readers)
    return _write_corpus(
        out, tokenizer, source, write, chat=chat, loss_on=loss_on, shard_tokens=shard_tokens
    )


def write_token_documents(
    documents: Iterable[NDArray[Any]],
    out: Path,
    tokenizer: Tokenizer,
    *,
    source: str,
    progress: Callable[[int, int], None],
) -> CorpusManifest:
    """Write documents that are tokens already, each with its end token; return the manifest.

    source: where they come from. progress: called with documents and tokens so far.
    """
    refuse_other_content(out)

    def write(shards: ShardWriter, tally: CorpusTally) -> None:
        for tokens in documents:
            shards.add_document(tokens, tally.add_document(tokens))
            progress(tally.num_documents, tally.num_tokens)

    return _write_corpus(out, tokenizer, source, write)


def _write_corpus(
    out: Path,
    tokenizer: Tokenizer,
    source: str,
    write: Callable[[ShardWriter, CorpusTally], None],
    *,
    chat: ChatEncoder | None = None,
    loss_on: LossOn = "assistant",
    shard_tokens: int = SHARD_TOKENS,
) -> CorpusManifest:
    """Write a corpus directory with the documents that `write` adds to its shards."""
    with assemble_folder(out) as folder:
        # Two bytes per token if all ids fit.
        shards = ShardWriter(
            folder, "<u2" if tokenizer.vocab_size <= 65536 else "<i4", shard_tokens
        )
        tally = CorpusTally(tokenizer.fingerprint)
        try:
            write(shards, tally)
            shards.close()
        finally:
            shards.abandon()
        tokenizer.save(folder / "tokenizer.json")
        if chat is not None:
            chat.template.save(folder)
        made = CorpusManifest(
            source=source,
            fingerprint=tally.fingerprint,
            tokenizer=tokenizer.fingerprint,
            vocab=tokenizer.vocab_size,
            end=tokenizer.eos_token_id,
            documents=tally.num_documents,
            tokens=tally.num_tokens,
            largest=tally.largest_token,
            shards=shards.finished_shards,
            template="" if chat is None else chat.template.fingerprint,
            learn="all" if chat is None else LEARN_VALUES[loss_on],
        )
        # Last: a directory with a manifest is complete.
        made.write_to(folder)
        return publish_corpus(made, folder, out)


TokenizedDocument = tuple[NDArray[Any], NDArray[np.bool_] | None]


def _write_documents(
    readers: Sequence[DocumentReader],
    batches: Iterable[Iterable[TokenizedDocument]],
    shards: ShardWriter,
    tally: CorpusTally,
    progress: PrepareProgress | None,
) -> None:
    total = sum(reader.total_bytes for reader in readers)
    for documents in batches:
        for tokens, mask in documents:
            shards.add_document(tokens, tally.add_document(tokens, mask), mask)
        if progress is not None:
            done = sum(reader.done_bytes for reader in readers)
            progress(done, total, tally.num_documents, tally.num_tokens)
    if progress is not None:
        progress(total, total, tally.num_documents, tally.num_tokens)


def _tokenize_texts(
    readers: Sequence[DocumentReader], tokenizer: Tokenizer
) -> Iterator[list[TokenizedDocument]]:
    """Tokens of texts, each with an end token."""
    end = np.array([tokenizer.eos_token_id], np.uint32)
    for reader in readers:
        for texts in _batch_texts(reader):
            yield [(np.concatenate([ids, end]), None) for ids in tokenizer.encode(texts)]


def _tokenize_conversations(
    readers: Sequence[DocumentReader], _: Tokenizer, *, chat: ChatEncoder, loss_on: LossOn
) -> Iterator[list[TokenizedDocument]]:
    """Tokens and masks of conversations; their template defines how they end."""
    for reader in readers:
        batch: list[TokenizedDocument] = []
        for record, at in reader.read_records():
            batch.append(chat.encode(parse_conversation(record, at), loss_on))
            if len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch = []
        yield batch


def _batch_texts(texts: Iterator[str] | DocumentReader) -> Iterator[list[str]]:
    """Batches of documents to encode at once, limited in number and in total text."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) >= BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def refuse_other_content(out: Path) -> None:
    """Refuse a target that contains anything but a corpus."""
    try:
        if "\0" in str(out):
            raise OSError(f"{str(out)!r} contains a NUL character")
        taken = (
            out.exists()
            and not (out / CORPUS_MANIFEST).is_file()
            and (out.is_file() or any(out.iterdir()))
        )
    except OSError as error:
        raise _write_error(out, error) from None
    if taken:
        raise DataError(
            f"{out} exists and is not a prepared corpus. A corpus must be written to a new or "
            "empty folder. Choose another one."
        )


def _write_error(out: Path, error: OSError) -> DataError:
    if error.filename:
        where = f" ({error.filename})"
    else:
        where = ""
    parent = out.absolute().parent
    return DataError(
        f"{out} cannot be written: {error.strerror or error}{where}. The corpus is written to a "
        f"temporary folder in {parent} and then renamed. Make {parent} writable, free disk space "
        "there, or choose another --output (for the cache, RANVIER_CACHE)."
    )


@contextmanager
def assemble_folder(out: Path) -> Iterator[Path]:
    """A hidden directory next to `out` to write into; removed unless it was renamed."""
    folder = out.absolute().with_name(f".{out.absolute().name}.{secrets.token_hex(4)}")
    # Remember which parents are created here, to remove them after a failure.
    missing = [above for above in folder.parents if not os.path.lexists(above)]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
    except OSError as error:
        raise _write_error(out, error) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        # Remove created parents as well, the innermost first; a parent that is not empty stays.
        for above in missing:
            with suppress(OSError):
                above.rmdir()


def publish_corpus(made: CorpusManifest, folder: Path, out: Path) -> CorpusManifest:
    """Rename a finished directory to `out`, unless `out` already has the same corpus."""
    try:
        # Atomic; it succeeds only if `out` does not exist or is an empty directory.
        os.rename(folder, out)
        return made
    except OSError:
        # Not empty: an earlier corpus, or one that another process has just written.
        if not (out / CORPUS_MANIFEST).is_file():
            raise
    found = CorpusManifest.read_from(out)
    if found.fingerprint != made.fingerprint:
        raise DataError(
            f"{out} has another corpus: fingerprint {found.fingerprint}, not {made.fingerprint}. "
            "A corpus is not overwritten. Choose another folder, or remove this one."
        )
    return found
