"""Corpus cache: the directory with the tokens of each input of a run, created when missing.

A prepared directory is used as it is. Existing Megatron pairs are indexed: hashes and manifest are
stored in the cache, tokens stay in place. Everything else is tokenized into the cache under a key
of its content.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from ranvier.data.chat.conversation import is_conversation
from ranvier.data.chat.template import load_chat_template
from ranvier.data.chat.tokenize import ChatEncoder, LossOn
from ranvier.data.checksums import ChecksumWriter, FileChecksum, digest_of, file_checksum
from ranvier.data.indexed_dataset import IndexedDataset, pair_file, pair_prefix
from ranvier.data.manifest import (
    CORPUS_MANIFEST,
    FIRST_CORPUS_FORMAT,
    LEARN_VALUES,
    CorpusManifest,
    CorpusShard,
)
from ranvier.data.prepare import (
    CorpusTally,
    PrepareProgress,
    assemble_folder,
    prepare_corpus,
    publish_corpus,
)
from ranvier.data.sources import STDLIB, DocumentReader, suffix_of
from ranvier.data.tokenizer import TOKENIZER_NAMES, Tokenizer, load_tokenizer
from ranvier.errors import DataError

PAIR_SUFFIXES = ("bin", "idx")
DESCRIPTION_FILES = {
    *("corpus.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "README.md"),
}
"""Files next to pairs that describe them; not texts to train on."""
DataFormat = Literal["auto", "text", "chat"]


def cache_corpus(
    source: str | Path,
    *,
    cache: Path,
    tokenizer: str = "standard",
    form: DataFormat = "auto",
    template: str = "",
    loss_on: LossOn = "assistant",
    field: str = "text",
    max_bytes: int | None = None,
    verify: bool = False,
    progress: PrepareProgress | None = None,
) -> Path:
    """The corpus directory of an input; verify: compare the contents of its files, not only sizes.

    form: the kind of its records; template: a file that replaces the tokenizer's chat template.
    """
    path = Path(source)
    # A prepared corpus, existing Megatron pairs, or raw documents, in this order.
    if source != STDLIB and os.path.isfile(path / CORPUS_MANIFEST):
        folder = path
    elif source != STDLIB and (prefixes := pair_prefixes(path)):
        known = _tokenizer_beside(prefixes, tokenizer, cache)
        folder = index_pairs(prefixes, cache, tokenizer=known, progress=progress)
    else:
        known = load_tokenizer(tokenizer, cache)
        reader = DocumentReader(source, field=field, max_bytes=max_bytes)
        # The key covers everything that determines the tokens.
        parts = [
            reader.content_digest(),
            known.fingerprint,
            field,
            str(reader.max_bytes),
            str(FIRST_CORPUS_FORMAT),
        ]
        # Only where the JSON does not determine it, so that older cache entries keep their keys.
        parts += [known.explicit_end_name] if known.explicit_end_name else []
        chat = None
        if holds_chats(reader, form):
            chat = ChatEncoder(load_chat_template(known, tokenizer, template), known)
            parts += [chat.template.fingerprint, LEARN_VALUES[loss_on]]
        folder = cache / "corpora" / digest_of(*parts)
        if not (folder / CORPUS_MANIFEST).is_file():
            prepare_corpus(
                [source],
                folder,
                known,
                chat=chat,
                loss_on=loss_on,
                field=field,
                max_bytes=max_bytes,
                progress=progress,
            )
    # Also for a cached corpus: its files may have been damaged or removed since.
    CorpusManifest.read_from(folder).check_files(folder, verify=verify)
    return folder.resolve()


def holds_chats(reader: DocumentReader, form: DataFormat) -> bool:
    """Whether the records of an input are conversations, as configured or by the first record."""
    if form == "text":
        return False
    if not reader.is_tabular:
        if form == "chat":
            raise DataError(
                f"{reader.name} contains plain text, but data.format=chat. Conversations must be "
                "records of .jsonl, .json or .parquet files. Use data.format=auto, or convert the "
                "file."
            )
        return False
    if form == "chat":
        return True
    records = reader.read_records()
    try:
        first, _ = next(records)
    # Reported later, when the texts are read.
    except DataError:
        return False
    finally:
        records.close()
    # A record with the text field is a document, even if it has messages as well.
    return reader.field not in first and is_conversation(first)


def pair_prefixes(path: Path) -> list[Path]:
    """The Megatron pairs of a prefix, of one of its files or of a directory; may be empty."""
    # Unlike Path.is_dir, os.path.isdir does not raise for impossible names.
    if os.path.isdir(path):
        if any(path.glob("*.idx")):
            found = [*path.glob("*.idx"), *path.glob("*.bin")]
        else:
            found = []
        if found:
            _refuse_texts(path, min(found))
        return sorted({pair_prefix(file) for file in found})
    prefix = pair_prefix(path)
    there = prefix != path or any(
        os.path.exists(pair_file(path, suffix)) for suffix in PAIR_SUFFIXES
    )
    if there and (prefix != path or not os.path.exists(path)):
        return [prefix]
    return []


def _refuse_texts(folder: Path, pair: Path) -> None:
    """Refuse text files next to pairs: only the pairs would be read."""
    for file in sorted(folder.iterdir()):
        known = (
            file.name.startswith(".") or file.name in DESCRIPTION_FILES or suffix_of(file) is None
        )
        if not known and not file.is_dir():
            raise DataError(
                f"{folder} contains a Megatron pair ({pair.name}) and a text file ({file.name}). A "
                "directory must contain one kind only. Move them into separate directories and mix "
                "them with data.mixture_weights."
            )


def _tokenizer_beside(prefixes: Sequence[Path], name: str, cache: Path) -> Tokenizer | None:
    """The tokenizer of pairs: the tokenizer.json next to them, or a given path."""
    tokenizer_file = prefixes[0].parent / "tokenizer.json"
    if os.path.lexists(tokenizer_file):
        return load_tokenizer(tokenizer_file, cache)
    # A name is the default for texts; these tokens may come from any tokenizer.
    if name in TOKENIZER_NAMES:
        return None
    return load_tokenizer(name, cache)


def index_pairs(
    prefixes: Sequence[Path],
    cache: Path,
    *,
    tokenizer: Tokenizer | None = None,
    progress: PrepareProgress | None = None,
) -> Path:
    """The cache directory with hashes and manifest of pairs, as one corpus in this order."""
    if tokenizer is None:
        fingerprint = ""
    else:
        fingerprint = tokenizer.fingerprint
    if tokenizer is not None and tokenizer.explicit_end_name:
        end_name = [tokenizer.explicit_end_name]
    else:
        end_name = []
    pairs = [IndexedDataset.open(prefix.absolute()) for prefix in prefixes]
    # Keyed by name, size and time: contents are hashed once, not at every start.
    labels = (_file_label(pair, suffix) for pair in pairs for suffix in PAIR_SUFFIXES)
    key = digest_of(str(FIRST_CORPUS_FORMAT), fingerprint, *end_name, *labels)
    folder = cache / "pairs" / key
    if (folder / CORPUS_MANIFEST).is_file():
        return folder
    tally = CorpusTally(fingerprint)
    sizes = [int(pair.document_bounds[-1]) * pair.dtype.itemsize for pair in pairs]
    with assemble_folder(folder) as made:
        shards = [
            _index_pair(pair, made / f"shard-{i:05}", tally, sum(sizes[:i]), sum(sizes), progress)
            for i, pair in enumerate(pairs)
        ]
        if tally.num_tokens == 0:
            raise DataError(
                f"{prefixes[0]} has no tokens ({tally.num_documents} documents). A corpus needs at "
                "least one token. Choose another pair."
            )
        if tokenizer is not None:
            _check_vocab(tokenizer, tally, prefixes[0])
            tokenizer.save(made / "tokenizer.json")
        manifest = CorpusManifest(
            source=", ".join(map(str, prefixes)),
            fingerprint=tally.fingerprint,
            tokenizer=fingerprint,
            vocab=tally.largest_token + 1 if tokenizer is None else tokenizer.vocab_size,
            end=None if tokenizer is None else tokenizer.eos_token_id,
            documents=tally.num_documents,
            tokens=tally.num_tokens,
            largest=tally.largest_token,
            shards=shards,
        )
        manifest.write_to(made)
        publish_corpus(manifest, made, folder)
    return folder


def _file_label(pair: IndexedDataset, suffix: str) -> str:
    path = pair_file(pair.prefix, suffix)
    now = path.stat()
    return f"{path} {now.st_size} {now.st_mtime_ns}"


def _index_pair(
    pair: IndexedDataset,
    prefix: Path,
    tally: CorpusTally,
    before: int,
    total: int,
    progress: PrepareProgress | None,
) -> CorpusShard:
    """Index one pair: write its hashes and compute the checksums of its files.

    before, total: bytes of the pairs before this one and of all pairs.
    """
    hashes = np.zeros(pair.num_documents, "<u8")
    for document in range(pair.num_documents):
        tokens = pair.document_tokens(document)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**31:
            raise DataError(
                f"{pair_file(pair.prefix, 'bin')}: document {document} has tokens from "
                f"{tokens.min()} to {tokens.max()}. Tokens must be at least 0 and below 2^31. "
                "Create the pair again."
            )
        hashes[document] = tally.add_document(tokens)
        # Report rarely: documents may be tiny.
        if progress is not None and (document % 1024 == 0 or document == pair.num_documents - 1):
            done = before + int(pair.document_bounds[document + 1]) * pair.dtype.itemsize
            progress(done, total, tally.num_documents, tally.num_tokens)
    with ChecksumWriter(pair_file(prefix, "hash")) as file:
        file.write(hashes.tobytes())
        stamps: dict[str, FileChecksum] = {"hash": file.close()}
    stamps |= {suffix: file_checksum(pair_file(pair.prefix, suffix)) for suffix in PAIR_SUFFIXES}
    return CorpusShard(
        str(pair.prefix), prefix.name, pair.num_documents, int(pair.document_bounds[-1]), stamps
    )


def _check_vocab(tokenizer: Tokenizer, tally: CorpusTally, prefix: Path) -> None:
    if tally.largest_token >= tokenizer.vocab_size:
        raise DataError(
            f"{prefix} contains the token {tally.largest_token}, but its tokenizer "
            f"{tokenizer.fingerprint} has only {tokenizer.vocab_size} ids. Put the tokenizer.json "
            "that created the pair next to it."
        )
