"""On a GPU: activations that wait on the host give the bits of those that stay, in less memory."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pool import Pool as Workers
from ranvier.config.plan import Plan
from ranvier.data.batch import Batch
from ranvier.data.loader import Loader
from ranvier.grid import Grid
from ranvier.memory.activation_offload import ActivationOffload
from ranvier.memory.host import Arena, HostBufferPool
from ranvier.models import Decoder, DecoderConfig
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.train.memory import placement
from training import run_of, stored, trainer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]
SHAPE = {"layers": 6, "embed": 64, "heads": 4, "head_dim": 16, "mlp": 256}
STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def options(**changes: Any) -> dict[str, Any]:
    shape = {f"model__{key}": value for key, value in SHAPE.items()}
    return {**shape, "train__dtype": "bf16", "train__deterministic": True, **changes}


def trained(grid: Grid, corpus: str, changes: dict[str, Any]) -> tuple[list[float], list[Tensor]]:
    """Losses of a run, and the weights it leaves; small tensors go, too."""
    before, placement.ActivationOffload = (
        placement.ActivationOffload,
        partial(ActivationOffload, small=1),
    )  # type: ignore[misc]
    try:
        run = run_of("", dict(grid.degrees), STEPS, **options(**changes))
        trainer = trainer_of(grid, corpus, run, "cuda")
        losses = [row["loss"] for row in trainer.run_steps()]
        store = trainer.state.parallel.step_context.save_policy.store
        if run.memory.activation_offload_fraction > 0.0:
            assert (
                isinstance(store, ActivationOffload)
                and store.offloaded_bytes > 0
                and store.saved_bytes() == (0, 0)
            )
        weights = trainer.state.parallel.sharded_state().values()
        return losses, [x.detach().cpu().clone() for x, _ in weights]
    finally:
        placement.ActivationOffload = before  # type: ignore[misc]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("compiled", ["on", "off"])
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_activations_from_the_host_change_no_bit(corpus: str, kind: str, compiled: str) -> None:
    """Two micro-batches a step, and the same buffers for both."""
    how = {"plan__recompute": kind, "plan__compile": compiled, "plan__micro_batch": 4}
    want = trained(Grid({}), corpus, how)
    for share in (0.5, 1.0):
        losses, weights = trained(
            Grid({}), corpus, {**how, "memory__activation_offload_fraction": share}
        )
        assert losses == want[0]
        assert all(torch.equal(a, b) for a, b in zip(weights, want[1], strict=True))


@pytest.mark.parametrize("degrees", [{"row": 2}, {"pipe": 2}], ids=str)
def test_kept_collectives_and_activations_on_two_ranks(
    pool: Workers, corpus: str, degrees: dict[str, int]
) -> None:
    """Two ranks share the GPU over Gloo."""
    plain = {"plan__recompute": "full", "plan__micro_batch": 2}
    away = {
        **plain,
        "memory__recompute_collectives": "save",
        "memory__activation_offload_fraction": 1.0,
    }
    want = pool.on_grid(degrees, trained, corpus, plain)
    for mine, others in zip(pool.on_grid(degrees, trained, corpus, away), want, strict=True):
        assert mine[0] == others[0]
        assert all(torch.equal(a, b) for a, b in zip(mine[1], others[1], strict=True))


def test_the_host_does_not_wait_for_the_copies(corpus: str) -> None:
    """A step is issued without one synchronization, once all buffers are there."""
    settings = {**options(memory__activation_offload_fraction=1.0), "train__deterministic": False}
    settings |= {"model__embed": 256, "data__seq_len": 512}
    trainer = trainer_of(Grid({}), corpus, run_of("", {}, 6, **settings), "cuda")
    store = trainer.state.parallel.step_context.save_policy.store
    assert isinstance(store, ActivationOffload)
    with Loader(trainer._batch_maker()) as loader:
        for _ in range(3):
            trainer.issue_step(loader)
        before = store.offloaded_bytes
        with warnings.catch_warnings(action="ignore"):  # that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.issue_step(loader)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert store.offloaded_bytes > before


def passed(share: float, compiled: str, kind: str) -> tuple[int, int, int]:
    """Most bytes in a pass beyond the weights; bytes on device and host after it."""
    config = DecoderConfig(
        layers=8, embed=256, heads=4, kv_heads=4, head_dim=64, mlp=1024, vocab=512
    )
    torch.manual_seed(1)
    model = parallelize(
        Decoder(config),
        Grid({}),
        Plan(recompute=kind, compile="on" if compiled else "off"),  # type: ignore[arg-type]
        dtype=torch.bfloat16,
        device="cuda",
    )
    parallel = get_parallel_model(model)
    device, blocks = parallel.pipeline.executor.device, parallel.blocks
    store = ActivationOffload(
        share,
        blocks,
        device,
        weights=lambda: [bucket.data for bucket in parallel.bucket_scheduler.buckets],
        pool=HostBufferPool(lambda size: Arena(size, device).buffer, room=2**35),
        last=blocks[-1],
    )
    parallel.step_context.save_policy.store = store
    # many tokens and few weights: what is kept is far more than the gradients that replace it
    tokens = torch.randint(0, 512, (16, 2048), generator=torch.Generator().manual_seed(2))
    batch = Batch(tokens, tokens.roll(1, 1), samples=torch.arange(16)).to(device)
    for _ in range(3):
        parallel.bucket_scheduler.begin_step("")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(batch.tokens, batch.targets)
        here, there = store.saved_bytes()
        loss.backward()
        most = torch.cuda.max_memory_allocated() - before
        del loss
    return most, here, there


@pytest.mark.parametrize("compiled", ["", "inductor"])
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_the_peak_falls_on_the_device(kind: str, compiled: str) -> None:
    """Of eight blocks seven go; of what goes two blocks are on the device at most."""
    most, *_ = passed(0.0, compiled, kind)
    half, *_ = passed(0.5, compiled, kind)
    least, here, there = passed(1.0, compiled, kind)
    assert there > 3 * here
    assert most - least > 0.6 * there, (most, least, here, there)
    assert least < half < most
