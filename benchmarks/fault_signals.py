"""Group A: signals, hangs, crash loops, conflicting runs, and runs that shrink."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial

from fault_crashes import NEVER, at_step, restarted
from fault_runs import (
    RUN,
    SAVED,
    TRAINER,
    Ended,
    Process,
    Stage,
    alive,
    case,
    check,
    close,
    losses,
    rows,
    same,
    soon,
)

from ranvier.checkpoint import directory as folders

SLOW = "before(Trainer, 'issue_step', lambda self, *_, **__: time.sleep(0.1))\n"
"""Steps long enough for a signal to arrive in between."""
THERE = SLOW + "before(Trainer, 'issue_step', at(3, 1, mark))\n"


def stopped(stage: Stage, ended: Ended) -> str:
    """Checks that a stopped run was saved once and resumes bit-identically."""
    ended.expect(75, "saved in")
    run = stage.folder / "run"
    done = len(rows(run))
    names = [path.name for path in folders.find_checkpoints(run / "checkpoints")]
    check(3 < done < 8 and names[-1] == f"step-{done:08}", f"{done} steps, {names}")
    stage.run("train", "run").expect(0, f"Resuming after step {done}")
    return f"75 after step {done}, then {same(run, stage.whole())}"


def told(stage: Stage, number: int, *, worker: bool) -> str:
    """Sends a signal to the launcher or to a rank in a step."""
    process = stage.start(*RUN, faults={TRAINER: THERE})
    pid = process.when()
    if worker:
        os.kill(pid, number)
    else:
        process.tell(number)
    began = time.monotonic()
    ended = process.end()
    seconds = soon(began, 10.0)
    return f"{stopped(stage, ended)}, {seconds:.1f} s"


for _id, _number, _worker in (
    ("A15 once", signal.SIGTERM, False),
    ("A16", signal.SIGTERM, True),
    ("A17 USR1", signal.SIGUSR1, False),
    ("A17 USR2", signal.SIGUSR2, False),
    ("A17 worker", signal.SIGUSR1, True),
):
    case(
        _id,
        f"{_number.name} to {'one rank' if _worker else 'the launcher'} in a step",
        "75, saved, resumes bit-equal",
    )(partial(told, number=_number, worker=_worker))


def twice(stage: Stage, number: int, code: int) -> str:
    """Sends two signals in a long step."""
    faults = {TRAINER: "before(Trainer, 'issue_step', at(3, 0, lambda: (mark(), time.sleep(30))))"}
    process = stage.start(*RUN, *SAVED, faults=faults)
    process.when()
    process.tell(number)
    time.sleep(0.5)
    began = process.tell(number)
    process.end().expect(code)
    seconds = soon(began, 2.0)
    left = {path.name for path in (stage.folder / "run" / "checkpoints").iterdir()}
    seen = {name for name in left if not name.startswith(".")}
    check(seen <= {"latest", "step-00000002"}, f"{seen}")
    return f"{code} after {seconds:.1f} s"


case("A15 twice", "a second SIGTERM", "143 immediately")(
    partial(twice, number=signal.SIGTERM, code=143)
)
case("A20", "Ctrl-C, Ctrl-C", "130 within 2 s")(partial(twice, number=signal.SIGINT, code=130))


@case("A18", "SIGTERM during a save", "that save is finished once, 75")
def _in_save(stage: Stage) -> str:
    code = """
from ranvier.checkpoint import checksummed_file as _blocks
def _slow(path, *_):
    if ".step-00000004" in str(path) and path.name == "rank-00001.safetensors":
        mark()
        time.sleep(1.5)
