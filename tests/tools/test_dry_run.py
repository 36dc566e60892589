"""Dry runs: what the planner predicts is what one rank of many does, byte for byte.

Bytes are counted at the fake process group, below comm, for random layouts of 8 to 4096 ranks.
"""

from __future__ import annotations

import json
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from commands import call
from ranvier.buckets.matrix_owners import OWNER_AXES
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import (
    DataConfig,
    DecoderModelConfig,
    LoraConfig,
    MemoryConfig,
    OptimConfig,
    TrainConfig,
)
from ranvier.cost.layers import ActivationShape
from ranvier.cost.optimizer import OptimizerName, OptimizerSpec
from ranvier.errors import PlanError
from ranvier.planner.comm_volume import step_comm_volume
from ranvier.planner.memory.total import peak_memory
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.tools.dry_run import dry_run, resolve_dry_run

SHAPE = {"layers": 4, "embed": 48, "heads": 24, "kv_heads": 6, "head_dim": 4, "mlp": 96}
MODELS = [
    {"vocab": 101},
    {"vocab": 96, "tie_embeddings": True, "qk_norm": "per_head"},
    {
        "vocab": 203,
        "tie_embeddings": True,
        "kv_heads": 24,
        "norm": "layer",
        "position_embedding": "learned",
    }
    | {"activation": "gelu", "bias": True, "max_seq": 64},
    {
        "vocab": 101,
        "qk_norm": "full",
        "norm_position": "post",
        "sliding_window": 8,
        "window_layers": (0, 2),
    },
]
DEGREES = {
    "pipe": (1, 1, 1, 2, 3),
    "data": (1, 2, 3, 4, 8, 16),
    "depth": (1, 2, 3, 4, 8),
    "row": (1, 2, 3, 4, 6, 12),
    "col": (1, 2, 3, 4, 6),
}
COUNT, SAMPLE = 50, 8


def drawn(draw: random.Random) -> tuple[RunConfig, int, int] | None:
    """A random run, its world and a rank of it; None if it cannot be."""
    degrees = {axis: draw.choice(sizes) for axis, sizes in DEGREES.items()}
    world, replicas = math.prod(degrees.values()), degrees["data"] * degrees["depth"]
    micro = draw.choice((1, 2, 3, 4, 6))
    chunks = draw.choice((1, 1, 2)) if degrees["pipe"] > 1 else 1
    plan = Plan(
        **degrees,
        col_splits=draw.choice(("samples", "features")),
        micro_batch=micro,
        global_batch=replicas * micro * draw.choice((1, 2)),
        recompute=draw.choice(("none", "none", "selective", "full")),
        reshard_after=draw.choice(("micro_batch", "micro_batch", "step")),
        virtual_stages=chunks,
        vocab_over_pipe=degrees["pipe"] > 1 and draw.random() < 0.25,
        schedule=draw.choice(("message_driven", "interleaved" if chunks > 1 else "1f1b")),
    )
    lora = LoraConfig(rank=3, dora=True) if draw.random() < 0.2 else LoraConfig()
    collectives = draw.choice(("rerun", "rerun", "save"))
    run = RunConfig(
        model=DecoderModelConfig(size="imported", **{**SHAPE, **draw.choice(MODELS)}),
        lora=lora,
        plan=plan,
        data=DataConfig(seq_len=48),
        train=TrainConfig(dtype=draw.choice(("bf16", "fp32"))),
        memory=MemoryConfig(recompute_collectives=collectives),
    )
    try:
        run.check_and_resolve(world)
    except PlanError:
        return None
    return (run, world, draw.randrange(world)) if 8 <= world <= 4096 else None


@cache
def layouts() -> list[tuple[RunConfig, int, int]]:
    """Those that can be, the same each time; few of them small."""
    draw, found = random.Random(9), list[tuple[RunConfig, int, int]]()
    while len(found) < COUNT:
        one = drawn(draw)
        if one is not None and (one[1] >= 64 or len(found) % 5 == 0):
            found.append(one)
    return found


def same(number: int) -> None:
    """Predicted bytes are counted bytes, for each operation and axis."""
    check_bytes(*layouts()[number])


def check_bytes(run: RunConfig, world: int, rank: int) -> None:
    """Predicted bytes are counted bytes, for each operation and axis."""
    found = dry_run(run, world=world, rank=rank, watched=False)
    run = resolve_dry_run(run, world=world, rank=rank)
    size = 2 if run.train.dtype == "bf16" else 4
    flow = ActivationShape(run.plan.micro_batch, run.data.seq_len, size, statistics_itemsize=4)
    kept = run.memory.recompute_collectives == "save"
    place = {"stage": found.index["pipe"], "context_index": found.index["context"]}
    place["stage_rank"] = stage_rank(found.index, run.plan)
    predicted = step_comm_volume(
        resolve_model_spec(run),
        run.plan,
        flow,
        **place,
        kept=kept,
        optimizer=OptimizerSpec.from_run(run),
    )
    assert found.comm_bytes() == predicted.bytes_by_axis(), (run.plan, run.model, rank)
    calls = sum(row.count for row in predicted.rows)
    assert calls == sum(row.calls for row in found.collectives)


