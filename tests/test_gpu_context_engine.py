"""The kernels of paged attention on the pages of each rank of context give the whole sequence.

`pytest --nccl tests/test_gpu_context_engine.py` runs engines on grids whose ranks share one GPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from infer.engine_cases import POSITIONS, Served, find_differences, make_requests, serve
from pool import NcclPools, Pool
from published_models import CASES, loaded, save, theirs
from ranvier import launch
from ranvier.config.engine import EngineConfig
from ranvier.grid import Grid
from ranvier.infer.engine import Engine, run_with_engine
from ranvier.infer.sampling_params import SamplingParams
from ranvier.infer.step_input import SequenceChunk, build_sequences
from ranvier.models.paged_attention import KVCache, attend_to_own_pages
from ranvier.nn.attention import merge_parts

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
SHAPES = [(32, 8, 128), (4, 4, 64), (6, 2, 80), (16, 1, 256), (12, 4, 24), (12, 4, 12)]
"""Heads, kv heads and head dim."""
STEPS = [
    [(1, 1), (1, 16), (1, 65), (1, 700)],
    [(1, 300), (1, 5), (7, 7), (40, 40), (33, 200), (2, 513)],
]
"""New tokens, and tokens in all, of the sequences of a step."""
COUNT = 6


@pytest.fixture(autouse=True)
def plain_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        from ranvier.infer import paged_kernels

        monkeypatch.setattr(paged_kernels, "has_dependent_launch", lambda device: False)


def make_chunks(sizes: list[tuple[int, int]], block_tokens: int) -> list[SequenceChunk]:
    """Sequences whose blocks are not adjacent."""
    counts = [-(-total // block_tokens) for _, total in sizes]
    order = torch.randperm(sum(counts)).add(1).tolist()
    return [
        SequenceChunk([0] * new, total - new, total, [order.pop() for _ in range(count)])
        for (new, total), count in zip(sizes, counts, strict=True)
    ]


def clear_unused_values(caches: list[Tensor], chunks: list[SequenceChunk]) -> None:
    """Clears the values after the last token of each sequence, as kernels do."""
    for index, cache in enumerate(caches):
        page_size = cache.shape[3]
        for chunk in chunks:
            for i, block in enumerate(chunk.blocks):
                page_begin = (i * len(caches) + index) * page_size
                cache[1, block, :, max(chunk.num_known_tokens - page_begin, 0) :] = 0.0


def attend(
    function: Any,
    inputs: list[Tensor],
    caches: list[Tensor],
    chunks: list[SequenceChunk],
    page_size: int,
    options: tuple[int, float],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs and log-sum-exps of the pages of each rank, `[C, T, h, k + 1]`, merged outputs, and
    the caches afterwards."""
    parts = []
    written = []
    for index, rank_cache in enumerate(caches):
        cache = KVCache(*rank_cache.clone().unbind(0))
        sequences = build_sequences(
            chunks,
            len(inputs[0]),
            page_size,
            inputs[0].device,
            context_size=len(caches),
            context_index=index,
        )
        o, lse = function(*inputs, cache, sequences, *options)
        assert not o.isnan().any() and not lse.isnan().any()
        parts.append(torch.cat([o, lse.T.unsqueeze(-1)], -1))
        written.append(torch.stack([cache.keys[1:], cache.values[1:]]))
    whole = torch.stack(parts)
    return whole, merge_parts(whole), written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("context_size", [2, 3, 4])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (37, 0.0), (0, 5.0), (100, 5.0)])
@pytest.mark.parametrize("shape", SHAPES[3:] if INTERPRETED else SHAPES, ids=str)
def test_kernels_equal_plain_attention_to_own_pages(
    shape: tuple[int, int, int],
    window: int,
    cap: float,
    context_size: int,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    from ranvier.infer import paged_kernels

    heads, kv_heads, head_dim = shape
    torch.manual_seed(0)
    for sizes in STEPS:
        chunks = make_chunks(sizes, page_size * context_size)
        most = 1 + max(block for chunk in chunks for block in chunk.blocks)
        tokens = sum(new for new, _ in sizes) + 3
        caches = [
            torch.randn(2, most, kv_heads, page_size, head_dim, device=DEVICE).to(dtype)
            for _ in range(context_size)
        ]
        clear_unused_values(caches, chunks)
        q = torch.randn(tokens, heads, head_dim, device=DEVICE).to(dtype)
        k, v = torch.randn(2, tokens, kv_heads, head_dim, device=DEVICE).to(dtype).unbind(0)
        options = (window, cap)
        with np.errstate(all="ignore"):
            have, y, written = attend(
                paged_kernels.attend_to_own_pages, [q, k, v], caches, chunks, page_size, options
            )
        want, exact, same = attend(
            attend_to_own_pages,
            [x.double() for x in (q, k, v)],
            [x.double() for x in caches],
            chunks,
            page_size,
            options,
        )
        limit = 2e-5 if dtype == torch.float32 else 3e-2
        assert torch.equal(have[..., -1] == float("-inf"), want[..., -1] == float("-inf"))
        seen = want[..., -1] > float("-inf")
        assert float((have.double() - want)[seen].abs().max()) < limit, sizes
        assert bool((have[..., :-1][~seen] == 0.0).all())
        assert float((y.double() - exact).abs().max()) < limit, sizes
        for one, other in zip(written, same, strict=True):
            assert torch.equal(one.double(), other), "the same is written"


# ---- engines -------------------------------------------------------------------------------------


def serve_with_kernels(
    grid: Grid, folder: Path, options: dict[str, Any], num_blocks: int, dtype: torch.dtype
) -> list[Served]:
    """The same requests with a cold and with a warm prefix cache; on the leader."""
    model = loaded(grid, folder, "samples", dtype)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=COUNT)

    def work(engine: Engine) -> list[Served]:
        from ranvier.infer import paged_kernels

        cores = engine.runner._cores
        assert all(core.attend_own_pages is paged_kernels.attend_to_own_pages for core in cores)
        assert engine.runner.step_graphs is None, "collectives are not captured"
        return [serve(engine, make_requests(params, name)) for name in ("cold", "warm")]

    return run_with_engine(model, EngineConfig(**options), work, num_blocks=num_blocks) or []


@pytest.mark.nccl
@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("ahead", ["off", "on"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral window"])
@pytest.mark.parametrize(
    "degrees", [{"context": 2}, {"context": 4}, {"context": 2, "row": 2}], ids=str
)
def test_an_engine_over_nccl_says_what_transformers_says(
    pool: Pool | NcclPools, tmp_path: Path, degrees: dict[str, int], name: str, ahead: str
) -> None:
    if not isinstance(pool, NcclPools):
        pytest.skip("needs --nccl")
    kind, config = CASES[name]
    model = theirs(kind, config | {"max_position_embeddings": POSITIONS})
    folder = save(model, tmp_path / "model")
    options = {"block_size": 16, "max_num_batched_tokens": 64, "async_scheduling": ahead}
    cold, warm = pool.on_grid(
        degrees, serve_with_kernels, folder, options, 12 * POSITIONS // 16, torch.float32
    )[0]
    assert find_differences(model, cold, "cold", count=COUNT) == []
    assert find_differences(model, warm, "warm", count=COUNT) == []
    assert warm.stats.prefix_cache_hits > cold.stats.prefix_cache_hits
