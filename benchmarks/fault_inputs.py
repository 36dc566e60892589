"""Groups E, F and G, as far as whole runs show them: wrong data, settings and numbers."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

from fault_files import base
from fault_runs import RUN, SAVED, TRAINER, Stage, case, check, close, rows, same

from ranvier.checkpoint import directory as folders


def corpus(stage: Stage, times: int = 200) -> list[str]:
    """Writes a small text corpus; returns the options that use it."""
    stage.folder.mkdir(exist_ok=True)
    lines = (f"Line {n} of {times} says {n * n}.\n" for n in range(times))
    (stage.folder / "text.txt").write_text("".join(lines))
    return ["--data.sources=text.txt"]


@case("E2", "resumed with other micro-batches and half the ranks", "losses within 1e-6")
def _micro(stage: Stage) -> str:
    run = base(stage)
    words = ["--plan.data=1", "--plan.micro-batch=2"]
    stage.run("train", "run", *words, ranks=1).expect(0, "Resuming after step 6")
    return close(run, stage.whole())


@case("E3", "the text was changed; then other_data", "65 with fingerprints; then continues")
def _changed(stage: Stage) -> str:
    words = corpus(stage)
    code = "before(Trainer, 'issue_step', at(5, 0, lambda: kill(signal.SIGTERM)))"
    stage.run(*RUN, *words, faults={TRAINER: code}).expect(75)
    corpus(stage, 201)
    stage.run("train", "run").expect(65, "fingerprint")
    stage.run("train", "run", "--checkpoint.allow-data-mismatch=True").expect(
        0, "Resuming after step"
    )
    return "65, then continues with other_data"


def no_text(stage: Stage, what: str) -> str:
    """Uses a corpus that cannot be read."""
    words = corpus(stage)
    path = stage.folder / "text.txt"
    path.unlink()
    if what == "empty":
        path.touch()
    ended = stage.run(*RUN, *words)
    check(ended.code in (64, 65), f"exit code {ended.code}: {ended.errors[-300:]}")
    check("Traceback" not in ended.errors, ended.errors[-500:])
    return f"{ended.code}: {ended.errors.strip()[:80]}"


for _name in ("missing", "empty"):
    case(f"E5 {_name}", f"the corpus is {_name}", "64 or 65 before ranks start")(
        partial(no_text, what=_name)
    )


@case("E6", "a text shorter than one batch", "read repeatedly, finite losses")
def _short(stage: Stage) -> str:
    stage.run(*RUN, *corpus(stage, 12), "--data.validation-fraction=0").expect(0)
    check(len(rows(stage.folder / "run")) == 8, "wrong number of steps")
    return "8 steps"


def loading(stage: Stage, action: str, code: int) -> str:
    """Makes the thread that reads data fail on rank 1."""
    text = f"""
_loaded = Trainer._batch_maker
def _bad(self):
    make = _loaded(self)
    def made(step):
        if step == 5 and self.grid.rank == 1:
            {action}
        return make(step)
    return made
