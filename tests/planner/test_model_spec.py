"""Lists of layers: as the models have them, without torch, and what is predicted from them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lists import made
from ranvier.config.plan import Plan
from ranvier.config.run import Run
from ranvier.config.sections import LoraConfig, ModelConfig
from ranvier.cost.layers import Flow
from ranvier.errors import PlanError
from ranvier.models import SIZES
from ranvier.planner import model_spec, model_spec_torch
from ranvier.planner.comm_volume import moves
from ranvier.planner.memory.total import space
from ranvier.planner.model_spec import FOLDER, Model, dense, of_run, of_size

SMALL = ("tiny", "qwen3-0.6b")


@pytest.mark.parametrize(
    "size", [*SMALL, *(pytest.param(n, marks=pytest.mark.full) for n in SIZES if n not in SMALL)]
)
def test_shipped_lists_are_those_of_the_models(size: str) -> None:
    """`python scripts/lists.py` writes them anew."""
    assert (FOLDER / f"{size}.json").read_text() == made(size)


def test_every_size_has_its_list() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {*SIZES}
    counted = {size: of_size(size).parameters for size in ("gpt2", "llama3-8b", "llama3-70b")}
    assert counted == {
        "gpt2": 124_439_808,
        "llama3-8b": 8_030_261_248,
        "llama3-70b": 70_553_706_496,
    }


def test_numbers_make_the_same_list() -> None:
    numbers = {"layers": 80, "embed": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128}
    one = dense(**numbers, mlp=28672, gated=True, vocab=128256)
    other = of_size("llama3-70b")
    assert [part.leaves for part in one.parts] == [part.leaves for part in other.parts]
    assert one.units == other.units and one.layers == other.layers == 80


def test_the_planner_needs_no_torch() -> None:
    code = "import sys; from ranvier.planner import comm_volume, model_spec; "
    code += "from ranvier.planner.memory import total; "
    code += "model_spec.of_size('llama3-8b'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_list_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has not a built-in size is built once; blocks that differ are different parts."""
    monkeypatch.setenv("RANVIER_CACHE", str(tmp_path))
    model = replace(ModelConfig.of("tiny"), window=8, window_layers=(0, 2))
    run = Run(model=model, lora=LoraConfig(rank=4, layers=(3,)))
    first = of_run(run)
    kinds = [(part.count, part.numbers) for part in first.parts if part.is_block]
    assert kinds == [(2, (0, 2)), (1, (1,)), (1, (3,))]
    assert 0 < first.trained < first.parameters
    monkeypatch.setattr(model_spec_torch, "listed", None)
    again = of_run(run)
    assert again.facts() == first.facts() == Model.read(first.facts()).facts()
    for path in (tmp_path / "leaves").glob("*.json"):
        path.write_text("{}")
    with pytest.raises(TypeError):  # a broken file is made anew
        of_run(run)


def test_unknown_sizes_are_told() -> None:
    with pytest.raises(PlanError, match=r"size 'llama4'. Lists ship for .*gpt2, llama3-1b"):
        model_spec.of_size("llama4")


def test_layouts_move_what_their_algebra_says() -> None:
    """Golden: bytes of one block of a plain model, by hand."""
    model = dense(
        layers=1, embed=64, heads=8, kv_heads=8, head_dim=8, mlp=256, gated=False, vocab=128
    )
    flow = Flow(samples=2, seq=32, itemsize=2, statistics=4)
    plan = Plan(data=1, row=2, col=2, batch=2, micro_batch=2)
    rows = [r for r in moves(model, plan, flow).rows if r.part == "block"]
    found = {(r.phase, r.op, r.axis): 0 for r in rows}
    for r in rows:
        found[r.phase, r.op, r.axis] += r.bytes * r.count
    x, inner = 2 * 32 * 32 * 2, 2 * 32 * 2  # [b, s, d/col] bytes; of a feature of all tokens
    assert found["forward", "all_gather", ("row",)] == 2 * x  # before qkv and up
    assert found["forward", "reduce_scatter", ("col",)] == inner * (3 * 64 + 256) // 2
    assert found["forward", "all_gather", ("col",)] == inner * (64 + 256) // 2  # o and down
    assert found["forward", "reduce_scatter", ("row",)] == 2 * x
    assert found["forward", "all_reduce", ("col",)] == 2 * 2 * 16 * 4  # a number a token a norm
    assert found["backward", "all_gather", ("row",)] == 4 * x  # x again, and dy of o and down
    assert found["backward", "reduce_scatter", ("row",)] == 2 * x


def test_more_ranks_need_less_of_each() -> None:
    model, flow = of_size("llama3-8b"), Flow(1, 8192, 2, 4)
    one = space(model, Plan(data=1, batch=1, micro_batch=1), flow)
    weights = model.parameters
    assert one.device["weights"] == 2 * weights and one.device["moments"] == 8 * weights
    full = space(model, Plan(data=1, batch=1, micro_batch=1, recompute="full"), flow)
    assert full.device["activations"] < one.device["activations"] / 4
    split = space(model, Plan(data=1, depth=8, batch=8, micro_batch=1), flow)
    assert split.device["weights"] == pytest.approx(2 * weights / 8, rel=1e-3)
    zero = space(model, Plan(data=8, batch=8, micro_batch=1), flow)
    assert zero.device["moments"] == pytest.approx(weights, rel=1e-3)
    assert zero.device["weights"] == 2 * weights
    hosted = space(model, Plan(data=1, batch=1, micro_batch=1), flow, states="host")
    assert hosted.host["moments"] == 8 * weights and "moments" not in hosted.device
