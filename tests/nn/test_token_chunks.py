"""Blocks in chunks of tokens: the same numbers as whole blocks, with less memory."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from equivalence import Case, Serial, batch_of, compare, run_case
from grids import label
from pool import Pool
from ranvier.config.plan import MAX_WHOLE_TOKENS, USUAL_TOKEN_CHUNK, Plan
from ranvier.grid import Grid
from ranvier.models.config import DecoderConfig
from ranvier.models.decoder import Decoder
from ranvier.nn.token_chunks import has_token_parts
from ranvier.parallel.parallelize import parallelize
from ranvier.train.memory.usage import HostMemoryCounter

LR, CLIP = 1e-2, 0.5
MODELS = ("llama", "gpt2", "qwen3", "biased", "olmo2", "gemma2", "lora", "dora")
GRIDS: list[dict[str, int]] = [{}, {"depth": 2}, {"context": 2}, {"data": 2}, {"pipe": 2}]


@functools.cache
def serial(model: str, packed: bool) -> Serial:
    """The model in one process, in whole blocks."""
    return Serial(model, batch_of(model, samples=8, packed=packed), LR, CLIP)


def list_cases() -> list[Any]:
    """All grids with all models; the other options vary."""
    cases = []
    for number, (degrees, model) in enumerate(itertools.product(GRIDS, MODELS)):
        options: dict[str, Any] = {"recompute": ("full", "selective", "none")[number % 3]}
        # 24 tokens of 8 samples are three tokens of each: the last chunk is shorter.
        options |= {"packed": bool(number % 2), "token_chunk": (24, 8, 2)[number % 3]}
        options |= {"fast": number % 5 != 4, "micro_batches": 1 + number % 2}
        if "pipe" in degrees:
            options |= {"policy": ("message_driven", "zero-bubble")[number % 2], "micro_batches": 2}
            model = ("deep tied", "deep learned")[number % 2]
        case = Case(model, **options)
        name = f"{label(degrees)}-{case.label}-{case.token_chunk}"
        cases.append(pytest.param(degrees, case, id=name))
    return cases


@pytest.mark.sample(2)
@pytest.mark.parametrize(("degrees", "case"), list_cases())
def test_chunks_equal_whole_blocks(pool: Pool, degrees: dict[str, int], case: Case) -> None:
    whole = serial(case.model, case.packed)
    assert compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)) == []


class OperationCounter(HostMemoryCounter):
    """Peak bytes of tensors, calls of each operation, and shapes of results."""

    counts_communication = True

    def __init__(self) -> None:
        super().__init__([])
        self.calls: Counter[str] = Counter()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls[func._schema.name.removeprefix("aten::")] += 1
        self.shapes |= {tuple(x.shape) for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out


def count_step(recompute: str, token_chunk: int) -> OperationCounter:
    """The tensors of a forward and backward pass over 64 tokens, with an MLP of 96."""
    config = DecoderConfig(layers=2, embed=16, heads=4, kv_heads=2, head_dim=4, mlp=96, vocab=29)
    torch.manual_seed(1)
    plan = Plan(recompute=recompute, token_chunk=token_chunk)  # type: ignore[arg-type]
    model = parallelize(Decoder(config).double(), Grid({}), plan)
    tokens = torch.randint(0, 29, (1, 64), generator=torch.Generator().manual_seed(3))
    counted = OperationCounter()
    with counted:
        model(tokens, tokens.roll(1, 1)).backward()
    return counted


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_nothing_of_the_size_of_the_mlp_is_whole(recompute: str) -> None:
    whole, chunked = count_step(recompute, 0), count_step(recompute, 16)
    assert (1, 64, 96) in whole.shapes and (1, 16, 96) in chunked.shapes
    assert not {(1, 64, 96), (64, 96), (96, 64)} & chunked.shapes
    assert chunked.peak_bytes() < 0.75 * whole.peak_bytes()


def test_the_mlp_runs_twice_and_selective_recomputation_saves_attention() -> None:
    full, selective = count_step("full", 16), count_step("selective", 16)
    # Two blocks of four chunks, in forward and for backward.
    assert full.calls["silu"] == selective.calls["silu"] == 2 * 4 * 2
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert (full.calls[attention], selective.calls[attention]) == (4, 2)


def test_only_long_samples_of_blocks_without_communication_are_in_chunks() -> None:
    assert Plan().tokens_per_chunk(1, MAX_WHOLE_TOKENS) == 0
    assert Plan().tokens_per_chunk(1, MAX_WHOLE_TOKENS + 1) == USUAL_TOKEN_CHUNK
    assert Plan().tokens_per_chunk(512, 1024) == 0, "a smaller micro-batch does the same"
    assert Plan(row=2).tokens_per_chunk(1, 2**20) == 0
    assert Plan(token_chunk=0).tokens_per_chunk(1, 2**20) == 0
    assert Plan(token_chunk=512).tokens_per_chunk(1, 1024) == 512
    assert Plan(token_chunk=512).tokens_per_chunk(1, 512) == 0


@pytest.mark.parametrize("axis", ["row", "col"])
def test_chunks_with_communication_are_refused(axis: str) -> None:
    plan = Plan(token_chunk=512, micro_batch=8).with_degrees({axis: 2})
    (problem,) = plan.find_problems({})
    assert f"{axis}=2" in problem and "token_chunk=0" in problem


def test_compiled_blocks_with_chunks_are_refused() -> None:
    (problem,) = Plan(token_chunk=512, compile="on", micro_batch=8).find_problems({})
    assert "compile='off'" in problem


def test_blocks_with_random_masks_or_experts_run_as_a_whole() -> None:
    config = DecoderConfig(layers=1, embed=16, heads=4, kv_heads=2, head_dim=4, mlp=24, vocab=29)
    changes: list[dict[str, Any]] = [{}, {"dropout": 0.1}, {"experts": 4, "experts_per_token": 2}]
    built = [Decoder(replace(config, **change)) for change in changes]
    models = [parallelize(model, Grid({}), Plan()) for model in built]
    assert [has_token_parts(model.blocks[0]) for model in models] == [True, False, False]
