"""`ranvier data canaries`: draw documents of a corpus into buckets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ranvier.config.arguments import CanaryFileOptions
from ranvier.config.run import RunConfig
from ranvier.config.sections import DataConfig
from ranvier.data.corpus import Corpus
from ranvier.data.sources import STDLIB
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import DataError, PlanError
from ranvier.system.terminal import command_line, print
from ranvier.train.prepare_data import tokenize_corpora
from ranvier.train.resume.run_directory import write_text_atomically


def write_canary_file(inputs: Sequence[str], wanted: CanaryFileOptions) -> int:
    """Write a file of canaries and print a summary; returns the exit code."""
    path = Path(wanted.output or Path("data") / "canaries.jsonl")
    _check_options(wanted, path)
    sources = tuple(inputs) or (STDLIB,)
    data = DataConfig(
        sources=sources,
        tokenizer=wanted.tokenizer,
        text_field=wanted.text_field,
        max_bytes=wanted.max_bytes,
        format="text",
    )
    corpora = [Corpus.open(one) for one in tokenize_corpora(replace(RunConfig(), data=data))]
    needed = len(wanted.buckets) * wanted.documents
    # A dict keeps the order, and each text once.
    texts = dict[str, None]()
    for text in _draw_texts(corpora, wanted.length, np.random.default_rng(wanted.seed)):
        texts[text] = None
        if len(texts) == needed:
            break
    if len(texts) < needed:
        raise DataError(
            f"{', '.join(sources)} has {len(texts)} documents of more than {wanted.length} tokens "
            f"that can be used, but {len(wanted.buckets)} buckets of {wanted.documents} need "
            f"{needed}. Use fewer --documents, a smaller --length, or more texts."
        )
    lines = [
        json.dumps({"text": text, "times": times, "bucket": str(times)})
        for times, some in zip(wanted.buckets, _split([*texts], wanted.documents), strict=True)
        for text in some
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}. The canaries are stored there. Use "
            "another --output."
        ) from None
    reads = sum(wanted.buckets) * wanted.documents
    print(
        f"{path}: {needed:,} documents of {wanted.length} tokens in buckets "
        f"{', '.join(map(str, wanted.buckets))}, read {reads:,} times in all"
    )
    # Not on the corpus of the canaries, which would be read more often than their number of times.
    words = ["--data.sources", "YOUR.txt", "--data.canaries", path]
    if wanted.tokenizer != DataConfig().tokenizer:
        words += ["--data.tokenizer", wanted.tokenizer]
    words += ["--data.seq-len", wanted.length + 1]
    print(f"Train with them, on other texts, for at least {reads:,} samples:")
    print(f"  {command_line('ranvier', 'train', *words)}")
    return 0


def _split(texts: Sequence[str], count: int) -> Iterator[Sequence[str]]:
    """Yields `count` texts at a time."""
    for start in range(0, len(texts), count):
        yield texts[start : start + count]


def _draw_texts(
    corpora: Sequence[Corpus], length: int, drawn: np.random.Generator
) -> Iterator[str]:
    """Yields the first `length` tokens of documents in random order, as texts.

    A text whose tokens are others, for example because it ends inside of a character, is left out.
    """
    # Documents end with their end token, which is not part of the text.
    places = [
        (corpus, int(start))
        for corpus in corpora
        for start in corpus.document_starts[corpus.document_lengths > length]
    ]
    for number in drawn.permutation(len(places)):
        corpus, start = places[number]
        tokenizer = _tokenizer_of(corpus)
        tokens = corpus.read_tokens(np.arange(start, start + length))
        text = tokenizer.decode(tokens.tolist())
        (again,) = tokenizer.encode([text])
        if np.array_equal(again, tokens):
            yield text


def _tokenizer_of(corpus: Corpus) -> Tokenizer:
    if corpus.tokenizer is None:
        raise DataError(
            f"{corpus.manifest.source} has tokens of an unknown tokenizer. Canaries are texts. Put "
            "the tokenizer.json of the tokens next to them, or pass the original texts."
        )
    return corpus.tokenizer


def _check_options(wanted: CanaryFileOptions, path: Path) -> None:
    """Raises if an option is invalid; reads nothing."""
    problems = []
    if not wanted.buckets or min(wanted.buckets) < 0 or max(wanted.buckets) > 10**9:
        problems.append(
            f"buckets={list(wanted.buckets)} is invalid. A bucket is how often its documents are "
            "read, from 0 to 10^9. Use --buckets 0 1 4 6 50."
        )
    twice = sorted({times for times in wanted.buckets if wanted.buckets.count(times) > 1})
    if twice:
        problems.append(
            f"buckets={list(wanted.buckets)} has {twice[0]} twice. Each bucket has another number "
            "of times. Name it once, and use more --documents."
        )
    least = {"documents": 1, "length": 2, "seed": 0, "max_bytes": 1}
    for name, low in least.items():
        value = getattr(wanted, name)
        if not low <= value < 2**31:
            problems.append(
                f"{name}={value} is out of range. It must be at least {low} and less than 2^31. "
                f"Use {low} or more."
            )
    if path.exists():
        problems.append(
            f"output={str(path)!r} exists already. A file is not overwritten. Remove it, or use "
            "another --output."
        )
    if problems:
        raise PlanError(problems)