def stage_rank(index: dict[str, int], plan: Plan) -> int:
    """Index of a rank among those of its stage."""
    found = 0
    for axis in OWNER_AXES:
        found = found * plan.degrees[axis] + index[axis]
    return found


OPTIMIZERS: list[tuple[OptimizerName, dict[str, Any]]] = [
    ("muon", {"data": 2, "depth": 2, "row": 3, "col": 2}),
    ("muon", {"pipe": 2, "data": 3, "row": 12, "virtual_stages": 2}),
    ("muon", {"context": 3, "depth": 4, "row": 2, "shard_weights_over": "depth_context"}),
    ("jorge", {"data": 3, "depth": 2, "row": 2}),
    ("jorge", {"pipe": 3, "row": 6, "col": 2}),
    ("sgd", {"data": 4, "depth": 2}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "degrees"), OPTIMIZERS, ids=str)
def test_predicted_bytes_of_optimizers_are_what_a_rank_sends(
    name: OptimizerName, degrees: dict[str, Any]
) -> None:
    """The exchange of matrices differs from rank to rank, as owners and shards do."""
    settings: dict[str, Any] = {"data": 1, "micro_batch": 2, **degrees}
    replicas = settings["data"] * settings.get("depth", 1)
    plan = Plan(global_batch=2 * replicas * settings["micro_batch"], **settings)
    model = DecoderModelConfig(size="imported", **{**SHAPE, "vocab": 96})
    optim = OptimConfig(name=name, max_preconditioner_dim=32)
    run = RunConfig(model=model, plan=plan, data=DataConfig(seq_len=48), optim=optim)
    for rank in (0, plan.world_size - 1):
        check_bytes(run, plan.world_size, rank)


@pytest.mark.parametrize("name", ["muon", "jorge", "sgd"])
def test_predicted_memory_of_optimizers_is_that_of_a_rank(name: OptimizerName) -> None:
    plan = Plan(data=2, row=2, global_batch=2, micro_batch=1)
    model = DecoderModelConfig(size="imported", **{**BIG, "layers": 3}, vocab=4096)
    optim = OptimConfig(name=name, max_preconditioner_dim=512)
    data = DataConfig(seq_len=256)
    run = RunConfig(model=model, plan=plan, data=data, optim=optim)
    weighed(run, plan.world_size, 0)


