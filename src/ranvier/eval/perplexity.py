"""Perplexity of a corpus, document by document.

Each document is read in windows of `seq` tokens. Each window after the first predicts only the
tokens that the previous one did not. With stride = seq, windows overlap by one token; with a
smaller stride, each token has at least seq - stride tokens of context (if the document has them).
The first token of a document is given, as in training.

    loss = -Σ log p / tokens,   perplexity = exp(loss),   bits per byte = -Σ log₂ p / bytes
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ranvier.data.corpus import Corpus, CorpusSplit
from ranvier.errors import DataError
from ranvier.eval.model_server import ModelServer
from ranvier.infer.logprobs import sequences_per_round
from ranvier.parallel.parallel_model import get_parallel_model

READ_AHEAD_ROUNDS = 64
"""Number of windows held in memory, in multiples of what all ranks process at once."""


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity of a corpus."""

    documents: int
    tokens: int
    """Number of predicted tokens."""
    bytes: int
    """Bytes of the text of these tokens; 0 if unknown."""
    nats: float
    """Sum of their losses."""

    @property
    def loss(self) -> float:
        """Loss per token, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        # math.exp overflows a float beyond about 709.
        if self.loss < 700.0:
            return math.exp(self.loss)
        return math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte; None if the number of bytes is unknown."""
        if self.bytes:
            return self.nats / math.log(2.0) / self.bytes
        return None


def compute_perplexity(
    served: ModelServer, corpus: Corpus, *, seq: int, stride: int = 0, held_out: float = 0.0
) -> PerplexityResult:
    """Returns the perplexity of the documents of a corpus; stride 0 means seq.

    In conversations, only the tokens with a loss count. held_out: fraction of the documents that
    training holds out; only these are read, or all documents if it is 0. Communicates: as
    `ModelServer.score_sequences`.
    """
    if held_out > 0.0:
        part: CorpusSplit = "held_out"
    else:
        part = "train"
    chosen = corpus.select_documents(held_out, part)
    if not (corpus.document_lengths[chosen] > 1).any():
        if held_out > 0.0:
            aside = " in its held-out part"
        else:
            aside = ""
        raise DataError(
            f"{corpus.manifest.source} has no document with two tokens{aside}. Perplexity needs at "
            "least one token to predict from another. Use another corpus."
        )
    terms = []
    tokens = 0
    known = 0
    # A generator, because a corpus may be larger than memory. `heard` marks tokens that count.
    todo = (
        (window, first, heard[start + 1 : start + len(window)])
        for one, heard in _read_documents(corpus, chosen)
        for start, window, first in split_into_windows(one, seq, stride)
    )
    # Scoring sorts by length, which saves padding only with many windows at a time.
    size = READ_AHEAD_ROUNDS * sequences_per_round(get_parallel_model(served.model), served.batch)
    while some := list(islice(todo, size)):
        for found, (_, first, heard) in zip(
            served.score_sequences([window for window, *_ in some]), some, strict=True
        ):
            terms.append(-float(found.logprobs[first:][heard[first:]].sum()))
            tokens += int(heard[first:].sum())
    # The bytes of a conversation are unknown, because its template adds text to the messages.
    if corpus.tokenizer is not None and not corpus.manifest.template:
        known = sum(_text_bytes(served, one) for one, _ in _read_documents(corpus, chosen))
    return PerplexityResult(len(chosen), tokens, known, math.fsum(terms))


def split_into_windows(
    tokens: np.ndarray, seq: int, stride: int = 0
) -> Iterator[tuple[int, list[int], int]]:
    """Yields windows of at most seq + 1 tokens: start, tokens, first prediction that counts.

    Each token of the document except the first is predicted exactly once among those that count.
    """
    stride = stride or seq
    # Tokens before `done` are already predicted; the first token of a document never is.
    done = 1
    for start in range(0, max(len(tokens) - 1, 0), stride):
        stop = min(start + seq + 1, len(tokens))
        if stop > done:
            yield start, tokens[start:stop].tolist(), done - start - 1
            done = stop


def _read_documents(corpus: Corpus, chosen: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the tokens of each document, and which of them count."""
    for number in chosen.tolist():
        places = corpus.document_starts[number] + np.arange(corpus.document_lengths[number])
        if corpus.manifest.template:
            yield corpus.read_with_mask(places)
        else:
            yield corpus.read_tokens(places), np.ones(len(places), bool)


def _text_bytes(served: ModelServer, tokens: np.ndarray) -> int:
    """Returns the bytes of the text of all tokens but the first."""
    decode = served.tokenizer.decode
    return len(decode(tokens.tolist()).encode()) - len(decode(tokens[:1].tolist()).encode())
