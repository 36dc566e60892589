"""On a GPU: pruned runs leave zeros, wherever states rest, and their steps wait for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ranvier.checkpoint.directory import find_checkpoints
from ranvier.grid import Grid
from ranvier.optim import pruning
from ranvier.train.resume.checkpointing import state_tensors
from ranvier.train.step import forward_backward
from ranvier.train.trainer import Trainer
from training import run_of, stored, trainer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]
SHAPE = {"layers": 4, "embed": 64, "heads": 4, "head_dim": 16, "mlp": 256}
Numbers = tuple[list[float], dict[str, Tensor]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def made(corpus: str, out: str = "", steps: int = 6, **changes: Any) -> Trainer:
    shape = {f"model__{key}": value for key, value in SHAPE.items()}
    options = {**shape, "train__dtype": "bf16", "plan__compile": "off", **changes}
    return trainer_of(Grid({}), corpus, run_of(out, {}, steps, **options), "cuda")


def left(trainer: Trainer) -> dict[str, Tensor]:
    state = {name: x.cpu().clone() for name, (x, _) in state_tensors(trainer.state).items()}
    return {name: x for name, x in state.items() if not name.startswith("random.")}


def trained(corpus: str, **changes: Any) -> Numbers:
    """Losses of a run, and all that it leaves."""
    trainer = made(corpus, **changes)
    return [row["loss"] for row in trainer.run_steps()], left(trainer)


def differing(one: Numbers, other: Numbers) -> list[str]:
    odd = [] if one[0] == other[0] else [f"{one[0]} {other[0]}"]
    return odd + [name for name, x in one[1].items() if not torch.equal(x, other[1][name])]


FIXED = {"prune__sparsity": 0.8, "train__deterministic": True}
GROWING = {**FIXED, "prune__update_interval": 2, "prune__final_step": 5}
TILE = {"memory__offload_tile": 4096, "memory__optimizer_step_on": "device"}
WAYS: dict[str, dict[str, Any]] = {
    "host": {"memory__optimizer_states": "host", **TILE},
    "split": {
        "memory__optimizer_states": "split",
        "memory__optimizer_states_on_device_gib": 1e-4,
        **TILE,
    },
    "weights": {"memory__optimizer_states": "host", "memory__parameters": "host", **TILE},
    "weights alone": {"memory__parameters": "host", **TILE},
}


@pytest.mark.parametrize("how", [FIXED, GROWING], ids=["fixed", "growing"])
@pytest.mark.parametrize("way", WAYS)
def test_states_elsewhere_change_no_bit(corpus: str, how: dict[str, Any], way: str) -> None:
    here = trained(corpus, **how)
    assert here[0][-1] < here[0][0]
    masks = {name.removesuffix(".mask"): x for name, x in here[1].items() if name.endswith("mask")}
    assert len(masks) == 28
    for name, mask in masks.items():
        assert not any(here[1][f"{name}.{kind}"][mask == 0].any() for kind in ("master", "mean"))
    assert differing(here, trained(corpus, **how, **WAYS[way])) == []


@pytest.mark.parametrize("how", [{"plan__compile": "on"}, {"plan__cuda_graph": True}], ids=str)
def test_compiled_and_recorded_steps_prune_alike(corpus: str, how: dict[str, Any]) -> None:
    more = {"data__document_mask": False, "prune__sparsity": 0.8}
    plain, other = trained(corpus, **more), trained(corpus, **more, **how)
    assert other[0] == pytest.approx(plain[0], abs=3e-2)
    for name, x in plain[1].items():
        if name.endswith(".mask"):
            assert torch.equal(x, other[1][name])


def test_a_run_goes_on_to_the_bit(corpus: str, tmp_path: Path) -> None:
    whole = trained(corpus, **GROWING)
    out = str(tmp_path / "run")
    first = made(corpus, out, checkpoint__interval=3, **GROWING)
    rows = first.run_steps()
    for _ in range(4):
        next(rows)
    first.checkpointer.saver.finish_saving()
    again = made(corpus, out, **GROWING)
    again.checkpointer.resume_from(find_checkpoints(Path(out) / "checkpoints")[0])
    assert again.state.step == 3
    losses = [row["loss"] for row in again.run_steps()]
    assert differing((whole[0][3:], whole[1]), (losses, left(again))) == []


@pytest.mark.parametrize("sparsity", [0.8, 0.98], ids=["bits", "positions"])
def test_a_step_waits_for_nothing_and_takes_the_bytes_of_the_formula(
    corpus: str, sparsity: float
) -> None:
    trainer = made(corpus, prune__sparsity=sparsity, data__document_mask=False)
    batches = [batch.to(trainer.device) for batch in trainer._batch_maker()(0)]
    for _ in range(3):  # kernels are compiled, buffers made
        forward_backward(trainer.state.model, batches)
        trainer.state.optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_backward(trainer.state.model, batches)
        trainer.state.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for bucket in trainer.state.parallel.bucket_scheduler.buckets:
        if not any(map(pruning.is_prunable, bucket.weights)):
            continue
        assert bucket.sparsity_mask is not None
        held = bucket.data.nbytes + bucket.sparsity_mask.num_bytes
        held += sum(x.nbytes for x in trainer.state.optimizer.state_store.states[bucket].values())
        assert held == pruning.pruned_bucket_bytes(
            bucket.size, bucket.sparsity_mask.row_counts, gradient=0
        )
