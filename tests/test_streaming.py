"""A rank that reads a published model has its part of it in memory, and nothing of it twice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pool import Pool
from ranvier.grid import Grid

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import streaming

SIZE, ROOM = 64 << 20, 12 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "model"
    assert streaming.write(folder, SIZE, torch.bfloat16) >= SIZE
    return folder


def read(grid: Grid, folder: str, twice: bool) -> streaming.Read:
    """What reading costs a rank; twice: as if it were read whole before."""
    from ranvier import from_pretrained
    from ranvier.checkpoint.hf.model import PublishedModel

    held: list[Any] = []

    def work() -> int:
        if twice:
            with PublishedModel.open(Path(folder)) as there:
                held.extend(there.load_tensor(name).clone() for name in there.shapes)
        held.append(from_pretrained(folder, grid=grid))
        queue = held[-1].parallel.bucket_scheduler
        return sum(bucket.data.numel() * bucket.data.element_size() for bucket in queue.buckets)

    return streaming.watched(_warmed(work, grid))


def _warmed(work: Callable[[], int], grid: Grid) -> Callable[[], int]:
    """Work whose imports and groups are there: they are not of the model."""
    import ranvier.integrations.pretrained  # noqa: F401

    grid.axis("row"), grid.axis("col"), grid.axis(*grid.degrees)
    return work


def test_a_rank_holds_its_part_once(pool: Pool, model: Path) -> None:
    for one in pool.on_grid({"row": 2, "col": 2}, read, str(model), False):
        assert SIZE / 4 <= one.shard < SIZE / 3
        assert one.above < 1.3 * one.shard + ROOM, one
    for one in pool.on_grid({"row": 2, "col": 2}, read, str(model), True):
        assert one.above > 1.3 * one.shard + ROOM, "a second copy would be seen"


def test_a_rank_holds_its_experts_once(pool: Pool, tmp_path: Path) -> None:
    """Of a mixture, whose file has a tensor for each expert, a rank reads its experts' parts."""
    assert streaming.write(tmp_path / "mixture", SIZE, torch.bfloat16, experts=8) >= SIZE
    for one in pool.on_grid({"expert": 2, "row": 2}, read, str(tmp_path / "mixture"), False):
        assert one.shard < SIZE * 0.6, "dense weights are on both ranks of expert"
        assert one.above < 1.3 * one.shard + ROOM, one


@pytest.mark.full
def test_reading_imports_no_compiler() -> None:
    import subprocess

    code = """
import sys
from ranvier.checkpoint.hf.model import entries_of, shapes_of
from ranvier.models import DecoderConfig
from ranvier.models.hf.registry import find_family
entries_of(find_family("llama"), DecoderConfig())
shapes_of(DecoderConfig())
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
