"""Injects faults into complete runs whose ranks share one GPU over NCCL: kills, stops, exceptions.

Usage: python benchmarks/nccl_faults.py [--trials 12] [--seed 0] [--backend gloo] [--keep]
           [--grid pipe=2,row=2] [--kind stop] [--steps 24] [--budget-seconds 600]

For each grid an uninterrupted `ranvier train` gives the losses of all steps and the duration of a
run. Every trial then starts the same run and injects one fault at a random time: after a random
step (including the last one), or while the ranks start. The kinds of faults alternate:

    kill       SIGKILL to a rank: the launcher restarts all ranks, and the run finishes
    launcher   SIGKILL to the launcher: all ranks end with it
    stop       SIGSTOP to a rank: the watchdog ends the run with 72 and names that rank
    term       SIGTERM to the launcher: the run saves and ends with 75
    exception  a rank raises an exception in a collective of a step: the run ends with 70

Except after `kill`, the same command is run again and must continue; only a run that had finished
before the fault may be refused (64). Each trial checks the exit codes, how long the ranks took to
end, the losses (bit-identical to the uninterrupted run, in every row of every step), leftover
processes, and GPU memory that was not released. Prints a line for each trial; the exit code is 1 if
any check failed.

Processes are found by a variable in their environment (Linux only). `--backend gloo` runs on the
CPU, for machines without a GPU. Not covered: several nodes, several GPUs, disk faults.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from script_parser import ScriptParser

MODEL = (
    *("--data.max-bytes", "60000", "--data.seq-len", "32", "--data.tokenizer", "bytes"),
    *("--model.layers", "2", "--model.embed", "32", "--model.head-dim", "8", "--model.mlp", "48"),
    *("--model.vocab", "260", "--train.eval-interval", "0", "--train.sample-prompt", ""),
    *("--train.deterministic", "True", "--train.seed", "0", "--plan.global-batch", "8"),
    *("--checkpoint.interval", "4", "--plan.compile", "off"),
)
"""Settings of a model with fast steps and frequent checkpoints."""
GRIDS = ("data=2,row=2", "depth=2,row=2", "pipe=2,row=2")
VARIABLE = "RANVIER_BENCHMARK_TRIAL"
"""Environment variable that all processes of a command inherit."""
WATCHDOG_SECONDS = 8.0
ORPHAN_SECONDS = 10.0
"""How long processes and GPU memory of a run may outlive it."""
MEMORY_MIB = 64
"""GPU memory that may be in use after a trial in addition to the amount before any run."""
POLL_SECONDS = 0.05
LATE_STEPS = 3
"""A run that is asked to stop this many steps before its end may also finish."""
ATTEMPTS = 3
"""Maximum number of runs that end before the fault is injected; it is injected earlier each
time.
"""
REFUSED = 64
"""Exit code of the command of a run that has finished."""
ERROR_LINES = 30
PATCH = """
import importlib.util, os, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
CALLS = (
    "all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all_single", "broadcast", "isend", "irecv",
)

class InjectedError(Exception):
    pass

def patch_call(module, name):
    call = getattr(module, name)
    def patched(*arguments, **options):
        try:
            os.unlink(os.path.join(HERE, f"raise-{module.get_rank()}"))
        except FileNotFoundError:
            return call(*arguments, **options)
        with open(os.path.join(HERE, "raising"), "w") as file:
            file.write(repr(time.monotonic()))
        os.replace(os.path.join(HERE, "raising"), os.path.join(HERE, "raised"))
        raise InjectedError(f"injected into {name}")
    setattr(module, name, patched)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "torch.distributed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def run_and_patch(module):
            run(module)
            for call in CALLS:
                if hasattr(module, call):
                    patch_call(module, call)
        spec.loader.exec_module = run_and_patch
        return spec

