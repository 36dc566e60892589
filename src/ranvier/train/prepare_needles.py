"""Corpora with needles for `ranvier data needles`; see `data.needles`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ranvier import launch
from ranvier.config.arguments import NeedleCorpusOptions
from ranvier.config.run import RunConfig
from ranvier.config.sections import DataConfig
from ranvier.data import prepare
from ranvier.data.corpus import Corpus
from ranvier.data.needles import (
    NUM_KEYS,
    Haystack,
    NeedleBuilder,
    NeedleTemplate,
    build_training_documents,
    check_training_lengths,
)
from ranvier.data.sources import STDLIB
from ranvier.data.tokenizer import load_tokenizer
from ranvier.errors import PlanError
from ranvier.system.terminal import command_line, print
from ranvier.train.prepare_data import show_corpus, tokenize_corpora
from ranvier.train.progress import show_progress

MAX_CORPUS_TOKENS = 10**11


def prepare_needle_corpus(inputs: Sequence[str], wanted: NeedleCorpusOptions) -> int:
    """Write a corpus with needles and print a summary; returns the exit code."""
    _check_options(wanted)
    folder = Path(wanted.output or Path("data") / "needles")
    # Checked before the texts are tokenized, which may take a while.
    prepare.refuse_other_content(folder)
    sources = tuple(inputs) or (STDLIB,)
    data = DataConfig(
        sources=sources,
        tokenizer=wanted.tokenizer,
        text_field=wanted.text_field,
        max_bytes=wanted.max_bytes,
    )
    tokenizer = load_tokenizer(wanted.tokenizer, launch.cache_dir())
    corpora = [Corpus.open(one) for one in tokenize_corpora(replace(RunConfig(), data=data))]
    for corpus in corpora:
        corpus.check_vocab(tokenizer.vocab_size)
    builder = NeedleBuilder(
        NeedleTemplate(wanted.needle), tokenizer, Haystack.from_corpora(corpora, tokenizer)
    )
    check_training_lengths(builder, wanted.lengths, wanted.max_needles)
    documents = build_training_documents(
        builder,
        wanted.lengths,
        tokens=wanted.tokens,
        max_needles=wanted.max_needles,
        seed=wanted.seed,
    )
    with show_progress("planting needles") as show:

        def report(count: int, tokens: int) -> None:
            done = min(tokens, wanted.tokens)
            show(done, wanted.tokens, f"{count:,} documents, {tokens:,} tokens")

        name = f"needles in {', '.join(sources)}"
        prepare.write_token_documents(documents, folder, tokenizer, source=name, progress=report)
    show_corpus(folder)
    words = ("--data.sources", folder, "--data.seq-len", max(wanted.lengths))
    print(f"Train on it with:\n  {command_line('ranvier', 'train', *words)}")
    return 0


def _check_options(wanted: NeedleCorpusOptions) -> None:
    """Raises if an option is invalid; reads nothing."""
    problems = []
    if not wanted.lengths or min(wanted.lengths) < 1 or max(wanted.lengths) >= 2**31:
        problems.append(
            f"lengths={list(wanted.lengths)} is invalid. Documents need at least one length, and "
            "each must be at least 1 token. Use --lengths 1024."
        )
    if not max(wanted.lengths, default=1) <= wanted.tokens <= MAX_CORPUS_TOKENS:
        problems.append(
            f"tokens={wanted.tokens} is out of range. A corpus must hold at least one document, "
            f"and at most {MAX_CORPUS_TOKENS:,} tokens. Use --tokens 50000000."
        )
    for name, most in {"max_needles": NUM_KEYS, "seed": 2**31 - 1}.items():
        value = getattr(wanted, name)
        if not 0 <= value <= most:
            problems.append(f"{name}={value} is out of range. It must be from 0 to {most}. Use 0.")
    if wanted.max_bytes < 1:
        problems.append(
            f"max_bytes={wanted.max_bytes} is too small. It must be at least 1. Use 16000000."
        )
    problem = NeedleTemplate(wanted.needle).find_problem()
    problems += [problem] if problem else []
    if problems:
        raise PlanError(problems)
