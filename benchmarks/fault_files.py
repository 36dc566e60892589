"""Group D: checkpoints that are damaged, from another model or from another grid."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from fault_runs import (
    RUN,
    SAVED,
    TRAINER,
    Stage,
    case,
    check,
    close,
    differing,
    losses,
    read,
    rows,
    same,
)

from ranvier.checkpoint import directory as folders
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.async_saver import save_and_wait
from ranvier.errors import CheckpointError
from ranvier.grid import Grid
from ranvier.sharding import Shard

NEWEST, BEFORE = "step-00000006", "step-00000004"
FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"


def base(stage: Stage, *words: str, ranks: int = 2) -> Path:
    """Returns the directory of a run with checkpoints at steps 2, 4 and 6, two steps from its
    end.
    """
    run = stage.folder / "run"
    shutil.copytree(stage.whole(*SAVED, *words, ranks=ranks), run)
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    (run / "checkpoints" / "latest").write_text(f"{NEWEST}\n")
    return run


def flipped(path: Path, at: int) -> None:
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def within(checkpoint: Path, end: str) -> tuple[Path, int]:
    """Returns the file and a byte of the first tensor whose name has this ending."""
    manifest = manifests.read_manifest(checkpoint)
    name = next(name for name in manifest.tensors if name.endswith(end))
    part = manifest.tensors[name].shards[0]
    return checkpoint / list(manifest.files)[part.file], part.offset + 5


def flip_tensor(end: str) -> Callable[[Path], None]:
    return lambda checkpoint: flipped(*within(checkpoint, end))


def edited(
    change: Callable[[bytes], bytes], name: str = manifests.MANIFEST_NAME
) -> Callable[[Path], None]:
    """Returns a function that changes the bytes of a file of a checkpoint."""

    def edit(checkpoint: Path) -> None:
        (checkpoint / name).write_bytes(change((checkpoint / name).read_bytes()))

    return edit


def _swap(checkpoint: Path) -> None:
    one, other = checkpoint / FIRST, checkpoint / SECOND
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "D1 weight": ("a bit of a weight flipped", flip_tensor(".master")),
    "D1 moment": ("a bit of a moment flipped", flip_tensor(".square")),
    "D1 random": ("a bit of the random state flipped", flip_tensor("random.cpu")),
    "D1 data": (
        "a digit of the position in the data changed",
        edited(lambda data: data.replace(b'"samples":48', b'"samples":49')),
    ),
    "D2": ("4 kB of zeros in a part", edited(lambda x: x[:8192] + bytes(4096) + x[12288:], SECOND)),
    "D3 empty": ("a part truncated to 0 bytes", edited(lambda x: b"", SECOND)),
    "D3 half": ("a part truncated to half", edited(lambda x: x[: len(x) // 2], FIRST)),
    "D3 byte": ("the last byte of a part removed", edited(lambda x: x[:-1], FIRST)),
    "D4 missing": ("a part removed", lambda checkpoint: (checkpoint / SECOND).unlink()),
    "D4 swapped": ("two parts swapped", _swap),
    "D5 missing": (
        "no manifest",
        lambda checkpoint: (checkpoint / manifests.MANIFEST_NAME).unlink(),
    ),
    "D5 cut": ("the manifest truncated to half", edited(lambda x: x[: len(x) // 2])),
    "D5 empty": ("an empty manifest", edited(lambda x: b"")),
    "D5 text": ("a manifest that is not JSON", edited(lambda x: b"hello\n")),
    "D5 digest": (
        "a digit of the digest in the manifest changed",
        edited(lambda x: x[:11] + (b"1" if x[11:12] == b"0" else b"0") + x[12:]),
    ),
}


def damaged(stage: Stage, name: str) -> str:
    """Damages the latest checkpoint; the previous one must be used."""
    run = base(stage)
    before = (run / "checkpoints" / NEWEST / manifests.MANIFEST_NAME).read_bytes()
    DAMAGE[name][1](run / "checkpoints" / NEWEST)
    path = run / "checkpoints" / NEWEST / manifests.MANIFEST_NAME
    if name in ("D1 data", "D5 digest"):
        check(path.read_bytes() != before, "nothing was changed")
    ended = stage.run("train", "run").expect(0, "skipped a damaged checkpoint", NEWEST)
    check("Resuming after step 4" in ended.out, ended.out)
    check((run / "checkpoints" / f"aside-{NEWEST}-1").is_dir(), "it was not moved aside")
    return f"'skipped a damaged checkpoint', resumed at step 4, {same(run, stage.whole())}"


for _name, (_words, _) in DAMAGE.items():
    case(_name, _words, "the previous one is used, bit-equal")(partial(damaged, name=_name))


@case("D4 foreign", "an unknown file in a checkpoint", "ignored, bit-equal")
def _foreign(stage: Stage) -> str:
    run = base(stage)
    (run / "checkpoints" / NEWEST / "notes.txt").write_text("mine")
    stage.run("train", "run").expect(0, "Resuming after step 6")
    return f"resumed at step 6, {same(run, stage.whole())}"


@case("D5 version", "a manifest of a later version", "refused (76), never restarted from scratch")
def _version(stage: Stage) -> str:
    run = base(stage)
    path = run / "checkpoints" / NEWEST / manifests.MANIFEST_NAME
    body = json.loads(path.read_bytes())["body"]
    body["format"] = 99
    text = json.dumps(body, separators=(",", ":")).encode()
    path.write_bytes(manifests.add_digest(text))
    stage.run("train", "run").expect(76)
    return "76"


POINTERS = {
    "missing": (None, 0),
    "empty": ("", 0),
    "garbage": ("\x00\xff?!", 0),
    "deleted": ("step-00000099\n", 0),
    "parent": ("../../other", 77),
    "absolute": ("/etc/passwd", 77),
}


def pointer(stage: Stage, name: str) -> str:
    """Changes the content of `latest`."""
    run, (text, code) = base(stage), POINTERS[name]
    path = run / "checkpoints" / "latest"
    path.unlink() if text is None else path.write_text(text)
    ended = stage.run("train", "run")
    if code:
        ended.expect(code, "Remove it")
        return f"{code}"
    ended.expect(0, "the newest checkpoint is step-00000006", "Resuming after step 6")
    return f"reported, resumed at step 6, {same(run, stage.whole())}"


for _name, (_, _code) in POINTERS.items():
    case(f"D6 {_name}", f"latest is {_name}", "77" if _code else "reported, latest step used")(
        partial(pointer, name=_name)
    )


@case("D7", "all checkpoints damaged", "66, each listed with its damage")
def _all(stage: Stage) -> str:
    run = base(stage)
    found = folders.find_checkpoints(run / "checkpoints")
    for path in found:
        flipped(*within(path, ".master"))
    ended = stage.run("train", "run").expect(66, *(path.name for path in found))
    check("resume=never" in ended.errors, ended.errors)
    check([*folders.find_checkpoints(run / "checkpoints")] == found, "they were moved")
    return "66, three listed, none changed"


@case("D8", "checkpoint.resume is an empty directory", "66 before the first step")
def _empty(stage: Stage) -> str:
    (stage.folder / "empty").mkdir(parents=True)
    stage.run(*RUN, "--checkpoint.resume=empty").expect(66, "has no checkpoint")
    return "66"


@case("D9", "a checkpoint of another model", "66 with all settings that differ")
def _other(stage: Stage) -> str:
    base(stage)
    words = [
        "--model.layers=1",
        "--model.embed=64",
        "--model.vocab=300",
        "--model.tie-embeddings=True",
    ]
    names = [word[2:].partition("=")[0] for word in words]
    ended = stage.run("train", "run", *words).expect(66, *names)
    check("Traceback" not in ended.errors, ended.errors)
    return f"66, lists {', '.join(names)}"


@case("D10", "names and shapes differ; then --checkpoint.strict", "66 with a list; then runs")
def _names(stage: Stage) -> str:
    run = base(stage)
    words = ["--model.layers=3", "--checkpoint.allow-config-mismatch=True"]
    stage.run("train", "run", *words).expect(66, "blocks.2.")
    stage.run("train", "run", *words, "--checkpoint.strict=False").expect(0, "so left as they are")
    return f"66 with names; not strict: {len(rows(run))} steps"


GRIDS = {
    "data 2 to 1": ("data=2", "data=1", 1),
    "data 1 to 2": ("data=1", "data=2", 2),
    "row 2 to 1": ("row=2", "data=1", 1),
    "1 to row 2": ("data=1", "row=2", 2),
    "row to col": ("row=2", "col=2", 2),
    "col to depth": ("col=2", "depth=2", 2),
    "depth to data": ("depth=2", "data=2", 2),
    "pipe 2 to 1": ("pipe=2", "data=1", 1),
    "data to pipe": ("data=2", "pipe=2", 2),
    "4 to 3": ("data=2,row=2", "data=3", 3),
}


def axes(grid: str) -> list[str]:
    """Returns a grid as options."""
    batch = ["--plan.global-batch=12"] if "4" in grid or "3" in grid or "," in grid else []
    return [*(f"--plan.{one}" for one in grid.split(",")), *batch]


def regridded(stage: Stage, name: str) -> str:
    """Resumes from a checkpoint on another grid."""
    old, new, ranks = GRIDS[name]
    world = 4 if "," in old else 1 if old == "data=1" else 2
    run = base(stage, *axes(old), ranks=world)
    words = [word for word in axes(old) if "plan.global_batch" not in word]
    undo = [word.partition("=")[0] + "=1" for word in words]
    undo += ["--plan.micro-batch=-1"]  # the share of a rank may be smaller
    stage.run("train", "run", *undo, *axes(new), ranks=ranks).expect(0, "Resuming after step 6")
    return close(run, stage.whole(*SAVED, *axes(old), ranks=world))


for _name, (_old, _new, _) in GRIDS.items():
    case(f"D11 {_name}", f"from {_old} to {_new}", "losses within 1e-6")(
        partial(regridded, name=_name)
    )


@case("D12", "data=2 to row=2, saved there, back to data=2", "bit-equal")
def _back(stage: Stage) -> str:
    run = base(stage)
    code = """