before(_blocks, "write_checksummed", _slow)
before(Trainer, "issue_step", lambda self, *_, **__: self.state.step == 4 and time.sleep(0.5))
"""
    process = stage.start(*RUN, *SAVED, faults={TRAINER: code})
    process.when()
    process.tell(signal.SIGTERM)
    ended = process.end().expect(75, "saved in")
    names = [path.name for path in folders.find_checkpoints(stage.folder / "run" / "checkpoints")]
    check(
        names[:2] == ["step-00000002", "step-00000004"] and len(names) == len({*names}), f"{names}"
    )
    check(not [name for name in names if "." in name], f"a step was saved twice: {names}")
    done = len(rows(stage.folder / "run"))
    stage.run("train", "run").expect(0, f"Resuming after step {done}")
    return f"{ended.code}, {names[-1]}, then {same(stage.folder / 'run', stage.whole())}"


WAITS = {
    "meeting": (
        "ranvier.launch.process_group",
        "before(sys.modules[__name__], 'init_process_group', "
        "lambda me, **_: me.rank == 1 and (mark(), time.sleep(60)))",
        False,
    ),
    "data": (
        TRAINER,
        "before(Trainer, '_batch_maker', lambda self: None)\n"
        "_loaded = Trainer._batch_maker\n"
        "def _late(self):\n"
        "    make = _loaded(self)\n"
        "    def slow(step):\n"
        "        if step == 3 and rank() == 1:\n"
        "            mark(); time.sleep(2)\n"
        "        return make(step)\n"
        "    return slow\n"
        "substitute(Trainer, '_batch_maker', _late)\n",
        True,
    ),
    "evaluation": (
        TRAINER,
        "before(Trainer, 'compute_val_loss', at(4, 1, lambda: (mark(), time.sleep(1))))",
        True,
    ),
}


def waiting(stage: Stage, name: str) -> str:
    """Sends SIGTERM while ranks wait for something."""
    module, code, saves = WAITS[name]
    words = (
        ["--train.eval-interval=4", "--data.validation-fraction=0.3"]
        if name == "evaluation"
        else []
    )
    process = stage.start(*RUN, *words, faults={module: code})
    process.when()
    time.sleep(0.2)
    began = process.tell(signal.SIGTERM)
    process.end().expect(75, "saved in" if saves else "nothing to save")
    seconds = soon(began, 10.0)
    return f"75 after {seconds:.1f} s"


for _name in WAITS:
    case(f"A19 {_name}", f"SIGTERM in: {_name}", "75 within 10 s")(partial(waiting, name=_name))


@case("A19 compile", "SIGTERM while blocks are compiled", "75 after the step")
def _compiling(stage: Stage) -> str:
    check(shutil.which("g++"), "no compiler")
    code = "before(Trainer, 'issue_step', at(0, 1, mark))"
    fresh = {"TORCHINDUCTOR_CACHE_DIR": str(stage.folder / "compiled")}
    fresh["RANVIER_CACHE"] = str(stage.folder / "cache")
    words = ["--plan.compile=on", "--model.layers=1"]
    process = stage.start(*RUN, *words, faults={TRAINER: code}, environment=fresh)
    process.when()
    time.sleep(0.5)
    began = process.tell(signal.SIGTERM)
    process.end().expect(75)
    return f"75 after {time.monotonic() - began:.1f} s"


@case("A21", "SIGKILL the launcher", "ranks end within 5 s")
def _launcher(stage: Stage) -> str:
    faults = {TRAINER: SLOW + "before(Trainer, 'issue_step', at(3, 1, mark))"}
    process = stage.start(*RUN, "--train.steps=500", faults=faults)
    process.when()
    began = process.tell(signal.SIGKILL)
    process.end()
    left = alive(stage.folder)
    check(not left, f"left: {left}")
    return f"no process left after {time.monotonic() - began:.1f} s"


# ---- hangs and loops --------------------------------------------------------------------


@case("A22", "SIGSTOP rank 1 for 6 s, watchdog 16 s", "a warning names rank 1, bit-equal")
def _stopped(stage: Stage) -> str:
    code = "before(Trainer, 'issue_step', at(3, 1, lambda: (mark(), kill(signal.SIGSTOP))))"
    process = stage.start(*RUN, "--launch.watchdog-seconds=16", faults={TRAINER: code})
    pid = process.when()
    time.sleep(6.0)
    os.kill(pid, signal.SIGCONT)
    process.end().expect(0, "Rank 1 is slow: no progress")
    return f"'Rank 1 lags', {same(stage.folder / 'run', stage.whole())}"


def hung(stage: Stage, action: str) -> str:
    """Checks a run in which a rank hangs."""
    code = f"before(Trainer, 'issue_step', at(3, 1, lambda: (mark(), {action})))"
    process = stage.start(*RUN, *SAVED, "--launch.watchdog-seconds=8", faults={TRAINER: code})
    process.when()
    began = time.monotonic()
    ended = process.end().expect(
        72, "HangError: Rank 1 has made no progress", "collective ", "rank 0:"
    )
    seconds = soon(began, 13.5)
    check(", line " in ended.errors, ended.errors[:300])
    return f"72 after {seconds:.1f} s, stacks and collectives shown"


case("A23", "SIGSTOP rank 1 forever, watchdog 8 s", "72 within 8 + 5 s, stacks")(
    partial(hung, action="kill(signal.SIGSTOP)")
)
case("A24", "rank 1 holds its interpreter (C sleep), watchdog 8 s", "72 by the launcher")(
    partial(hung, action="__import__('ctypes').PyDLL(None).sleep(60)")
)


@case("A25", "rank 1 crashes at the same step each time", "93 after 3 restarts")
def _loop(stage: Stage) -> str:
    code = "before(Trainer, 'issue_step', at(5, 1, kill, ''))"
    ended = stage.run(*RUN, *SAVED, faults={TRAINER: code}).expect(93, "3 consecutive restarts")
    check(ended.errors.count("Restarting all ranks") == 3, ended.errors)
    return "93 after 3 restarts"


@case("A26", "6 kills of random ranks at random steps of 60", "bit-equal, reports goodput")
def _random(stage: Stage) -> str:
    draw = stage.draw()
    steps = sorted(draw.sample(range(3, 58), 6))
    code = "\n".join(
        f"before(Trainer, 'issue_step', at({step}, {draw.randrange(2)}, kill, 'k{step}'))"
        for step in steps
    )
    words = ["--train.steps=60"]
    process = stage.start(*RUN, *words, "--checkpoint.interval=3", faults={TRAINER: code})
    ended = process.end(180.0).expect(0)
    run = stage.folder / "run"
    facts = json.loads((run / "run.json").read_text())
    count = len(facts["launches"][0]["failures"])
    check(count == 6, f"{count} restarts")
    done = same(run, stage.whole(*words))
    return f"killed at {steps}: {done}, goodput {facts['goodput']:.0%} of {ended.seconds:.0f} s"


# ---- conflicting runs -------------------------------------------------------------------


@case("A27 lock", "a process of an earlier run locks the directory", "77 within 5 s, names it")
def _locked(stage: Stage) -> str:
    (stage.folder / "run").mkdir(parents=True)
    code = (
        "import sys, time; from pathlib import Path; from ranvier.train.resume import "
        "run_directory as folder; handle = folder.lock_dir(Path('run')); print('locked', "
        "flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], cwd=stage.folder, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        process = stage.start(*RUN)
        out, errors = process.child.communicate(timeout=30)
        seconds = time.monotonic() - process.began
        ended = Ended(process.child.returncode, out, errors, seconds)
        ended.expect(77, f"is in use by process {holder.pid}", within=20.0)
    finally:
        holder.kill()
        holder.wait()
    return f"77 after {ended.seconds:.1f} s, process named"


@case("A27 port", "another process listens on MASTER_PORT", "71 with the address; not a hang")
def _port(stage: Stage) -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words = [*RUN, "--train.comm-timeout-seconds=5"]
        ended = stage.run(*words, ranks=0, environment=ranks).expect(71, f"127.0.0.1:{port}")
    return (
        f"71 after {ended.seconds:.1f} s, {'in use' if 'EADDRINUSE' in ended.errors else 'other'}"
    )


@case("A28", "a second run in the same directory", "77; the first is bit-equal")
def _second(stage: Stage) -> str:
    slow = """
