"""On a GPU: what comes from the host (states, weights, gradients) gives the bits of what stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ranvier.checkpoint.directory import find_checkpoints
from ranvier.grid import Grid
from ranvier.memory.host import Arena
from ranvier.train.resume.checkpointing import state_tensors
from training import run_of, stored, trainer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("deterministic"),
]
SHAPE = {"layers": 4, "embed": 64, "heads": 4, "head_dim": 16, "mlp": 256}
Numbers = tuple[list[float], dict[str, Tensor]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def trained(corpus: str, out: str = "", steps: int = 6, **changes: Any) -> Numbers:
    """Losses of a run, and all that it leaves."""
    shape = {f"model__{key}": value for key, value in SHAPE.items()}
    options = {**shape, "train__dtype": "bf16", "train__deterministic": True, **changes}
    trainer = trainer_of(Grid({}), corpus, run_of(out, {}, steps, **options), "cuda")
    losses = [row["loss"] for row in trainer.run_steps()]
    if out:
        trainer.save_checkpoint()
    state = {name: x.cpu().clone() for name, (x, _) in state_tensors(trainer.state).items()}
    return losses, {name: x for name, x in state.items() if not name.startswith("random.")}


def differing(one: Numbers, other: Numbers) -> list[str]:
    odd = [] if one[0] == other[0] else [f"{one[0]} {other[0]}"]
    return odd + [name for name, x in one[1].items() if not torch.equal(x, other[1][name])]


@pytest.fixture(scope="module")
def plain(corpus: str) -> Callable[[str], Numbers]:
    """By `plan.compile`, once each."""
    return cache(lambda compiled: trained(corpus, plan__compile=compiled, plan__micro_batch=4))


TILE = {"memory__offload_tile": 4096, "memory__optimizer_step_on": "device"}
WAYS: dict[str, dict[str, Any]] = {
    "host": {"memory__optimizer_states": "host", **TILE},
    "split": {
        "memory__optimizer_states": "split",
        "memory__optimizer_states_on_device_gib": 1e-3,
        **TILE,
    },
    "weights": {"memory__optimizer_states": "host", "memory__parameters": "host", **TILE},
    "weights alone": {"memory__parameters": "host", **TILE},
}


@pytest.mark.parametrize("compiled", ["on", "off"])
@pytest.mark.parametrize("way", WAYS)
def test_what_comes_from_the_host_changes_no_bit(
    corpus: str, plain: Callable[[str], Numbers], way: str, compiled: str
) -> None:
    found = trained(corpus, plan__compile=compiled, plan__micro_batch=4, **WAYS[way])
    assert differing(plain(compiled), found) == []


def test_states_in_a_file_change_no_bit(
    corpus: str, plain: Callable[[str], Numbers], tmp_path: Path
) -> None:
    file = {"memory__optimizer_states": "disk", "memory__offload_dir": str(tmp_path), **TILE}
    found = trained(corpus, plan__compile="off", plan__micro_batch=4, **file)
    assert differing(plain("off"), found) == []


@pytest.mark.parametrize("weights", ["device", "host"])
def test_the_cpu_updates_alike(corpus: str, plain: Callable[[str], Numbers], weights: str) -> None:
    """Up to rounding, as the two kernels add and divide in another order.

    In bf16 only the states of the first update can be compared, whose gradients have equal bits.
    Then the last bit of a master weight may decide how the working weight is rounded, and Adam
    steps as far for a small gradient, of which most is rounding, as for a large one. In fp32
    differences stay small.
    """
    options = {"plan__compile": "off", "plan__micro_batch": 4}
    on_cpu = {
        "memory__optimizer_states": "host",
        "memory__parameters": weights,
        **TILE,
        "memory__optimizer_step_on": "cpu",
    }
    for dtype, steps, limit in (("bf16", 1, 1e-6), ("fp32", 6, 5e-5)):
        how = {**options, "train__dtype": dtype}
        losses, state = trained(corpus, steps=steps, **how)
        cpu_losses, cpu_state = trained(corpus, steps=steps, **how, **on_cpu)
        assert cpu_losses == pytest.approx(losses, rel=limit)
        for name, x in state.items():
            error = (cpu_state[name] - x).abs().max()
            assert error <= limit * x.abs().max(), (dtype, name, error)
    losses, _ = trained(corpus, **options, **on_cpu)
    assert losses == pytest.approx(plain("off")[0], abs=2e-2)


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_narrow_moments_from_the_host_change_no_bit(corpus: str, moments: str) -> None:
    how = {"optim__state_dtype": moments, "plan__compile": "off"}
    here = trained(corpus, **how)
    assert differing(here, trained(corpus, **how, **WAYS["host"])) == []
    assert differing(here, trained(corpus, **how, **WAYS["weights"])) == []


def test_a_run_with_states_on_the_host_goes_on_to_the_bit(corpus: str, tmp_path: Path) -> None:
    how = {"plan__compile": "off", "optim__state_dtype": "int8", **WAYS["weights"]}
    whole = trained(corpus, steps=6, **how)
    shape = {f"model__{key}": value for key, value in SHAPE.items()}
    options = {**shape, "train__dtype": "bf16", "train__deterministic": True, **how}
    out = str(tmp_path / "run")
    first = trainer_of(
        Grid({}), corpus, run_of(out, {}, 6, checkpoint__interval=3, **options), "cuda"
    )
    steps = first.run_steps()
    for _ in range(4):
        next(steps)
    first.checkpointer.saver.finish_saving()
    again = trainer_of(Grid({}), corpus, run_of(out, {}, 6, **options), "cuda")
    again.checkpointer.resume_from(find_checkpoints(Path(out) / "checkpoints")[0])
    assert again.state.step == 3
    losses = [row["loss"] for row in again.run_steps()]
    state = {
        n: x.cpu()
        for n, (x, _) in state_tensors(again.state).items()
        if not n.startswith("random.")
    }
    assert differing((whole[0][3:], whole[1]), (losses, state)) == []


def test_an_arena_is_pinned_and_exact() -> None:
    device = torch.device("cuda")
    arena = Arena(10_000_000, device)
    part = arena.allocate_tensor((1000,), torch.float32)
    assert part.is_pinned() and arena.buffer.numel() == 10_000_000
    x = torch.arange(1000.0, device="cuda")
    part.copy_(x, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(part, torch.arange(1000.0))
