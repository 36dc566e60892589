"""Stored corpora: for each input of a run the folder with its tokens, made when it is not there.

A prepared folder is used as it is. The pairs of others are indexed: hashes and manifest go to the
cache, tokens stay in place. Everything else is prepared in the cache under a key of its content.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from ranvier.data.chat.conversation import is_conversation
from ranvier.data.chat.template import template_of
from ranvier.data.chat.tokenize import Chat, Learn
from ranvier.data.checksums import Sink, Stamp, digest_of, stamp_of
from ranvier.data.indexed_dataset import Pair, part, prefix_of
from ranvier.data.manifest import FIRST_FORMAT, NAME, Manifest, Shard
from ranvier.data.prepare import Progress, Tally, assembled, prepare, publish
from ranvier.data.sources import EMBEDDED, Reader, suffix_of
from ranvier.data.tokenizer import NAMES, Tokenizer, tokenizer_of
from ranvier.errors import DataError

BOTH = ("bin", "idx")
ASIDE = {
    *("corpus.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "README.md"),
}
"""Files beside pairs that describe them: no texts to train on."""
Form = Literal["auto", "text", "chat"]


def stored(
    source: str | Path,
    *,
    cache: Path,
    tokenizer: str = "standard",
    form: Form = "auto",
    template: str = "",
    learn: Learn = "answers",
    field: str = "text",
    max_bytes: int | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Path:
    """The folder of an input's corpus; verify: compare the content of its files, not only sizes.

    form: what its records are; template: a file in place of the tokenizer's own chat template.
    """
    path = Path(source)
    if source != EMBEDDED and os.path.isfile(path / NAME):
        folder = path
    elif source != EMBEDDED and (prefixes := pair_prefixes(path)):
        known = _tokenizer_beside(prefixes, tokenizer, cache)
        folder = index_pairs(prefixes, cache, tokenizer=known, progress=progress)
    else:
        known = tokenizer_of(tokenizer, cache)
        reader = Reader(source, field=field, max_bytes=max_bytes)
        parts = [reader.digest(), known.fingerprint, field, str(reader.limit), str(FIRST_FORMAT)]
        # Only where the JSON leaves it open: corpora from before are found again.
        parts += [known.told] if known.told else []
        chat = None
        if holds_chats(reader, form):
            chat = Chat(template_of(known, tokenizer, template), known)
            parts += [chat.template.fingerprint, learn]
        folder = cache / "corpora" / digest_of(*parts)
        if not (folder / NAME).is_file():
            prepare(
                [source],
                folder,
                known,
                chat=chat,
                learn=learn,
                field=field,
                max_bytes=max_bytes,
                progress=progress,
            )
    Manifest.read(folder).check(folder, verify=verify)
    return folder.resolve()


def holds_chats(reader: Reader, form: Form) -> bool:
    """Whether the records of an input are conversations: as is said, or as the first one looks."""
    if form == "text":
        return False
    if not reader.tabular:
        if form == "chat":
            raise DataError(
                f"{reader.name} holds texts, but data.format=chat. Conversations are records of "
                ".jsonl, .json or .parquet files. Use data.format=auto, or convert it."
            )
        return False
    if form == "chat":
        return True
    records = reader.records()
    try:
        first, _ = next(records)
    except DataError:  # said where the texts are read
        return False
    finally:
        records.close()
    return reader.field not in first and is_conversation(first)


def pair_prefixes(path: Path) -> list[Path]:
    """The Megatron pairs of a prefix, of one of its files or of a folder, if there are any."""
    if os.path.isdir(path):  # unlike Path.is_dir, whatever the name
        found = [*path.glob("*.idx"), *path.glob("*.bin")] if any(path.glob("*.idx")) else []
        if found:
            _refuse_texts(path, min(found))
        return sorted({prefix_of(file) for file in found})
    prefix = prefix_of(path)
    there = prefix != path or any(os.path.exists(part(path, suffix)) for suffix in BOTH)
    return [prefix] if there and (prefix != path or not os.path.exists(path)) else []


def _refuse_texts(folder: Path, pair: Path) -> None:
    """Refuse texts beside pairs: only the pairs would be read."""
    for file in sorted(folder.iterdir()):
        known = file.name.startswith(".") or file.name in ASIDE or suffix_of(file) is None
        if not known and not file.is_dir():
            raise DataError(
                f"{folder} holds a Megatron pair ({pair.name}) and a text ({file.name}). A "
                "directory holds one kind. Put them in directories of their own and mix them with "
                "data.weights."
            )


def _tokenizer_beside(prefixes: Sequence[Path], name: str, cache: Path) -> Tokenizer | None:
    """The tokenizer of pairs: the tokenizer.json beside them, or a path that was asked for."""
    beside = prefixes[0].parent / "tokenizer.json"
    if os.path.lexists(beside):
        return tokenizer_of(beside, cache)
    # A name is the choice for texts; these tokens may come from anywhere.
    return None if name in NAMES else tokenizer_of(name, cache)


def index_pairs(
    prefixes: Sequence[Path],
    cache: Path,
    *,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder in the cache with hashes and manifest of pairs, one corpus in this order."""
    fingerprint = "" if tokenizer is None else tokenizer.fingerprint
    told = [tokenizer.told] if tokenizer is not None and tokenizer.told else []
    pairs = [Pair.open(prefix.absolute()) for prefix in prefixes]
    # By name, size and time: their content is digested once, not at every start.
    labels = (_label(pair, suffix) for pair in pairs for suffix in BOTH)
    key = digest_of(str(FIRST_FORMAT), fingerprint, *told, *labels)
    folder = cache / "pairs" / key
    if (folder / NAME).is_file():
        return folder
    tally = Tally(fingerprint)
    sizes = [int(pair.bounds[-1]) * pair.dtype.itemsize for pair in pairs]
    with assembled(folder) as made:
        shards = [
            _indexed(pair, made / f"shard-{i:05}", tally, sum(sizes[:i]), sum(sizes), progress)
            for i, pair in enumerate(pairs)
        ]
        if tally.tokens == 0:
            raise DataError(
                f"{prefixes[0]} holds no token ({tally.documents} documents). A corpus needs at "
                "least one. Choose another pair."
            )
        if tokenizer is not None:
            _check_vocab(tokenizer, tally, prefixes[0])
            tokenizer.save(made / "tokenizer.json")
        manifest = Manifest(
            source=", ".join(map(str, prefixes)),
            fingerprint=tally.fingerprint,
            tokenizer=fingerprint,
            vocab=tally.largest + 1 if tokenizer is None else tokenizer.vocab,
            end=None if tokenizer is None else tokenizer.end,
            documents=tally.documents,
            tokens=tally.tokens,
            largest=tally.largest,
            shards=shards,
        )
        manifest.write(made)
        publish(manifest, made, folder)
    return folder


