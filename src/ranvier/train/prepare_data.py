"""Tokenization of corpora for a run or for `ranvier data`, with a progress display."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np

from ranvier import launch
from ranvier.config.run import RunConfig
from ranvier.data import prepare as preparing
from ranvier.data.cache import DataFormat, holds_chats, pair_prefixes
from ranvier.data.canaries import Canary, CanaryDocuments
from ranvier.data.chat.conversation import parse_conversation
from ranvier.data.chat.template import load_chat_template
from ranvier.data.chat.tokenize import ChatEncoder, LossOn
from ranvier.data.corpus import Corpus
from ranvier.data.dataset import cache_corpora
from ranvier.data.manifest import LEARN_VALUES, CorpusManifest
from ranvier.data.prepare import PrepareProgress
from ranvier.data.sources import DocumentReader
from ranvier.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from ranvier.errors import DataError, PlanError
from ranvier.system.terminal import command_line, escape_controls, print
from ranvier.train.progress import show_progress


def tokenize_corpora(run: RunConfig) -> list[str]:
    """The directories of a run's tokenized corpora; missing ones are created in the cache."""
    data = run.data
    with tokenization_progress() as progress:
        folders = cache_corpora(
            data.sources,
            cache=launch.cache_dir(),
            tokenizer=data.tokenizer,
            form=data.format,
            template=data.chat_template,
            loss_on=data.loss_on,
            field=data.text_field,
            max_bytes=data.max_bytes,
            verify=data.verify_checksums,
            progress=progress,
        )
    return [str(folder) for folder in folders]


def tokenize_canaries(canaries: Sequence[Canary], folders: Sequence[str]) -> str:
    """A file with the tokens of canaries, by the tokenizer of the corpora of a run; it is in the
    cache."""
    tokenizers = (Corpus.open(folder).tokenizer for folder in folders)
    tokenizer = next((one for one in tokenizers if one is not None), None)
    if tokenizer is None:
        raise DataError(
            f"{folders[0]} has tokens of an unknown tokenizer. Canaries are texts, and need the "
            "tokenizer of the corpora. Put its tokenizer.json next to the corpus."
        )
    documents = CanaryDocuments.tokenize(canaries, tokenizer)
    path = launch.cache_dir() / "canaries" / f"{documents.fingerprint}.npz"
    documents.save(path)
    return str(path)


def prepare_corpus(
    inputs: Sequence[str],
    *,
    output: str,
    tokenizer: str,
    vocab: int,
    text_field: str,
    format: DataFormat,
    chat_template: str,
    loss_on: LossOn,
) -> int:
    """Tokenize files into a directory and print a summary; returns the exit code."""
    if not inputs:
        raise PlanError(
            "`ranvier data prepare` needs at least one file. Use: ranvier data prepare FILE ... "
            "--output DIR."
        )
    # Inputs in Megatron's indexed format are tokenized already.
    tokens = [path for path in inputs if pair_prefixes(Path(path))]
    if tokens:
        raise PlanError(
            f"{tokens[0]} is already tokenized. `ranvier data prepare` tokenizes texts. Train on "
            f"it directly: {command_line('ranvier', 'train', '--data.sources', Path(tokens[0]))}"
        )
    folder = Path(output or Path("data") / Path(inputs[0]).resolve().name.partition(".")[0])
    # Checked before the tokenizer is trained, which may take a long time.
    preparing.refuse_other_content(folder)
    chats = _has_chats(inputs, text_field, format)
    words = _load_or_train_tokenizer(inputs, tokenizer, vocab, text_field, chats=chats)
    if chats:
        chat = ChatEncoder(load_chat_template(words, tokenizer, chat_template), words)
    else:
        chat = None
    with tokenization_progress() as progress:
        preparing.prepare_corpus(
            inputs, folder, words, chat=chat, loss_on=loss_on, field=text_field, progress=progress
        )
    show_corpus(folder)
    print(f"Train on it with:\n  {command_line('ranvier', 'train', '--data.sources', folder)}")
    return 0


def _has_chats(inputs: Sequence[str], field: str, form: DataFormat) -> bool:
    """Whether all inputs hold conversations (or all plain text); raises on a mixture."""
    found = {path: holds_chats(DocumentReader(path, field=field), form) for path in inputs}
    if len(set(found.values())) > 1:
        kinds = ", ".join(f"{path}: {'chat' if it else 'text'}" for path, it in found.items())
        raise PlanError(
            f"{kinds}. A prepared corpus must contain one kind only. Prepare them separately, and "
            "mix them with data.mixture_weights."
        )
    return any(found.values())


def _load_or_train_tokenizer(
    inputs: Sequence[str], name: str, vocab: int, field: str, *, chats: bool
) -> Tokenizer:
    """Load the tokenizer `name`; "train" trains one on the inputs."""
    if name != "train":
        return load_tokenizer(name, launch.cache_dir())
    if chats:
        records = chain.from_iterable(DocumentReader(path).read_records() for path in inputs)
        talks = (parse_conversation(record, at) for record, at in records)
        return train_tokenizer((text for talk in talks for text in talk.message_texts), vocab)
    return train_tokenizer(
        chain.from_iterable(DocumentReader(path, field=field) for path in inputs), vocab
    )


def show_corpus(folder: Path) -> int:
    """Print a summary of a prepared corpus; returns the exit code."""
    corpus = CorpusManifest.read_from(folder)
    print(
        f"{folder}: {corpus.documents:,} documents, {corpus.tokens:,} tokens, "
        f"vocabulary of {corpus.vocab:,}"
    )
    print(f"  from {corpus.source}, in {len(corpus.shards)} shard(s)")
    print(f"  corpus fingerprint: {corpus.fingerprint}")
    print(f"  tokenizer fingerprint: {corpus.tokenizer or 'unknown'}")
    if corpus.template:
        loss_on = next(ours for ours, stored in LEARN_VALUES.items() if stored == corpus.learn)
        print(f"  chat template fingerprint: {corpus.template}, loss on {loss_on}")
        print("  the first conversation, with the learned text in «»:\n")
        lines = escape_controls(mark_learned_tokens(Corpus.open(folder))).splitlines()
        print("\n".join(f"    {line}" for line in lines))
    return 0


def mark_learned_tokens(corpus: Corpus, document: int = 0) -> str:
    """The text of a conversation with « and » around the tokens that the loss includes."""
    assert corpus.tokenizer is not None, corpus.folder
    start = int(corpus.document_starts[document])
    tokens, mask = corpus.read_with_mask(
        np.arange(start, start + int(corpus.document_lengths[document]))
    )
    # Split where the mask changes.
    cuts = np.flatnonzero(np.diff(mask)) + 1
    parts = []
    for some, learned in zip(np.split(tokens, cuts), np.split(mask, cuts), strict=True):
        text = corpus.tokenizer.decode_with_specials(some)
        parts.append(f"«{text}»" if learned.any() else text)
    return "".join(parts)


@contextmanager
def tokenization_progress() -> Iterator[PrepareProgress]:
    """Show the progress of tokenization."""
    with show_progress("tokenizing") as show:

        def show_counts(done: int, total: int, documents: int, tokens: int) -> None:
            show(done, total, f"{documents:,} documents, {tokens:,} tokens")

        yield show_counts
