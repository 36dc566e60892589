"""The engine as `serving.py` runs it: models, workloads, requests, and when their tokens come."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from right_step import TwinWeights, load_parallel
from right_tokens import NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS
from serving_bound import Bound, draw_prompts
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan
from ranvier.grid import Grid
from ranvier.infer.engine import Engine, open_engine
from ranvier.infer.model_source import ModelSource
from ranvier.infer.request import Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.models import MODEL_SIZES, Decoder, DecoderConfig
from ranvier.parallel.parallel_model import get_parallel_model

Row = dict[str, Any]
SIZES: dict[str, DecoderConfig] = {
    **{name: MODEL_SIZES[name] for name in ("llama3-8b", "llama3-1b", "qwen3-0.6b")},
    # As in one_gpu.py.
    "1.5b": DecoderConfig(
        layers=16, embed=2048, heads=32, kv_heads=8, head_dim=64, mlp=8192, vocab=128256,
        max_seq=4096, rope_theta=500000.0,
    ),
    # Heads, width and vocabulary that are not powers of two.
    "2.8b": DecoderConfig(
        layers=20, embed=3072, heads=24, kv_heads=6, head_dim=128, mlp=9216, vocab=100003,
        max_seq=8192, rope_theta=500000.0,
    ),
}  # fmt: skip
TOY = DecoderConfig(
    layers=2, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=96, vocab=257, max_seq=512
)
TOY_SIZES = {"toy": TOY, "toy-qwen3": replace(TOY, qk_norm="per_head", tie_embeddings=True)}
PROFILED_STEPS = 20


@dataclass(frozen=True)
class Workload:
    """Numbers of tokens and requests of the cases."""

    single: tuple[int, int] = (128, 512)
    """Tokens in and out at batch 1."""
    batch: tuple[int, int] = (64, 2048)
    """Sequences and tokens of each."""
    steps: int = 32
    """Timed decode steps of a batch."""
    nano: tuple[int, int, int] = (256, 100, 1024)
    """Requests, and bounds of their tokens in and out."""
    prefill: tuple[int, int] = (4, 2048)
    """Prompts and tokens of each."""
    prefix: tuple[int, int] = (4096, 64)
    """Tokens that prompts share, and those of each prompt alone."""
    skip: int = 16
    """First decode steps that are not timed."""
    checked: tuple[int, int] = (PROMPT_TOKENS, NEW_TOKENS)
    """Tokens in and out of the answers that are compared with the twin."""


TOY_WORKLOAD = Workload((16, 8), (4, 64), 6, (8, 10, 40), (2, 32), (128, 64), 2, (6, 5))


@dataclass(frozen=True)
class ShapeSource(ModelSource):
    """Random weights of any shape."""

    shape: DecoderConfig = TOY

    def load_config(self) -> DecoderConfig:
        """Returns the architecture of the model."""
        return self.shape


@dataclass(frozen=True)
class Setup:
    """A model, its bound, and how it is measured."""

    size: str
    config: DecoderConfig
    device: torch.device
    bound: Bound
    work: Workload
    repeats: int
    settings: Mapping[str, Any]
    """Settings of the engine that replace those of a case."""
    tunes: bool
    """Whether the compiler of the plain loop searches parameters of kernels."""
    nano_vllm: Path | None
    smoke: bool
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    """Greedy tokens of each contestant for the prompts that are checked."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def build_model(self) -> Decoder:
        """Returns our model with the weights of the twin."""
        plan = Plan(data=1, compile="on" if self.device.type == "cuda" else "off")
        source = ShapeSource(Path(), "random", size=self.size, shape=self.config)
        model = source.load(Grid({}), self.device, plan, self.dtype)
        load_parallel(get_parallel_model(model), TwinWeights(self.config, self.device))
        return model

    def checked_prompts(self) -> list[list[int]]:
        """Returns the prompts of which all contestants generate greedy tokens."""
        return draw_prompts([self.work.checked[0]] * NUM_PROMPTS, self.config.vocab, 2026)

    def answer(self, engine: Engine) -> list[list[int]]:
        """Returns the greedy tokens of our engine."""
        new_tokens = self.work.checked[1]
        requests = make_requests(self.checked_prompts(), [new_tokens] * NUM_PROMPTS, name="check")
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            engine.add(request)
        while engine.has_unfinished:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
        return list(tokens.values())

    def answer_alone(self, model: Decoder) -> list[list[int]]:
        """Returns the greedy tokens of an engine that has no other requests."""
        length = sum(self.work.checked)
        case = {"max_num_seqs": NUM_PROMPTS, "max_model_len": length}
        with self.open_engine(model, num_tokens=NUM_PROMPTS * length, **case) as engine:
            return self.answer(engine)

    @contextmanager
    def open_engine(self, model: Decoder, *, num_tokens: int, **case: Any) -> Iterator[Engine]:
        """Context with an engine whose cache holds some tokens. case: settings of the engine."""
        config = EngineConfig(**{**case, **self.settings})
        # Each request may have a block that is not full.
        num_blocks = num_tokens // config.block_size + 2 * config.max_num_seqs + 2
        with open_engine(model, config, num_blocks=num_blocks) as engine:
            yield engine

    def peer_repeats(self) -> int:
        """Returns the number of runs of a peer."""
        return max(1, self.repeats - 1)


