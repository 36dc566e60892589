"""Files of a checkpoint: what is written is read, damage is named, harm is refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ranvier.checkpoint import async_saver, checksummed_file, load, rank_file
from ranvier.checkpoint import manifest as manifests
from ranvier.cli import checkpoint
from ranvier.errors import (
    CheckpointError,
    DamageError,
    RanvierError,
    UnsafeInputError,
    VersionError,
)
from ranvier.grid import Grid
from ranvier.sharding import Shard, ShardedStateDict

ALONE = Grid({})
FILE = "rank-00000.safetensors"


def whole(tensor: torch.Tensor) -> tuple[torch.Tensor, Shard]:
    shape = tuple(tensor.shape)
    return tensor, Shard(shape, (0,) * len(shape), shape, shape)


def state() -> ShardedStateDict:
    weights = torch.arange(600_000.0).reshape(600, 1000)
    return {
        "a.master": whole(weights),
        "a.mean": whole(weights.bfloat16()),
        "b.master": whole(torch.tensor(2.5, dtype=torch.float64)),
        "c.master": whole(torch.zeros(0, 3)),
    }


def made(folder: Path, tensors: ShardedStateDict | None = None) -> Path:
    path = async_saver.save_and_wait(
        folder, 7, state() if tensors is None else tensors, {"samples": 3}, ALONE
    )
    assert path is not None
    return path


@st.composite
def places(draw: st.DrawFn) -> tuple[Shard, Shard]:
    """Two parts of the same whole, padded or not, flat ranges or boxes."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))

    def one() -> Shard:
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        valid = tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
        local = tuple(n + draw(st.integers(0, 2)) for n in valid)
        place = Shard(shape, start, valid, local)
        count = torch.Size(local).numel()
        low = draw(st.integers(0, count))
        return (
            place.narrow_flat(low, draw(st.integers(low, count))) if draw(st.booleans()) else place
        )

    return one(), one()


@given(places())
def test_parts_meet_where_they_hold_the_same_elements(both: tuple[Shard, Shard]) -> None:
    one, other = both
    numbers = torch.arange(1, 1 + torch.Size(one.global_shape).numel()).reshape(one.global_shape)
    source, target = one.slice_from(numbers).reshape(-1), other.slice_from(numbers).reshape(-1)
    got = torch.zeros_like(target)
    for a in one.to_boxes():
        for b in other.to_boxes():
            for piece in [] if (met := a.intersection(b)) is None else met.split_to_fit(4):
                goal = b.intersection(piece)
                assert goal is not None and piece.span <= 4
                into = got.as_strided(goal.size, goal.strides, goal.offset)
                assert not into.any(), "no element comes twice"
                into.copy_(source.as_strided(piece.size, piece.strides, piece.offset))
    there = torch.zeros_like(numbers)
    one.write_into(there, source.reshape((-1,) if one.flat_range else one.local_shape))
    assert torch.equal(got, other.slice_from(there).reshape(-1))


def test_what_is_saved_is_loaded_to_the_bit_by_us_and_by_others(tmp_path: Path) -> None:
    """D16: scalars, no elements, several blocks, not contiguous, shared storage."""
    base = torch.randn(700, 900)
    tensors = {**state(), "d.master": whole(base.t()), "e.master": whole(base[:, ::2])}
    path = made(tmp_path, tensors)
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", FILE]
    assert (tmp_path / "latest").read_text() == "step-00000007\n"
    manifest = manifests.read_manifest(path)
    found = {name: load.empty_shard(entry) for name, entry in manifest.tensors.items()}
    load.fill_tensors(path, manifest, found)
    others = load_file(path / FILE)
    for name, (tensor, _) in tensors.items():
        assert torch.equal(found[name][0], tensor), name
        assert torch.equal(others[name], tensor), name
    assert manifest.step == 7 and manifest.facts == {"samples": 3}
    assert {"ranvier", "torch", "python"} <= set(manifest.versions)
    assert len(manifest.files[FILE].checksums) > 5