sys.meta_path.insert(0, Finder())
"""
"""A `sitecustomize` with which a rank raises in its next collective once a file requests it."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault, and the required outcome."""

    name: str
    exit_code: int
    end_seconds: float
    """How long after the fault all ranks must have ended."""
    at_start: bool
    """Whether it is also injected while ranks start. There the watchdog waits for 600 s, and no
    step is running that could raise."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill", 0, 15.0, at_start=True),
        Kind("launcher", -signal.SIGKILL, 10.0, at_start=True),
        Kind("stop", 72, WATCHDOG_SECONDS + 15.0, at_start=False),
        Kind("term", 75, 60.0, at_start=True),
        Kind("exception", 70, 15.0, at_start=False),
    )
}


# ---- processes --------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessStatus:
    """The content of /proc/PID/stat of a process."""

    state: str
    session: int
    start_ticks: int

    @classmethod
    def read(cls, pid: int) -> ProcessStatus | None:
        """Returns the status of a process; None if there is none."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        words = text.rpartition(")")[2].split()
        return cls(state=words[0], session=int(words[3]), start_ticks=int(words[19]))


@dataclass(frozen=True)
class Process:
    """A process; a later one with the same number is a different process."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Returns whether the process runs or is stopped.

        An exiting process no longer has an environment but may still hold its GPU memory.
        """
        status = ProcessStatus.read(self.pid)
        return (
            status is not None
            and status.start_ticks == self.start_ticks
            and status.state not in ("Z", "X")
        )

    def describe(self) -> str:
        """Returns its number and command line."""
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{self.pid}/cmdline").read_bytes()
            return f"{self.pid} ({line.replace(bytes(1), b' ').decode(errors='replace')[:100]})"
        return str(self.pid)


def find_processes(token: str) -> list[Process]:
    """Returns the processes that have inherited a token in their environment."""
    entry = f"{VARIABLE}={token}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if entry not in environment.split(b"\0"):
            continue
        status = ProcessStatus.read(int(path.name))
        if status is not None and status.state not in ("Z", "X"):
            found.append(Process(int(path.name), status.start_ticks))
    return found


def find_rank_number(process: Process) -> int | None:
    """Returns the rank of a process that leads a session and maps the heartbeat of one rank."""
    status = ProcessStatus.read(process.pid)
    if status is None or status.session != process.pid:
        return None
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_bytes()
    except OSError:
        return None
    numbers = {int(number) for number in re.findall(rb"\brank(\d+)\.pulse\b", maps)}
    return numbers.pop() if len(numbers) == 1 else None


class TrainCommand:
    """A `ranvier train` that was started, with its output and all processes that belong to it.

    Leaving the context ends all remaining processes.
    """

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.token = uuid.uuid4().hex
        self.rank_of: dict[Process, int] = {}
        """All ranks found so far, including those of earlier attempts."""
        self.others: set[Process] = set()
        """Other processes found so far: launcher, forkserver, resource tracker."""
        self._errors = folder / f"stderr-{self.token[:8]}.txt"
        with self._errors.open("w") as errors, self._errors.with_suffix(".out").open("w") as out:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "ranvier", "train", *arguments],
                env={**os.environ, **environment, VARIABLE: self.token},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for this script, which ends it
            )
        self.began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_processes()

    def observe_processes(self) -> None:
        """Looks for new processes."""
        for process in find_processes(self.token):
            if process in self.rank_of:
                continue
            rank = None if process.pid == self.child.pid else find_rank_number(process)
            if rank is None:
                self.others.add(process)
            else:
                self.rank_of[process] = rank
                self.others.discard(process)

    def find_ranks(self) -> dict[int, Process]:
        """Returns the ranks that are alive, by their number."""
        self.observe_processes()
        return {rank: process for process, rank in self.rank_of.items() if process.is_alive()}

    def wait_until(self, is_met: Callable[[], bool], seconds: float) -> bool:
        """Waits for a condition while observing processes; returns whether it was met in time."""
        limit = time.monotonic() + seconds
        while not is_met():
            if time.monotonic() > limit:
                return False
            self.observe_processes()
            time.sleep(POLL_SECONDS)
        return True

    def has_exited(self) -> bool:
        """Returns whether the launcher has ended."""
        return self.child.poll() is not None

    def list_alive(self) -> list[Process]:
        """Returns all processes of the command that are alive."""
        self.observe_processes()
        return [process for process in (*self.rank_of, *self.others) if process.is_alive()]

    def kill_processes(self) -> None:
        """Ends all remaining processes."""
        limit = time.monotonic() + ORPHAN_SECONDS
        while (alive := self.list_alive()) and time.monotonic() < limit:
            for process in alive:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)
            self.child.poll()
            time.sleep(POLL_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=1.0)

    def read_errors(self) -> str:
        """Returns its stderr."""
        return self._errors.read_text(errors="replace")


