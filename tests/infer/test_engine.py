"""The engine says what `transformers` says, whatever the grid, the load and the cache."""

from __future__ import annotations

import functools
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
from ranvier.config.plan import AXES
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
    ({"context": 2}, "samples"),
    ({"context": 4}, "samples"),
    ({"context": 3}, "samples"),
    ({"context": 2, "row": 2}, "samples"),
    ({"context": 2, "row": 4}, "samples"),
    ({"context": 2, "col": 2}, "samples"),
    ({"pipe": 2, "context": 2}, "samples"),
    ({"expert": 2, "context": 2}, "samples"),
]
HEADS = 4
LAYERS = 2
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
    made: dict[tuple[str, int, int], tuple[Any, Path]] = {}

    def get(name: str, layers: int = LAYERS, heads: int = HEADS) -> tuple[Any, Path]:
        if (name, layers, heads) not in made:
            kind, config = CASES[name]
            is_gpt2 = kind == "gpt2"
            sizes = {
                "n_positions" if is_gpt2 else "max_position_embeddings": POSITIONS,
                "n_layer" if is_gpt2 else "num_hidden_layers": layers,
                "n_head" if is_gpt2 else "num_attention_heads": heads,
            }
            border = {"original_max_position_embeddings": LONG_BORDER} if "long" in name else {}
            model = theirs(kind, config | sizes | border)
            made[name, layers, heads] = model, save(model, tmp_path_factory.mktemp("model"))
        return made[name, layers, heads]

    return get


def count_head_parts(degrees: dict[str, int], inner: str) -> int:
    """Number of ranks that share the heads of a layer."""
    return degrees.get("row", 1) * (degrees.get("col", 1) if inner == "features" else 1)


def fits(name: str, degrees: dict[str, int], inner: str) -> bool:
    """Whether a model can be split over a grid."""
    _, config = CASES[name]
    experts = config.get("num_experts", 1)
    has_heads = HEADS % count_head_parts(degrees, inner) == 0
    return has_heads and experts % degrees.get("expert", 1) == 0


def has_one_home(degrees: dict[str, int], inner: str) -> bool:
    """Whether all sequences of a grid are in one place."""
    axes = ["data", "expert", "depth"] + ["col"] * (inner == "samples")
    return all(degrees.get(axis, 1) == 1 for axis in axes)


SAMPLE: list[tuple[str, tuple[dict[str, int], str], tuple[int, int, int], str]] = [
    ("phi3 long, tied", ({}, "samples"), LOADS[1], "on"),
    ("gemma2", ({"col": 2}, "features"), LOADS[2], "off"),
    ("mixtral tied, window", ({"expert": 2, "col": 2}, "samples"), LOADS[0], "on"),
    ("llama 3.1", ({"pipe": 2, "row": 2}, "samples"), LOADS[0], "on"),
    ("qwen3", ({"context": 2, "row": 2}, "samples"), LOADS[0], "on"),
]
"""Models, grids and loads without `--full`: in a small pool, in steps of 7 and of 64 tokens, with
and without a step ahead of the host."""


