"""Lists of layers: as the models have them, without torch, and what is predicted from them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lists import made
from ranvier.config.kinds import named_model
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import LoraConfig
from ranvier.cost.layers import ActivationShape
from ranvier.errors import PlanError
from ranvier.models import MODEL_SIZES
from ranvier.planner import model_spec, model_spec_torch
from ranvier.planner.comm_volume import step_comm_volume
from ranvier.planner.memory.total import peak_memory
from ranvier.planner.model_spec import (
    SPEC_FOLDER,
    ModelSpec,
    dense_decoder,
    load_shipped_spec,
    resolve_model_spec,
)

SMALL = ("tiny", "qwen3-0.6b")


@pytest.mark.parametrize(
    "size",
    [*SMALL, *(pytest.param(n, marks=pytest.mark.full) for n in MODEL_SIZES if n not in SMALL)],
)
def test_shipped_lists_are_those_of_the_models(size: str) -> None:
    """`python scripts/lists.py` writes them anew."""
    assert (SPEC_FOLDER / f"{size}.json").read_text() == made(size)


def test_every_size_has_its_list() -> None:
    assert {path.stem for path in SPEC_FOLDER.glob("*.json")} == {*MODEL_SIZES}
    counted = {
        size: load_shipped_spec(size).num_parameters for size in ("gpt2", "llama3-8b", "llama3-70b")
    }
    assert counted == {
        "gpt2": 124_439_808,
        "llama3-8b": 8_030_261_248,
        "llama3-70b": 70_553_706_496,
    }


def test_numbers_make_the_same_list() -> None:
    numbers = {"layers": 80, "embed": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128}
    one = dense_decoder(**numbers, mlp=28672, gated=True, vocab=128256)
    other = load_shipped_spec("llama3-70b")
    assert [part.layers for part in one.parts] == [part.layers for part in other.parts]
    assert one.units == other.units and one.num_layers == other.num_layers == 80


def test_the_planner_needs_no_torch() -> None:
    code = "import sys; from ranvier.planner import comm_volume, model_spec; "
    code += "from ranvier.planner.memory import total; "
    code += "model_spec.load_shipped_spec('llama3-8b'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_list_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has not a built-in size is built once; blocks that differ are different parts."""
    monkeypatch.setenv("RANVIER_CACHE", str(tmp_path))
    model = replace(named_model("tiny"), sliding_window=8, window_layers=(0, 2))
    run = RunConfig(model=model, lora=LoraConfig(rank=4, layers=(3,)))
    first = resolve_model_spec(run)
    kinds = [(part.count, part.block_indices) for part in first.parts if part.is_block]
    assert kinds == [(2, (0, 2)), (1, (1,)), (1, (3,))]
    assert 0 < first.num_trainable < first.num_parameters
    monkeypatch.setattr(model_spec_torch, "build_model_spec", None)
    again = resolve_model_spec(run)
    assert again.to_dict() == first.to_dict() == ModelSpec.from_dict(first.to_dict()).to_dict()
    for path in (tmp_path / "leaves").glob("*.json"):
        path.write_text("{}")
    with pytest.raises(TypeError):  # a broken file is made anew
        resolve_model_spec(run)


def test_unknown_sizes_are_told() -> None:
    with pytest.raises(PlanError, match=r"size 'llama4'. Known sizes: .*gpt2, .*llama3-1b"):
        model_spec.load_shipped_spec("llama4")


def test_layouts_move_what_their_algebra_says() -> None:
    """Golden: bytes of one block of a plain model, by hand."""
    model = dense_decoder(
        layers=1, embed=64, heads=8, kv_heads=8, head_dim=8, mlp=256, gated=False, vocab=128
    )
    flow = ActivationShape(samples=2, seq=32, itemsize=2, statistics_itemsize=4)
    plan = Plan(data=1, row=2, col=2, global_batch=2, micro_batch=2)
    rows = [r for r in step_comm_volume(model, plan, flow).rows if r.part == "block"]
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
    model, flow = load_shipped_spec("llama3-8b"), ActivationShape(1, 8192, 2, 4)
    one = peak_memory(model, Plan(data=1, global_batch=1, micro_batch=1), flow)
    weights = model.num_parameters
    assert one.device["weights"] == 2 * weights and one.device["moments"] == 8 * weights
    full = peak_memory(model, Plan(data=1, global_batch=1, micro_batch=1, recompute="full"), flow)
    assert full.device["activations"] < one.device["activations"] / 4
    split = peak_memory(model, Plan(data=1, depth=8, global_batch=8, micro_batch=1), flow)
    assert split.device["weights"] == pytest.approx(2 * weights / 8, rel=1e-3)
    zero = peak_memory(model, Plan(data=8, global_batch=8, micro_batch=1), flow)
    assert zero.device["moments"] == pytest.approx(weights, rel=1e-3)
    assert zero.device["weights"] == 2 * weights
    hosted = peak_memory(model, Plan(data=1, global_batch=1, micro_batch=1), flow, states="host")
    assert hosted.host["moments"] == 8 * weights and "moments" not in hosted.device
