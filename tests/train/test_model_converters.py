"""How layers compute: packed weights and ways of attention change no result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence import ONE_PASS, batch_of, copied, gradients, micros_of, worst
from pool import Pool
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.config.plan import Plan
from ranvier.cost.layers import ActivationShape
from ranvier.grid import Grid
from ranvier.models import Decoder, DecoderConfig
from ranvier.models.document_attention import causal_attention
from ranvier.nn import attention_backends, float8
from ranvier.nn.autotune import Autotuner
from ranvier.nn.fused_linear import FusedLinear
from ranvier.nn.linear import Linear
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.sharding import ShardedStateDict
from ranvier.train.model_converters import choose_arithmetic
from ranvier.train.resume.checkpointing import state_tensors
from ranvier.train.step import forward_backward
from training import run_of, stored, trainer_of

SHAPE = {"layers": 2, "embed": 16, "heads": 8, "kv_heads": 2, "head_dim": 4, "mlp": 24, "vocab": 29}
BATCH = batch_of("llama", samples=8, packed=False)
QKV, ENTER = "blocks.1.attention.qkv", "blocks.1.mlp.enter"


def decoder(grid: Grid, *, fast: bool = True, inner: Any = "samples", **changes: int) -> Any:
    """A decoder, the same on every call."""
    torch.manual_seed(1)
    model = Decoder(DecoderConfig(**{**SHAPE, **changes})).double()  # type: ignore[arg-type]
    model = parallelize(model, grid, Plan(col_splits=inner).with_degrees(grid.degrees))
    get_parallel_model(model).step_context.overlapped_autograd = fast
    return model


def packs(model: Any, name: str) -> list[tuple[int, int]]:
    """Ranges of siblings whose weights are one matrix."""
    return [(run.start, run.stop) for run in model.get_submodule(name).packed_layers]


# ---- packing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_heads", "want"), [(1, [(1, 3)]), (2, [(1, 3)]), (4, [(1, 3)]), (8, [])]
)
def test_only_narrow_siblings_are_packed(kv_heads: int, want: list[tuple[int, int]]) -> None:
    """k and v beside a q twice as wide; neither three alike nor gate and up."""
    model = decoder(Grid({}), kv_heads=kv_heads)
    assert packs(model, QKV) == want and packs(model, ENTER) == []


def test_wide_siblings_are_not_packed() -> None:
    model = decoder(Grid({}))
    siblings = model.get_submodule(QKV)
    siblings.pack_weights(7)
    assert siblings.packed_layers == []
    siblings.pack_weights(8)
    assert packs(model, QKV) == [(1, 3)]
    siblings.pack_weights(32, all_alike=True)
    assert packs(model, QKV) == [(0, 3)]
    siblings.pack_weights(31, all_alike=True)
    assert packs(model, QKV) == [(1, 3)]


def test_a_packed_matrix_is_the_weights_themselves() -> None:
    model = decoder(Grid({}))
    (run,) = model.get_submodule(QKV).packed_layers
    k, v = (model.get_submodule(f"{QKV}.{name}").weight for name in "kv")
    assert torch.equal(run.matrix, torch.cat([k, v]))
    assert run.matrix.data_ptr() == k.data_ptr()
    whole = {
        name: torch.full_like(x, 3.0) for name, (x, _) in model.parallel.sharded_state().items()
    }
    model.parallel.load_full_state(whole)
    assert bool((run.matrix == 3.0).all())


def taken(model: Any, micros: list[Any]) -> ShardedStateDict:
    """Gradients of a step."""
    forward_backward(model, micros)
    return copied(gradients(model.parallel))


def compared(have: ShardedStateDict, want: ShardedStateDict) -> list[str]:
    """What differs between gradients."""
    lines = [] if [*have] == [*want] else [f"{[*have]} instead of {[*want]}"]
    for name, (part, place) in want.items():
        assert have[name][1] == place
        lines += worst(name, have[name][0], part, ONE_PASS) if part.numel() else []
    return lines


PACKINGS = ("apart", "packed", "all")
"""Of none, of narrow siblings, of all."""


def packings(grid: Grid, inner: str) -> dict[str, list[str]]:
    """What packing changes in gradients of the reference, which alone packs outside of graphs."""
    micros, found = micros_of(BATCH, grid, 2 if grid.world_size == 1 else 1), dict[str, list[str]]()
    want = taken(decoder(grid, inner=inner), micros)
    for kind in PACKINGS:
        model = decoder(grid, inner=inner, fast=False)
        for leaf in model.parallel.layers.values():
            if isinstance(leaf, FusedLinear) and kind != "packed":
                leaf.pack_weights(1 << 20 if kind == "all" else 0, all_alike=True)
        found[kind] = compared(taken(model, micros), want)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("degrees", "inner"),
    [
        ({}, "samples"),
        ({"row": 2, "col": 2}, "features"),
        ({"depth": 2, "row": 2}, "samples"),  # split over depth, weights are not packed
    ],
    ids=["one", "features", "depth"],
)
def test_packing_changes_no_gradient(pool: Pool, degrees: dict[str, int], inner: str) -> None:
    for lines_of in pool.on_grid(degrees, packings, inner):
        assert len(lines_of) == len(PACKINGS)
        assert {name: lines for name, lines in lines_of.items() if lines} == {}


def test_names_know_nothing_of_packing() -> None:
    torch.manual_seed(1)
    plain = [name for name, _ in Decoder(DecoderConfig(**SHAPE)).named_parameters()]  # type: ignore[arg-type]
    model = decoder(Grid({}))
    for leaf in model.parallel.layers.values():
        if isinstance(leaf, FusedLinear):
            leaf.pack_weights(1 << 20, all_alike=True)
    assert packs(model, QKV) == [(0, 3)]
    assert [*dict(model.named_parameters())] == plain and {*model.state_dict()} == {*plain}
    assert {*model.parallel.sharded_state()} == {*plain}


# ---- runs -------------------------------------------------------------------------------

EVEN = {"embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 48}
"""Sizes that fp8 takes."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def test_in_fp8_all_siblings_are_packed_and_checkpoints_are_the_same(
    tmp_path: Path, corpus: str
) -> None:
    names = []
    for kind in ("off", "tensorwise"):
        changes = {f"model__{name}": size for name, size in EVEN.items()} | {"train__float8": kind}
        out = tmp_path / kind
        trainer = trainer_of(Grid({}), corpus, run_of(str(out), {}, 1, **changes))
        whole = kind != "off"
        assert packs(trainer.state.model, QKV) == ([(0, 3)] if whole else [(1, 3)])
        assert packs(trainer.state.model, ENTER) == ([(0, 2)] if whole else [])
        layers = [x for x in trainer.state.parallel.layers.values() if isinstance(x, Linear)]
        assert sum(isinstance(x.matmul_backend, float8.Float8Linear) for x in layers) == (
            14 if whole else 0
        )
        assert trainer.notes == (
            ["fp8 (tensorwise): 14 layers, 21,504 parameters per rank"] if whole else []
        )
        list(trainer.run_steps())
        trainer.save_checkpoint()
        names.append(sorted(state_tensors(trainer.state)))
    assert names[0] == names[1]
    trainer.checkpointer.resume_from(find_checkpoints(tmp_path / "off" / "checkpoints")[-1])


