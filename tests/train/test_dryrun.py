"""Dry runs: what the planner predicts is what one rank of many does, byte for byte.

Bytes are counted at the fake process group, below comm, for random layouts of 8 to 4096 ranks.
"""

from __future__ import annotations

import math
import random
from functools import cache

import pytest

from ranvier.errors import PlanError
from ranvier.layers import Flow
from ranvier.plan import Plan
from ranvier.planner.leaves import of_run
from ranvier.planner.moves import moves
from ranvier.run import Run
from ranvier.settings import DataConfig, LoraConfig, MemoryConfig, ModelConfig, TrainConfig
from ranvier.train.dryrun import checked, dry

SHAPE = {"layers": 5, "embed": 48, "heads": 24, "kv_heads": 6, "head_dim": 4, "mlp": 96}
MODELS = [
    {"vocab": 101},
    {"vocab": 96, "tied": True, "qk_norm": True},
    {"vocab": 203, "tied": True, "kv_heads": 24, "norm": "layer", "positions": "learned"}
    | {"activation": "gelu", "bias": True, "max_seq": 64},
    {"vocab": 101, "qk_whole": True, "norms": "after", "window": 8, "window_layers": (0, 3)},
]
DEGREES = {
    "pipe": (1, 1, 1, 2, 3),
    "data": (1, 2, 3, 4, 8, 16),
    "depth": (1, 2, 3, 4, 8),
    "row": (1, 2, 3, 4, 6, 12),
    "col": (1, 2, 3, 4, 6),
}
COUNT, SAMPLE = 50, 8


def drawn(draw: random.Random) -> tuple[Run, int, int] | None:
    """A random run, its world and a rank of it; None if it cannot be."""
    degrees = {axis: draw.choice(sizes) for axis, sizes in DEGREES.items()}
    world, replicas = math.prod(degrees.values()), degrees["data"] * degrees["depth"]
    micro = draw.choice((1, 2, 3, 4, 6))
    chunks = draw.choice((1, 1, 2)) if degrees["pipe"] > 1 else 1
    plan = Plan(
        **degrees,
        inner=draw.choice(("samples", "features")),
        micro_batch=micro,
        batch=replicas * micro * draw.choice((1, 2, 3)),
        recompute=draw.choice(("none", "none", "selective", "full")),
        gathered=draw.choice(("again", "again", "keep")),
        chunks=chunks,
        spread=degrees["pipe"] > 1 and draw.random() < 0.25,
        policy=draw.choice(("message", "interleaved" if chunks > 1 else "1f1b")),
    )
    lora = LoraConfig(rank=3, dora=True) if draw.random() < 0.2 else LoraConfig()
    collectives = draw.choice(("again", "again", "keep"))
    run = Run(
        model=ModelConfig(size="imported", **{**SHAPE, **draw.choice(MODELS)}),
        lora=lora,
        plan=plan,
        data=DataConfig(seq=48),
        train=TrainConfig(dtype=draw.choice(("bf16", "fp32"))),
        memory=MemoryConfig(collectives=collectives),
    )
    try:
        run.check(world)
    except PlanError:
        return None
    return (run, world, draw.randrange(world)) if 8 <= world <= 4096 else None


@cache
def layouts() -> list[tuple[Run, int, int]]:
    """Those that can be, the same each time; few of them small."""
    draw, found = random.Random(9), list[tuple[Run, int, int]]()
    while len(found) < COUNT:
        one = drawn(draw)
        if one is not None and (one[1] >= 64 or len(found) % 5 == 0):
            found.append(one)
    return found


def same(number: int) -> None:
    """Predicted bytes are counted bytes, for each operation and axis."""
    run, world, rank = layouts()[number]
    found = dry(run, world=world, rank=rank)
    run = checked(run, world=world, rank=rank)
    size = 2 if run.train.dtype == "bf16" else 4
    flow = Flow(run.plan.micro_batch, run.data.seq, size, statistics=4)
    kept = run.memory.collectives == "keep"
    predicted = moves(of_run(run), run.plan, flow, stage=found.index["pipe"], kept=kept)
    assert found.bytes() == predicted.bytes(), (run.plan, run.model, rank)
    calls = sum(row.count for row in predicted.rows)
    assert calls == sum(row.calls for row in found.rows)


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
    assert any(p.spread for p in plans) and any(p.chunks > 1 for p in plans)
