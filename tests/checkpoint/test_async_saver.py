"""Saving behind a run: who waits, errors of one rank on all, disks that fail, what stays."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pool import Pool
from ranvier.checkpoint import checksummed_file, directory, load, rank_file
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.async_saver import AsyncSaver, save_and_wait
from ranvier.checkpoint.directory import (
    RetentionPolicy,
    find_checkpoints,
    newest_checkpoints,
    read_latest_pointer,
    set_aside,
    write_latest_pointer,
)
from ranvier.comm import collectives
from ranvier.comm.consensus import world_axis
from ranvier.errors import NumericError, OtherRankError, UnsafeInputError, WriteError
from ranvier.grid import Grid
from ranvier.sharding import Shard, ShardedStateDict

ALONE = Grid({})
CPU = torch.device("cpu")


def state(value: float, size: int = 50_000) -> ShardedStateDict:
    place = Shard((size,), (0,), (size,), (size,))
    return {"a.master": (torch.full((size,), value), place)}


def kept(path: Path, step: int, value: float | None = None, **keep: Any) -> Path:
    numbers = state(float(step) if value is None else value)
    made = save_and_wait(
        path, step, numbers, {"held_out_loss": value}, ALONE, keep=RetentionPolicy(**keep)
    )
    assert made is not None
    return made


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_the_run_goes_on_while_it_is_saved_and_only_changes_wait(tmp_path: Path) -> None:
    saver, go = AsyncSaver(tmp_path, ALONE, CPU), threading.Event()
    write = saver._write_rank_file
    saver._write_rank_file = lambda *rest: (go.wait(), write(*rest))[1]  # type: ignore[method-assign]
    mine = state(1.0)
    saver.save(1, mine, {})
    saver.wait_for_copies()  # returns once it is copied: nothing has been written yet
    mine["a.master"][0].fill_(2.0)
    assert saver.report_progress() == (4 + 3, 0) and find_checkpoints(tmp_path) == []
    with pytest.raises(AssertionError, match="while writing step 1"):
        saver.save(2, mine, {})
    assert saver.wait_for_save(0.05) is False, "a disk that is too slow is not waited for"
    go.set()
    assert saver.finish_saving() == tmp_path / "step-00000001"
    assert load.load_full_tensors(tmp_path / "step-00000001")["a"].unique().tolist() == [1.0]


def test_what_rests_on_the_host_is_not_copied_and_waits_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_file, "is_read_in_place", lambda flat, _: flat.numel() > 10)
    saver, mine = AsyncSaver(tmp_path, ALONE, CPU), state(1.0)
    mine["b"] = torch.arange(3.0), Shard((3,), (0,), (3,), (3,))
    saver.save(1, mine, {})
    assert sum(chunk.numel() for chunk in saver._host_buffer.chunks) == 12  # of b alone
    saver.wait_for_copies()
    assert (
        directory.temporary_path(tmp_path, 1, saver.nonce) / rank_file.rank_file_names(0)[1]
    ).exists()
    mine["a.master"][0].fill_(2.0)
    path = saver.finish_saving()
    assert path is not None
    assert load.load_full_tensors(path)["a"].unique().tolist() == [1.0]
    mine["a.master"][0][-1] = torch.nan
    with pytest.raises(NumericError, match=r"a\.master is not finite"):
        saver.save(2, mine, {})
        saver.finish_saving()


def test_reports_of_steps_before_change_nothing(tmp_path: Path) -> None:
    """A device's numbers are read one step later: what they say of a phase that is over is old."""
    saver = AsyncSaver(tmp_path, ALONE, CPU)
    saver.save(1, state(1.0), {})
    saver.handle_reports(0, 0)  # sent before the save began
    assert saver._phase == "writing"
    while saver.report_progress()[0] == 4 + 3:
        time.sleep(0.001)
    saver.handle_reports(4 + 2, 0)
    saver.handle_reports(4 + 2, 0)  # sent before the one that was heard
    assert saver._phase == "committing"
    saver.finish_saving()
    assert saver.report_progress() == (4, 0) and len(find_checkpoints(tmp_path)) == 1
    saver.save(2, state(2.0), {})
    saver.handle_reports(4 + 2, 0)  # of the save before: this one is not written yet
    saver.handle_reports(4, 0)
    assert saver._phase == "writing"
    saver.finish_saving()
    assert len(find_checkpoints(tmp_path)) == 2