def _again(self, *_, **__):
    if self.state.step == 6:
        self.checkpointer.saver.step = -1
        self.save_checkpoint()
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
before(Trainer, "run_steps", _again)
"""
    grid = ["--plan.data=1", "--plan.row=2"]
    stage.run("train", "run", *grid, faults={TRAINER: code})
    one, other = (read(run / "checkpoints" / f"{NEWEST}{more}") for more in ("", ".2"))
    bad = differing(one, other)
    check(not bad, f"tensors differ: {bad[:3]}")
    stage.run("train", "run", "--plan.data=2", "--plan.row=1").expect(0, "Resuming after step 6")
    return f"{len(one)} tensors equal, {same(run, stage.whole())}"


@case("D13 moments", "another dtype of moments", "66")
def _moments(stage: Stage) -> str:
    base(stage)
    stage.run("train", "run", "--optim.state-dtype=bf16").expect(66, "optim.state_dtype='bf16'")
    return "66, lists the setting"


@case("D13 length", "another number of steps, so another schedule", "reported, continues")
def _length(stage: Stage) -> str:
    run = base(stage)
    stage.run("train", "run", "--train.steps=10").expect(0, "changed: train.steps from 8 to 10")
    check(len(losses(run)) == 10, "other steps")
    return "'changed: train.steps from 8 to 10'"


@case("D14", "a norm weight of rank 1 changed on row=2 before a save", "74, not saved, reported")
def _drift(stage: Stage) -> str:
    code = """
