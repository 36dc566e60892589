"""Corpora of a run or of `ranvier data`: tokenized with a progress display, shown in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np

from ranvier import launch
from ranvier.config.run import Run
from ranvier.data import prepare as preparing
from ranvier.data.cache import Form, holds_chats, pair_prefixes
from ranvier.data.chat.conversation import conversation_of
from ranvier.data.chat.template import template_of
from ranvier.data.chat.tokenize import Chat, Learn
from ranvier.data.corpus import Corpus
from ranvier.data.dataset import stored_all
from ranvier.data.manifest import Manifest
from ranvier.data.prepare import Progress
from ranvier.data.sources import Reader
from ranvier.data.tokenizer import Tokenizer, tokenizer_of, trained
from ranvier.errors import PlanError
from ranvier.system.terminal import command_line, escape_controls, print
from ranvier.train.progress import shown


def stored(run: Run) -> list[str]:
    """The folders of a run's tokenized corpora, made where they are not there yet."""
    data = run.data
    with tokenizing() as progress:
        folders = stored_all(
            data.corpus,
            cache=launch.cache(),
            tokenizer=data.tokenizer,
            form=data.format,
            template=data.template,
            learn=data.learn,
            field=data.field,
            max_bytes=data.max_bytes,
            verify=data.verify,
            progress=progress,
        )
    return [str(folder) for folder in folders]


def prepare(
    inputs: Sequence[str],
    *,
    out: str,
    tokenizer: str,
    vocab: int,
    field: str,
    format: Form,
    template: str,
    learn: Learn,
) -> int:
    """Tokenize files into a directory and print what it holds; the exit code."""
    if not inputs:
        raise PlanError(
            "data prepare was given no file. It tokenizes one or more. "
            "Write: ranvier data prepare FILE ... --out DIR."
        )
    tokens = [path for path in inputs if pair_prefixes(Path(path))]
    if tokens:
        raise PlanError(
            f"{tokens[0]} holds tokens already. prepare makes them of texts. Train on it as it is: "
            f"{command_line('ranvier', 'train', '--data.corpus', Path(tokens[0]))}"
        )
    folder = Path(out or Path("data") / Path(inputs[0]).resolve().name.partition(".")[0])
    preparing.refuse_other(folder)
    chats = _hold_chats(inputs, field, format)
    words = _words(inputs, tokenizer, vocab, field, chats=chats)
    chat = Chat(template_of(words, tokenizer, template), words) if chats else None
    with tokenizing() as progress:
        preparing.prepare(
            inputs, folder, words, chat=chat, learn=learn, field=field, progress=progress
        )
    show(folder)
    print(f"Train on it with:\n  {command_line('ranvier', 'train', '--data.corpus', folder)}")
    return 0


def _hold_chats(inputs: Sequence[str], field: str, form: Form) -> bool:
    """Whether the inputs hold conversations, or all of them texts."""
    found = {path: holds_chats(Reader(path, field=field), form) for path in inputs}
    if len(set(found.values())) > 1:
        kinds = ", ".join(f"{path}: {'chat' if it else 'text'}" for path, it in found.items())
        raise PlanError(
            f"{kinds}. A prepared corpus holds one kind. Prepare them apart, and mix them with "
            "data.weights."
        )
    return any(found.values())


def _words(inputs: Sequence[str], name: str, vocab: int, field: str, *, chats: bool) -> Tokenizer:
    """The tokenizer of a name; train: learnt from the inputs."""
    if name != "train":
        return tokenizer_of(name, launch.cache())
    if chats:
        records = chain.from_iterable(Reader(path).records() for path in inputs)
        talks = (conversation_of(record, at) for record, at in records)
        return trained((text for talk in talks for text in talk.texts), vocab)
    return trained(chain.from_iterable(Reader(path, field=field) for path in inputs), vocab)


def show(folder: Path) -> int:
    """Print what a prepared corpus holds; the exit code."""
    corpus = Manifest.read(folder)
    print(f"{folder}: {corpus.documents:,} documents, {corpus.tokens:,} tokens of {corpus.vocab:,}")
    print(f"  from {corpus.source}, in {len(corpus.shards)} shard(s)")
    print(f"  fingerprint of the corpus: {corpus.fingerprint}")
    print(f"  fingerprint of the tokenizer: {corpus.tokenizer or 'unknown'}")
    if corpus.template:
        print(f"  fingerprint of the chat template: {corpus.template}, learn {corpus.learn}")
        print("  the first conversation, with what is learnt in «»:\n")
        lines = escape_controls(marked(Corpus.open(folder))).splitlines()
        print("\n".join(f"    {line}" for line in lines))
    return 0


def marked(corpus: Corpus, document: int = 0) -> str:
    """The text of a conversation with « and » around the tokens that are learnt."""
    assert corpus.tokenizer is not None, corpus.folder
    start = int(corpus.starts[document])
    tokens, mask = corpus.learned(np.arange(start, start + int(corpus.lengths[document])))
    cuts = np.flatnonzero(np.diff(mask)) + 1
    parts = []
    for some, learned in zip(np.split(tokens, cuts), np.split(mask, cuts), strict=True):
        text = corpus.tokenizer.shown(some)
        parts.append(f"«{text}»" if learned.any() else text)
    return "".join(parts)


@contextmanager
def tokenizing() -> Iterator[Progress]:
    """Shows how far the tokenizing is."""
    with shown("tokenizing") as show:

        def told(done: int, total: int, documents: int, tokens: int) -> None:
            show(done, total, f"{documents:,} documents, {tokens:,} tokens")

        yield told
