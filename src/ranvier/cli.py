"""The command line: one verb, one line to a function."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ranvier import launch
from ranvier import run as runs
from ranvier.errors import PlanError
from ranvier.launch import Ranks
from ranvier.run import ModelConfig, Run

USAGE = """\
usage: ranvier VERB [run.toml] [--nproc N] [--section.setting VALUE ...]

  train     train a model; without arguments a small one on the standard library's sources
  verify    compare the configured grid with one process on a shrunk model, in float64

`ranvier VERB --help` lists all settings. Examples:
  ranvier train
  ranvier train --nproc 8 --plan.row 2 --plan.col 2 --plan.depth 2 --train.steps 5
  ranvier verify --plan.row 4 --plan.depth 2
  torchrun --nproc-per-node 8 -m ranvier train --plan.row 8
"""
USAGE_ERROR = 64


@dataclass(frozen=True, kw_only=True)
class Arguments(Run):
    """What a verb is given: a run, and how many local ranks to start."""

    nproc: int = 0
    """Local ranks to start; 0: one (train), or as many as the plan needs (verify)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb; exits with its code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verbs: dict[str, Callable[[Arguments], int]] = {"train": _train, "verify": _verify}
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        raise SystemExit(0 if words else USAGE_ERROR)
    if words[0] not in verbs:
        print(f"ranvier: {words[0]!r} is no verb. Verbs are {', '.join(verbs)}.", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)
    with launch.reported(Ranks()):
        code = verbs[words[0]](parse(words[0], words[1:]))
    raise SystemExit(code)


def parse(verb: str, words: Sequence[str]) -> Arguments:
    """Settings from defaults, then the file, then options."""
    import tyro

    words = list(words)
    file = words.pop(0) if words and not words[0].startswith("-") else None
    size = _option(words, "--model.size")
    if file is not None:
        run = runs.load(Path(file), size=size)
    else:
        run = Run() if size is None else Run(model=ModelConfig.of(size))
    default = Arguments(**{f.name: getattr(run, f.name) for f in dataclasses.fields(run)})
    try:
        parsed: Arguments = tyro.cli(
            Annotated[Arguments, tyro.conf.arg(name="")],
            prog=f"ranvier {verb} [run.toml]",
            args=words,
            default=default,
            config=(tyro.conf.FlagConversionOff,),
        )
    except SystemExit as stop:
        raise SystemExit(USAGE_ERROR if stop.code else 0) from None
    return parsed


def _option(words: Sequence[str], name: str) -> str | None:
    """The last value given to an option."""
    found = None
    for i, word in enumerate(words):
        if word.startswith(f"{name}="):
            found = word.partition("=")[2]
        if word == name and i + 1 < len(words):
            found = words[i + 1]
    return found


def _world(arguments: Arguments, default: int) -> tuple[Ranks | None, int]:
    """Who a launcher says I am, and how many ranks there are."""
    me = launch.ranks()
    if arguments.nproc < 0 or (me is not None and arguments.nproc not in (0, me.world)):
        started = "none are started yet" if me is None else f"a launcher has started {me.world}"
        raise PlanError(
            f"nproc={arguments.nproc}, but {started}. nproc is the number of local ranks to start, "
            "from 1. Leave it out under a launcher."
        )
    return me, me.world if me else arguments.nproc or default


def _run(arguments: Arguments) -> Run:
    return Run(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(Run)})


def _train(arguments: Arguments) -> int:
    """Check, then train here or start local ranks that do."""
    from ranvier.train import trainer

    me, world = _world(arguments, 1)
    run = _run(arguments).check(world)
    trainer.check_data(run)
    task = functools.partial(_train_rank, run)
    if me is None and world > 1:
        return launch.start(world, task, preload=["ranvier.train.trainer"])
    with launch.reported(me or Ranks()):
        return task(me or Ranks())


def _train_rank(run: Run, me: Ranks) -> int:
    from ranvier.train import trainer

    backend = trainer.backend_of(run, me, trainer.device_of(run, me))
    with launch.joined(me, backend, run.train.timeout):
        trainer.train(run, me)
    return 0


def _verify(arguments: Arguments) -> int:
    """Shrink, then compare on as many local ranks as the plan needs."""
    from ranvier import verify

    run = _run(arguments)
    me, world = _world(arguments, verify.world_of(run.plan))
    run = run.check(world)
    if me is None and world > verify.MOST_RANKS:
        raise PlanError(
            f"The plan needs {world} ranks. verify starts at most {verify.MOST_RANKS} on one "
            "machine. Use smaller degrees; an axis behaves alike at 2 and at 200."
        )
    task = functools.partial(_verify_rank, run)
    if me is None and world > 1:
        return launch.start(world, task, preload=["ranvier.verify"])
    with launch.reported(me or Ranks()):
        return task(me or Ranks())


def _verify_rank(run: Run, me: Ranks) -> int:
    from ranvier import verify

    with launch.joined(me, "gloo", run.train.timeout):
        return verify.verify(run, me)
