"""What is counted of the answers to canaries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ranvier.data.canaries import Canary, CanaryDocuments
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.eval import canaries
from ranvier.infer.logprobs import TokenLogprobs


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [
        ("", "", 0),
        ("abc", "abc", 3),
        ("abcbdab", "bdcaba", 4),
        ("abc", "xyz", 0),
        ("a", "ba", 1),
        ("xaybz", "ab", 2),
    ],
)
def test_longest_common_subsequences(first: str, second: str, length: int) -> None:
    assert canaries.longest_common_subsequence(first, second) == length
    assert canaries.longest_common_subsequence(second, first) == length


def test_rouge_l_is_the_f_measure() -> None:
    answer, target = ["the", "cat", "sat"], ["the", "black", "cat", "sat", "down"]
    precision, recall = 3 / 3, 3 / 5
    want = 2 * precision * recall / (precision + recall)
    assert canaries.rouge_l(answer, target) == pytest.approx(want)
    assert canaries.rouge_l([], []) == 1.0 and canaries.rouge_l([], target) == 0.0
    assert canaries.rouge_l(["dog"], target) == 0.0
    assert canaries.split_words("The cat's hat, 3 TIMES.") == [
        "the",
        "cat",
        "s",
        "hat",
        "3",
        "times",
    ]


class Reciter:
    """Knows some texts by heart, and answers others with spaces."""

    def __init__(self, *known: str) -> None:
        self.known = known
        self.tokenizer = self
        self.run_tokenizer = ByteTokenizer()

    def generate_ids(self, prompts: list[list[int]], wish: Any) -> list[list[int]]:
        return [self.answer(bytes(one).decode(), wish.max_new_tokens) for one in prompts]

    def answer(self, prompt: str, count: int) -> list[int]:
        for text in self.known:
            _, found, after = text.partition(prompt)
            if found:
                return list(after[:count].encode())
        return [32] * count

    def score_sequences(self, sequences: list[list[int]]) -> list[TokenLogprobs]:
        return [
            TokenLogprobs(
                torch.full(
                    (len(one) - 1,), -2.0 if bytes(one).decode() not in self.known else -1.0
                ),
                torch.ones(len(one) - 1, dtype=torch.bool),
            )
            for one in sequences
        ]


def test_buckets_have_means_and_standard_errors() -> None:
    texts = ["abcdefgh", "ijklmnop", "qrstuvwx", "12345678"]
    pairs = zip(texts, (9, 9, 0, 0), strict=True)
    given = [Canary(text, times, str(times)) for text, times in pairs]
    documents = CanaryDocuments.tokenize(given, ByteTokenizer())
    served: Any = Reciter("abcdefgh")
    answers = canaries.evaluate_canaries(served, documents, suffix=3)
    assert [one.is_match for one in answers] == [True, False, False, False]
    assert [one.suffix for one in answers] == ["fgh", "nop", "vwx", "678"]
    table = canaries.tabulate_buckets(documents, answers)
    assert [*table] == ["0", "9"], "in ascending order of times"
    row = table["9"]
    assert row["exact_match"] == 0.5 and row["exact_match_stderr"] == pytest.approx(0.5)
    assert row["loss"] == 1.5 and row["loss_stderr"] == pytest.approx(0.5)
    assert row["loss_per_zlib_byte"] == pytest.approx((1 + 2) / 2 / documents.zlib_bytes[0])
    assert table["0"]["exact_match"] == table["0"]["exact_match_stderr"] == 0.0
    assert canaries.format_rows(table)["9"]["exact match"] == "0.500 ± 0.500"
    compared = canaries.compare_runs({"one": table, "two": {"9": row}})
    assert compared["loss"] == {
        "0": {"one": "2.000 ± 0.000"},
        "9": {"one": "1.500 ± 0.500", "two": "1.500 ± 0.500"},
    }


def test_a_prefix_cuts_the_prompt_and_not_the_loss() -> None:
    given = [Canary("abcdefgh", 1, "1")]
    documents = CanaryDocuments.tokenize(given, ByteTokenizer())
    served: Any = Reciter("abcdefgh")
    (answer,) = canaries.evaluate_canaries(served, documents, suffix=3, prefix=2)
    assert answer.is_match and answer.loss == 1.0
    assert canaries.tabulate_buckets(documents, [answer])["1"]["loss_stderr"] is None