CONTEXT: list[dict[str, object]] = [
    {"context": 6, "row": 2, "depth": 4, "recompute": "full"},
    {"context": 4, "depth": 4, "context_attention": "ring", "shard_weights_over": "depth_context"},
    {"context": 3, "row": 2, "data": 4, "context_attention": "ulysses", "recompute": "selective"},
    {"context": 16, "pipe": 2, "col": 3, "col_splits": "features", "context_order": "contiguous"},
    {"context": 8, "data": 2, "col": 2, "shard_weights_over": "depth_context"},
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(len(CONTEXT)))
def test_predicted_bytes_over_context_are_what_a_rank_sends(number: int) -> None:
    """Ranks of context send different numbers of keys; layers with a window send halos."""
    settings: dict[str, Any] = {"data": 1, "micro_batch": 2, **CONTEXT[number]}
    replicas = settings["data"] * settings.get("depth", 1)
    plan = Plan(global_batch=replicas * settings["micro_batch"], **settings)
    windows = {} if plan.context_attention == "ring" else MODELS[3]
    model = DecoderModelConfig(size="imported", **{**SHAPE, "vocab": 96, "max_seq": 96, **windows})
    run = RunConfig(model=model, plan=plan, data=DataConfig(seq_len=96))
    check_bytes(run, plan.world_size, plan.world_size // 2 + 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(SAMPLE))
def test_predicted_bytes_are_what_a_rank_says(number: int) -> None:
    same(number)


@pytest.mark.full
@pytest.mark.parametrize("number", range(SAMPLE, COUNT))
def test_predicted_bytes_of_more_layouts(number: int) -> None:
    same(number)


def test_layouts_are_of_all_kinds() -> None:
    plans = [run.plan for run, _, _ in layouts()]
    worlds = sorted(world for _, world, _ in layouts())
    assert worlds[0] < 64 and worlds[-1] > 2000 and len(worlds) == COUNT
    for axis, sizes in DEGREES.items():
        assert {getattr(plan, axis) for plan in plans} >= {*sizes[:3]}, axis
    assert any(p.vocab_over_pipe for p in plans) and any(p.virtual_stages > 1 for p in plans)


BIG = {"layers": 6, "embed": 1024, "heads": 16, "kv_heads": 4, "head_dim": 64, "mlp": 3072}
LEARNED = {"norm": "layer", "position_embedding": "learned", "activation": "gelu", "bias": True}
KINDS = [
    {"vocab": 32000},
    {"vocab": 32000, "tie_embeddings": True, "qk_norm": "per_head"},
    {"vocab": 50257, "tie_embeddings": True, "kv_heads": 16, "max_seq": 4096, **LEARNED},
    {"vocab": 128256},
    {"vocab": 32000, "embed": 2048, "mlp": 5632, "heads": 32, "kv_heads": 8},
    {"vocab": 32001, "embed": 1056, "heads": 24, "kv_heads": 8, "head_dim": 44, "mlp": 2880},
    {"vocab": 16384, "qk_norm": "full", "norm_position": "post"},
    {"vocab": 32000, "activation": "geglu", "sliding_window": 256, "window_layers": (0, 2)},
]
"""Models whose tensors are larger than what is constant."""
MIXTURES = [
    {"experts": 8, "experts_per_token": 2, "expert_mlp": 1024},
    {"experts": 8, "experts_per_token": 2, "expert_mlp": 512, "shared_expert_mlp": 1024},
    {"experts": 16, "experts_per_token": 3, "expert_mlp": 512, "moe_layer_interval": 2},
]


def large(draw: random.Random) -> tuple[RunConfig, int, int] | None:
    """A random run whose memory is worth counting, its world and a rank; None if it cannot be."""
    pipe, mixture = draw.choice((1, 2, 2, 3, 4, 4, 8)), draw.random() < 0.25
    degrees = {"pipe": pipe, "data": draw.choice((1, 1, 2, 4)), "depth": draw.choice((1, 2, 3, 4))}
    degrees |= {axis: draw.choice((1, 1, 2, 4)) for axis in ("row", "col")}
    degrees["expert"] = draw.choice((1, 2, 4)) if mixture else 1
    world = math.prod(degrees.values())
    replicas = degrees["data"] * degrees["expert"] * degrees["depth"]
    micro, chunks = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2)) if pipe > 1 else 1
    orders = ("gpipe", "zero-bubble", "interleaved" if chunks > 1 else "1f1b")
    plan = Plan(
        **degrees,
        col_splits=draw.choice(("samples", "features")),
        micro_batch=micro,
        global_batch=replicas * micro * draw.choice((1, 2, 3, 8)),
        recompute=draw.choice(("none", "selective", "full", "full")),
        reshard_after=draw.choice(("micro_batch", "micro_batch", "step")),
        virtual_stages=chunks,
        vocab_over_pipe=pipe > 1 and draw.random() < 0.15,
        schedule=draw.choice(("message_driven", *orders)) if pipe > 1 else "message_driven",
    )
    shape = {**BIG, "layers": draw.choice((4, 6, 8, 11)), **draw.choice(KINDS)}
    shape |= draw.choice(MIXTURES) if mixture else {}
    run = RunConfig(
        model=DecoderModelConfig(size="imported", **shape),
        plan=plan,
        data=DataConfig(seq_len=draw.choice((1024, 1536, 2048))),
        train=TrainConfig(dtype=draw.choice(("bf16", "bf16", "fp32"))),
        memory=MemoryConfig(recompute_collectives=draw.choice(("rerun", "rerun", "save"))),
        optim=OptimConfig(state_dtype=draw.choice(("master", "master", "bf16", "int8"))),
    )
    try:
        run.check_and_resolve(world)
    except PlanError:
        return None
    stage = draw.choice((0, pipe - 1, draw.randrange(pipe)))
    return run, world, stage * (world // pipe) + draw.randrange(world // pipe)


def weighed(run: RunConfig, world: int, rank: int) -> None:
    """Predicted memory is within 5 % of all tensors that live at once."""
    found = dry_run(run, world=world, rank=rank)
    run = resolve_dry_run(run, world=world, rank=rank)
    size = 2 if run.train.dtype == "bf16" else 4
    flow = ActivationShape(run.plan.micro_batch, run.data.seq_len, size, statistics_itemsize=4)
    kept, stage = run.memory.recompute_collectives == "save", found.index["pipe"]
    optimizer = OptimizerSpec.from_run(run)
    predicted = peak_memory(
        resolve_model_spec(run), run.plan, flow, stage=stage, keeps=kept, optimizer=optimizer
    )
    for name in ("weights", "master", "moments"):
        # States of the owners of tiles are those of the rank with most of them.
        most = 1.05 if name == "moments" and run.optim.name == "jorge" else 1.0
        counted = found.memory.device.get(name, 0)
        assert counted <= predicted.device.get(name, 0) <= most * counted, name
    told = (run.plan, run.model, rank, predicted, found.memory)
    assert predicted.allocated_bytes == pytest.approx(found.memory.allocated_bytes, rel=0.05), told


@pytest.mark.full
@pytest.mark.parametrize("number", range(24))
def test_predicted_memory_of_random_layouts(number: int) -> None:
    draw, one = random.Random(100 + number), None
    while one is None:
        one = large(draw)
    weighed(*one)


MEMORY = [
    {"depth": 8, "row": 4, "micro_batch": 2, "recompute": "full"},
    {"pipe": 3, "depth": 4, "global_batch": 16, "schedule": "1f1b"},
    {"pipe": 4, "global_batch": 4, "row": 2, "recompute": "selective", "schedule": "gpipe"},
    {"micro_batch": 2},
    {"data": 4, "row": 2, "col": 4, "col_splits": "features", "recompute": "selective"},
    {"data": 64, "depth": 4, "global_batch": 1024, "micro_batch": 1},
    {"row": 8, "col": 2, "depth": 2, "micro_batch": 4, "recompute": "selective"},
    {"pipe": 4, "global_batch": 8, "row": 2, "recompute": "full"},
    {"depth": 256, "micro_batch": 1},
]
CONTEXT_MEMORY = [
    {"context": 64, "recompute": "full"},
    {"context": 16, "row": 2, "depth": 2, "recompute": "selective"},
    {"context": 8, "depth": 2, "shard_weights_over": "depth_context", "recompute": "full"},
    {"context": 8, "row": 4, "context_attention": "ulysses"},
    {"context": 8, "row": 2, "context_attention": "ring", "recompute": "full"},
]


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, len(CONTEXT_MEMORY)))]
)
def test_predicted_memory_over_context_is_that_of_a_rank(number: int) -> None:
    """Long samples, so that fetched keys and their gradients are most of it."""
    settings: dict[str, Any] = {"data": 1, "micro_batch": 1, **CONTEXT_MEMORY[number]}
    plan = Plan(global_batch=settings.get("depth", 1), **settings)
    model = DecoderModelConfig(size="imported", **BIG, vocab=32000, max_seq=2**18)
    run = RunConfig(model=model, plan=plan, data=DataConfig(seq_len=2**18))
    weighed(run, plan.world_size, 0)


