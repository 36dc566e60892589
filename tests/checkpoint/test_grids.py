"""Any grid to any grid: state to the bit, the next losses, weights after them, the samples."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pool import Pool
from ranvier.buckets import spec
from ranvier.checkpoint import load
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.cost.layers import AxisGroup
from ranvier.grid import Grid
from ranvier.sharding import ShardedStateDict, Sharding
from ranvier.train.resume.checkpointing import state_tensors
from states import assemble
from training import run_of, stored, trainer_of

GRIDS: list[dict[str, int]] = [
    {},
    {"data": 2},
    {"data": 4},
    {"depth": 3},
    {"row": 4},
    {"col": 2},
    {"pipe": 2},
    {"pipe": 4},
    {"pipe": 2, "row": 2, "data": 2},
    {"depth": 2, "row": 2, "col": 2},
    {"data": 2, "depth": 2, "col": 2},
    {"pipe": 2, "depth": 2, "col": 2},
    {"context": 2},
    {"context": 4},
    {"data": 2, "context": 2},
    {"context": 2, "row": 2},
    {"context": 2, "depth": 2},
    {"pipe": 2, "context": 2},
]
CHANGES: dict[str, Any] = {
    "plan__global_batch": 24,
    "model__layers": 3,
    "model__tie_embeddings": True,
    "checkpoint__keep_latest": 0,
}
"""Three layers on two or four stages, 257 tokens, 2 kv heads on 4 rows: nothing divides."""
STEPS = 2
"""Taken after a load."""
Found = tuple[list[float], list[float], ShardedStateDict, list[int]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def moved(grid: Grid, corpus: str, source: str, out: str, steps: int) -> Found:
    """Go on from `source` (or begin) and save at once, then take steps.

    What differs from the file, losses, master weights of this rank, and the samples it has read.
    """
    trainer = trainer_of(grid, corpus, run_of(out, dict(grid.degrees), 5, **CHANGES))
    odd: list[float] = []
    if source:
        trainer.checkpointer.resume_from(Path(source))
        manifest = manifests.read_manifest(Path(source))
        mine = {
            n: x for n, x in state_tensors(trainer.state).items() if not n.startswith("random.")
        }
        whole = {name: load.empty_shard(manifest.tensors[name]) for name in mine}
        load.fill_tensors(Path(source), manifest, whole)
        for name, (part, place) in mine.items():
            want = place.slice_from(whole[name][0]).reshape(part.shape)
            odd += [0.0] * (not torch.equal(part, want))
        trainer.save_checkpoint()
    seen: list[int] = []
    take = trainer.take_step

    def watched(batches: Any, *rest: Any) -> Any:
        seen.extend(n for batch in batches for n in batch.samples.tolist())
        return take(batches, *rest)

    trainer.take_step = watched
    losses = []
    for row in trainer.run_steps():
        losses.append(row["loss"])
        if len(losses) == steps:
            break
    if not source:
        trainer.save_checkpoint()
    state = {
        n: (x.clone(), p)
        for n, (x, p) in trainer.state.optimizer.sharded_state().items()
        if "master" in n
    }
    return odd, losses, state, seen if reads(grid) else []


def reads(grid: Grid) -> bool:
    """Whether the samples of this rank are counted: others along these axes read the same."""
    return all(grid.index[axis] == 0 for axis in ("pipe", "context", "row", "col"))


def whole_of(parts: list[Found]) -> dict[str, torch.Tensor]:
    return assemble(state for _, _, state, _ in parts)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> tuple[Path, Found]:
    """A checkpoint after two steps of one process, and what that does next."""
    folder = tmp_path_factory.mktemp("origin")
    moved(Grid({}), corpus, "", str(folder / "a"), 2)
    (path,) = find_checkpoints(folder / "a" / "checkpoints")
    return path, moved(Grid({}), corpus, str(path), str(folder / "b"), STEPS)


def compare(parts: list[Found], alone: Found, *, same: bool) -> None:
    """What a grid does next is what one process does."""
    assert [odd for odd, *_ in parts if odd] == [], "loaded to the bit"
    for _, losses, _, _ in parts:
        assert losses == (alone[1] if same else pytest.approx(alone[1], rel=1e-6))
    plain = whole_of([alone])
    for name, value in whole_of(parts).items():
        assert torch.allclose(value, plain[name], rtol=1e-9, atol=1e-9), name
    assert sorted(n for *_, seen in parts for n in seen) == sorted(alone[3])


def test_a_state_survives_all_grids_to_the_bit(
    pool: Pool,
    tmp_path: Path,
    corpus: str,
    origin: tuple[Path, Found],
    request: pytest.FixtureRequest,
) -> None:
    """From each of all grids (a sample: four) to the next and back to the first (D11, D12)."""
    first, alone = origin
    source = first
    some = range(1, len(GRIDS)) if request.config.getoption("--full") else (3, 12, 9)
    for number, degrees in enumerate([*(GRIDS[i] for i in some), GRIDS[0]]):
        out = tmp_path / str(number)
        parts = pool.on_grid(degrees, moved, corpus, str(source), str(out), STEPS)
        compare(parts, alone, same=degrees == {})
        source = find_checkpoints(out / "checkpoints")[0]
    one, two = (manifests.read_manifest(path) for path in (first, source))
    assert one.facts["samples"] == two.facts["samples"] == 24 * one.step
    for name, entry in one.tensors.items():
        if name.startswith("random."):
            continue
        state = [{name: load.empty_shard(entry)} for _ in range(2)]
        load.fill_tensors(first, one, state[0])
        load.fill_tensors(source, two, state[1])
        assert torch.equal(state[0][name][0], state[1][name][0]), name


def moved_earlier(grid: Grid, *arguments: Any) -> Found:
    """As `moved`, with the flat ranges of earlier versions: only data splits states.

    All other ranks with the same shards summed gradients before, as ranks that share kv heads do.
    """

    def over_data(sharding: Sharding, degrees: Mapping[str, int]) -> AxisGroup:
        return AxisGroup(("data",) if degrees["data"] > 1 else (), degrees["data"])

    def over_others(sharding: Sharding, degrees: Mapping[str, int]) -> dict[str, int]:
        same = sharding.replica_counts(degrees)
        return {axis: n for axis, n in same.items() if axis not in ("data", "pipe")}

    with mock.patch.multiple(spec, replica_axis=over_data, shared_ranks=over_others):
        return moved(grid, *arguments)


def test_states_that_only_data_split_load_and_give_the_same_losses(
    pool: Pool, tmp_path: Path, corpus: str, origin: tuple[Path, Found]
) -> None:
    saved = tmp_path / "earlier"
    degrees = {"data": 2, "depth": 2}
    pool.on_grid(degrees, moved_earlier, corpus, str(origin[0]), str(saved), 0)
    (path,) = find_checkpoints(saved / "checkpoints")
    parts = pool.on_grid(degrees, moved, corpus, str(path), str(tmp_path / "now"), STEPS)
    compare(parts, origin[1], same=False)
    # Seven norms are cut into halves over data, and now into quarters over data and depth.
    assert [parts_of_norms(folder) for folder in (saved, tmp_path / "now")] == [8, 10]


def parts_of_norms(folder: Path) -> int:
    """Number of parts of the moments of all norms in a checkpoint."""
    tensors = manifests.read_manifest(find_checkpoints(folder / "checkpoints")[0]).tensors
    norms = [entry for name, entry in tensors.items() if "norm" in name and ".mean" in name]
    return sum(bool(part.shard.to_boxes()) for entry in norms for part in entry.shards)


@pytest.mark.full
def test_each_grid_loads_what_each_other_saved(
    pool: Pool,
    tmp_path: Path,
    corpus: str,
    origin: tuple[Path, Found],
    request: pytest.FixtureRequest,
) -> None:
    pairs = list(itertools.permutations(range(len(GRIDS)), 2))
    random.Random(0).shuffle(pairs)
    # All pairs would take twice as long.
    for a, b in pairs[:160] if request.config.getoption("--full") else pairs[:2]:
        saved = tmp_path / f"{a}-{b}"
        pool.on_grid(GRIDS[a], moved, corpus, str(origin[0]), str(saved), 0)
        (path,) = find_checkpoints(saved / "checkpoints")
        parts = pool.on_grid(GRIDS[b], moved, corpus, str(path), str(tmp_path / f"{a}-{b}+"), STEPS)
        compare(parts, origin[1], same=False)


def stretch(grid: Grid, corpus: str, out: str, stop: int, steps: int) -> tuple[int, list[int]]:
    """Go on with a run to step `stop` without a last save; where it began, samples by step."""
    changes = {**CHANGES, "checkpoint__interval": 2, "checkpoint__async_save": False}
    trainer = trainer_of(grid, corpus, run_of(out, dict(grid.degrees), steps, **changes))
    paths = find_checkpoints(Path(out) / "checkpoints")[::-1]
    if paths:
        trainer.checkpointer.resume_from(*paths)
    begun, seen = trainer.state.step, list[int]()
    take = trainer.take_step

    def watched(batches: Any, *rest: Any) -> Any:
        seen.extend(n for batch in batches for n in batch.samples.tolist())
        return take(batches, *rest)

    trainer.take_step = watched
    for _ in trainer.run_steps():
        if trainer.state.step >= stop:
            break
    return begun, seen if reads(grid) else []


@pytest.mark.full
def test_every_sample_is_read_once_whatever_the_grids(
    pool: Pool, tmp_path: Path, corpus: str
) -> None:
    """E1, E2: interrupted at random steps, resumed on other grids; lost steps are read again."""
    draw, batch, steps = random.Random(3), 24, 9
    lives: list[tuple[int, int, list[int]]] = []
    while not lives or lives[-1][1] < steps:
        begun = lives[-1][1] if lives else 0
        stop = min(begun + draw.randint(1, 4), steps)
        degrees = draw.choice([GRIDS[i] for i in (1, 3, 4, 5, 6)])
        parts = pool.on_grid(degrees, stretch, corpus, str(tmp_path), stop, steps)
        seen = [n for _, samples in parts for n in samples]
        lives.append((parts[0][0], stop, seen))
    counted: list[int] = []
    for (start, stop, seen), after in zip(lives, [*lives[1:], (steps, 0, [])], strict=True):
        assert sorted(seen) == list(range(start * batch, stop * batch))
        counted += [n for n in seen if n < after[0] * batch]  # what the next one went on from
    assert sorted(counted) == list(range(steps * batch))
    assert len(lives) > 2 and any(life[0] % 2 == 0 and life[0] > 0 for life in lives)
