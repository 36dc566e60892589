"""How much of its canaries a model has memorized: exact matches and losses by bucket.

A canary is memorized if its last tokens follow from the tokens before them by greedy decoding.
Greedy decoding repeats a text exactly if each of its tokens is the most likely one after the text
before it, so one forward pass is enough, and nothing has to be generated.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import nn

from ranvier.data.canaries import CanaryDocuments
from ranvier.infer.logprobs import TokenLogprobs, score_sequences
from ranvier.train.report.memorization import LOSS_KEY, MATCH_KEY


@dataclass(frozen=True)
class CanaryScore:
    """What a model knows of a canary."""

    bucket: str
    is_match: bool
    """Whether greedy decoding repeats the suffix exactly."""
    loss: float
    """Mean loss of the tokens of the text, in nats."""
    zlib_bytes: int
    """Bytes of the text as compressed by zlib."""

    @property
    def loss_per_zlib_byte(self) -> float:
        """loss / zlib_bytes: the loss relative to how simple the text is anyway."""
        return self.loss / self.zlib_bytes


ScoreT = TypeVar("ScoreT", bound=CanaryScore)


def score_suffixes(
    canaries: CanaryDocuments, scored: Sequence[TokenLogprobs], suffix: int
) -> list[CanaryScore]:
    """Scores of canaries from the log-probabilities of their texts, without end tokens."""
    return [
        CanaryScore(bucket, bool(one.is_greedy[-suffix:].all()), -float(one.logprobs.mean()), size)
        for one, bucket, size in zip(scored, canaries.buckets, canaries.zlib_bytes, strict=True)
    ]


def score_canaries(
    model: nn.Module, canaries: CanaryDocuments, *, suffix: int, batch: int
) -> dict[str, Any]:
    """Metrics of a step: the fraction of memorized canaries, and their loss, by bucket.

    batch: sequences per micro-batch. Communicates: as `score_sequences`.
    """
    texts = [np.concatenate(pair).tolist() for pair in canaries.split_suffixes(suffix)]
    scores = score_suffixes(canaries, score_sequences(model, texts, batch=batch), suffix)
    groups = group_by_bucket(canaries, scores)
    return {
        MATCH_KEY: {name: _mean(one.is_match for one in some) for name, some in groups.items()},
        LOSS_KEY: {name: _mean(one.loss for one in some) for name, some in groups.items()},
    }


def group_by_bucket(canaries: CanaryDocuments, scores: Iterable[ScoreT]) -> dict[str, list[ScoreT]]:
    """The scores of each bucket, in ascending order of times."""
    groups: dict[str, list[ScoreT]] = {bucket: [] for bucket in canaries.bucket_times}
    for score in scores:
        groups[score.bucket].append(score)
    return groups


def mean_and_error(values: Iterable[float]) -> tuple[float, float | None]:
    """The mean and its standard error; None for the error of a single value."""
    numbers = [float(value) for value in values]
    if len(numbers) < 2:
        return numbers[0], None
    return statistics.fmean(numbers), statistics.stdev(numbers) / math.sqrt(len(numbers))


def _mean(values: Iterable[float]) -> float:
    return mean_and_error(values)[0]
