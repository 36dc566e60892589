"""A rank that loads a model never holds much more than its own part of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pool import Pool
from ranvier.checkpoint.async_saver import save_and_wait
from ranvier.config import run as runs
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import DecoderModelConfig
from ranvier.grid import Grid
from ranvier.infer.load import MASTER_SUFFIX, build_empty_model, load_model
from ranvier.models import DecoderConfig
from ranvier.parallel.parallel_model import get_parallel_model
from training import SHAPE

WIDE = {**SHAPE, "layers": 4, "embed": 1024, "heads": 8, "head_dim": 128, "mlp": 4096}
"""300 MiB in fp32 on one rank."""


def status(name: str) -> int:
    """Bytes that the kernel tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def saved(grid: Grid, out: str) -> None:
    """A run without training: config and checkpoint."""
    shape = dataclasses.asdict(DecoderConfig(**WIDE, vocab=8192))
    run = RunConfig(
        model=DecoderModelConfig(size="tiny", **shape), plan=Plan(**grid.degrees, global_batch=8)
    )
    model = build_empty_model(run.model, grid, "cpu")
    state = {
        f"{n}{MASTER_SUFFIX}": part for n, part in get_parallel_model(model).sharded_state().items()
    }
    for tensor, _ in state.values():
        tensor.fill_(0.25)
    save_and_wait(Path(out) / "checkpoints", 1, state, {}, grid)
    (Path(out) / "config.toml").write_text(runs.to_toml(run.check_and_resolve(grid.world_size)))


def grown(grid: Grid, out: str) -> tuple[int, int, float]:
    """Bytes of my part, the most that anonymous memory grew by, and the mean of my weights."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, files = status("RssAnon"), status("RssFile") + status("RssShmem")
    model = load_model(Path(out), grid, "cpu")
    peak = status("VmHWM") - files  # files that were mapped meanwhile make it larger, not smaller
    buckets = get_parallel_model(model).bucket_scheduler.buckets
    own = sum(bucket.data.numel() * bucket.data.element_size() for bucket in buckets)
    return own, peak - before, float(buckets[0].data[:100].mean())


@pytest.mark.full
@pytest.mark.parametrize("degrees", [{"row": 2, "depth": 2}, {"pipe": 2, "col": 2}])
def test_loading_takes_little_more_than_the_part(
    pool: Pool, tmp_path: Path, degrees: dict[str, int]
) -> None:
    pool.on_grid({"row": 1}, saved, str(tmp_path))
    _, *others = pool.on_grid(degrees, grown, str(tmp_path))  # the first has memory to use again
    for own, more, mean in others:
        assert own > 50 << 20 and mean == 0.25
        assert more < 1.3 * own + (64 << 20), (own >> 20, more >> 20)