def test_a_save_without_host_memory_is_an_error_not_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2: the optimizer does not wait for a copy that nobody makes."""
    saver = AsyncSaver(tmp_path, ALONE, CPU)

    def none(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(rank_file.HostBuffer, "ensure_size", none)
    saver.save(1, state(1.0), {})
    saver.wait_for_copies()
    with pytest.raises(MemoryError, match="no room"):
        saver.finish_saving()


def test_host_memory_grows_with_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file, "CHUNK_BYTES", 100_000)
    saver = AsyncSaver(tmp_path, ALONE, CPU)
    for step, size in ((1, 10_000), (2, 60_000), (3, 5_000), (4, 200_000)):
        saver.save(step, state(float(step), size), {})
        path = saver.finish_saving()
        assert path is not None
        assert torch.equal(load.load_full_tensors(path)["a"], torch.full((size,), float(step)))


def test_old_checkpoints_that_cannot_be_removed_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def busy(*_: Any) -> None:
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(directory, "prune_checkpoints", busy)
    assert kept(tmp_path, 1).name == "step-00000001"
    assert "old checkpoints were not removed" in capsys.readouterr().err


def test_facts_that_are_known_later_are_committed(tmp_path: Path) -> None:
    saver = AsyncSaver(tmp_path, ALONE, CPU)
    saver.save(1, state(1.0), {"samples": 1})
    saver.add_facts(guard={"window": [0.1]})
    path = saver.finish_saving()
    assert path is not None
    assert manifests.read_manifest(path).facts == {"samples": 1, "guard": {"window": [0.1]}}


def failing(grid: Grid, where: str, rank: int, phase: str) -> str:
    """What this rank is told when the disk of one rank fails in a phase."""
    saver = AsyncSaver(Path(where), grid, CPU)

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")

    with pytest.MonkeyPatch.context() as patch:
        if grid.rank == rank:
            patch.setattr(
                *(
                    (rank_file, "write_rank_file")
                    if phase == "part"
                    else (directory, "write_manifest")
                ),
                full,
            )
        saver.save(2, state(float(grid.rank)), {})
        try:
            for _ in range(1000):  # as steps do
                mine = torch.tensor(saver.report_progress())
                both = collectives.all_reduce(mine, world_axis(grid), "max").wait().tolist()
                saver.handle_reports(*both)
                time.sleep(0.002)
        except (WriteError, OtherRankError) as error:
            return f"{type(error).__name__} {error.exit_code}"
    return "nothing"


@pytest.mark.parametrize(("rank", "phase"), [(1, "part"), (0, "part"), (0, "commit")])
def test_the_failure_of_one_rank_is_an_error_of_all_at_the_next_step(
    pool: Pool, tmp_path: Path, rank: int, phase: str
) -> None:
    """C1, C2: nothing of it is left, the checkpoint before stays."""
    kept(tmp_path, 1)
    told = pool.on_grid({"row": 2}, failing, str(tmp_path), rank, phase)
    assert told[rank] == "WriteError 73" and told[1 - rank] == "OtherRankError 73"
    assert names(tmp_path) == ["latest", "step-00000001"]


ERRORS = ["ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "ENAMETOOLONG", "EIO"]


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_a_disk_that_fails_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: str
) -> None:
    """C1, C2, C3, C6: the message has the bytes needed, and nothing half done stays."""
    kept(tmp_path, 1)
    code = getattr(errno, name)

    def fails(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(WriteError, match=r"needs about 20\d,\d\d\d bytes") as error:
            kept(tmp_path, 2)
    assert os.strerror(code) in str(error.value) and error.value.exit_code == 73
    assert names(tmp_path) == ["latest", "step-00000001"]
    assert load.load_full_tensors(find_checkpoints(tmp_path)[-1])["a"][0] == 1.0
    assert kept(tmp_path, 2).name == "step-00000002", "the next one is good again"


def test_a_disk_that_stumbles_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C5."""
    calls = []
    original = os.fsync

    def stumbles(handle: int) -> None:
        calls.append(handle)
        if len(calls) in (1, 4):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(handle)

    monkeypatch.setattr(os, "fsync", stumbles)
    saver = AsyncSaver(tmp_path, ALONE, CPU)
    saver.save(1, state(1.0), {})
    path = saver.finish_saving()
    assert path is not None and saver.num_repeats == 2
    assert load.load_full_tensors(path)["a"][0] == 1.0
    assert "retrying the write" in capsys.readouterr().err