def _drift(self, **_):
    if self.state.step == 4 and self.grid.rank == 1:
        weight = dict(self.state.model.named_parameters())["blocks.0.norm1.weight"]
        weight.data.view(-1)[0] += 1e-3
before(Trainer, "save_checkpoint", _drift)
"""
    words = ["--plan.row=2"]
    ended = stage.run(*RUN, *SAVED, *words, faults={TRAINER: code}).expect(74, "norm1.weight")
    check("rank 1" in ended.errors or "rank 0" in ended.errors, ended.errors)
    names = [path.name for path in folders.find_checkpoints(stage.folder / "run" / "checkpoints")]
    check(names == ["step-00000002"], str(names))
    return f"74: {ended.errors.splitlines()[0][:90]}"


@case("D15", "non-finite weights", "not saved (74); loading such a checkpoint warns")
def _bad(stage: Stage) -> str:
    poison = """
from ranvier.train.resume import checkpointing
_tensors = checkpointing.tensors_to_write
def tensors(state):
    found = _tensors(state)
    if state.step == {step}:
        name = next(n for n in found[0] if n.endswith(".master"))
        found[0][name][0].view(-1)[0] = float("nan")
    return found
substitute(checkpointing, "tensors_to_write", tensors)
"""
    faults = {TRAINER: poison.format(step=4)}
    stage.run(*RUN, *SAVED, "--guard.replica-check-interval=0", faults=faults).expect(
        74, "not finite"
    )
    names = [path.name for path in folders.find_checkpoints(stage.folder / "run" / "checkpoints")]
    check(names == ["step-00000002"], str(names))
    other = Stage(stage.folder / "other", stage.root)
    through = """
