"""parallelize: what it refuses, what it keeps, and how a new model with a new layer is added."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from equivalence import Case, Serial, batch_of, compare, run_case
from grids import grids, label
from pool import Pool
from ranvier.config.plan import Plan
from ranvier.data.batch import Batch
from ranvier.errors import PlanError, ShardingError
from ranvier.grid import Grid
from ranvier.models import EXAMPLES, MODEL_SIZES, Decoder
from ranvier.models.decoder import CrossEntropy, DecoderConfig
from ranvier.parallel.parallel_model import enclosing_block, get_parallel_model
from ranvier.parallel.parallelize import parallelize


class Mixer(nn.Module):
    """A new layer in plain PyTorch.

    A gate with parameters of its own, a causal shift of the sequence inside.
    """

    dims = {
        "enter": ("mlp", "embed"),
        "gate": ("mlp",),
        "kernel": ("mlp", "taps"),
        "leave": ("embed", "mlp"),
        "scale": ("embed",),
    }

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)
        self.gate, self.scale = nn.Parameter(torch.rand(24)), nn.Parameter(torch.rand(16))
        self.kernel = nn.Parameter(torch.rand(24, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        before = nn.functional.pad(y, (0, 0, 1, 0))[:, :-1]
        y = y * self.kernel[:, 0] + before * self.kernel[:, 1]
        return self.leave(torch.tanh(y) * self.gate) * self.scale


class Mixing(nn.Module):
    """A new model: it names its dims and knows nothing of grids."""

    dims = {
        "embed": ("vocab", "embed"),
        "norm": ("embed",),
        "head": ("vocab", "embed"),
        "loss": ("vocab",),
    }

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"vocab": 29, "embed": 16, "mlp": 24}
        self.embed, self.norm = nn.Embedding(29, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.head, self.loss = nn.Linear(16, 29), CrossEntropy()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.loss(self.head(self.norm(x)), targets)


def run_new(grid: Grid, case: Case, batch: Batch) -> dict[str, Any]:
    with mock.patch.dict(EXAMPLES, {"new": Mixing}):
        return run_case(grid, case, batch, 1e-2, 0.5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "degrees", [g for g in grids((4, 8)) if len(set(g.values())) < 3][::3], ids=label
)
def test_a_new_model_with_a_new_layer_runs_on_a_grid(pool: Pool, degrees: dict[str, int]) -> None:
    batch = batch_of("new", samples=8, packed=False)
    with mock.patch.dict(EXAMPLES, {"new": Mixing}):
        serial = Serial("new", batch, 1e-2, 0.5)
    for inner in ("samples", "features"):
        results = pool.on_grid(degrees, run_new, Case("new", inner=inner), batch)
        assert compare(serial, results) == []


class Stack(nn.Module):
    """A block with a list inside."""

    dims = {"mlp.0": ("mlp", "embed"), "mlp.2": ("embed", "mlp")}

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x)
        return y


class Stacked(Mixing):
    """A model whose blocks have lists inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Stack() for _ in range(2))