def read_gpu_memory() -> list[int] | None:
    """Returns the MiB in use on each GPU by all processes; None without a GPU."""
    query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30.0)
        return [int(line) for line in text.stdout.split()] or None
    # In a separate process: a CUDA context in this one would occupy memory in all trials.
    code = (
        "import torch\n"
        "for device in range(torch.cuda.device_count()):\n"
        "    free, total = torch.cuda.mem_get_info(device)\n"
        "    print((total - free) >> 20)\n"
    )
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        words = (sys.executable, "-c", code)
        text = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60.0)
        return [int(line) for line in text.stdout.split()] or None
    return None


# ---- runs -------------------------------------------------------------------------------


def parse_grid(text: str) -> dict[str, int]:
    """Returns the ranks on each axis: `pipe=2,row=2`."""
    try:
        grid = {axis: int(size) for axis, size in (word.split("=") for word in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a grid such as pipe=2,row=2") from None
    return grid


def format_grid(grid: Mapping[str, int]) -> str:
    """Formats a grid; the inverse of `parse_grid`."""
    return ",".join(f"{axis}={size}" for axis, size in grid.items())


@dataclass(frozen=True)
class Setup:
    """The settings that all runs share."""

    root: Path
    backend: str
    steps: int
    memory: list[int] | None
    """MiB in use on each GPU before any run; None if not checked."""

    def build_arguments(self, grid: Mapping[str, int], out: Path) -> list[str]:
        """Returns the arguments of `ranvier train`."""
        arguments = [*MODEL, "--train.steps", str(self.steps), "--train.output-dir", str(out)]
        arguments += ["--nproc", str(math.prod(grid.values()))]
        for axis, size in grid.items():
            arguments += [f"--plan.{axis}", str(size)]
        if "pipe" in grid:
            arguments += ["--plan.micro-batch", "2"]
        arguments += ["--train.backend", self.backend]
        if self.backend == "nccl":
            return [*arguments, "--launch.share-gpu", "True"]
        return [*arguments, "--train.device", "cpu"]

    def start_command(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> TrainCommand:
        """Starts a command whose output is written to a folder; all of them share one cache."""
        cache = {"RANVIER_CACHE": str(self.root / "cache")}
        return TrainCommand(arguments, folder, {**cache, **(environment or {})})

    def measure_memory_growth(self) -> int | None:
        """Returns the MiB in use on a GPU in addition to the amount before any run, once it is
        small.
        """
        if self.memory is None:
            return None
        limit = time.monotonic() + ORPHAN_SECONDS
        while True:
            now = read_gpu_memory()
            if now is None:
                return None
            growth = max(after - before for after, before in zip(now, self.memory, strict=True))
            if growth <= MEMORY_MIB or time.monotonic() > limit:
                return growth
            time.sleep(0.2)


def count_rows(out: Path) -> int:
    """Returns the number of steps in the metrics of a run, which may be running."""
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def is_finished(out: Path) -> bool:
    """Returns whether a run is recorded as finished."""
    try:
        status = json.loads((out / "run.json").read_text())["status"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(status == "finished")


def read_losses(out: Path) -> Iterator[tuple[int, float]]:
    """Yields the step and loss of each row of the metrics of a run."""
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield int(row["step"]), row["loss"]


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run; times are in seconds since its command was started."""

    losses: dict[int, float]
    ranks_seconds: float
    """When all ranks were running."""
    first_seconds: float
    """When the first step was written."""
    end_seconds: float

    @property
    def patience_seconds(self) -> float:
        """Seconds after which a run counts as hung; it may start twice and share the machine."""
        return 60.0 + 4.0 * self.end_seconds

    def find_differences(self, out: Path) -> list[str]:
        """Returns the differences in the losses of a run, which must be bit-identical in every
        row.
        """
        try:
            rows = list(read_losses(out))
        except (OSError, ValueError, KeyError) as error:
            return [f"metrics.jsonl cannot be read: {error}"]
        missing = sorted({*self.losses} - {step for step, _ in rows})
        problems = [f"no loss of steps {missing}"] if missing else []
        wrong = [(step, loss) for step, loss in rows if self.losses.get(step) != loss]
        if wrong:
            step, loss = wrong[0]
            problems.append(
                f"{len(wrong)} losses differ, the first is {loss!r} at step {step} instead of "
                f"{self.losses.get(step)!r}"
            )
        return problems


class FailedReferenceError(Exception):
    """An uninterrupted run failed, so nothing can be compared with it."""


def run_reference(setup: Setup, grid: Mapping[str, int]) -> Reference:
    """Runs a grid without a fault."""
    folder = setup.root / f"reference-{format_grid(grid)}"
    folder.mkdir()
    out = folder / "run"
    world = math.prod(grid.values())
    ranks_seconds = first_seconds = 0.0
    with setup.start_command(setup.build_arguments(grid, out), folder) as command:
        while not command.has_exited():
            seconds = time.monotonic() - command.began
            if not ranks_seconds and len(command.find_ranks()) == world:
                ranks_seconds = seconds
            if not first_seconds and count_rows(out):
                first_seconds = seconds
            if seconds > 300.0:
                break
            time.sleep(POLL_SECONDS)
        end_seconds = time.monotonic() - command.began
        code = command.child.poll()
        if code != 0 or not ranks_seconds or not first_seconds:
            found = f"{len(command.rank_of)} of {world} ranks found, {count_rows(out)} steps"
            raise FailedReferenceError(
                f"exit code {code} after {end_seconds:.1f} s, {found}\n"
                f"{format_errors(command.read_errors())}"
            )
    reference = Reference(dict(read_losses(out)), ranks_seconds, first_seconds, end_seconds)
    if [*reference.losses] != [*range(setup.steps)]:
        raise FailedReferenceError(f"its metrics have the steps {[*reference.losses]}")
    return reference


def format_errors(text: str) -> str:
    """Returns the last lines of a stderr, indented."""
    lines = text.splitlines()[-ERROR_LINES:]
    return "\n".join(f"    | {line}" for line in lines)


# ---- trials -----------------------------------------------------------------------------


@dataclass
class Trial:
    """A fault in a run, and its outcome."""

    number: int
    kind: Kind
    grid: dict[str, int]
    setup: Setup
    rank: int
    """The rank of the fault, if it concerns one rank."""
    at_start: bool
    """Whether the fault is before the first step."""
    share: float
    """Position of the fault, as a fraction of all steps or of the start-up time."""
    reference: Reference = field(init=False)
    start_seconds: float = field(init=False)
    """Duration of the start-up of the ranks."""
    start_began: float = math.inf
    """When all ranks of this run were running."""
    moment: str = "never"
    rows: int = 0
    """Steps written before the fault."""
    end_seconds: float | None = None
    """Seconds from the fault to the end of all ranks."""
    exit_codes: list[int | None] = field(default_factory=list)
    losses: str = "not compared"
    left: list[str] = field(default_factory=list)
    """Processes that outlived their command."""
    memory: int | None = None
    problems: list[str] = field(default_factory=list)
    errors: str = ""
    """The stderr of the command that failed, or of the last one."""

    def play(self, reference: Reference) -> None:
        """Starts the run, injects the fault, continues the run, and checks everything."""
        self.reference = reference
        self.start_seconds = reference.first_seconds - reference.ranks_seconds
        for attempt in range(ATTEMPTS):
            folder = self.setup.root / f"trial-{self.number}-{attempt}"
            folder.mkdir()
            if self._interrupt_run(folder) or self.problems:
                break
            self.share *= 0.8
        else:
            self.problems.append(f"{ATTEMPTS} runs ended before the fault was injected")
        if not self.problems and self.exit_codes != [0]:
            self._continue_run(folder)
        if is_finished(folder / "run"):
            differences = self.reference.find_differences(folder / "run")
            self.problems += differences
            self.losses = "differ" if differences else "equal"
        elif not self.problems:
            self.problems.append("run.json does not record that the run has finished")
        self.memory = self.setup.measure_memory_growth()
        if self.memory is not None and self.memory > MEMORY_MIB:
            self.problems.append(f"{self.memory} MiB of GPU memory were not released")

    def format_line(self, trials: int) -> str:
        """Formats the outcome in one line."""
        seconds = "-" if self.end_seconds is None else f"{self.end_seconds:.2f} s"
        codes = ", then ".join("none" if code is None else str(code) for code in self.exit_codes)
        memory = "-" if self.memory is None else f"{self.memory:+d} MiB"
        return (
            f"trial {self.number:>2}/{trials}  {self.kind.name:9}  {format_grid(self.grid):13}  "
            f"{self.moment:38}  ranks ended after {seconds:>7}  exit code {codes or '-':10}  "
            f"losses {self.losses:12}  {len(self.left)} processes left  memory {memory:>7}  "
            f"{'FAILED' if self.problems else 'ok'}"
        )

    def _build_arguments(self, folder: Path) -> list[str]:
        arguments = self.setup.build_arguments(self.grid, folder / "run")
        if self.kind.name == "stop":
            arguments += ["--launch.watchdog-seconds", f"{WATCHDOG_SECONDS:g}"]
        return arguments

    def _interrupt_run(self, folder: Path) -> bool:
        """Starts the run and injects the fault; returns whether the run was still running."""
        environment = {}
        if self.kind.name == "exception":
            (folder / "sitecustomize.py").write_text(PATCH)
            paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH", "")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        arguments = self._build_arguments(folder)
        with self.setup.start_command(arguments, folder, environment) as command:
            if not self._wait_for_moment(command, folder / "run"):
                return self._note_early_end(command)
            self.rows = count_rows(folder / "run")
            when = f"{self.rows} steps" if self.rows else "no step"
            target = "launcher" if self.kind.name in ("launcher", "term") else f"rank {self.rank}"
            seconds = time.monotonic() - command.began
            self.moment = f"{target} after {when} ({seconds:.2f} s)"
            ranks = command.find_ranks()
            known = set(command.rank_of)
            struck = self._inject_fault(command, ranks, folder)
            if struck is None:
                return self._note_early_end(command)
            self._check_end(command, known, struck)
            self.errors = command.read_errors()
        return True

    def _wait_for_moment(self, command: TrainCommand, out: Path) -> bool:
        """Waits until the fault is due; returns whether the run was still running."""
        world = math.prod(self.grid.values())
        steps = 1 + int(self.share * self.setup.steps)

        def is_ready() -> bool:
            if command.has_exited():
                return True
            if self.at_start:
                return len(command.find_ranks()) == world
            return len(command.rank_of) == world and count_rows(out) >= steps

        if not command.wait_until(is_ready, self.reference.patience_seconds):
            self.problems.append(
                "the run did not reach " + ("a rank" if self.at_start else "a step")
            )
            return False
        self.start_began = time.monotonic()
        if self.at_start:
            command.wait_until(command.has_exited, self.share * self.start_seconds)
        return not command.has_exited()

    def _note_early_end(self, command: TrainCommand) -> bool:
        """Checks that a run that ended before the fault has finished; returns False."""
        # The reference was slower, perhaps because of other load on the machine.
        self.start_seconds = min(self.start_seconds, time.monotonic() - self.start_began)
        command.wait_until(command.has_exited, self.reference.patience_seconds)
        self.moment = "never"
        self.errors = command.read_errors()
        code = command.child.poll()
        if code != 0:
            self.exit_codes.append(code)
            self.problems.append(f"exit code {code} before the fault")
        return False

    def _inject_fault(
        self, command: TrainCommand, ranks: Mapping[int, Process], folder: Path
    ) -> float | None:
        """Injects the fault of the trial; returns the time, or None if the run had ended."""
        name = self.kind.name
        if not ranks:  # only the launcher is left, which is about to end
            return None
        if name == "exception":
            return self._raise_exception(command, folder)
        if name in ("launcher", "term"):
            began = time.monotonic()
            command.child.send_signal(signal.SIGKILL if name == "launcher" else signal.SIGTERM)
            return began
        if self.rank not in ranks:
            return None
        began = time.monotonic()
        try:
            os.kill(ranks[self.rank].pid, signal.SIGKILL if name == "kill" else signal.SIGSTOP)
        except ProcessLookupError:
            return None
        return began

    def _raise_exception(self, command: TrainCommand, folder: Path) -> float | None:
        """Makes the rank raise in its next collective; returns the time, or None if it issued
        none.
        """
        (folder / f"raise-{self.rank}").touch()
        raised = folder / "raised"
        command.wait_until(
            lambda: raised.exists() or command.has_exited(), self.reference.patience_seconds
        )
        return float(raised.read_text()) if raised.exists() else None

    def _check_end(self, command: TrainCommand, known: set[Process], struck: float) -> None:
        """Checks how a run ends after its fault. known: the ranks started before."""
        kind = self.kind

        def is_ended() -> bool:
            # After a kill other ranks are started; after any other fault no rank may be left.
            ranks = known if kind.name == "kill" else {*known, *command.rank_of}
            return not any(rank.is_alive() for rank in ranks)

        if not command.wait_until(is_ended, struck + kind.end_seconds - time.monotonic()):
            alive = sorted(command.rank_of[rank] for rank in known if rank.is_alive())
            self.problems.append(f"ranks {alive} alive {kind.end_seconds:g} s after the fault")
            self.exit_codes.append(command.child.poll())
            return
        self.end_seconds = time.monotonic() - struck
        self._check_exit(command)
        code = self.exit_codes[-1]
        restarted = any(rank not in known for rank in command.rank_of)
        errors = command.read_errors()
        finishing = kind.name == "term" and self.rows >= self.setup.steps - LATE_STEPS
        if code != kind.exit_code and not (finishing and code == 0):
            self.problems.append(f"exit code {code} instead of {kind.exit_code}")
        if kind.name == "kill" and not restarted and self.rows < self.setup.steps:
            self.problems.append("the ranks were not restarted")
        if kind.name != "kill" and restarted:
            self.problems.append("the ranks were restarted")
        if kind.name == "exception" and "InjectedError" not in errors:
            self.problems.append("the exception is not in the message")
        if kind.name == "stop":
            hang = next((line for line in errors.splitlines() if "HangError" in line), "")
            if not re.search(rf"\brank {self.rank}\b", hang, re.IGNORECASE):
                self.problems.append(f"the message of the hang does not name rank {self.rank}")

    def _check_exit(self, command: TrainCommand) -> None:
        """Waits for the end of a command and of all its processes."""
        if not command.wait_until(command.has_exited, self.reference.patience_seconds):
            seconds = time.monotonic() - command.began
            self.problems.append(f"the command has not ended {seconds:.0f} s after its start")
        self.exit_codes.append(command.child.poll())
        if not command.wait_until(lambda: not command.list_alive(), ORPHAN_SECONDS):
            left = [process.describe() for process in command.list_alive()]
            self.left += left
            self.problems.append(f"leftover processes: {', '.join(left)}")

    def _continue_run(self, folder: Path) -> None:
        """Runs the same command again; it must finish, unless it had before the fault."""
        finished = is_finished(folder / "run") and self.exit_codes[-1] != KINDS["term"].exit_code
        with self.setup.start_command(self._build_arguments(folder), folder) as command:
            self._check_exit(command)
            self.errors = command.read_errors()
        code = self.exit_codes[-1]
        if code != 0 and not (finished and code == REFUSED):
            self.problems.append(f"exit code {code} of the same command run again")


def plan_trials(options: argparse.Namespace, setup: Setup) -> Iterator[Trial]:
    """Yields trials of all kinds and grids in rotation; a third of them are at the start."""
    draw = random.Random(options.seed)
    counts = dict.fromkeys(options.kind, 0)
    for number in range(1, options.trials + 1):
        kind = KINDS[options.kind[(number - 1) % len(options.kind)]]
        grid = options.grid[(number - 1) % len(options.grid)]
        counts[kind.name] += 1
        yield Trial(
            number=number,
            kind=kind,
            grid=grid,
            setup=setup,
            rank=draw.randrange(math.prod(grid.values())),
            at_start=kind.at_start and counts[kind.name] % 3 == 2,
            share=draw.random(),
        )


@dataclass
class Session:
    """All trials, the references that they need, and the number of failures."""

    options: argparse.Namespace
    setup: Setup
    began: float = field(default_factory=time.monotonic)
    references: dict[str, Reference | None] = field(default_factory=dict)
    """Reference by name of the grid; None if its uninterrupted run failed."""
    trials: int = 0
    failures: int = 0

    def play(self) -> int:
        """Runs all trials that the budget allows; returns the exit code."""
        try:
            for grid in self.options.grid if self.options.smoke else ():
                self._get_reference(grid)
            for trial in plan_trials(self.options, self.setup):
                seconds = time.monotonic() - self.began
                if self.options.budget_seconds and seconds > self.options.budget_seconds:
                    print(
                        f"Stopped after {seconds:.0f} s: {self.trials} of {self.options.trials} "
                        "trials were done"
                    )
                    break
                reference = self._get_reference(trial.grid)
                if reference is not None:
                    self._play_trial(trial, reference)
        except KeyboardInterrupt:
            print("Interrupted", flush=True)
            self.failures += 1
        print(f"{self.trials} trials, {self.failures} failures", flush=True)
        return int(self.failures > 0 or (self.trials == 0 and not self.options.smoke))

    def _play_trial(self, trial: Trial, reference: Reference) -> None:
        """Runs a trial and prints its outcome."""
        trial.play(reference)
        self.trials += 1
        self.failures += bool(trial.problems)
        print(trial.format_line(self.options.trials), flush=True)
        if trial.problems:
            print("\n".join(f"    {problem}" for problem in trial.problems))
            print(format_errors(trial.errors), flush=True)

    def _get_reference(self, grid: Mapping[str, int]) -> Reference | None:
        """Returns the uninterrupted run of a grid, which runs once; None if it failed."""
        name = format_grid(grid)
        if name in self.references:
            return self.references[name]
        self.references[name] = None
        try:
            reference = run_reference(self.setup, grid)
        except FailedReferenceError as error:
            self.failures += 1
            print(f"reference    {name:13}  FAILED, no trials on this grid: {error}", flush=True)
            return None
        print(
            f"reference    {name:13}  {self.setup.steps} steps, all ranks after "
            f"{reference.ranks_seconds:.1f} s, first step after {reference.first_seconds:.1f} s, "
            f"end after {reference.end_seconds:.1f} s",
            flush=True,
        )
        self.references[name] = reference
        return reference


def parse_options() -> argparse.Namespace:
    """Parses the command line."""
    assert __doc__ is not None
    parser = ScriptParser(
        __doc__,
        smoke="--backend gloo --grid data=2 --trials 0 --steps 6",
        skipped="trials, which take longer; the uninterrupted run of a grid is made",
    )
    parser.add_argument("--trials", type=int, default=12, help="number of trials (12)")
    parser.add_argument("--seed", type=int, default=0, help="seed of times and ranks (0)")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument(
        "--grid",
        type=parse_grid,
        action="append",
        help=f"a grid, e.g. pipe=2,row=2; may be repeated ({' '.join(GRIDS)})",
    )
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="a kind of fault; may be repeated (all)"
    )
    parser.add_argument("--steps", type=int, default=24, help="steps per run (24)")
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=0.0,
        help="start no trial after this many seconds; 0: no limit",
    )
    parser.add_argument(
        "--shared-device",
        action="store_true",
        help="other programs use the GPU at the same time, so its memory is not compared",
    )
    parser.add_argument("--keep", action="store_true", help="keep the directories of all runs")
    options = parser.parse_args()
    options.grid = options.grid or [parse_grid(text) for text in GRIDS]
    options.kind = options.kind or [*KINDS]
    return options


def main() -> int:
    options = parse_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes are ended then, too
    memory = read_gpu_memory() if options.backend == "nccl" else None
    if options.backend == "nccl" and memory is None:
        sys.exit("NCCL needs a GPU, and none was found. Use --backend gloo to run on the CPU.")
    root = Path(tempfile.mkdtemp(prefix="nccl-faults-"))
    memory = None if options.shared_device else memory
    setup = Setup(root, options.backend, options.steps, memory)
    command = setup.build_arguments(options.grid[0], Path("OUT"))
    print(f"ranvier train {shlex.join(command)}", flush=True)
    try:
        return Session(options, setup).play()
    finally:
        if options.keep:
            print(f"The runs are in {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