Trainer._batch_maker = _bad
"""
    words = ["--train.comm-timeout-seconds=6", "--launch.watchdog-seconds=60"]
    ended = stage.run(*RUN, *SAVED, *words, faults={TRAINER: text}).expect(code, "rank 1")
    check("Traceback" not in ended.errors, ended.errors[-500:])
    return f"{code}: {ended.errors.strip()[:80]}"


case("E8 error", "reading data fails on rank 1 (EIO)", "65, names the rank")(
    partial(loading, action="fail(errno.EIO)", code=65)
)
case("E8 hang", "reading data hangs on rank 1, timeout 6 s", "72, names the rank")(
    partial(loading, action="time.sleep(40)", code=72)
)


def refused(stage: Stage, words: tuple[str, ...], says: str) -> str:
    """Checks that invalid settings are refused."""
    ended = stage.run(*RUN, *words).expect(64, says)
    check("Traceback" not in ended.errors, ended.errors[-500:])
    check(not (stage.folder / "run").exists(), "a directory was created")
    return f"64: {ended.errors.strip()[:90]}"


for _name, _words, _says in (
    ("F1 world", ("--plan.row=3",), "row"),
    ("F1 batch", ("--plan.global-batch=7",), "batch"),
    ("F2 name", ("--optim.lrr=1",), "optim.lr"),
    ("F3 number", ("--optim.lr=nan",), "optim.lr"),
    ("F7 interval", ("--checkpoint.interval=-2",), "checkpoint.interval"),
):
    case(_name, " ".join(_words), "64 before anything starts")(
        partial(refused, words=_words, says=_says)
    )


@case("F4", "ranks with different settings (another launcher)", "64, names keys and ranks")
def _unequal(stage: Stage) -> str:
    from ranvier.launch import find_free_port

    port = str(find_free_port())
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    other = Stage(Path(f"{stage.folder}-1"), stage.root)
    begun = [
        one.start(
            *RUN,
            f"--optim.lr={lr}",
            ranks=0,
            environment={**ranks, "MASTER_PORT": port, "RANK": who, "LOCAL_RANK": who},
        )
        for one, lr, who in ((stage, "0.01", "0"), (other, "0.02", "1"))
    ]
    ends = [process.end() for process in begun]
    check([end.code for end in ends] == [64, 64], f"exit codes {[end.code for end in ends]}")
    text = "".join(end.errors for end in ends)
    check("optim.lr" in text and "rank 1" in text, text)
    return "64 on both, names optim.lr and rank 1"


@case("F9", "resumed with another number of steps and another batch", "reported, continues")
def _longer(stage: Stage) -> str:
    base(stage)
    words = ["--train.steps=9", "--plan.global-batch=4", "--plan.micro-batch=-1"]
    stage.run("train", "run", *words).expect(
        0, "changed: train.steps", "changed: plan.global_batch"
    )
    return "both are reported"


# ---- numbers ----------------------------------------------------------------------------

BAD = """
_assemble = Trainer.from_run
def _poisoned(*arguments, **options):
    import torch
    made = _assemble(*arguments, **options)
    def poison(module, inputs, output):
        if made.state.step in {steps} and made.grid.rank == 1:
            return output.index_fill(0, torch.tensor([0]), torch.nan)
    next(iter(made.state.model.blocks)).register_forward_hook(poison)
    return made
Trainer.from_run = _poisoned
"""


@case("G1", "a NaN on rank 1 in one step", "skipped on all ranks, counted")
def _one_bad(stage: Stage) -> str:
    faults = {TRAINER: BAD.format(steps=(4,))}
    stage.run(*RUN, *SAVED, faults=faults).expect(0, "(1 of guard.max_skipped_steps=10")
    found = [row["step"] for row in rows(stage.folder / "run") if row["skipped"]]
    check(found == [4], f"skipped: {found}")
    return "step 5 skipped and reported, the run finishes"


@case("G3", "a NaN on rank 1 in more steps than allowed", "74, names a checkpoint")
def _many_bad(stage: Stage) -> str:
    faults = {TRAINER: BAD.format(steps=(4, 5, 6))}
    ended = stage.run(*RUN, *SAVED, "--guard.max-skipped-steps=1", faults=faults)
    ended.expect(74, "resume from run/checkpoints/step-0000000")
    check(folders.find_checkpoints(stage.folder / "run" / "checkpoints"), "no checkpoint")
    return "74, names a checkpoint"


@case("G6", "a bit of a weight flips on rank 1", "74 at the next comparison, names the rank")
def _flip(stage: Stage) -> str:
    code = """
def _flip(self, *_, **__):
    if self.state.step == 4 and self.grid.rank == 1:
        import torch
        weight = next(p for p in self.state.model.parameters() if p.dim() > 1)
        weight.data.view(torch.int32).view(-1)[0] ^= 1
before(Trainer, "compare_replicas", _flip)
"""
    ended = stage.run(*RUN, "--guard.replica-check-interval=4", faults={TRAINER: code}).expect(
        74, "different bits"
    )
    return f"74: {ended.errors.strip()[:80]}"


def resumed(stage: Stage, grid: str) -> str:
    """Stops a run and resumes it on the same grid."""
    code = "before(Trainer, 'issue_step', at(3, 1, lambda: kill(signal.SIGTERM)))"
    stage.run(*RUN, f"--plan.{grid}", faults={TRAINER: code}).expect(75)
    stage.run("train", "run").expect(0, "Resuming after step")
    return same(stage.folder / "run", stage.whole(f"--plan.{grid}"))


for _name in ("row=2", "col=2", "depth=2", "pipe=2"):
    case(f"G9 {_name}", f"stopped and resumed on {_name} ({signal.SIGTERM.name})", "bit-equal")(
        partial(resumed, grid=_name)
    )