def make_requests(
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    name: str,
    temperature: float = 0.0,
) -> list[Request]:
    """Returns requests for a number of tokens each."""
    return [
        Request(
            request_id=f"{name}-{i}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True),
        )
        for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]


@dataclass
class Timeline:
    """When the tokens of some requests came."""

    start: float
    times: list[float] = field(default_factory=list)
    """End of each step that returned tokens."""
    counts: list[int] = field(default_factory=list)
    """Tokens that it returned."""
    generated: dict[str, int] = field(default_factory=dict)
    """Tokens of each request so far."""

    def take_step(self, engine: Engine) -> None:
        """Runs a step, and records what it returns."""
        outputs = engine.step()
        count = 0
        for output in outputs:
            if output.error:
                raise RuntimeError(f"{output.request_id}: {output.error}")
            count += len(output.token_ids)
            before = self.generated.get(output.request_id, 0)
            self.generated[output.request_id] = before + len(output.token_ids)
        if count:
            self.times.append(time.perf_counter())
            self.counts.append(count)

    @property
    def seconds(self) -> float:
        """Time from the start to the last token."""
        return self.times[-1] - self.start


def run_requests(engine: Engine, requests: Sequence[Request]) -> Timeline:
    """Runs requests to their end; none of them may be cut short."""
    timeline = Timeline(time.perf_counter())
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        timeline.take_step(engine)
    expected = sum(request.params.max_tokens or 0 for request in requests)
    if sum(timeline.counts) != expected:
        raise RuntimeError(f"{sum(timeline.counts)} tokens instead of {expected} were generated")
    return timeline


def abort_requests(engine: Engine, requests: Sequence[Request]) -> None:
    """Ends requests, and the steps that are still in flight."""
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_unfinished:
        engine.step()


def profile_steps(engine: Engine, layers: int) -> Row:
    """Returns the kernels per layer, and the busy and idle milliseconds of decode steps."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    ranges = []
    kernels = 0
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            ranges.append((event.time_range.start, event.time_range.end))
            kernels += not event.name.startswith(("Memcpy", "Memset"))
    if not ranges:
        return {"profile": "no kernels were recorded"}
    ranges.sort()
    busy = 0.0
    end = ranges[0][0]
    for start, stop in ranges:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    span = end - ranges[0][0]
    return {
        "kernels_per_step": kernels / PROFILED_STEPS,
        "kernels_per_layer": kernels / PROFILED_STEPS / layers,
        "busy_ms": busy / 1e3 / PROFILED_STEPS,
        "idle_ms": (span - busy) / 1e3 / PROFILED_STEPS,
    }
