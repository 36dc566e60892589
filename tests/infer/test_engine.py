"""The engine says what `transformers` says, whatever the grid, the load and the cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from engine_cases import (
    COUNT,
    POSITIONS,
    Served,
    find_differences,
    record_logprobs,
    serve_alone,
    serve_twice,
)

from pool import Pool
from published_models import CASES, save, theirs
from ranvier.grid import Grid

GRIDS: list[tuple[dict[str, int], str]] = [
    ({}, "samples"),
    ({"row": 2}, "samples"),
    ({"row": 4}, "features"),
    ({"col": 2}, "samples"),
    ({"col": 2}, "features"),
    ({"row": 2, "col": 2}, "samples"),
    ({"row": 2, "col": 2}, "features"),
    ({"depth": 2, "row": 2}, "samples"),
    ({"data": 2, "col": 2}, "samples"),
    ({"pipe": 2}, "samples"),
    ({"pipe": 2, "row": 2, "col": 2}, "features"),
    ({"pipe": 2, "data": 2, "row": 2}, "samples"),
    ({"expert": 2, "row": 2}, "samples"),
    ({"expert": 2, "depth": 2, "col": 2}, "samples"),
]
HEADS = 4
ONE_HOME = ("samples", "row2-samples", "row4-features", "col2-features", "pipe2-samples")
LOADS: list[tuple[int, int, int]] = [
    # Budget, block size, blocks: 15 blocks of 16 are one longest request, block 0 is not used.
    (64, 16, 0),
    (65, 16, 16),
    (7, 64, 0),
    (1, 16, 0),
]
LONG_BORDER = 100
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def label(case: tuple[dict[str, int], str]) -> str:
    degrees, inner = case
    return "-".join([*(f"{axis}{size}" for axis, size in degrees.items()), inner]) or "one"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Models of transformers, and where they are stored, by the name of their case."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in made:
            kind, config = CASES[name]
            length = "n_positions" if kind == "gpt2" else "max_position_embeddings"
            longer = {length: POSITIONS}
            border = {"original_max_position_embeddings": LONG_BORDER} if "long" in name else {}
            model = theirs(kind, config | longer | border)
            made[name] = model, save(model, tmp_path_factory.mktemp("model"))
        return made[name]

    return get


def fits(name: str, degrees: dict[str, int], inner: str) -> bool:
    """Whether a model can be split over a grid."""
    _, config = CASES[name]
    parts = degrees.get("row", 1) * (degrees.get("col", 1) if inner == "features" else 1)
    experts = config.get("num_experts", 1)
    return HEADS % parts == 0 and experts % degrees.get("expert", 1) == 0


MODELS_ON_GRIDS = [
    pytest.param(name, grid, id=f"{name}-{label(grid)}")
    for name in CASES
    for grid in GRIDS
    if fits(name, *grid)
]


@pytest.mark.nccl
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "load",
    [
        pytest.param(load, id=str(load), marks=pytest.mark.full if load[0] == 1 else ())
        for load in LOADS
    ],
)
@pytest.mark.parametrize(("name", "grid"), MODELS_ON_GRIDS)
def test_greedy_tokens_are_those_of_transformers(
    pool: Pool,
    published: Any,
    name: str,
    grid: tuple[dict[str, int], str],
    load: tuple[int, int, int],
    request: pytest.FixtureRequest,
) -> None:
    degrees, inner = grid
    is_full = request.config.getoption("--full")
    # A small pool preempts only if sequences grow.
    count = COUNT if is_full or load[2] else 8
    params = GREEDY | {"max_tokens": count}
    model, folder = published(name)
    budget, block_size, num_blocks = load
    options = {"max_num_batched_tokens": budget, "block_size": block_size}
    num_blocks = num_blocks or 12 * POSITIONS // block_size + 1
    cold, warm = pool.on_grid(degrees, serve_twice, folder, inner, options, num_blocks, params)[0]
    border = LONG_BORDER if "long" in name else math.inf
    assert find_differences(model, cold, "cold", border, count) == []
    assert find_differences(model, warm, "warm", border, count) == []
    check_counts(cold, warm, is_small=load[2] > 0, has_one_home=label(grid) in ONE_HOME)


def check_counts(cold: Served, warm: Served, *, is_small: bool, has_one_home: bool) -> None:
    """No block leaks, a small pool preempts, and a large one keeps all prefixes."""
    assert warm.stats.num_free_blocks == warm.stats.num_blocks
    if not has_one_home:
        return
    if is_small:
        assert warm.stats.num_preemptions >= 5
    else:
        assert cold.stats.num_preemptions == 0
        hits = warm.stats.prefix_cache_hits - cold.stats.prefix_cache_hits
        prompts = warm.stats.num_prompt_tokens - cold.stats.num_prompt_tokens
        assert hits > 0.5 * prompts


LAYOUTS = [
    ({"row": 2}, "samples"),
    ({"row": 4}, "features"),
    ({"row": 2, "col": 2}, "samples"),
    ({"row": 2, "col": 2}, "features"),
    ({"depth": 2, "row": 2}, "samples"),
    ({"pipe": 2, "row": 2}, "samples"),
    ({"expert": 2, "row": 2}, "samples"),
]


@pytest.mark.nccl
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["llama tied, biases", "gemma2", "qwen3_moe mixed", "gpt2"])
@pytest.mark.parametrize("grid", LAYOUTS, ids=label)
def test_layouts_have_the_same_logits_and_the_predicted_communication(
    pool: Pool, published: Any, name: str, grid: tuple[dict[str, int], str]
) -> None:
    degrees, inner = grid
    if not fits(name, degrees, inner):
        pytest.skip("the model has no experts to split")
    _, folder = published(name)
    (want,) = record_logprobs(Grid({}), folder, inner, ["tokens"])
    for found in pool.on_grid(degrees, record_logprobs, folder, inner, ["tokens", "none"]):
        for have in found:
            assert have.differences == []
            if have.logprobs:
                assert have.logprobs == pytest.approx(want.logprobs, abs=1e-9)


@pytest.mark.nccl
@pytest.mark.sample(1)
@pytest.mark.parametrize("load", LOADS[:3], ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=label)
def test_draws_do_not_depend_on_grid_batch_or_preemption(
    pool: Pool, published: Any, grid: tuple[dict[str, int], str], load: tuple[int, int, int]
) -> None:
    degrees, inner = grid
    name = "mixtral" if "expert" in degrees else "llama"
    _, folder = published(name)
    params = {"temperature": 0.8, "seed": 5, "top_p": 0.95, "max_tokens": 10, "ignore_eos": True}
    alone = serve_alone(Grid({}), folder, params)
    budget, block_size, num_blocks = load
    options = {"max_num_batched_tokens": budget, "block_size": block_size}
    num_blocks = num_blocks or 12 * POSITIONS // block_size + 1
    cold, warm = pool.on_grid(degrees, serve_twice, folder, inner, options, num_blocks, params)[0]
    for i, tokens in enumerate(alone):
        assert cold.tokens(f"cold{i}") == tokens
        assert warm.tokens(f"warm{i}") == tokens