import torch
from ranvier.checkpoint import rank_file
substitute(rank_file, "max_magnitude", lambda _: torch.zeros(()))
"""
    text = through + poison.format(step=8)
    other.run(*RUN, "--guard.replica-check-interval=0", faults={TRAINER: text}).expect(0)
    ended = other.run("train", "run", "--train.steps=9")
    check("has values that are not finite" in ended.errors, ended.errors[-600:])
    return f"74, not saved; loading warns, then {ended.code}"


@case("D16", "20,000 tensors, empty ones, scalars, strides", "round trip equal")
def _many(stage: Stage) -> str:
    def whole(tensor: torch.Tensor) -> tuple[torch.Tensor, Shard]:
        shape = tuple(tensor.shape)
        return tensor, Shard(shape, (0,) * len(shape), shape, shape)

    state = {f"t{n}": whole(torch.full((2,), float(n))) for n in range(20_000)}
    shared = torch.arange(12.0)
    state |= {"empty": whole(torch.empty(0, 3)), "scalar": whole(torch.tensor(3.0))}
    state |= {"part": whole(shared[:6].view(2, 3)), "rest": whole(shared[6:])}
    began = time.monotonic()
    save_and_wait(stage.folder / "checkpoints", 1, state, {}, Grid({}))
    found = read(stage.folder / "checkpoints" / "step-00000001")
    bad = differing(found, {name: tensor for name, (tensor, _) in state.items()})
    check(not bad, f"differ: {bad[:3]}")
    return f"{len(found)} tensors in {time.monotonic() - began:.1f} s"


def linked(stage: Stage, kind: str) -> str:
    """Replaces a part by a link or a pipe."""
    run = base(stage)
    path = run / "checkpoints" / NEWEST / SECOND
    path.rename(stage.folder / "moved")
    if kind == "symlink":
        path.symlink_to(stage.folder / "moved")
    elif kind == "hard link":
        os.link(stage.folder / "moved", path)
    else:
        os.mkfifo(path)
    ended = stage.run("train", "run").expect(77, SECOND)
    return f"77 after {ended.seconds:.1f} s"


for _name in ("symlink", "hard link", "pipe"):
    case(f"D17 {_name}", f"a part is a {_name}", "77, nothing blocks")(partial(linked, kind=_name))


@case("D18", "checkpoints are read while newer ones replace them", "complete, or a clean error")
def _reader(stage: Stage) -> str:
    words = ["--checkpoint.interval=1", "--checkpoint.keep-latest=1", "--train.steps=60"]
    process, good, gone = stage.start(*RUN, *words), 0, 0
    where = stage.folder / "run" / "checkpoints"
    while process.child.poll() is None:
        found = folders.find_checkpoints(where)
        for path in found[-1:]:
            try:
                check(len(read(path)) > 20, "tensors are missing")
                good += 1
            except CheckpointError:
                gone += 1
        if not found:
            time.sleep(0.05)
    process.end().expect(0)
    check(good > 0, f"{good} reads")
    return f"{good} complete, {gone} refused as missing"
