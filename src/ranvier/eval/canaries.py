"""Memorization: how much of its canaries a model repeats, by bucket.

Each canary (see `data.canaries`) is cut before its last tokens, the suffix. The model continues the
rest with the most likely tokens, and the continuation is compared with the suffix:

    exact match   all tokens are equal
    RougeL        2 P R / (P + R), with P = lcs / len(continuation), R = lcs / len(suffix), and lcs
                  the length of the longest common subsequence: of token ids, and of words
    loss          mean loss of all tokens of the text, in nats
    loss / zlib   loss / bytes of the text as compressed by zlib: small if the model knows the text
                  better than its simplicity explains

Results are means over the canaries of a bucket, with standard errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.config.arguments import EvalOptions
from ranvier.data.canaries import CanaryDocuments, read_canaries
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import PlanError
from ranvier.eval.model_server import GenerationConfig, ModelServer
from ranvier.eval.tokenization import EvalTokenizer
from ranvier.train.memorization import (
    CanaryScore,
    group_by_bucket,
    mean_and_error,
    score_suffixes,
)

OPTIONS = ("suffix", "prefix")
"""Options that only this evaluation uses."""
METRIC_LABELS = {
    "exact_match": "exact match",
    "rouge_l_tokens": "RougeL tokens",
    "rouge_l_words": "RougeL words",
    "loss": "loss",
    "loss_per_zlib_byte": "loss / zlib",
}
ERROR_SUFFIX = "_stderr"


@dataclass(frozen=True)
class CanaryAnswer(CanaryScore):
    """What a model knows of a canary, and how it continues the canary."""

    rouge_l_tokens: float
    rouge_l_words: float
    suffix: str
    answer: str

    def to_record(self) -> dict[str, Any]:
        """Returns the facts of the answer."""
        return {
            "bucket": self.bucket,
            "exact_match": self.is_match,
            **{name: getattr(self, name) for name in [*METRIC_LABELS][1:]},
            "suffix": self.suffix,
            "answer": self.answer,
        }


def check_options(wanted: EvalOptions, folder: Path) -> None:
    """Raises if canaries cannot be evaluated with these options; reads no weights."""
    problems = [
        f"{name}={value} is out of range. It must be at least {low} and less than 2^31. Use "
        f"{low} or more."
        for name, low in {"suffix": 1, "prefix": 0}.items()
        if not low <= (value := getattr(wanted, name)) < 2**31
    ]
    if problems:
        raise PlanError(problems)
    canaries = load_canaries(wanted.canaries, EvalTokenizer.from_run(folder).run_tokenizer)
    # Raises if a canary is too short.
    list(canaries.split_suffixes(wanted.suffix, wanted.prefix))


def load_canaries(path: str, tokenizer: Tokenizer) -> CanaryDocuments:
    """Returns the canaries of a file, tokenized as in training."""
    return CanaryDocuments.tokenize(read_canaries(Path(path)), tokenizer)


def evaluate_canaries(
    served: ModelServer, canaries: CanaryDocuments, *, suffix: int, prefix: int = 0
) -> list[CanaryAnswer]:
    """Returns the answer to each canary.

    suffix: number of last tokens to predict. prefix: number of tokens to predict them from; 0 means
    all. Communicates: as `ModelServer.generate_ids` and `ModelServer.score_sequences`.
    """
    parts = list(canaries.split_suffixes(suffix, prefix))
    wish = GenerationConfig(max_new_tokens=suffix)
    answers = served.generate_ids([prompt.tolist() for prompt, _ in parts], wish)
    whole = [np.concatenate(pair).tolist() for pair in canaries.split_suffixes(suffix)]
    scored = score_suffixes(canaries, served.score_sequences(whole), suffix)
    decode = served.tokenizer.run_tokenizer.decode
    found = []
    for (_, target), answer, score in zip(parts, answers, scored, strict=True):
        suffix_text = decode(target.tolist())
        text = decode(answer)
        found.append(
            CanaryAnswer(
                score.bucket,
                answer == target.tolist(),
                score.loss,
                score.zlib_bytes,
                rouge_l(answer, target.tolist()),
                rouge_l(split_words(text), split_words(suffix_text)),
                suffix_text,
                text,
            )
        )
    return found


def rouge_l(answer: Sequence[Any], target: Sequence[Any]) -> float:
    """Returns the F-measure of the longest common subsequence; 1 if both are empty."""
    if not answer or not target:
        return float(len(answer) == len(target))
    common = longest_common_subsequence(answer, target)
    # 2 P R / (P + R) without a division by zero.
    return 2 * common / (len(answer) + len(target))


def longest_common_subsequence(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Returns the length of the longest common subsequence."""
    # Row i has the lengths for the first i items, and each prefix of the second sequence.
    row = [0] * (len(second) + 1)
    for item in first:
        before = row
        row = [0]
        for place, other in enumerate(second):
            same = before[place] + 1 if item == other else 0
            row.append(max(same, row[place], before[place + 1]))
    return row[-1]


def split_words(text: str) -> list[str]:
    """Returns the words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def tabulate_buckets(
    canaries: CanaryDocuments, answers: Sequence[CanaryAnswer]
) -> dict[str, dict[str, Any]]:
    """Returns means and standard errors of all metrics by bucket."""
    table: dict[str, dict[str, Any]] = {}
    for bucket, some in group_by_bucket(canaries, answers).items():
        row: dict[str, Any] = {"times": canaries.bucket_times[bucket], "documents": len(some)}
        records = [one.to_record() for one in some]
        for name in METRIC_LABELS:
            row[name], row[name + ERROR_SUFFIX] = mean_and_error(one[name] for one in records)
        table[bucket] = row
    return table


def format_rows(table: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns a table for people: each mean with its standard error."""
    return {
        bucket: {
            "times": row["times"],
            "documents": row["documents"],
            **{label: _format_mean(row, name) for name, label in METRIC_LABELS.items()},
        }
        for bucket, row in table.items()
    }


def compare_runs(
    tables: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, dict[str, str]]]:
    """Returns for each metric a table of buckets and runs. tables: of each run."""
    buckets = dict.fromkeys(bucket for table in tables.values() for bucket in table)
    return {
        label: {
            bucket: {
                run: _format_mean(table[bucket], name)
                for run, table in tables.items()
                if bucket in table
            }
            for bucket in buckets
        }
        for name, label in METRIC_LABELS.items()
    }


def _format_mean(row: Mapping[str, Any], name: str) -> str:
    mean = row[name]
    error = row[name + ERROR_SUFFIX]
    # Losses per byte are small.
    digits = 5 if name == "loss_per_zlib_byte" else 3
    if error is None:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def render_answers(answers: Sequence[CanaryAnswer]) -> str:
    """Returns the answers as JSON lines."""
    return "".join(json.dumps(one.to_record()) + "\n" for one in answers)
