"""Requests to an engine on a grid, and what `transformers` says about its tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from published_models import VOCAB, loaded
from ranvier.config.engine import EngineConfig
from ranvier.config.plan import RowSplit
from ranvier.grid import Grid
from ranvier.infer.engine import Engine, open_engine, run_with_engine
from ranvier.infer.model_runner import ModelRunner
from ranvier.infer.request import EngineStats, Request, TokenOutput
from ranvier.infer.sampling_params import SamplingParams
from ranvier.infer.step_input import StepInput
from ranvier.trace import diff_events

LENGTHS = (1, 2, 3, 15, 16, 17, 40, 63, 64, 65, 130, 200)
COUNT = 40
"""Tokens of each answer."""
POSITIONS = 256
TIE = 1e-5
"""Logits that are closer are a tie."""


def prompts(lengths: Sequence[int] = LENGTHS) -> list[tuple[int, ...]]:
    """A prompt of each length."""
    return [
        tuple((7 * n + 5 * i * i + i) % VOCAB for i in range(size))
        for n, size in enumerate(lengths)
    ]


@dataclasses.dataclass(frozen=True)
class Served:
    """What an engine returned."""

    outputs: dict[str, list[TokenOutput]]
    stats: EngineStats
    num_steps: int

    def tokens(self, request_id: str) -> list[int]:
        """All tokens of a request."""
        return [token for one in self.outputs[request_id] for token in one.token_ids]


def serve(engine: Engine, requests: Sequence[Request]) -> Served:
    """Runs all requests at once."""
    for request in requests:
        engine.add(request)
    outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
    num_steps = 0
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.request_id].append(output)
        num_steps += 1
        assert num_steps < 20_000, "the engine makes no progress"
    return Served(outputs, engine.stats(), num_steps)


def make_requests(params: SamplingParams, name: str = "") -> list[Request]:
    """A request for each prompt."""
    return [
        Request(request_id=f"{name}{i}", prompt_token_ids=prompt, params=params, stream=i)
        for i, prompt in enumerate(prompts())
    ]


def serve_twice(
    grid: Grid,
    folder: Path,
    inner: str,
    options: dict[str, Any],
    num_blocks: int,
    params: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> list[Served]:
    """The same requests with a cold and with a warm prefix cache; on the leader.

    First the tokens of a step are split over context, and then all its ranks compute all of them.
    """
    model = loaded(grid, folder, inner, dtype)
    splits: dict[str, RowSplit] = {"cold": "tokens", "warm": "none"}

    def work(engine: Engine) -> list[Served]:
        found = []
        for name, engine.runner.context_splits in splits.items():
            found.append(serve(engine, make_requests(SamplingParams(**params), name)))
        return found

    return run_with_engine(model, EngineConfig(**options), work, num_blocks=num_blocks) or []


@torch.no_grad()
def reference_logits(model: Any, tokens: Sequence[int], border: float = math.inf) -> Tensor:
    """Logits after each token of a text that grows token by token, by `transformers`.

    border: length after which LongRoPE turns all keys by other factors.
    """
    whole: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    if len(tokens) > border:
        short = model(torch.tensor([tokens[: int(border)]]), use_cache=False).logits[0]
        whole = torch.cat([short, whole[int(border) :]])
    return whole


def find_differences(
    model: Any, served: Served, name: str, border: float = math.inf, count: int = COUNT
) -> list[str]:
    """Tokens that are not the most likely ones of `transformers`, except in ties."""
    lines = []
    for i, prompt in enumerate(prompts()):
        tokens = served.tokens(f"{name}{i}")
        if len(tokens) != count:
            lines.append(f"{name}{i} has {len(tokens)} tokens")
            continue
        logits = reference_logits(model, [*prompt, *tokens[:-1]], border)[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        gaps = logits.amax(1) - chosen
        lines += [
            f"{name}{i}, token {place}: {gap:g} below the most likely one"
            for place, gap in enumerate(gaps.tolist())
            if gap > TIE
        ]
    return lines


def serve_alone(grid: Grid, folder: Path, params: dict[str, Any]) -> list[list[int]]:
    """The tokens of each request, if it is the only one."""
    model = loaded(grid, folder)
    found = []
    for request in make_requests(SamplingParams(**params)):
        with open_engine(model, EngineConfig(), num_blocks=9) as engine:
            found.append(serve(engine, [request]).tokens(request.request_id))
    return found


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Log-probabilities of all tokens in one layout, and unexpected communication of a rank."""

    logprobs: list[float]
    differences: list[str]


def record_logprobs(
    grid: Grid, folder: Path, inner: str, layouts: Sequence[RowSplit]
) -> list[Recorded]:
    """Serves prompts in float64 with each layout of the residual stream over row and context."""
    model = loaded(grid, folder, inner, torch.float64)
    params = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    found = []
    for layout, context_splits in product(layouts, get_args(RowSplit)):
        if context_splits == "tokens" and grid.degrees["context"] == 1:
            continue
        differences: list[str] = []
        with open_engine(
            model, EngineConfig(max_num_batched_tokens=24), num_blocks=40, row_splits=layout
        ) as engine:
            watch_steps(engine.runner, differences)
            engine.runner.context_splits = context_splits
            if grid.rank != 0:
                engine.runner.follow()
                found.append(Recorded([], differences))
                continue
            served = serve(engine, make_requests(params)[:8])
        scores = [
            score.logprob
            for outputs in served.outputs.values()
            for output in outputs
            for score in (*(output.prompt_logprobs or ()), *output.logprobs)
        ]
        found.append(Recorded(scores, differences))
    return found


def watch_steps(runner: ModelRunner, differences: list[str]) -> None:
    """Compares the communication of each step with what its layers predict."""
    run_step = runner._run
    dynamic = runner.parallel.data_dependent_layers

    def run_and_compare(step: StepInput) -> Any:
        with runner.grid.trace.record_events() as events:
            outputs = run_step(step)
        names = {*runner.parallel.communicating_layers} - dynamic
        recorded = [event for event in events if event.where in names and "depth" not in event.axis]
        predicted = [event for event in runner.predict_events(step) if event.where in names]
        differences.extend(diff_events(predicted, recorded))
        return outputs

    runner._run = run_and_compare  # type: ignore[method-assign]
