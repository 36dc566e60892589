"""The engine runs models with a ladder residual: the tokens are those of the full forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from engine_cases import serve, watch_steps

from equivalence import Case, build, sized
from pool import Pool
from ranvier.config.engine import EngineConfig
from ranvier.config.plan import RowSplit
from ranvier.grid import Grid
from ranvier.infer.engine import open_engine
from ranvier.infer.request import Request
from ranvier.infer.sampling_params import SamplingParams

VOCAB = 29
COUNT = 6
"""Tokens of each answer."""
LADDER = sized(layers=4, residual="'ladder'", max_seq=64)
SOME = sized(layers=4, residual="'ladder'", ladder_layers="(1,3)", max_seq=64, bias=True)
EXPERTS = sized(layers=2, residual="'ladder'", experts=8, experts_per_token=2, max_seq=64)
CASES: list[tuple[str, dict[str, int], str]] = [
    (LADDER, {"row": 2}, "samples"),
    (SOME, {"pipe": 2}, "samples"),
    (LADDER, {"pipe": 2, "row": 2}, "samples"),
    (SOME, {"row": 2, "col": 2}, "features"),
    (LADDER, {"context": 2, "row": 2}, "samples"),
    (SOME, {"data": 2, "col": 2}, "samples"),
    (EXPERTS, {"expert": 2, "row": 2}, "samples"),
]


def prompts() -> list[tuple[int, ...]]:
    """Prompts of several lengths."""
    return [tuple((7 * n + 5 * i * i + i) % VOCAB for i in range(n)) for n in (1, 2, 5, 16, 23)]


@dataclass(frozen=True)
class Answers:
    """Tokens and log-probabilities of each prompt, and unexpected communication of a rank."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    differences: list[str]


def answer(grid: Grid, model: str, inner: str) -> list[Answers]:
    """Serves all prompts, with each layout of the residual stream over row."""
    built = Case(model, inner=inner).on(grid).eval()
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
    requests = [
        Request(request_id=str(i), prompt_token_ids=prompt, params=params, stream=i)
        for i, prompt in enumerate(prompts())
    ]
    found = []
    for layout in get_args(RowSplit):
        differences: list[str] = []
        with open_engine(
            built,
            EngineConfig(max_num_batched_tokens=16, block_size=8),
            num_blocks=40,
            row_splits=layout,
        ) as engine:
            watch_steps(engine.runner, differences)
            if grid.rank != 0:
                engine.runner.follow()
                found.append(Answers([], [], differences))
                continue
            served = serve(engine, requests)
        tokens = [served.tokens(request.request_id) for request in requests]
        scores = [
            [score.logprob for one in served.outputs[request.request_id] for score in one.logprobs]
            for request in requests
        ]
        found.append(Answers(tokens, scores, differences))
    return found


@torch.no_grad()
def expected(model: str) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and log-probabilities of the whole model in one process, one forward pass each."""
    plain = build_plain(model)
    tokens, scores = [], []
    for prompt in prompts():
        text, own = list(prompt), []
        for _ in range(COUNT):
            logits = plain(torch.tensor([text]))[0, -1]
            text.append(int(logits.argmax()))
            own.append(float(logits.log_softmax(-1)[text[-1]]))
        tokens.append(text[len(prompt) :])
        scores.append(own)
    return tokens, scores


def build_plain(model: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return build(model).eval()


@pytest.mark.nccl
@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "degrees", "inner"), CASES, ids=str)
def test_tokens_are_those_of_the_full_forward_pass(
    pool: Pool, model: str, degrees: dict[str, int], inner: str
) -> None:
    tokens, scores = expected(model)
    ranks = pool.on_grid(degrees, answer, model, inner)
    for found in ranks[0]:
        assert found.tokens == tokens
        for have, want in zip(found.logprobs, scores, strict=True):
            assert have == pytest.approx(want, rel=1e-9)
    assert [line for rank in ranks for one in rank for line in one.differences] == []