class Chained(Mixing):
    """A model whose blocks are an `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Stack(), Stack())  # type: ignore[assignment]


def test_blocks_in_a_sequential_have_a_bucket_each() -> None:
    parallel = get_parallel_model(parallelize(Chained(), Grid({})))
    buckets = {weight.bucket.name for weight in parallel.weights.values()}
    assert buckets == {"embed", "head", "layers.0", "layers.1", "vectors"}


def test_a_plan_of_another_order_of_ranks_is_refused() -> None:
    plan = Plan(data=2, row=2, rank_order=("row", "data"))
    with pytest.raises(PlanError, match=r"rank_order=\['row', 'data'\].*Grid.from_plan"):
        parallelize(Mixing(), Grid({"data": 2, "row": 2}), plan)
    parallelize(Mixing(), Grid.from_plan(plan, rank=0), plan)
    with pytest.raises(PlanError, match="cannot both be inferred"):
        parallelize(Mixing(), Grid({"data": 2, "row": 2}), Plan(data=-1, row=-1))


def run_stacked(grid: Grid, case: Case, batch: Batch) -> tuple[dict[str, Any], list[Any]]:
    with mock.patch.dict(EXAMPLES, {"stacked": Stacked}):
        parallel = get_parallel_model(case.on(grid))
        names = ("norm", "layers.1.mlp.2", "layers.0.mlp.0.weight", "head.weight")
        buckets = {weight.bucket.name for weight in parallel.weights.values()}
        found = [parallel.blocks, [parallel.block_of(name) for name in names], sorted(buckets)]
        return run_case(grid, case, batch, 1e-2, 0.5), found


def test_a_layer_in_a_list_inside_of_a_block_belongs_to_the_block(pool: Pool) -> None:
    batch = batch_of("stacked", samples=8, packed=False)
    with mock.patch.dict(EXAMPLES, {"stacked": Stacked}):
        serial = Serial("stacked", batch, 1e-2, 0.5)
    results = pool.on_grid({"depth": 2}, run_stacked, Case("stacked", recompute="full"), batch)
    assert compare(serial, [result for result, _ in results]) == []
    assert [found for _, found in results] == 2 * [
        [
            ("layers.0", "layers.1"),
            ["", "layers.1", "layers.0", ""],
            ["embed", "head", "layers.0", "layers.1", "vectors"],
        ]
    ]


def test_of_nested_blocks_the_innermost_counts() -> None:
    blocks = ["stages.1", "stages.1.blocks.0", "stages.1.blocks.1"]
    names = {
        "stages.1.norm": "stages.1",
        "stages.1.blocks.1.mlp.up": "stages.1.blocks.1",
        "stages.1.blocks.10.up": "stages.1",
        "stages.1": "",
        "head": "",
    }
    assert {name: enclosing_block(name, blocks) for name in names} == names


class Unnamed(nn.Module):
    dims = {"up": ("mlp", "embed")}

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"embed": 4, "mlp": 4}
        self.up, self.gate = nn.Linear(4, 4), nn.Linear(4, 64, bias=False)
        self.scale = nn.Parameter(torch.ones(4))


def test_unnamed_weights_are_refused_all_at_once() -> None:
    with pytest.raises(ShardingError) as error:
        parallelize(Unnamed(), Grid({}))
    text = str(error.value)
    assert "Unnamed has 2 weights without named dimensions" in text
    assert (
        "gate.weight (64, 4)" in text and "scale (4,)" in text and "Add each weight to dims" in text
    )


def test_a_name_the_model_has_not_is_refused() -> None:
    model = Unnamed()
    names = {"up": ("mlp", "embed"), "upp": ("mlp", "embed")}
    with pytest.raises(ShardingError, match=r"dims contains 'upp'.*Use one of .*up, gate"):
        parallelize(model, Grid({}), dims=names)


def test_linear_layers_that_stay_inside_are_refused() -> None:
    with pytest.raises(ShardingError, match=r"\('mlp', 'heads'\).*must map 'embed'"):
        parallelize(Unnamed(), Grid({}), dims={"up": ("mlp", "heads")})


def test_a_layer_without_leaf_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    with pytest.raises(ShardingError, match="0 is a Conv2d, which has no parallel version"):
        parallelize(model, Grid({}), dims={"0": ("embed",)})


# ---- plan ----------------------------------------------------------------------------------------


def small_decoder(**changes: Any) -> Decoder:
    """A decoder without values."""
    with torch.device("meta"):
        shape = {"layers": 4, "embed": 16, "heads": 4, "head_dim": 4, "mlp": 24, "vocab": 29}
        return Decoder(DecoderConfig(**(shape | changes)))


def settings_of(model: nn.Module) -> dict[str, Any]:
    """What of a plan has reached the parallel model."""
    parallel = get_parallel_model(model)
    queue = parallel.bucket_scheduler
    pipeline = parallel.pipeline.config
    return {
        "col_splits": parallel.table.col_splits,
        "overlap": tuple(sorted(queue.overlap)),
        "shard_weights_over": parallel.table.shard_weights_over,
        "reshard_after": "step" if queue.keep_unsharded else "micro_batch",
        "recompute": set(parallel.recompute_modes.values()),
        "compile": "off" if parallel.compiled_blocks is None else "on",
        "moe_dispatch_dtype": {layer.site.dispatch for layer in parallel.layers.values()},
        "schedule": pipeline.policy,
        "virtual_stages": pipeline.chunks,
        "stage_starts": parallel.pipeline.executor.stage.stage_starts,
        "max_in_flight": pipeline.max_in_flight,
        "stage_time_jitter": pipeline.jitter,
        "vocab_over_pipe": bool(parallel.pipeline.executor.stage.vocab_layers),
    }


CHANGED: dict[str, tuple[Any, Any]] = {
    "col_splits": ("features", "features"),
    "overlap": (("dw",), ("dw",)),
    "shard_weights_over": ("depth_context", "depth_context"),
    "reshard_after": ("step", "step"),
    "recompute": ("selective", {"selective"}),
    "compile": ("on", "on"),
    "moe_dispatch_dtype": ("bf16", {"bf16"}),
    "schedule": ("1f1b", "1f1b"),
    "stage_starts": ((2,), (0, 2)),
    "max_in_flight": (3, 3),
    "stage_time_jitter": (0.5, 0.5),
    "vocab_over_pipe": (True, True),
}
"""Settings: what the plan says, and what the model has then."""


@pytest.mark.parametrize("name", CHANGED)
def test_a_setting_of_the_plan_reaches_the_model(name: str) -> None:
    grid = Grid({"pipe": 2, "row": 2})
    said, had = CHANGED[name]
    plain = settings_of(parallelize(small_decoder(), grid))
    assert plain == settings_of(parallelize(small_decoder(), grid, Plan(pipe=2, row=2)))
    plan = replace(Plan(pipe=2, row=2), **{name: said})
    changed = settings_of(parallelize(small_decoder(), grid, plan))
    assert changed[name] == had != plain[name]
    if name != "vocab_over_pipe":  # it moves the work of stages too
        assert {**changed, name: plain[name]} == plain


def test_two_virtual_stages_of_the_plan_reach_the_model() -> None:
    model = parallelize(small_decoder(), Grid({"pipe": 2}), Plan(pipe=2, virtual_stages=2))
    assert settings_of(model)["virtual_stages"] == 2
    assert len(settings_of(model)["stage_starts"]) == 4


def test_stages_are_balanced_by_the_profile_of_the_plan(tmp_path: Path) -> None:
    profile = tmp_path / "times.toml"
    profile.write_text("forward = [9.0, 1.0, 1.0, 1.0, 1.0, 1.0]\n")
    plan = Plan(pipe=2, stage_profile=str(profile))
    stage = parallelize(small_decoder(), Grid({"pipe": 2}), plan).parallel.pipeline.executor.stage
    assert stage.stage_starts == (0, 1)


def test_stages_are_balanced_for_the_length_of_samples() -> None:
    """The share of attention, which the head has not, grows with the length."""
    grid = Grid({"pipe": 2})
    shares = []
    for seq_len in (8, 4096):
        model = parallelize(small_decoder(max_seq=4096), grid, seq_len=seq_len)
        *_, block, head = model.parallel.pipeline.executor.stage.part_costs
        shares.append(head / block)
    assert shares[1] < 0.1 * shares[0]


@pytest.mark.parametrize("plan", [Plan(row=4), Plan(row=2, data=3), Plan(), Plan(row=2, depth=2)])
def test_a_plan_of_another_grid_is_refused(plan: Plan) -> None:
    rule = r"The plan has .*, but the grid has .*must have the same degrees\. Use Plan\("
    with pytest.raises(PlanError, match=rule):
        parallelize(small_decoder(), Grid({"row": 2}), plan)


def test_a_degree_that_is_left_open_is_that_of_the_grid() -> None:
    model = parallelize(small_decoder(), Grid({"data": 2, "row": 2}), Plan(row=2))
    assert model.parallel.grid.degrees["data"] == 2
    with pytest.raises(
        PlanError, match=r"has row=1, col=4, but the grid has row=2, col=1.*Plan\(row=2, col=1"
    ):
        parallelize(small_decoder(), Grid({"row": 2}), Plan(col=4))


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", MODEL_SIZES)
def test_every_size_is_swapped_on_the_meta_device(size: str) -> None:
    config = MODEL_SIZES[size]
    with torch.device("meta"):
        model = Decoder(config)
    count = sum(p.numel() for p in model.parameters())
    grid = Grid({"depth": 2, "row": 2, "col": 2}, rank=3)
    model = parallelize(model, grid, materialize=False)
    parallel = model.parallel
    assert sum(torch.Size(w.sharding.shape).numel() for w in parallel.weights.values()) == count
    assert all(p.is_meta for p in model.parameters())
    billions = {"gpt2": 0.124, "llama3-1b": 1.236, "llama3-8b": 8.03, "llama3-70b": 70.55}
    billions |= {"llama3-405b": 405.9, "qwen3-0.6b": 0.596, "qwen3-8b": 8.19}
    if size in billions:
        assert count / 1e9 == pytest.approx(billions[size], rel=0.005)


def test_padding_of_the_vocabulary_stays_zero_through_steps(pool: Pool) -> None:
    """Padded rows are zero before and after, so they can never be seen."""
    for found in pool.on_grid({"row": 2, "col": 2, "depth": 2}, padding_after_steps):
        assert found == 0.0


def padding_after_steps(grid: Grid) -> float:
    from equivalence import micros_of
    from ranvier.optim.optimizer import Optimizer
    from ranvier.train.step import forward_backward

    model = Case("llama").on(grid)
    optimizer = Optimizer(model.parallel.bucket_scheduler, lr=1e-1)
    for _ in range(2):
        forward_backward(model, micros_of(batch_of("llama", samples=8, packed=False), grid, 1))
        optimizer.step()
    worst = 0.0
    for weight in model.parallel.weights.values():
        rest = weight.param.detach().clone()
        rest[tuple(slice(n) for n in weight.shard.valid_shape)] = 0.0
        worst = max(worst, rest.abs().max().item())
    return worst


def test_initial_values_do_not_depend_on_the_grid(pool: Pool) -> None:
    from states import assemble

    (one,) = pool.on_grid({}, initial)
    want = assemble([one])
    for degrees in ({"row": 2, "col": 2, "depth": 2}, {"depth": 8}, {"data": 2, "row": 4}):
        have = assemble(pool.on_grid(degrees, initial))
        assert all(torch.equal(have[name], value) for name, value in want.items())
    deviation = {name: value.std().item() for name, value in want.items()}
    assert deviation["blocks.0.attention.o.weight"] == pytest.approx(0.02 / 2, rel=0.1)
    assert deviation["head.weight"] == pytest.approx(0.02, rel=0.1)
    assert torch.equal(want["norm.weight"], torch.ones(16))


def initial(grid: Grid) -> Any:
    with torch.device("meta"):
        model = Decoder(DecoderConfig(layers=2, embed=16, heads=8, head_dim=4, mlp=24, vocab=29))
    return parallelize(model, grid, seed=4).parallel.sharded_state()
