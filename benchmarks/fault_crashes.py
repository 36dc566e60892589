"""Group A: ranks killed in each phase, and runs that must continue bit-identically."""

from __future__ import annotations

import json
import signal
import time
from functools import partial

from fault_runs import RUN, SAVED, STEPS, TRAINER, Stage, case, check, same

from ranvier.checkpoint import directory as folders

ONCE = "--launch.max-restarts=1"
NEVER = "--launch.max-restarts=0"
KILL = "before(Trainer, {name!r}, at({step}, {who}, kill))"
HOOKED = """
_assemble = Trainer.from_run
def _hooked(*arguments, **options):
    made = _assemble(*arguments, **options)
    def hook(module, inputs, output):
        if made.state.step == 5 and made.grid.rank == 1 and module.training:
            {action}
    next(iter(made.state.model.blocks)).register_forward_hook(hook)
    return made
Trainer.from_run = _hooked
"""
NOW = """
NOW = [0]
before(Trainer, "issue_step", lambda self, *_, **__: NOW.__setitem__(0, self.state.step))
"""


def at_step(name: str, step: int = 5, who: int = 1) -> dict[str, str]:
    """Kills a rank when it calls a method of its trainer."""
    return {TRAINER: KILL.format(name=name, step=step, who=who)}


def restarted(stage: Stage, faults: dict[str, str], *words: str, ranks: int = 2) -> str:
    """Checks that a run continues by itself after a kill, bit-identically, from the last save."""
    ended = stage.run(*RUN, *SAVED, *words, faults=faults, ranks=ranks)
    ended.expect(0, "SIGKILL", "Restarting all ranks from the latest checkpoint")
    run, whole = stage.folder / "run", stage.whole(*words, ranks=ranks)
    (launch,) = json.loads((run / "run.json").read_text())["launches"]
    check(len(launch["failures"]) == 1, f"{len(launch['failures'])} restarts, not 1")
    begins = json.loads((run / "run.json").read_text())["restarts"]
    lost = launch["failures"][0]["step"] - (begins[-1] if begins else 0)
    check(lost <= 3, f"{lost} steps were lost")
    return f"{same(run, whole)}, {lost} step(s) repeated"


# ---- before the first step --------------------------------------------------------------


@case("A1", "SIGKILL rank 1 before it connects to the others", "71 within 15 s, no orphans")
def _before_meeting(stage: Stage) -> str:
    code = (
        "before(sys.modules[__name__], 'init_process_group', "
        "lambda me, **_: me.rank == 1 and kill())"
    )
    faults = {"ranvier.launch.process_group": code}
    ended = stage.run(*RUN, NEVER, "--train.comm-timeout-seconds=15", faults=faults)
    ended.expect(71, "Rank 1 was killed by signal 9 (SIGKILL) before its first step", within=15.0)
    return f"71 after {ended.seconds:.1f} s"


@case("A2", "SIGKILL rank 1 before the model is built", "71 within 5 s")
def _before_building(stage: Stage) -> str:
    code = "before(Trainer, 'from_run', lambda *_, **__: rank() == 1 and (mark(), kill()))"
    process = stage.start(*RUN, NEVER, faults={TRAINER: code})
    process.when()
    process.began = time.monotonic()
    ended = process.end().expect(71, "Rank 1 was killed by signal 9", within=5.0)
    return f"71 after {ended.seconds:.1f} s"


@case("A3", "error in the constructor of the model on rank 1", "70, its own traceback first")
def _constructor(stage: Stage) -> str:
    code = """
from ranvier.models import Decoder
def _no(*_, **__):
    if rank() == 1:
        raise RuntimeError("words of rank 1")
before(Decoder, "__init__", _no)
"""
    ended = stage.run(*RUN, faults={TRAINER: code}).expect(70, "words of rank 1")
    check(ended.errors.startswith("rank 1: Traceback"), ended.errors[:200])
    check("rank 0" not in ended.errors, "rank 0 also reports an error")
    return "70, only the traceback of rank 1"


# ---- in a step --------------------------------------------------------------------------


@case("A4 end", "SIGKILL rank 0, which hosts the store, no restarts", "71 within 5 s")
def _store(stage: Stage) -> str:
    code = "before(Trainer, 'issue_step', at(5, 0, lambda: (mark(), kill())))"
    process = stage.start(*RUN, NEVER, faults={TRAINER: code})
    process.when()
    process.began = time.monotonic()
    ended = process.end().expect(71, "Rank 0 was killed by signal 9 (SIGKILL) at step 4", within=5)
    return f"71 after {ended.seconds:.1f} s"


@case("A4 again", "SIGKILL rank 0, which hosts the store, in a step", "restart, bit-equal")
def _store_again(stage: Stage) -> str:
    return restarted(stage, at_step("issue_step", who=0), ONCE)