def test_a_directory_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    """C4."""
    where = tmp_path / "checkpoints"
    saver = AsyncSaver(where, ALONE, CPU)
    where.rmdir()
    saver.save(1, state(1.0), {})
    with pytest.raises(WriteError, match="needs about") as error:
        saver.finish_saving()
    assert error.value.exit_code == 73 and not where.exists()
    where.write_text("a file")
    with pytest.raises(WriteError):
        save_and_wait(where, 1, state(1.0), {}, ALONE)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A disk of a few blocks, if this machine lets us have one."""
    mounted: list[Path] = []

    def make(options: str) -> Path:
        path = tmp_path / "disk"
        path.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        if subprocess.run(words, capture_output=True).returncode:
            pytest.skip("mounting a disk needs root")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("options", ["size=600k", "size=600k,nr_inodes=6"])
def test_a_full_disk_and_one_without_inodes(
    small_disk: Callable[[str], Path], options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """C1, C8, C11: a real one."""
    disk = small_disk(options)
    kept(disk, 1)
    with pytest.raises(WriteError, match="No space left on device"):
        save_and_wait(
            disk, 2, state(2.0, 200_000 if "inodes" not in options else 50_000), {}, ALONE
        )
    assert "inodes" in options or "needs about" in capsys.readouterr().err, "said before"
    assert names(disk) == ["latest", "step-00000001"]
    assert load.load_full_tensors(find_checkpoints(disk)[-1])["a"][0] == 1.0


def test_numbers_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """D15."""
    bad = state(1.0)
    bad["a.master"][0][77] = torch.nan
    with pytest.raises(NumericError, match=r"a\.master is not finite after step 3"):
        save_and_wait(tmp_path, 3, bad, {}, ALONE)
    assert names(tmp_path) == []


def test_what_stays(tmp_path: Path) -> None:
    for step, loss in ((2, 3.0), (4, 1.0), (6, 2.0), (8, 2.5), (9, 2.2)):
        kept(tmp_path, step, loss, keep_latest=2, keep_interval=6, keep_best=True)
    assert [p.name[-1] for p in find_checkpoints(tmp_path)] == ["4", "6", "8", "9"], (
        "best, multiple, last two"
    )
    kept(tmp_path, 10, 9.0, keep_latest=1)
    assert [p.name[-2:] for p in find_checkpoints(tmp_path)] == ["10"]


def test_a_step_can_be_saved_again_and_the_newer_counts(tmp_path: Path) -> None:
    one = kept(tmp_path, 3, 1.0, keep_latest=0)
    two = kept(tmp_path, 3, 2.0, keep_latest=0)
    assert (one.name, two.name) == ("step-00000003", "step-00000003.2")
    assert newest_checkpoints(tmp_path) == ([two, one], [])
    kept(tmp_path, 3, 7.0, keep_latest=1)
    assert names(tmp_path) == ["latest", "step-00000003.3"]


def test_the_newest_is_found_by_its_step_not_its_time(tmp_path: Path) -> None:
    """C9."""
    for step in (5, 10, 123456789):
        kept(tmp_path, step)
    os.utime(tmp_path / "step-00000005", (time.time() + 3600,) * 2)
    assert [p.name for p in newest_checkpoints(tmp_path)[0]] == [
        *("step-123456789", "step-00000010", "step-00000005")
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is missing"),
        ("", "does not name a checkpoint"),
        ("hello\x00", "does not name a checkpoint"),
        ("step-00000099", "names step-00000099"),
        ("step-00000001", "names step-00000001"),
    ],
)
def test_the_pointer_is_a_hint_only(tmp_path: Path, text: str | None, words: str) -> None:
    """D6."""
    for step in (1, 2):
        kept(tmp_path, step)
    pointer = tmp_path / "latest"
    pointer.unlink() if text is None else pointer.write_text(f"{text}\n")
    paths, lines = newest_checkpoints(tmp_path)
    assert [p.name[-1] for p in paths] == ["2", "1"] and words in lines[0]


@pytest.mark.parametrize("text", ["../..", "/etc/passwd", "..", "a/b", "step-00000001/../.."])
def test_a_pointer_that_leads_outside_is_refused(tmp_path: Path, text: str) -> None:
    """D6."""
    kept(tmp_path, 1)
    (tmp_path / "latest").write_text(text)
    with pytest.raises(UnsafeInputError) as error:
        newest_checkpoints(tmp_path)
    assert error.value.exit_code == 77


def test_links_to_checkpoints_and_pointers_are_refused(tmp_path: Path) -> None:
    """D17."""
    kept(tmp_path / "a", 1)
    (tmp_path / "a" / "latest").unlink()
    (tmp_path / "a" / "latest").symlink_to("/etc/hostname")
    with pytest.raises(UnsafeInputError):
        read_latest_pointer(tmp_path / "a")
    (tmp_path / "a" / "latest").unlink()
    (tmp_path / "a" / "step-00000002").symlink_to(tmp_path / "a" / "step-00000001")
    with pytest.raises(UnsafeInputError):
        find_checkpoints(tmp_path / "a")


def test_later_checkpoints_are_set_aside_not_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        kept(tmp_path, step)
    moved = set_aside(tmp_path, 1)
    assert [path.name for path in moved] == ["aside-step-00000002-1", "aside-step-00000003-1"]
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000001"]
    assert load.load_full_tensors(moved[0])["a"][0] == 2.0
    write_latest_pointer(tmp_path, "step-00000001")
    assert newest_checkpoints(tmp_path)[1] == []


def test_a_reader_of_a_checkpoint_that_is_pruned_finishes_or_says_so(tmp_path: Path) -> None:
    """D18."""
    path = kept(tmp_path, 1)
    manifest = manifests.read_manifest(path)
    with checksummed_file.ChecksummedFile(
        path / "rank-00000.safetensors", manifest.files["rank-00000.safetensors"]
    ) as file:
        shutil.rmtree(path)
        assert len(file.read(0, file.checksums.size)) == file.checksums.size, "what is open stays"
    with pytest.raises(load.DamageError, match="cannot be read"):
        load.fill_tensors(
            path, manifest, {"a.master": load.empty_shard(manifest.tensors["a.master"])}
        )
