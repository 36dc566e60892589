"""Layouts of attention over context are built while batches are loaded, and found in the step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import training
from pool import Pool
from ranvier.cost import context_attention
from ranvier.grid import Grid
from ranvier.nn import context_documents


def threads_that_build(
    grid: Grid, corpus: str, folder: str, changes: dict[str, Any]
) -> tuple[set[bool], int]:
    """Whether layouts are built in the main thread, and how many; for two steps of a run."""
    found: list[bool] = []
    build = context_attention.build_layout

    def record(*arguments: Any, **options: Any) -> Any:
        found.append(threading.current_thread() is threading.main_thread())
        return build(*arguments, **options)

    degrees = {axis: size for axis, size in grid.degrees.items() if size > 1}
    run = training.run_of(folder, {"data": 1, **degrees}, 2, checkpoint__interval=-1, **changes)
    trainer = training.trainer_of(grid, corpus, run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_documents, "build_layout", record)
        assert len(list(trainer.run_steps())) == 2
    return set(found), len(found)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return training.stored(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("degrees", "changes"),
    [
        ({"context": 2}, {"plan__micro_batch": 2}),
        ({"context": 2, "col": 2}, {"plan__micro_batch": 4, "plan__context_attention": "ulysses"}),
    ],
    ids=str,
)
def test_the_main_thread_builds_no_layout(
    pool: Pool, tmp_path: Path, corpus: str, degrees: dict[str, int], changes: dict[str, Any]
) -> None:
    found = pool.on_grid(degrees, threads_that_build, corpus, str(tmp_path), changes)
    micro_batches = 8 // changes["plan__micro_batch"]
    # The thread may load further steps before the run ends.
    for in_main, count in found:
        assert in_main == {False} and count in range(2 * micro_batches, 8 * micro_batches), found