def _label(pair: Pair, suffix: str) -> str:
    path = part(pair.prefix, suffix)
    now = path.stat()
    return f"{path} {now.st_size} {now.st_mtime_ns}"


def _indexed(
    pair: Pair, prefix: Path, tally: Tally, before: int, total: int, progress: Progress | None
) -> Shard:
    """The shard of a pair; its hashes are written, its files digested.

    before, total: bytes of the pairs before this one and of all.
    """
    hashes = np.zeros(pair.documents, "<u8")
    for document in range(pair.documents):
        tokens = pair.document(document)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**31:
            raise DataError(
                f"{part(pair.prefix, 'bin')}: document {document} has tokens from {tokens.min()} "
                f"to {tokens.max()}. A token is 0 or more and below 2^31. Make the pair again."
            )
        hashes[document] = tally.add(tokens)
        if progress is not None and (document % 1024 == 0 or document == pair.documents - 1):
            done = before + int(pair.bounds[document + 1]) * pair.dtype.itemsize
            progress(done, total, tally.documents, tally.tokens)
    with Sink(part(prefix, "hash")) as file:
        file.write(hashes.tobytes())
        stamps: dict[str, Stamp] = {"hash": file.close()}
    stamps |= {suffix: stamp_of(part(pair.prefix, suffix)) for suffix in BOTH}
    return Shard(str(pair.prefix), prefix.name, pair.documents, int(pair.bounds[-1]), stamps)


def _check_vocab(tokenizer: Tokenizer, tally: Tally, prefix: Path) -> None:
    if tally.largest >= tokenizer.vocab:
        raise DataError(
            f"{prefix} holds token {tally.largest}. Its tokenizer {tokenizer.fingerprint} has "
            f"{tokenizer.vocab} ids, from 0. Put the tokenizer.json that made the pair beside it."
        )