CHEAP = 1
SLOW = [pytest.param(n, marks=pytest.mark.full) for n in range(CHEAP, len(MEMORY))]


@pytest.mark.parametrize("number", [*range(CHEAP), *SLOW])
def test_predicted_memory_is_that_of_a_rank(number: int) -> None:
    """Layouts of each kind: the first, a middle and the last stage among them."""
    settings = {"micro_batch": 1, **MEMORY[number]}
    axes = [settings.get(axis, 1) for axis in ("pipe", "data", "depth", "row", "col")]
    world, replicas = math.prod(axes), settings.get("data", 1) * settings.get("depth", 1)
    plan = Plan(**{"data": 1, "global_batch": replicas * settings["micro_batch"], **settings})
    model = DecoderModelConfig(size="imported", **BIG, vocab=32000, max_seq=4096)
    run = RunConfig(model=model, plan=plan, data=DataConfig(seq_len=4096))
    weighed(run, world, world - 1 if plan.pipe == 3 else world // 2 if plan.pipe == 1 else 0)


def test_the_command_says_and_writes_what_a_rank_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--world", "64", "--rank", "17", "--plan.row", "4", "--plan.depth", "4"]
    file = tmp_path / "dry.json"
    assert call("dry-run", *words, "--plan.global-batch", "16", "--output", str(file)) == 0
    facts, out = json.loads(file.read_text()), capsys.readouterr().out
    assert facts["index"]["row"] == 1 and "rank 17 of 64 (data=1 row=1)" in out
    assert facts["shards"]["blocks.0.mlp.down.weight"] == {"part": [48, 128], "whole": [192, 512]}
    assert "blocks.*.mlp.down.weight         48 x 128 of 192 x 512  x 4" in out
    total = sum(row["bytes"] for row in facts["collectives"] if row["axis"] == ["row"])
    assert total > 0 and "reduce_scatter" in out and "sum of tensors" in out
    assert "the peak is between layers" in out


WRONG = [
    (["--world", "8", "--rank", "8"], "rank=8 is not valid with world=8"),
    (["--world", "8", "--rank", "-1"], "Use --rank 0"),
    (["--world", "7", "--plan.row", "2"], "needs a multiple of 2 ranks, but there are 7"),
    (["--prune.sparsity", "0.5"], "Pruning masks depend on the values of weights"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_mistakes_are_told(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("dry-run", *words) != 0
    assert message in capsys.readouterr().err
