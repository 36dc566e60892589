"""The engine runs models with streams: the tokens are those of the full forward pass."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch
from engine_cases import serve, watch_steps

from commands import call
from equivalence import Case, sized
from infer.tiny_model import write_tiny_model
from pool import Pool
from ranvier.config.engine import EngineConfig
from ranvier.config.plan import RowSplit
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.infer.engine import block_bytes, open_engine
from ranvier.infer.request import Request
from ranvier.infer.sampling_params import SamplingParams

VOCAB = 29
COUNT = 6
"""Tokens of each answer."""
TWO = sized(layers=4, parscale_streams=2, parscale_prefix_tokens=3, max_seq=64)
FOUR = sized(layers=2, parscale_streams=4, parscale_prefix_tokens=5, max_seq=64, kv_heads=8)
WINDOW = sized(layers=2, parscale_streams=2, sliding_window=6, attn_logit_softcap=3.0, max_seq=64)
EXPERTS = sized(layers=2, parscale_streams=2, experts=8, experts_per_token=2, max_seq=64)
CASES: list[tuple[str, dict[str, int], str]] = [
    (FOUR, {"row": 2}, "samples"),
    (TWO, {"pipe": 2, "row": 2}, "samples"),
    (FOUR, {"row": 2, "col": 2}, "features"),
    (WINDOW, {"data": 2, "col": 2}, "samples"),
    (EXPERTS, {"expert": 2, "row": 2}, "samples"),
    (TWO, {"depth": 2, "col": 2}, "samples"),
]


def prompts() -> list[tuple[int, ...]]:
    """Prompts of several lengths; the last two have a prefix in common."""
    some = [tuple((7 * n + 5 * i * i + i) % VOCAB for i in range(n)) for n in (1, 2, 5, 23)]
    return [*some, (*some[-1], 3, 1)]


@dataclass(frozen=True)
class Answers:
    """Tokens and log-probabilities of each prompt, and unexpected communication of a rank."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    differences: list[str]


def answer(grid: Grid, model: str, inner: str) -> list[Answers]:
    """Serves all prompts twice, with each layout of the residual stream over row.

    The second time, the prompts are in the prefix cache.
    """
    built = Case(model, inner=inner).on(grid).eval()
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
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
            for turn in range(2):
                requests = [
                    Request(request_id=f"{turn} {i}", prompt_token_ids=p, params=params, stream=i)
                    for i, p in enumerate(prompts())
                ]
                served = serve(engine, requests)
                tokens = [served.tokens(request.request_id) for request in requests]
                scores = [
                    [s.logprob for one in served.outputs[request.request_id] for s in one.logprobs]
                    for request in requests
                ]
                found.append(Answers(tokens, scores, differences))
    return found


def expected(model: str) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens by the full forward pass of the plain model, and their log-probabilities."""
    plain = Case(model).build().eval()
    tokens, logprobs = [], []
    for prompt in prompts():
        text = list(prompt)
        scores = []
        for _ in range(COUNT):
            with torch.no_grad():
                logits = plain(torch.tensor([text]))[0, -1].log_softmax(-1)
            best = int(logits.argmax())
            scores.append(float(logits[best]))
            text.append(best)
        tokens.append(text[len(prompt) :])
        logprobs.append(scores)
    return tokens, logprobs


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "degrees", "inner"), CASES, ids=str)
def test_tokens_are_those_of_the_full_forward_pass(
    pool: Pool, model: str, degrees: dict[str, int], inner: str
) -> None:
    want, scores = expected(model)
    for rank in pool.on_grid(degrees, answer, model, inner):
        for answers in rank:
            assert answers.differences == []
            if answers.tokens:
                assert answers.tokens == want
                for have, one in zip(answers.logprobs, scores, strict=True):
                    assert have == pytest.approx(one, abs=1e-9)


def refuse_context(grid: Grid) -> str:
    model = Case(TWO).on(grid).eval()
    try:
        with open_engine(model, EngineConfig(block_size=8), num_blocks=8):
            return ""
    except PlanError as error:
        return str(error)


def test_streams_over_context_are_refused_by_name(pool: Pool) -> None:
    for text in pool.on_grid({"context": 2}, refuse_context):
        assert "plan.context=2 is not supported for generation with" in text
        assert "model.parscale_streams=2" in text and "Use plan.context=1" in text


def test_a_block_has_the_keys_of_all_streams() -> None:
    one = Case(sized(layers=2, max_seq=64)).on(Grid({}))
    four = Case(sized(layers=2, parscale_streams=4, max_seq=64)).on(Grid({}))
    config = EngineConfig(block_size=8)
    assert block_bytes(four, config) == 4 * block_bytes(one, config)


def test_the_commands_know_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, run = write_tiny_model(tmp_path / "tiny"), tmp_path / "run"
    assert call("upcycle", str(model), "--parscale-streams", "2", "--output", str(run)) == 0
    assert "2 streams, 48 prefix tokens" in capsys.readouterr().out
    words = ("--max-new-tokens", "4", "--temperature", "0")
    assert call("generate", str(run), "--prompt", "def f(x):", *words) == 0
    text = tmp_path / "text.txt"
    text.write_text("A text that has some words, and a few more of them.\n" * 40)
    assert call("eval", str(run), "--corpus", str(text), "--train.device", "cpu") == 0
    (file,) = run.glob("eval-*.json")
    assert 0.0 < json.loads(file.read_text())["corpora"][str(text)]["loss"] < 20.0
    assert call("serve", str(run), "--dry-run", "--engine.kv-cache-gib", "0.001") == 0
    assert call("generate", str(run), "--prompt", "def", "--plan.context", "2") != 0
    found = capsys.readouterr()
    assert found.err.startswith("PlanError: plan.context=2 is not supported for generation with")
    assert call("upcycle", str(run), "--parscale-streams", "4") != 0
    assert "already has parscale_streams=2" in capsys.readouterr().err
    assert call("upcycle", str(model), "--parscale-streams", "1") != 0
    assert "parscale_streams=1 is too small" in capsys.readouterr().err
    assert call("upcycle", str(model), "--parscale-streams", "100000") != 0
    assert "parscale_streams=100000 is too large" in capsys.readouterr().err
    assert call("upcycle", str(model), "--parscale-streams", "0") != 0
    assert "upcycle got no number of experts, ladder layers or streams" in capsys.readouterr().err
    assert call("upcycle", str(model), "--parscale-streams", "2", "--experts", "4") != 0
    assert "--experts 4 and --parscale-streams 2" in capsys.readouterr().err
