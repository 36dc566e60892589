"""Ranks of context store the pages of a sequence in turn, and together have the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import POSITIONS, make_requests, serve
from torch import Tensor

from pool import Pool
from published_models import CASES, VOCAB, loaded, save, theirs
from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan, RowSplit
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.infer.engine import Engine, run_with_engine
from ranvier.infer.request import Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.infer.step_input import SequenceChunk, build_sequences
from ranvier.models import Decoder, DecoderConfig
from ranvier.models.paged_attention import KVCache, attend_to_own_pages, paged_attention
from ranvier.nn.attention import merge_parts
from ranvier.parallel.parallelize import parallelize

HEAD_DIM = 6
CHUNKS = [(1, 1), (1, 30), (1, 5), (7, 7), (13, 29), (2, 41)]
"""New tokens, and tokens in all, of the sequences of a step."""


def split_over_blocks(chunks: list[tuple[int, int]], block_size: int) -> list[SequenceChunk]:
    """Sequences whose blocks are not adjacent."""
    counts = [-(-total // block_size) for _, total in chunks]
    order = torch.randperm(sum(counts)).add(1).tolist()
    return [
        SequenceChunk([0] * new, total - new, total, [order.pop() for _ in range(count)])
        for (new, total), count in zip(chunks, counts, strict=True)
    ]


def draw_history(chunks: list[tuple[int, int]], kv_heads: int) -> list[Tensor]:
    """Keys and values of all tokens of each sequence, `[2, g, length, k]`."""
    return [torch.randn(2, kv_heads, total, HEAD_DIM, dtype=torch.float64) for _, total in chunks]


def fill_cache(
    history: list[Tensor],
    chunks: list[SequenceChunk],
    page_size: int,
    context_size: int,
    context_index: int,
) -> KVCache:
    """The cache of one rank with the tokens before the step, and large numbers elsewhere."""
    most = 1 + max(block for chunk in chunks for block in chunk.blocks)
    shape = (most, history[0].shape[1], page_size, HEAD_DIM)
    cache = KVCache(*torch.full((2, *shape), 99.0, dtype=torch.float64).unbind(0))
    for one, chunk in zip(history, chunks, strict=True):
        for place in range(chunk.start):
            page, slot = divmod(place, page_size)
            block = chunk.blocks[page // context_size]
            if page % context_size == context_index:
                cache.keys[block, :, slot] = one[0, :, place]
                cache.values[block, :, slot] = one[1, :, place]
    return cache


@pytest.mark.parametrize("context_size", [2, 3, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (1, 0.0), (6, 5.0)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_of_all_ranks_give_attention_to_the_sequence(
    context_size: int, heads: int, kv_heads: int, window: int, cap: float, page_size: int
) -> None:
    torch.manual_seed(0)
    history = draw_history(CHUNKS, kv_heads)
    num_tokens = sum(new for new, _ in CHUNKS) + 2
    q = torch.randn(num_tokens, heads, HEAD_DIM, dtype=torch.float64)
    new = [one[:, :, total - count :] for one, (count, total) in zip(history, CHUNKS, strict=True)]
    padding = torch.randn(2, kv_heads, 2, HEAD_DIM, dtype=torch.float64)
    k, v = torch.cat([*new, padding], 2).transpose(1, 2).unbind(0)
    whole = split_over_blocks(CHUNKS, page_size)
    cache = fill_cache(history, whole, page_size, 1, 0)
    sequences = build_sequences(whole, num_tokens, page_size, torch.device("cpu"))
    want = paged_attention(q, k, v, cache, sequences, window, cap)
    shared = split_over_blocks(CHUNKS, page_size * context_size)
    parts = []
    for index in range(context_size):
        own = fill_cache(history, shared, page_size, context_size, index)
        sequences = build_sequences(
            shared,
            num_tokens,
            page_size,
            torch.device("cpu"),
            context_size=context_size,
            context_index=index,
        )
        o, lse = attend_to_own_pages(q, k, v, own, sequences, window, cap)
        assert not o.isnan().any() and not lse.isnan().any()
        assert bool((o[(lse == float("-inf")).T] == 0.0).all())
        parts.append(torch.cat([o, lse.T.unsqueeze(-1)], -1))
    assert bool((parts[-1][..., -1] == float("-inf")).any()), "the last rank has no page of some"
    have = merge_parts(torch.stack(parts))
    assert float((have - want).abs().max()) < 1e-12
    # A rank that is left out is missed.
    assert float((merge_parts(torch.stack(parts[1:])) - want).abs().max()) > 1e-3


def test_a_step_that_sees_many_keys_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from ranvier.models import paged_attention as module

    torch.manual_seed(0)
    history = draw_history(CHUNKS, 2)
    num_tokens = sum(new for new, _ in CHUNKS)
    q = torch.randn(num_tokens, 4, HEAD_DIM, dtype=torch.float64)
    k, v = torch.randn(2, num_tokens, 2, HEAD_DIM, dtype=torch.float64).unbind(0)
    chunks = split_over_blocks(CHUNKS, 8)
    sequences = build_sequences(
        chunks, num_tokens, 4, torch.device("cpu"), context_size=2, context_index=1
    )
    found = []
    for limit in (module.MAX_SCORES, 100):
        monkeypatch.setattr(module, "MAX_SCORES", limit)
        cache = fill_cache(history, chunks, 4, 2, 1)
        found.append(attend_to_own_pages(q, k, v, cache, sequences))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-14)


# ---- engines -------------------------------------------------------------------------------------

PAGE_SIZE = 8
NUM_BLOCKS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers with enough positions."""
    kind, config = CASES["llama"]
    model = theirs(kind, config | {"max_position_embeddings": POSITIONS})
    return save(model, tmp_path_factory.mktemp("model"))