def test_many_tensors_load_in_linear_time(tmp_path: Path) -> None:
    """D16: each block is read about once, whatever lies in it."""
    many = {f"{n}.master": whole(torch.full((600,), float(n))) for n in range(2_000)}
    path = made(tmp_path, many)
    reads: list[int] = []
    read = checksummed_file.ChecksummedFile.read

    def counted(self: checksummed_file.ChecksummedFile, start: int, stop: int) -> memoryview:
        reads.append(
            -(-stop // checksummed_file.BLOCK_BYTES) - start // checksummed_file.BLOCK_BYTES
        )
        return read(self, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksummed_file.ChecksummedFile, "read", counted)
        mine = {name: whole(torch.zeros(600)) for name in many}
        assert load.load_checkpoint(path, mine) == []
    size = (path / FILE).stat().st_size
    assert sum(reads) <= 2 * -(-size // checksummed_file.BLOCK_BYTES) + 1
    assert all(torch.equal(mine[name][0], many[name][0]) for name in many)


def test_a_rank_reads_only_the_blocks_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(tmp_path, {"a.master": whole(torch.arange(4e6).reshape(4000, 1000))})
    read: list[int] = []
    original = os.preadv

    def counted(handle: int, into: list[memoryview], at: int) -> int:
        read.append(len(into[0]))
        return original(handle, into, at)

    monkeypatch.setattr(os, "preadv", counted)
    mine, shape = torch.zeros(100, 1000), (100, 1000)
    load.load_checkpoint(path, {"a.master": (mine, Shard((4000, 1000), (3000, 0), shape, shape))})
    assert torch.equal(mine, torch.arange(3e6, 3.1e6).reshape(shape))
    assert sum(read) <= 3 * checksummed_file.BLOCK_BYTES


def edited(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A hostile manifest whose digest is right."""

    def do(path: Path) -> None:
        body = json.loads((path / "manifest.json").read_bytes())["body"]
        body = change(body) or body
        text = json.dumps(body, separators=(",", ":")).encode()
        (path / "manifest.json").write_bytes(manifests.add_digest(text))

    return do


def bytes_of(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        (path / name).write_bytes(change((path / name).read_bytes()))

    return do


def zeroed(data: bytes) -> bytes:
    return data[:500_000] + bytes(4096) + data[504_096:]


def named(name: str) -> Callable[[Path], None]:
    return edited(lambda body: body["files"].update({name: [0, ""]}))


def part_at(begin: int) -> Callable[[Path], None]:
    return edited(lambda body: body["tensors"]["a.master"][2][0].__setitem__(1, begin))


def kind_of(place: int, value: Any) -> Callable[[Path], None]:
    return edited(lambda body: body["tensors"]["a.master"].__setitem__(place, value))


MANIFEST = "manifest.json"
DAMAGE: dict[str, tuple[Callable[[Path], Any], type[RanvierError], str]] = {
    "D2 a page of zeros": (bytes_of(FILE, zeroed), DamageError, "is damaged in bytes"),
    "D3 empty": (bytes_of(FILE, lambda data: b""), DamageError, "has 0 bytes"),
    "D3 half": (bytes_of(FILE, lambda data: data[: len(data) // 2]), DamageError, "bytes, but"),
    "D3 one byte less": (bytes_of(FILE, lambda data: data[:-1]), DamageError, "bytes, but"),
    "D3 one byte more": (bytes_of(FILE, lambda data: data + b"x"), DamageError, "bytes, but"),
    "D4 missing": (lambda path: (path / FILE).unlink(), DamageError, "cannot be read"),
    "D5 no manifest": (lambda path: (path / MANIFEST).unlink(), DamageError, "no manifest"),
    "D5 empty": (bytes_of(MANIFEST, lambda data: b""), DamageError, "digest"),
    "D5 cut": (bytes_of(MANIFEST, lambda data: data[:99]), DamageError, "digest"),
    "D5 no JSON": (bytes_of(MANIFEST, lambda data: b"hello"), DamageError, "digest"),
    "D5 other hash": (
        bytes_of(MANIFEST, lambda data: data[:11] + b"0" * 64 + data[75:]),
        DamageError,
        "digest",
    ),
    "D5 newer": (edited(lambda body: {**body, "format": 99}), VersionError, "format 99"),
    "D5 a list": (edited(lambda body: [body]), VersionError, "format"),
    "no tensors": (edited(lambda body: body.pop("tensors") and None), DamageError, "KeyError"),
    "path traversal": (named("../../etc/passwd"), UnsafeInputError, "names the file"),
    "an absolute path": (named("/dev/zero"), UnsafeInputError, "names the file"),
    "a part outside of its file": (part_at(10**15), DamageError, "a shard at"),
    "a negative offset": (part_at(-8), DamageError, "not a valid count"),
    "too large a shape": (kind_of(1, [10**9] * 2), DamageError, "a shard at|elements instead of"),
    "a type that is none": (kind_of(0, "__reduce__"), DamageError, "KeyError"),
    "parts that overlap": (
        edited(
            lambda body: body["tensors"]["a.master"].__setitem__(
                2, [[0, 8000, [0, 0], [300, 1000], [300, 1000], None]] * 2
            )
        ),
        DamageError,
        "overlap",
    ),
    "thousands of dims": (kind_of(1, [1] * 60_000), DamageError, "a tensor has 60000 dims|a shard"),
    "deep JSON": (
        bytes_of(MANIFEST, lambda data: manifests.add_digest(b"[" * 100_000)),
        DamageError,
        "not valid JSON",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_by_load_and_by_verify(
    tmp_path: Path, good: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, kind, words = DAMAGE[case]
    path = Path(shutil.copytree(good, tmp_path / good.name))
    damage(path)
    with pytest.raises(kind, match=words):
        load.load_checkpoint(
            path, {name: (torch.zeros_like(x), p) for name, (x, p) in state().items()}
        )
    if issubclass(kind, CheckpointError):
        assert checkpoint.verify_checkpoints(path) == 66
        assert "damaged" in capsys.readouterr().out
    else:
        with pytest.raises(kind):
            checkpoint.verify_checkpoints(path)


def test_a_disk_that_cannot_be_read_is_damage(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(DamageError, match="Input/output error"):
        load.load_full_tensors(good)


def test_a_header_larger_than_its_file_is_refused(tmp_path: Path, good: Path) -> None:
    path = Path(shutil.copytree(good, tmp_path / good.name))
    data = bytearray((path / FILE).read_bytes())
    data[:8] = (1 << 60).to_bytes(8, "little")
    (path / FILE).unlink()
    sums = checksummed_file.write_checksummed(path / FILE, [memoryview(data)])
    edited(lambda body: body["files"].update({FILE: [sums.size, sums.to_hex()]}))(path)
    with pytest.raises(UnsafeInputError, match="its header claims to have 1152921504606846976"):
        load.load_full_tensors(path)
    with pytest.raises(UnsafeInputError):
        checkpoint.verify_checkpoints(path)


def test_swapped_files_are_noticed_and_foreign_ones_ignored(tmp_path: Path) -> None:
    """D4."""
    one, two = (
        made(tmp_path / str(n), {"a.master": whole(torch.full((9,), float(n)))}) for n in (1, 2)
    )
    (one / "notes.txt").write_text("mine")
    (one / "rank-00099.safetensors").write_bytes(b"x")
    assert load.load_full_tensors(one)["a"][0] == 1.0 and checkpoint.verify_checkpoints(one) == 0
    shutil.copyfile(two / FILE, one / FILE)
    with pytest.raises(DamageError, match="is damaged in bytes"):
        load.load_full_tensors(one)


@pytest.mark.parametrize("kind", ["symlink", "hard link", "fifo", "directory"])
@pytest.mark.parametrize("name", [FILE, MANIFEST])
def test_what_is_no_plain_file_is_refused_without_blocking(
    tmp_path: Path, good: Path, kind: str, name: str
) -> None:
    """D17."""
    path = Path(shutil.copytree(good, tmp_path / good.name))
    (path / name).unlink()
    if kind == "symlink":
        (path / name).symlink_to(good / name)
    elif kind == "hard link":
        shutil.copyfile(good / name, tmp_path / "other")
        os.link(tmp_path / "other", path / name)
    elif kind == "fifo":
        os.mkfifo(path / name)
    else:
        (path / name).mkdir()
    with pytest.raises(UnsafeInputError, match="Replace it with a copy"):
        load.load_full_tensors(path)


class Bomb:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.marker),)


@pytest.mark.parametrize("name", [FILE, MANIFEST, ".metadata", "rank-00000.json"])
def test_a_pickle_is_never_executed(tmp_path: Path, good: Path, name: str) -> None:
    path = Path(shutil.copytree(good, tmp_path / good.name))
    marker = tmp_path / "executed"
    (path / name).write_bytes(pickle.dumps(Bomb(str(marker))))
    before = sorted(p.name for p in path.iterdir())
    if name in (FILE, MANIFEST):
        with pytest.raises(DamageError):
            load.load_full_tensors(path)
    else:
        load.load_full_tensors(path)
    assert not marker.exists() and sorted(p.name for p in path.iterdir()) == before
    # Our own bytes of a few lines above, which only touch a file: without this the test could not
    # tell a payload that was refused from one that never worked.
    pickle.loads((path / name).read_bytes())
    assert marker.exists(), "the control: it would have"


def test_nothing_that_executes_is_read_anywhere() -> None:
    root = Path(async_saver.__file__).parents[1]
    bad = ("import pickle", "torch.load(", "allow_pickle=True", "marshal", " exec(", " eval(")
    lines = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if any(word in line for word in bad)
    ]
    assert lines == []


def test_names_shapes_and_types_that_differ_are_listed(tmp_path: Path) -> None:
    """D10."""
    path = made(tmp_path)
    other = {
        "a.master": whole(torch.zeros(600, 1000)),
        "a.mean": whole(torch.zeros(600, 1000)),
        "b.master": whole(torch.zeros(2, dtype=torch.float64)),
        "x.master": whole(torch.zeros(4)),
    }
    with pytest.raises(CheckpointError) as error:
        load.load_checkpoint(path, other)
    for words in (
        "missing: x.master",
        "wrong shape: b.master [], not [2]",
        "a.mean torch.bfloat16",
    ):
        assert words in str(error.value)
    assert load.load_checkpoint(path, other, strict=False) == ["b.master", "x.master"]
    assert torch.equal(other["a.master"][0], state()["a.master"][0])
    assert torch.equal(other["a.mean"][0], state()["a.mean"][0].float())


def test_the_digest_is_of_the_bytes() -> None:
    body = b'{"a":1}'
    text = manifests.add_digest(body)
    assert json.loads(text) == {"sha256": hashlib.sha256(body).hexdigest(), "body": {"a": 1}}


def test_bad_numbers_are_seen_in_every_type() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for bad in (torch.nan, torch.inf, -torch.inf):
            x = torch.zeros(1000, dtype=dtype)
            x[517] = bad
            tensors = {"ok": whole(torch.zeros(3)), "x": whole(x), "n": whole(torch.arange(3))}
            assert not bool(rank_file.max_magnitude(x for x, _ in tensors.values()).isfinite())
    assert bool(rank_file.max_magnitude([torch.arange(3), torch.ones(2)]).isfinite())


def test_neighbours_in_memory_are_copied_together() -> None:
    base = torch.arange(100.0)
    tensors = {"a": whole(base[:10]), "b": whole(base[10:30].view(4, 5)), "c": whole(base[40:50])}
    tensors |= {"d": whole(base[50:60].bfloat16()), "e": whole(torch.zeros(0))}
    layout = rank_file.FileLayout.from_state(tensors)
    found = rank_file.flat_runs(tensors, layout)
    assert [len(flat) for _, flat in found] == [30, 10, 10]
    assert [begin for begin, _ in found] == [0, 120, 160]
    assert torch.equal(found[0][1], base[:30]) and torch.equal(found[1][1], base[40:50])


def test_the_state_of_a_trainer_is_few_copies() -> None:
    """As many as a device's queue takes without the host waiting, however many weights."""
    from ranvier.models import MODEL_SIZES, Decoder
    from ranvier.optim.optimizer import Optimizer
    from ranvier.parallel.parallelize import parallelize

    model = parallelize(Decoder(MODEL_SIZES["tiny"]), ALONE)
    state = Optimizer(model.parallel.bucket_scheduler).sharded_state()  # type: ignore[arg-type,union-attr]
    assert (
        len(rank_file.flat_runs(state, rank_file.FileLayout.from_state(state))) <= len(state) // 2
    )