def list_cases(is_full: bool) -> list[Any]:
    """Parameters of models on grids, each with a load."""
    product = [
        (name, grid, load)
        for name in CASES
        for grid in GRIDS
        for load in LOADS
        if fits(name, *grid)
    ]
    # Every grid and every load is run both ways.
    cases = [(*case, ("off", "on")[(i + i // len(LOADS)) % 2]) for i, case in enumerate(product)]
    return [
        pytest.param(*case, id=f"{case[0]}-{label(case[1])}-{case[2]}-{case[3]}")
        for case in (cases if is_full else SAMPLE)
    ]


@pytest.mark.nccl
def test_greedy_tokens_are_those_of_transformers(
    pool: Pool,
    published: Any,
    name: str,
    grid: tuple[dict[str, int], str],
    load: tuple[int, int, int],
    ahead: str,
    request: pytest.FixtureRequest,
) -> None:
    is_full = request.config.getoption("--full")
    # A small pool preempts only if sequences grow.
    count = COUNT if is_full or load[2] else 6
    check_greedy(pool, name, published(name), grid, load, count, ahead)


def check_greedy(
    pool: Pool,
    name: str,
    made: tuple[Any, Path],
    grid: tuple[dict[str, int], str],
    load: tuple[int, int, int],
    count: int,
    ahead: str,
) -> None:
    """Compares the tokens of an engine, cold and warm, with those of `transformers`."""
    model, folder = made
    degrees, inner = grid
    budget, block_size, num_blocks = load
    # Each rank of context has its share of a block. A small pool must hold the longest request.
    context = degrees.get("context", 1)
    page_size = -(-block_size // context) if num_blocks else block_size // context
    options = {
        "max_num_batched_tokens": budget,
        "block_size": page_size,
        "async_scheduling": ahead,
    }
    num_blocks = num_blocks or 12 * POSITIONS // block_size + 1
    params = GREEDY | {"max_tokens": count}
    cold, warm = pool.on_grid(degrees, serve_twice, folder, inner, options, num_blocks, params)[0]
    border = LONG_BORDER if "long" in name else math.inf
    assert find_differences(model, cold, "cold", border, count) == []
    assert find_differences(model, warm, "warm", border, count) == []
    check_counts(cold, warm, is_small=load[2] > 0, has_one_home=has_one_home(*grid))


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


def list_grids(most: int) -> list[tuple[dict[str, int], str]]:
    """All grids of up to `most` ranks; row and col are powers of two, as the sizes of models are.

    Models have an expert for each rank of expert, and heads and layers as the grid needs.
    """
    grids: list[dict[str, int]] = [{}]
    for axis in AXES:
        sizes = (2, 4, 8) if axis in TENSOR else range(2, most + 1)
        grids += [
            grid | {axis: size}
            for grid in grids
            for size in sizes
            if math.prod(grid.values()) * size <= most
        ]
    found = [grid for grid in grids if list_models(grid)]
    found.sort(key=lambda grid: math.prod(grid.values()))
    return [
        (grid, inner)
        for grid in found
        for inner in ("samples", "features")
        if inner == "samples" or "col" in grid
    ]


TENSOR = ("row", "col")


def list_models(degrees: dict[str, int]) -> list[str]:
    """Models whose experts can be split over a grid."""
    experts = degrees.get("expert", 1)
    return [name for name, (_, one) in CASES.items() if one.get("num_experts", 1) % experts == 0]


def choose_model(number: int, degrees: dict[str, int]) -> str:
    """A model for the n-th grid; another one for the next grid."""
    # The factors of LongRoPE fit heads of one size only.
    is_long = math.prod(degrees.get(axis, 1) for axis in TENSOR) <= HEADS
    names = [name for name in list_models(degrees) if is_long or "long" not in name]
    return names[number % len(names)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Products of models, grids and loads, which only `--full` needs."""
    is_full = metafunc.config.getoption("--full")
    if metafunc.function is test_greedy_tokens_are_those_of_transformers:
        metafunc.parametrize(("name", "grid", "load", "ahead"), list_cases(is_full))
    elif metafunc.function is test_every_grid_says_what_transformers_says:
        grids = list_grids(8 if is_full else 1)
        cases = [
            pytest.param(choose_model(number, grid[0]), grid, id=label(grid))
            for number, grid in enumerate(grids)
        ]
        metafunc.parametrize(("name", "grid"), cases)
        metafunc.parametrize("load", LOADS, ids=str)
    elif metafunc.function is test_draws_do_not_depend_on_grid_batch_or_preemption:
        metafunc.parametrize("grid", GRIDS if is_full else [GRIDS[6]], ids=label)
        metafunc.parametrize("load", LOADS[:3] if is_full else [LOADS[1]], ids=str)
        # The requests that are served alone have no step ahead of the host.
        metafunc.parametrize("ahead", ["off", "on"] if is_full else ["on"])


@pytest.mark.full
def test_every_grid_says_what_transformers_says(
    pool: Pool,
    published: Any,
    name: str,
    grid: tuple[dict[str, int], str],
    load: tuple[int, int, int],
) -> None:
    degrees, inner = grid
    heads = max(HEADS, count_head_parts(degrees, inner))
    made = published(name, max(LAYERS, degrees.get("pipe", 1)), heads)
    ahead = "on" if load in LOADS[1:3] else "off"
    check_greedy(pool, name, made, grid, load, COUNT, ahead)


LAYOUTS = [
    ({"row": 2}, "samples"),
    ({"row": 4}, "features"),
    ({"row": 2, "col": 2}, "samples"),
    ({"row": 2, "col": 2}, "features"),
    ({"depth": 2, "row": 2}, "samples"),
    ({"pipe": 2, "row": 2}, "samples"),
    ({"expert": 2, "row": 2}, "samples"),
    ({"context": 2}, "samples"),
    ({"context": 2, "row": 2}, "samples"),
    ({"context": 2, "col": 2}, "samples"),
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


@pytest.fixture(scope="module")
def alone(published: Any) -> Any:
    """Tokens of requests that are served alone in one process, by the name of the model."""

    @functools.cache
    def get(name: str) -> list[list[int]]:
        return serve_alone(Grid({}), published(name)[1], DRAWN)

    return get


DRAWN = {"temperature": 0.8, "seed": 5, "top_p": 0.95, "max_tokens": 10, "ignore_eos": True}


@pytest.mark.nccl
def test_draws_do_not_depend_on_grid_batch_or_preemption(
    pool: Pool,
    published: Any,
    alone: Any,
    grid: tuple[dict[str, int], str],
    load: tuple[int, int, int],
    ahead: str,
) -> None:
    degrees, inner = grid
    name = "mixtral" if "expert" in degrees else "llama"
    _, folder = published(name)
    budget, block_size, num_blocks = load
    options = {
        "max_num_batched_tokens": budget,
        "block_size": block_size,
        "async_scheduling": ahead,
    }
    num_blocks = num_blocks or 12 * POSITIONS // block_size + 1
    cold, warm = pool.on_grid(degrees, serve_twice, folder, inner, options, num_blocks, DRAWN)[0]
    for i, tokens in enumerate(alone(name)):
        assert cold.tokens(f"cold{i}") == tokens
        assert warm.tokens(f"warm{i}") == tokens
