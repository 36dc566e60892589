"""Perplexity of a corpus, document by document.

Each document is read in windows of `seq` tokens, of which each but the first predicts only what the
one before has not: with stride = seq they share one token, with a smaller one each token has at
least seq - stride tokens of context (where the document has them). The first token of a document is
given, as in training.

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
"""Windows held in memory at once, in multiples of what all ranks process at once."""


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
        """Bits per byte; None where bytes are unknown."""
        if self.bytes:
            return self.nats / math.log(2.0) / self.bytes
        return None


def compute_perplexity(
    served: ModelServer, corpus: Corpus, *, seq: int, stride: int = 0, held_out: float = 0.0
) -> PerplexityResult:
    """Perplexity of the documents of a corpus; stride 0 means seq.

    Of conversations only the tokens with a loss count. held_out: fraction of the documents that
    training holds out, which alone are read; 0: all documents. Communicates: as
    `ModelServer.score_sequences`.
    """
    if held_out > 0.0:
        part: CorpusSplit = "held_out"
    else:
        part = "train"
    chosen = corpus.select_documents(held_out, part)
    if not (corpus.document_lengths[chosen] > 1).any():
        if held_out > 0.0:
            aside = " that is held out"
        else:
            aside = ""
        raise DataError(
            f"{corpus.manifest.source} has no document with two tokens{aside}. A token is "
            "predicted from those before it. Choose another corpus."
        )
    terms = []
    tokens = 0
    known = 0
    # Lazy: a corpus may be larger than memory. `heard` marks the tokens whose loss counts.
    todo = (
        (window, first, heard[start + 1 : start + len(window)])
        for one, heard in _read_documents(corpus, chosen)
        for start, window, first in split_into_windows(one, seq, stride)
    )
    # Scoring sorts by length, which saves padding only if it sees many windows at once.
    size = READ_AHEAD_ROUNDS * sequences_per_round(get_parallel_model(served.model), served.batch)
    while some := list(islice(todo, size)):
        for found, (_, first, heard) in zip(
            served.score_sequences([window for window, *_ in some]), some, strict=True
        ):
            terms.append(-float(found.logprobs[first:][heard[first:]].sum()))
            tokens += int(heard[first:].sum())
    # The bytes of a conversation are unknown: its template adds text around the messages.
    if corpus.tokenizer is not None and not corpus.manifest.template:
        known = sum(_text_bytes(served, one) for one, _ in _read_documents(corpus, chosen))
    return PerplexityResult(len(chosen), tokens, known, math.fsum(terms))


def split_into_windows(
    tokens: np.ndarray, seq: int, stride: int = 0
) -> Iterator[tuple[int, list[int], int]]:
    """Yield windows of at most seq + 1 tokens: start, tokens, first prediction that counts.

    Each token of the document but the first is predicted exactly once among those that count.
    """
    stride = stride or seq
    # Tokens before `done` are predicted already; the first of a document never is.
    done = 1
    for start in range(0, max(len(tokens) - 1, 0), stride):
        stop = min(start + seq + 1, len(tokens))
        if stop > done:
            yield start, tokens[start:stop].tolist(), done - start - 1
            done = stop


def _read_documents(corpus: Corpus, chosen: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens of each document, and which of them count."""
    for number in chosen.tolist():
        places = corpus.document_starts[number] + np.arange(corpus.document_lengths[number])
        if corpus.manifest.template:
            yield corpus.read_with_mask(places)
        else:
            yield corpus.read_tokens(places), np.ones(len(places), bool)


def _text_bytes(served: ModelServer, tokens: np.ndarray) -> int:
    """Bytes of the text of all tokens but the first."""
    decode = served.tokenizer.decode
    return len(decode(tokens.tolist()).encode()) - len(decode(tokens[:1].tolist()).encode())
