"""Runs with injected faults: real `ranvier train` processes, and code injected into them.

A fault is code that a process runs after it has imported a module. The package does not know about
it: a `sitecustomize` next to the run injects it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ranvier.checkpoint import directory as folders
from ranvier.checkpoint import load
from ranvier.checkpoint import manifest as manifests

SMALL = [
    *("--data.max-bytes", "60000", "--data.seq-len", "32", "--data.tokenizer", "bytes"),
    *("--model.layers", "2", "--model.embed", "32", "--model.head-dim", "8", "--model.mlp", "48"),
    *("--model.vocab", "260", "--train.eval-interval", "0", "--train.sample-prompt", ""),
]
"""A run with a few hundredths of a second per step."""
STEPS = 8
RUN = ["train", *SMALL, "--train.output-dir", "run", "--train.steps", str(STEPS)]
SAVED = ["--checkpoint.interval", "2", "--checkpoint.keep-latest", "0"]
HANG_SECONDS = 90.0
"""A run that takes longer has hung."""
ORPHAN_SECONDS = 5.0
"""How long processes of a run may outlive it."""
PATIENCE = [1.0]
"""Factor on time limits: larger on a busy machine."""
TRAINER = "ranvier.train.trainer"
SITE = """
import importlib.util, sys
FAULTS = {faults!r}

class Finder:
    def find_spec(self, name, path=None, target=None):
        code = FAULTS.pop(name, None)
        if code is None:
            return None
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def patched(module):
            run(module)
            exec("from injected import *\\n" + code, vars(module))
        spec.loader.exec_module = patched
        return spec

sys.meta_path.insert(0, Finder())
"""
INJECTED = '''
import errno, os, signal, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))

def first(name="once"):
    """Whether this is the first time, in all processes."""
    try:
        os.close(os.open(os.path.join(HERE, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def rank():
    from torch import distributed
    return distributed.get_rank() if distributed.is_initialized() else 0

def kill(number=9):
    os.kill(os.getpid(), number)

def mark(name="there"):
    """Tell the observer that this point was reached, and by which process."""
    hidden = os.path.join(HERE, f"{name}-{os.getpid()}")  # several ranks may come here
    with open(hidden, "w") as file:
        file.write(str(os.getpid()))
    os.replace(hidden, os.path.join(HERE, name))

def fail(number):
    raise OSError(number, os.strerror(number))

def before(owner, name, action):
    """Have something happen before a function runs."""
    inner = getattr(owner, name)
    def patched(*arguments, **options):
        action(*arguments, **options)
        return inner(*arguments, **options)
    setattr(owner, name, patched)

def substitute(owner, name, value):
    """Have something else instead of what is there."""
    getattr(owner, name)
    setattr(owner, name, value)

def at(step, who, action, name="once"):
    """An action of one rank after so many steps of its trainer; once, unless name is ""."""
    def met(self, *_, **__):
        if self.state.step == step and self.grid.rank == who and (not name or first(name)):
            action()
    return met
'''


class WrongError(Exception):
    """The result is not the expected one."""


class UnableError(Exception):
    """This machine cannot run a case."""


def check(good: object, words: str) -> None:
    """Raises if a condition does not hold."""
    if not good:
        raise WrongError(words)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    errors: str
    seconds: float

    def expect(self, code: int, *words: str, within: float = 0.0) -> Ended:
        """Raises on another exit code, missing words, or too long a time."""
        text = self.out + self.errors
        check(self.code == code, f"exit code {self.code}, not {code}: {self.errors[-600:]}")
        for word in words:
            check(word in text, f"exit code {code} without {word!r}: {text[-1500:]}")
        late = within and self.seconds > within * PATIENCE[0]
        check(not late, f"took {self.seconds:.1f} s, not {within:g}")
        return self


def alive(folder: Path) -> list[int]:
    """Returns the processes that work in a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            here = os.readlink(path / "cwd")
            letter = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if here == str(folder) and letter not in "ZX":
            found.append(int(path.name))
    return found


@dataclass
class Process:
    """A command that has been started."""

    folder: Path
    child: subprocess.Popen[str]
    began: float = field(default_factory=time.monotonic)

    def when(self, name: str = "there", seconds: float = 40.0) -> int:
        """Waits until a process of the run has reached a mark; returns its id."""
        limit = time.monotonic() + seconds * PATIENCE[0]
        while not (self.folder / name).exists():
            if self.child.poll() is not None or time.monotonic() > limit:
                ended = self.end()
                raise WrongError(f"no mark {name!r}: exit code {ended.code}: {ended.errors[-600:]}")
            time.sleep(0.02)
        return int((self.folder / name).read_text())

    def tell(self, number: int) -> float:
        """Sends a signal to the launcher; returns the time."""
        self.child.send_signal(number)
        return time.monotonic()

    def end(self, seconds: float = HANG_SECONDS) -> Ended:
        """Waits for the end. A hang or an orphan is an error."""
        try:
            out, errors = self.child.communicate(timeout=seconds * PATIENCE[0])
        except subprocess.TimeoutExpired:
            self.child.kill()
            out, errors = self.child.communicate()
            raise WrongError(f"hung for {seconds:.0f} s: {errors[-600:]}") from None
        took, limit = time.monotonic() - self.began, time.monotonic() + ORPHAN_SECONDS
        while left := alive(self.folder):
            if time.monotonic() > limit:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise WrongError(f"orphans: {left}")
            time.sleep(0.05)
        return Ended(self.child.returncode, out, errors, took)