PHASES = {
    "forward": HOOKED.format(action="first() and kill()"),
    "backward": HOOKED.format(action="output.register_hook(lambda _: first() and kill() or None)"),
    "reduce": """
from ranvier.buckets.scheduler import BucketScheduler
def _reduce(self, *_):
    if NOW[0] == 5 and rank() == 1 and first():
        kill()
before(BucketScheduler, "_reduce_over_replicas", _reduce)
"""
    + NOW,
    "optimizer": """
from ranvier.optim import optimizer as _optimizer
_count = []
def _half(*_, **__):
    if NOW[0] == 5 and rank() == 1:
        _count.append(0)
        if len(_count) == 2 and first():
            kill()
before(_optimizer.fused_adamw, "fused_adamw", _half)
"""
    + NOW,
    "scheduler": at_step("next_lr")[TRAINER],
    "logging": at_step("read_step", 6)[TRAINER],
}


def _phase(name: str, stage: Stage) -> str:
    return restarted(stage, {TRAINER: PHASES[name]})


for _name in PHASES:
    case(f"A5 {_name}", f"SIGKILL rank 1 in: {_name}", "restart, bit-equal")(partial(_phase, _name))


@case("A5 metrics", "SIGKILL rank 0 while it writes a row of metrics", "restart, bit-equal")
def _metrics(stage: Stage) -> str:
    code = """
_written = metrics_file
def metrics_file(path):
    made = _written(path)
    enter = made.__enter__
    def entered(*_):
        sink = enter()
        def write(row):
            sink(row)
            if row["step"] == 5 and first():
                kill()
        return write
    class Both:
        __enter__ = entered
        __exit__ = lambda self, *error: made.__exit__(*error)
    return Both()
"""
    return restarted(stage, {"ranvier.train.loggers": code})


@case("A5 evaluation", "SIGKILL rank 1 in an evaluation", "restart, bit-equal")
def _evaluation(stage: Stage) -> str:
    words = ["--train.eval-interval=3", "--data.validation-fraction=0.3"]
    done = restarted(stage, at_step("compute_val_loss", 6), *words)
    ours, theirs = (
        [json.loads(line)["val_loss"] for line in (run / "metrics.jsonl").open()]
        for run in (stage.folder / "run", stage.whole(*words))
    )
    check(ours == theirs, f"validation losses {ours}, not {theirs}")
    return done


@case("A6", "SIGKILL between messages of 2 stages, 4 micro-batches", "restart, bit-equal")
def _messages(stage: Stage) -> str:
    code = """
from ranvier.pipeline.step import PipelineStep
_sent = []
def _third(*_, **__):
    _sent.append(0)
    if len(_sent) == 5 * 4 + 3 and rank() == 1 and first():
        kill()
before(PipelineStep, "_send_result", _third)
"""
    words = ["--plan.pipe=2", "--plan.global-batch=8", "--plan.micro-batch=2"]
    return restarted(stage, {TRAINER: code}, *words)


# ---- in a save --------------------------------------------------------------------------

POINTS = """
import random
CALLS = ("open", "pwrite", "fsync", "mkdir", "unlink", "replace")
_left = [-1]
_steps = {steps}
def _begin(self, step, *_, **__):
    if self.grid.rank == {who} and step in _steps and first(f"save-{{step}}"):
        _left[0] = _steps[step]
from ranvier.checkpoint import async_saver as _saver
before(_saver.AsyncSaver, "save", _begin)
def _count(name, *_, **__):
    import threading
    if threading.current_thread().name == "checkpoint" and _left[0] >= 0:
        _left[0] -= 1
        if _left[0] < 0:
            with open(os.path.join(HERE, "killed"), "a") as file:
                file.write(name + "\\n")
            kill()
for _name in CALLS:
    before(os, _name, lambda *a, _name=_name, **k: _count(_name))
"""


def kills(stage: Stage, steps: dict[int, int], who: int, total: int) -> str:
    """Kills a rank at the n-th disk call of the saves of these steps; the run continues."""
    words = ["--checkpoint.interval=2", "--checkpoint.keep-latest=2", f"--train.steps={total}"]
    faults = {TRAINER: POINTS.format(steps=steps, who=who)}
    process = stage.start(*RUN, *words, faults=faults)
    process.end(240.0).expect(0)
    run = stage.folder / "run"
    killed = (stage.folder / "killed").read_text().split()
    told = json.loads((run / "run.json").read_text())
    check(len(killed) >= len(steps) - 2, f"only {len(killed)} kills: {killed}")
    done = same(run, stage.whole(f"--train.steps={total}"))
    left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    check(not left, f"leftover files: {left}")
    begins = told["restarts"]
    near = all(step - 2 <= begin for step, begin in zip(sorted(steps), begins, strict=False))
    check(near, f"restarts from {begins}")
    return f"{len(killed)} kills ({', '.join(sorted({*killed}))}), {done}"


@case("A7", "SIGKILL rank 1 in the first save", "starts from scratch and reports it, bit-equal")
def _first_save(stage: Stage) -> str:
    faults = at_step("save_checkpoint", 2)
    ended = stage.run(*RUN, *SAVED, faults=faults).expect(0, "no complete checkpoint")
    check("66" not in ended.errors, ended.errors)
    return f"'no complete checkpoint', {same(stage.folder / 'run', stage.whole())}"