def test_a_cpu_has_nothing_to_choose() -> None:
    model = decoder(Grid({}))
    run = run_of("", {}, 1)
    assert (
        choose_arithmetic(run, model, Grid({}), torch.device("cpu"), ActivationShape(8, 8, 8, 8))
        == []
    )


# ---- attention --------------------------------------------------------------------------


def attended(function: attention_backends.AttentionFunction) -> Tensor:
    """Attention with shared keys."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 5, heads, 8) for heads in (4, 2, 2)]
    return function(*(torch.randn(shape, generator=generator) for shape in shapes))


def test_ways_of_attention_take_what_they_can() -> None:
    """Others go the way of torch."""
    assert attention_backends.backend_with_fallback("auto") is attention_backends.sdpa_attention
    want = attended(causal_attention)
    for name in attention_backends.BACKENDS:
        assert torch.equal(attended(attention_backends.backend_with_fallback(name)), want)
    x = torch.zeros(2, 5, 4, 8)
    assert [
        name
        for name in attention_backends.BACKENDS
        if attention_backends.supports_inputs(name, x, x, x)
    ] == ["auto"]
    fastest = Autotuner("cpu")
    assert attention_backends.choose_backend(2, 5, 4, 2, 8, torch.float32, "cpu", fastest) == "auto"
    assert not fastest.results, "nothing is measured where there is no choice"


def test_neighbours_that_multiply_otherwise_are_not_packed() -> None:
    model = decoder(Grid({}))
    leaf = model.blocks[0].attention.qkv
    leaf.layers[1].matmul_backend = float8.Float8Linear()
    leaf.pack_weights()
    assert leaf.packed_layers == []
    leaf.layers[2].matmul_backend = float8.Float8Linear()
    leaf.pack_weights()
    assert [(run.start, run.stop) for run in leaf.packed_layers] == [(1, 3)]