def longest_answer(grid: Grid, folder: Path, options: dict[str, Any], num_blocks: int) -> Any:
    """The maximum length of an engine, a request of that length, and one that is longer."""
    model = loaded(grid, folder)

    def work(engine: Engine) -> tuple[int, list[int], str, int]:
        longest = engine.max_model_len
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        prompt = tuple(i * i % VOCAB for i in range(longest - 5))
        request = Request(request_id="one", prompt_token_ids=prompt, params=params)
        served = serve(engine, [request])
        try:
            engine.add(replace(request, prompt_token_ids=prompt * 2))
        except PlanError as error:
            return longest, served.tokens("one"), str(error), served.stats.num_blocks
        return longest, served.tokens("one"), "", served.stats.num_blocks

    return run_with_engine(model, EngineConfig(**options), work, num_blocks=num_blocks)


@pytest.mark.parametrize("context", [2, 4])
def test_context_holds_as_many_times_longer_sequences(
    pool: Pool, folder: Path, context: int
) -> None:
    options = {"block_size": PAGE_SIZE, "max_num_batched_tokens": 32}
    one, _, _, _ = longest_answer(Grid({}), folder, options, NUM_BLOCKS)
    longest, tokens, error, num_blocks = pool.on_grid(
        {"context": context}, longest_answer, folder, options, NUM_BLOCKS
    )[0]
    # The last token is sampled and not stored.
    assert longest - 1 == context * (one - 1) == context * (NUM_BLOCKS - 1) * PAGE_SIZE
    assert num_blocks == NUM_BLOCKS - 1 and "tokens" in error
    alone = longest_answer(
        Grid({}), folder, options | {"max_model_len": longest}, context * NUM_BLOCKS
    )
    assert alone[0] == longest and tokens == alone[1] and len(tokens) == 5


def score_mixture(grid: Grid, splits: RowSplit) -> list[float]:
    """Log-probabilities of greedy tokens of a mixture whose experts have a capacity."""
    torch.manual_seed(3)
    config = DecoderConfig(
        layers=2,
        embed=16,
        heads=4,
        kv_heads=2,
        head_dim=4,
        mlp=24,
        vocab=VOCAB,
        experts=4,
        experts_per_token=2,
        capacity_factor=0.75,
        max_seq=64,
    )
    serial = Decoder(config).eval()
    with torch.no_grad():
        for param in serial.parameters():
            param.normal_(std=0.4)
    plan = Plan().with_degrees(grid.degrees)
    model = parallelize(serial, grid, plan, dtype=torch.float64, device="cpu").eval()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4, logprobs=0)

    def work(engine: Engine) -> list[float]:
        engine.runner.context_splits = splits
        served = serve(engine, make_requests(params)[:6])
        return [one.logprob for some in served.outputs.values() for x in some for one in x.logprobs]

    return run_with_engine(model, EngineConfig(block_size=4), work, num_blocks=80) or []


def test_capacities_of_experts_do_not_depend_on_context(pool: Pool) -> None:
    want = score_mixture(Grid({}), "none")
    # Tokens are not split: the first ones of a step have priority.
    have = pool.on_grid({"context": 2}, score_mixture, "tokens")[0]
    assert have == pytest.approx(want, abs=1e-9)