@case("A8", "SIGKILL rank 1 at 20 random calls while it writes", "20 restarts, bit-equal")
def _writing(stage: Stage) -> str:
    draw = stage.draw()
    steps = {step: draw.randrange(7) for step in range(2, 42, 2)}
    return kills(stage, steps, 1, 42)


@case("A9", "SIGKILL rank 0 in commits: manifest, rename, latest", "restarts, bit-equal")
def _committing(stage: Stage) -> str:
    draw = stage.draw()
    steps = {step: draw.randrange(8, 22) for step in range(2, 14, 2)}
    return kills(stage, steps, 0, 16)


@case("A10", "SIGKILL rank 0 while it removes an old checkpoint", "the rest is complete")
def _removing(stage: Stage) -> str:
    code = """
from ranvier.checkpoint import directory as _folders
def _half(path):
    if path.name.endswith(".removing") and path.is_dir() and first():
        (path / "rank-00000.safetensors").unlink()
        kill()
before(_folders, "_remove_path", _half)
"""
    words = ["--checkpoint.interval=2", "--checkpoint.keep-latest=1"]
    stage.run(*RUN, *words, faults={TRAINER: code}).expect(0, "Resuming after step 4")
    run = stage.folder / "run"
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    check(names == ["latest", f"step-{STEPS:08}"], str(names))
    return f"the half-removed checkpoint is gone, {same(run, stage.whole())}"


@case("A11 error", "the writing thread of rank 1 fails: no space", "73 within a step")
def _thread_error(stage: Stage) -> str:
    return _writer(stage, "fail(errno.ENOSPC)", 73, "No space left on device")


@case("A11 end", "the writing thread of rank 1 ends (SystemExit)", "an error, not a hang")
def _thread_end(stage: Stage) -> str:
    return _writer(stage, "raise SystemExit(0)", 71, "before the run was complete")


@case("A11 lost", "the writing thread of rank 1 ends silently", "73, not a hang")
def _thread_lost(stage: Stage) -> str:
    code = """
from ranvier.checkpoint import async_saver as _saver
_begin = _saver.AsyncSaver._start_thread
def _none(self, work):
    if self.grid.rank == 1 and self.step == 4:
        work = lambda: None
    _begin(self, work)
substitute(_saver.AsyncSaver, "_start_thread", _none)
"""
    stage.run(*RUN, *SAVED, faults={TRAINER: code}).expect(73, "rank-00001.json is missing")
    names = [path.name for path in folders.find_checkpoints(stage.folder / "run" / "checkpoints")]
    check(names == ["step-00000002"], str(names))
    return "73, no incomplete checkpoint is committed"


def _writer(stage: Stage, action: str, code: int, words: str) -> str:
    text = f"""
from ranvier.checkpoint import rank_file as _part
def _fails(folder, who, *_):
    if who == 1 and ".step-00000004" in str(folder):
        {action}
before(_part, "write_rank_file", _fails)
"""
    ended = stage.run(*RUN, *SAVED, faults={TRAINER: text}).expect(code, words)
    run = stage.folder / "run"
    names = [path.name for path in folders.find_checkpoints(run / "checkpoints")]
    check(names == ["step-00000002"], str(names))
    steps = len((run / "metrics.jsonl").read_text().splitlines())
    check(steps <= 6, f"{steps} steps were taken")
    stage.run(*RUN, *SAVED).expect(0, "Resuming after step 2")
    return f"{ended.code} after step {steps}, then resumed at step 2, {same(run, stage.whole())}"


@case("A12", "SIGKILL rank 1 while it loads", "the next start loads the same, bit-equal")
def _loading(stage: Stage) -> str:
    code = """
before(Trainer, "issue_step", at(5, 1, kill, "step"))
from ranvier.checkpoint import load as _load
def _half(copy, *_):
    if rank() == 1 and first("load"):
        kill()
before(_load.ElementCopy, "copy_from", _half)
"""
    ended = stage.run(*RUN, *SAVED, faults={TRAINER: code}).expect(0)
    check(ended.errors.count("Restarting all ranks") == 2, ended.errors)
    return f"two restarts, {same(stage.folder / 'run', stage.whole())}"


# ---- exits without a kill -----------------------------------------------------------------


@case("A13", "os._exit(0) of rank 1 in a step", "71, never 0")
def _quiet(stage: Stage) -> str:
    code = "before(Trainer, 'issue_step', at(5, 1, lambda: os._exit(0)))"
    ended = stage.run(*RUN, faults={TRAINER: code})
    ended.expect(71, "Rank 1 exited with code 0 at step 4, before the run was complete")
    return "71"


def _fault(number: int, stage: Stage) -> str:
    code = f"before(Trainer, 'issue_step', at(5, 1, lambda: kill({number})))"
    name = signal.Signals(number).name
    ended = stage.run(*RUN, *SAVED, faults={TRAINER: code})
    ended.expect(71, f"Rank 1 was killed by signal {number} ({name}) at step 4")
    return f"71, {name} is named"


for _number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE):
    case(f"A14 {_number.name}", f"{_number.name} in rank 1", "71, the signal named")(
        partial(_fault, _number)
    )