def _waits(self, *_, **__):
    while self.state.step == 3 and not os.path.exists(os.path.join(HERE, "go")):
        mark()
        time.sleep(0.1)
before(Trainer, "issue_step", _waits)
"""
    first: Process = stage.start(*RUN, faults={TRAINER: slow})
    first.when()
    other = Stage(stage.folder / "other", stage.root)
    words = [*RUN, "--train.output-dir=../run"]
    other.run(*words).expect(77, "is in use by process")
    (stage.folder / "go").touch()
    first.end().expect(0)
    return f"77, {same(stage.folder / 'run', stage.whole())}"


# ---- more and fewer ranks ---------------------------------------------------------------


@case("X1", "SIGKILL rank 2 of 4", "others end within 5 s, restart, bit-equal")
def _four(stage: Stage) -> str:
    faults = at_step("issue_step", who=2)
    words = ["--plan.data=2", "--plan.row=2"]
    done = restarted(stage, faults, *words, ranks=4)
    again = Stage(stage.folder.with_name("X1-end"), stage.root)
    process = again.start(
        *RUN,
        *words,
        NEVER,
        faults={TRAINER: "before(Trainer, 'issue_step', at(5, 2, lambda: (mark(), kill())))"},
        ranks=4,
    )
    process.when()
    process.began = time.monotonic()
    ended = process.end().expect(71, "Rank 2 was killed", within=5.0)
    return f"{done}; all ended after {ended.seconds:.1f} s"


@case("X2", "rank 1 crashes on two ranks, --launch.fallback-grids data=1", "continues on one rank")
def _smaller(stage: Stage) -> str:
    code = """
def _dies(self, *_, **__):
    if self.state.step == 5 and self.grid.rank == 1:
        kill()
before(Trainer, "issue_step", _dies)
"""
    words = [
        "--launch.fallback-grids",
        "data=1",
        "--launch.max-restarts=1",
        "--checkpoint.interval=2",
    ]
    ended = stage.run(*RUN, *words, faults={TRAINER: code})
    ended.expect(0, "Continuing on the grid data=1")
    run, whole = stage.folder / "run", stage.whole()
    check(len(losses(run)) == len(losses(whole)), "wrong number of steps")
    return f"'Continuing on the grid data=1', {close(run, whole)}"
