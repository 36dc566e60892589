"""The Triton kernels of the sampler draw the same tokens as PyTorch on a CPU."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sampler_cases import KINDS, expected, make_case, row_of, splitmix, whole
from torch import Tensor

from ranvier import launch
from ranvier.infer import sampler
from ranvier.infer.sampler import SampledTokens, sample_tokens, score_tokens
from ranvier.infer.sampling_inputs import SamplingInputs, SamplingRow

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton can run kernels without a GPU, slowly, to test their arithmetic."""
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not (torch.cuda.is_available() and launch.has_triton()),
        reason="needs a CUDA device, or TRITON_INTERPRET=1",
    ),
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if INTERPRETED:
        monkeypatch.setattr(sampler, "can_use_kernels", lambda x: x.dtype != torch.float64)
    # The interpreter computes with numpy, which warns of infinite numbers.
    with np.errstate(all="ignore"):
        yield


def sample(logits: Tensor, rows: list[SamplingRow]) -> SampledTokens:
    inputs = SamplingInputs.from_rows(rows, logits.shape[1]).to(DEVICE)
    return sample_tokens(logits.to(DEVICE), inputs, whole(logits.shape[1]))


@pytest.mark.parametrize(("vocab", "count"), [(1, 10), (3, 30), (50, 60), (5000, 60)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_equal_the_reference(vocab: int, count: int, dtype: torch.dtype) -> None:
    logits, rows = make_case(vocab, vocab, count)
    x = torch.as_tensor(logits).to(dtype)
    found = sample(x, rows)
    assert found.tokens.tolist() == expected(x.float().numpy(), rows)
    assert not found.failed.any()


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_each_kind_alone(params: dict[str, Any]) -> None:
    logits, _ = make_case(4, 3000, 12)
    rows = [row_of(i, i, **params) for i in range(12)]
    assert sample(torch.as_tensor(logits), rows).tokens.tolist() == expected(logits, rows)


def unscramble(x: int) -> int:
    """The inverse of the hash of counters."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        x = x ^ (x >> shift) ^ (x >> 2 * shift)
        x = x * pow(factor, -1, 2**64) % 2**64
    return x


@pytest.mark.parametrize("bits", [0, 2**64 - 1, 1 << 11, 1 << 30, 2**64 - 2**30])
def test_the_largest_and_the_smallest_noise(bits: int) -> None:
    # The noise of token 2500 is that of these bits.
    key = unscramble(unscramble(bits) ^ 2500)
    assert splitmix(splitmix(key) ^ 2500) == bits
    key -= (key >> 63) << 64
    logits = np.random.default_rng(0).normal(size=(4, 5000)).astype(np.float32)
    logits[:, 2500] += [0.0, 5.0, 30.0, 200.0]
    rows = [dataclasses.replace(row_of(), key=key) for _ in range(4)]
    found = sample(torch.as_tensor(logits), rows).tokens.tolist()
    assert found == expected(logits, rows)
    assert found[3] == 2500


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1300},
        {"top_p": 0.97, "temperature": 1.7},
        {"top_k": 1200, "top_p": 0.8},
        {"top_k": 1200, "top_p": 1e-12},
        {"top_p": 0.001},
    ],
    ids=str,
)
def test_thresholds_are_exact(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    logits, _ = make_case(4, 1500, 4)
    x = torch.as_tensor(logits)
    inputs = SamplingInputs.from_rows([row_of(i, **params) for i in range(4)], 1500)
    found = sampler._find_filter(x.to(DEVICE), inputs.to(DEVICE), whole(1500), 1500)
    monkeypatch.setattr(sampler, "can_use_kernels", lambda x: False)
    wanted = sampler._find_filter(x, inputs, whole(1500), 1500)
    assert torch.equal(found.thresholds.cpu(), wanted.thresholds)
    assert torch.equal(found.candidates.cpu(), wanted.candidates)


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_a_row_without_an_allowed_token_fails(params: dict[str, Any]) -> None:
    x = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    x[2, 4], x[3, 8], x[4, 1] = math.nan, -math.nan, math.inf
    rows = [row_of(i, **params) for i in range(5)]
    rows[1] = dataclasses.replace(rows[1], forbidden_token_ids=range(9))
    found = sample(x, rows)
    assert found.failed.tolist() == [False, True, True, True, True]
    assert found.tokens[1:].tolist() == [0] * 4


def test_scores_are_those_of_the_reference() -> None:
    logits, _ = make_case(3, 5000, 20)
    x = torch.as_tensor(logits)
    tokens = torch.arange(20) * 249
    found = score_tokens(x.to(DEVICE), tokens.to(DEVICE), whole(5000), num_top=4)
    wanted = score_tokens(x.double(), tokens, whole(5000), num_top=4)
    torch.testing.assert_close(found.logprobs.cpu(), wanted.logprobs.float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(found.ranks.cpu(), wanted.ranks)
    assert torch.equal(found.top_tokens.cpu(), wanted.top_tokens)
    # The same bits alone.
    alone = [
        score_tokens(x[i : i + 1].to(DEVICE), tokens[i : i + 1].to(DEVICE), whole(5000))
        for i in range(20)
    ]
    assert torch.equal(torch.cat([one.logprobs for one in alone]), found.logprobs)


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_draws_are_captured_in_a_graph(params: dict[str, Any]) -> None:
    logits, _ = make_case(8, 3000, 16)
    params = params | {"logprobs": 2}
    x = torch.as_tensor(logits).cuda()
    first = [row_of(i, 5, **params) for i in range(16)]
    inputs = SamplingInputs.from_rows(first, 3000).to("cuda")
    sample_tokens(x, inputs, whole(3000))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sample_tokens(x, inputs, whole(3000))
    for position in (5, 6):
        inputs.positions.fill_(position)
        graph.replay()
        rows = [row_of(i, position, **params) for i in range(16)]
        assert found.tokens.tolist() == expected(logits, rows)