@dataclass
class Stage:
    """A directory in which a case runs."""

    folder: Path
    root: Path
    """The directory of all cases; undisturbed runs are shared."""
    seed: int = 0

    def draw(self) -> random.Random:
        """Returns random numbers that are the same each time."""
        return random.Random(f"{self.seed} {self.folder.name}")

    def start(
        self,
        *words: str,
        faults: Mapping[str, str] | None = None,
        ranks: int = 2,
        environment: Mapping[str, str] | None = None,
        begin: Callable[[], None] | None = None,
    ) -> Process:
        """Starts a command. faults: code by the module after whose import it runs."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "injected.py").write_text(INJECTED)
        (self.folder / "sitecustomize.py").write_text(SITE.format(faults=dict(faults or {})))
        path = os.pathsep.join([str(self.folder), *_paths()])
        known = {**os.environ, "PYTHONPATH": path, "RANVIER_CACHE": str(self.root / "cache")}
        count = ["--nproc", str(ranks)] if ranks else []
        child = subprocess.Popen(
            [sys.executable, "-m", "ranvier", *words, *count],
            cwd=self.folder,
            env={**known, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=begin,
        )
        return Process(self.folder, child)

    def run(self, *words: str, **how: Any) -> Ended:
        """Runs a command to its end."""
        return self.start(*words, **how).end()

    def whole(self, *words: str, ranks: int = 2) -> Path:
        """Returns the directory of an undisturbed run, which is made once."""
        words = tuple(word for word in words if not word.startswith("--launch"))
        name = "whole-" + "-".join(word.lstrip("-").replace("/", "_") for word in words)
        stage = Stage(self.root / f"{name}-{ranks}", self.root)
        run = stage.folder / "run"
        if not (run / "report.html").exists():
            shutil.rmtree(stage.folder, ignore_errors=True)
            stage.run(*RUN, *words, ranks=ranks).expect(0)
        return run


def _paths() -> list[str]:
    """Returns the paths of the package, also for processes in another directory."""
    package = str(Path(folders.__file__).resolve().parents[2])
    return [package, *filter(None, [os.environ.get("PYTHONPATH", "")])]


def rows(run: Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """Returns the losses of a run."""
    return [row["loss"] for row in rows(run)]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of the latest checkpoint of a run."""
    found = folders.find_checkpoints(run / "checkpoints")
    check(found, f"{run} has no checkpoint")
    return read(found[-1])


def read(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint, moments and random states included."""
    manifest = manifests.read_manifest(checkpoint)
    state = {name: load.empty_shard(entry) for name, entry in manifest.tensors.items()}
    load.fill_tensors(checkpoint, manifest, state)
    return {name: tensor for name, (tensor, _) in state.items()}


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of tensors that are not bit-identical."""
    return [
        name
        for name in sorted({*one, *other})
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


def soon(began: float, limit: float) -> float:
    """Returns the seconds since a time; raises if they exceed the limit."""
    seconds = time.monotonic() - began
    check(seconds < limit * PATIENCE[0], f"took {seconds:.1f} s, not {limit:g}")
    return seconds


def same(run: Path, whole: Path, *, weights: bool = True) -> str:
    """Raises if losses or tensors are not bit-identical to an undisturbed run."""
    ours, theirs = rows(run), rows(whole)
    check([row["step"] for row in ours] == [*range(len(theirs))], f"{run}: wrong steps")
    odd = [a["step"] for a, b in zip(ours, theirs, strict=True) if a["loss"] != b["loss"]]
    check(not odd, f"losses differ from step {odd[:1]}")
    if weights:
        bad = differing(tensors(run), tensors(whole))
        check(not bad, f"tensors differ: {bad[:3]}")
    return "bit-equal"


def close(run: Path, whole: Path, bound: float = 1e-6) -> str:
    """Raises if losses differ from an undisturbed run by more than rounding."""
    pairs = list(zip(losses(run), losses(whole), strict=True))
    worst = max(abs(a - b) / abs(b) for a, b in pairs)
    check(worst <= bound, f"losses differ by {worst:.2g}")
    return f"losses within {worst:.1g}"


# ---- cases ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A fault in a run, and the expected result."""

    name: str
    done: str
    expected: str
    play: Callable[[Stage], str]


CASES: list[Case] = []


def case(
    name: str, done: str, expected: str
) -> Callable[[Callable[[Stage], str]], Callable[[Stage], str]]:
    """Adds a case."""

    def add(play: Callable[[Stage], str]) -> Callable[[Stage], str]:
        CASES.append(Case(name, done, expected, play))
        return play

    return add
