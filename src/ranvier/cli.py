"""The command line: one verb, one line to a function."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ranvier import launch
from ranvier import run as runs
from ranvier.errors import PlanError
from ranvier.launch import Ranks
from ranvier.run import Run
from ranvier.settings import ModelConfig, nearest

USAGE = """\
usage: ranvier VERB ...

  train [run.toml | RUN]     train a model; without arguments a small one on the texts of Python's
                             standard library; a RUN (its directory) is continued
  generate RUN --prompt ...  text from the newest checkpoint of a run
  report RUN                 write report.html of a run again
  profile RUN | run.toml     where the time of its steps goes, kernel by kernel, on one rank
  simulate [run.toml | RUN]  play a step of its pipeline: time, bubble, what stages wait for; drawn
  data prepare FILE ...      tokenize corpora once, into memory-mapped shards
  data show DIR              what a prepared corpus holds
  verify [run.toml]          compare the configured grid with one process, shrunk, in float64
  doctor [--matmuls]         what this machine has, what is missing and how to get it; or how fast
                             it multiplies the matrices of a model, in which layout

`ranvier VERB --help` lists all settings. Examples:
  ranvier train
  ranvier train --data.corpus my.jsonl --train.steps 500
  ranvier train --plan.row 2 --plan.col 2 --plan.depth 2 --train.steps 5
  ranvier generate runs/tiny --prompt "def main("
  torchrun --nproc-per-node 8 -m ranvier train --plan.row 8
  srun ranvier train run.toml
"""
USAGE_ERROR = PlanError.exit_code
MOST_RANKS = 256
Config = TypeVar("Config")
Settings = TypeVar("Settings", bound=Run)


@dataclass(frozen=True, kw_only=True)
class Arguments(Run):
    """What train and verify are given: a run, and how many local ranks to start."""

    nproc: int = 0
    """Local ranks to start; 0: as many as the plan needs, else one for each GPU, or two on a CPU
    (train), or one (verify)."""


@dataclass(frozen=True, kw_only=True)
class Profile(Run):
    """Where the time of a run's steps goes, kernel by kernel, on one rank.

    The run is put together anew and takes a few steps on its own data; its metrics and checkpoints
    are not touched. Settings of the run can be changed for it.
    """

    steps: int = 2
    """Steps that are profiled."""
    warm: int = 3
    """Steps taken before; the pace of the last is what the report tells."""
    top: int = 15
    """Kernels in the table."""
    out: str = ""
    """Directory of profile.txt, profile.json and trace.json.gz; empty: profile/ inside the run's,
    or NAME-profile/ next to NAME.toml."""


@dataclass(frozen=True, kw_only=True)
class Simulate(Run):
    """A step of a run's pipeline, played without processes, with each policy.

    Writes timeline.svg, timeline.html and timeline-trace.json (for Perfetto).
    """

    times: str = ""
    """TOML table (forward, backward, weight: seconds of each virtual stage; link; jitter;
    [stragglers]) or RUN whose measured times are taken; empty: those of the given RUN, or times
    in proportion to the work of the layers."""
    jitter: float | None = None
    """How much times vary: the deviation of their logarithm."""
    link: float | None = None
    """Time from the end of a job until the next stage has its message."""
    straggler: tuple[str, ...] = ()
    """STAGE=FACTOR: stages that take longer."""
    seed: int = 0
    """Of the jitter."""
    policies: tuple[str, ...] = ()
    """Policies to compare with that of the plan; empty: all."""
    out: str = ""
    """Directory of the drawings; empty: the run's, or this one."""


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Tokenize corpora once, into memory-mapped shards (Megatron pairs) with a fingerprint."""

    out: str = ""
    """Directory to make; empty: data/ and the name of the first file."""
    tokenizer: str = "standard"
    """standard: byte pairs learnt from Python's standard library; bytes; train: learn one from
    these files; or a tokenizer.json."""
    vocab: int = 4096
    """Tokens of a tokenizer that is trained."""
    field: str = "text"
    """Key of a .jsonl record, or column of a .parquet file, that holds the text."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Text from a checkpoint of a run."""

    prompt: str = ""
    """What the text begins with."""
    tokens: int = 100
    """Most tokens to say."""
    temperature: float = 0.8
    """0: always the likeliest token; higher: more surprising."""
    top_k: int = 50
    """Draw from this many likeliest tokens; 0: from all."""
    seed: int = 0
    """Of the draw."""
    step: int = -1
    """Checkpoint after this step; -1: the newest."""
    device: str = "cpu"
    """cpu or cuda."""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """What this machine has, what is missing and how to get it."""

    matmuls: bool = False
    """Instead: time the matrix products of a model in several layouts and keep the fastest."""
    size: str = ""
    """Model whose layers are timed; empty: llama3-1b, or tiny on a CPU."""
    tokens: int = 0
    """Tokens of a micro-batch; 0: 16384, or 512 on a CPU."""
    dtype: str = ""
    """bf16, fp16 or fp32; empty: bf16 where the device has it, or fp32."""


@dataclass(frozen=True)
class Nothing:
    """No settings."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb; exits with its code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        raise SystemExit(0 if words else USAGE_ERROR)
    with launch.reported(Ranks(), quiet=launch.is_follower()):
        if words[0] not in VERBS:
            near = nearest(words[0], VERBS)
            raise PlanError(f"{words[0]!r} is no verb.{near} Verbs are {', '.join(VERBS)}.")
        code = VERBS[words[0]](words[1:])
        sys.stdout.flush()
    raise SystemExit(code)


def asked(
    kind: type[Config], default: Config, verb: str, words: Sequence[str], *, flags: bool = False
) -> Config:
    """The settings that options change in a default; flags: booleans take no value."""
    import tyro

    try:
        settings: Config = tyro.cli(
            kind,
            prog=f"ranvier {verb}",
            args=list(words),
            default=default,
            config=(tyro.conf.FlagCreatePairsOff if flags else tyro.conf.FlagConversionOff,),
        )
    except SystemExit as stop:
        raise SystemExit(USAGE_ERROR if stop.code else 0) from None
    return settings


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first option, and the rest."""
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:first]), list(words[first:])


def parse(verb: str, words: Sequence[str]) -> Arguments:
    """Settings from defaults, then the file or the run, then options."""
    return filled(Arguments, f"{verb} [run.toml]", words)


def filled(kind: type[Settings], usage: str, words: Sequence[str]) -> Settings:
    """As `parse`, for any class of settings that holds a run."""
    files, options = split(words)
    if len(files) > 1:
        raise PlanError(
            f"{files[1]!r} follows {files[0]!r}. One file or run is read. Leave it out."
        )
    size = _option(options, "--model.size")
    if files and os.path.isdir(files[0]):
        if not (Path(files[0]) / "config.toml").exists():
            raise PlanError(
                f"{files[0]} is a directory without config.toml. Give a TOML file, or the "
                "directory of a run to continue it."
            )
        run = runs.load(Path(files[0]) / "config.toml", size=size)
        run = replace(run, train=replace(run.train, out=files[0]))
    elif files:
        run = runs.load(Path(files[0]), size=size)
    else:
        run = Run() if size is None else Run(model=ModelConfig.of(size))
    default = kind(**{f.name: getattr(run, f.name) for f in dataclasses.fields(run)})
    return asked(kind, default, usage, options)


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
    if not 0 <= arguments.nproc <= MOST_RANKS or (
        me is not None and arguments.nproc not in (0, me.world)
    ):
        started = "none are started yet" if me is None else f"a launcher has started {me.world}"
        raise PlanError(
            f"nproc={arguments.nproc}, but {started}. nproc is the number of local ranks to start, "
            f"from 1 to {MOST_RANKS}. Leave it out under a launcher."
        )
    world = me.world if me else arguments.nproc or default
    if me is None and world > MOST_RANKS:
        raise PlanError(
            f"The plan needs {world} ranks. At most {MOST_RANKS} are started on one machine. Use "
            "smaller degrees, or a launcher such as srun or torchrun."
        )
    return me, world


def _run(arguments: Run) -> Run:
    return Run(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(Run)})


def _train(words: Sequence[str]) -> int:
    """Check, tokenize, then train here or start local ranks that do."""
    arguments = parse("train", words)
    from ranvier.train import corpora, folder, show, train

    run = _run(arguments)
    me, world = _world(arguments, train.ranks_of(run))
    run = run.check(world)
    show.check_log(run)
    folder.check_out(run)
    one = me or Ranks(local_world=world)
    device = train.device_of(run, one)
    train.check_memory(train.settled(run, device, train.backend_of(run, one, device)), one, device)
    task = functools.partial(_train_rank, run)
    if me is not None:
        with launch.reported(me):
            return task(me, stored=None)
    stored = corpora.stored(run)
    train.opened(run, stored)  # what is wrong with the data is said before any rank starts
    if world > 1:
        task = functools.partial(task, stored=stored)
        return launch.start(world, task, preload=[train.__name__])
    return task(Ranks(), stored=stored)


def _train_rank(run: Run, me: Ranks, *, stored: list[str] | None) -> int:
    from ranvier.train import train

    device = train.device_of(run, me)
    with launch.joined(me, train.backend_of(run, me, device), run.train.timeout):
        return train.train(run, me, stored)


def _verify(words: Sequence[str]) -> int:
    """Shrink, then compare on as many local ranks as the plan needs."""
    from ranvier import verify

    arguments = parse("verify", words)
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
        return launch.start(world, task, preload=[verify.__name__])
    with launch.reported(me or Ranks()):
        return task(me or Ranks())


def _verify_rank(run: Run, me: Ranks) -> int:
    from ranvier import verify

    with launch.joined(me, "gloo", run.train.timeout):
        return verify.verify(run, me)


def _data(words: Sequence[str]) -> int:
    """prepare or show."""
    verbs: dict[str, Callable[[Sequence[str]], int]] = {"prepare": _prepare, "show": _data_show}
    if not words or words[0] not in verbs:
        if words[:1] in (["--help"], ["-h"]):
            print(USAGE, end="")
            return 0
        what = f"data {words[0]!r} is no verb" if words else "data needs a verb"
        raise PlanError(f"{what}. Verbs are {', '.join(verbs)}. See ranvier --help.")
    return verbs[words[0]](words[1:])


def _prepare(words: Sequence[str]) -> int:
    from ranvier.train import corpora

    inputs, options = split(words)
    settings = asked(Prepare, Prepare(), "data prepare FILE ...", options)
    return corpora.prepare(inputs, **dataclasses.asdict(settings))


def _data_show(words: Sequence[str]) -> int:
    from ranvier.train import corpora

    return corpora.show(Path(_one("data show", "a prepared corpus", words)))


def _generate(words: Sequence[str]) -> int:
    from ranvier.infer import sample

    folders, options = split(words)
    settings = asked(Generate, Generate(), "generate RUN", options)
    folder = Path(_one("generate", "a run", folders))
    return sample.say(folder, **dataclasses.asdict(settings))


def _report(words: Sequence[str]) -> int:
    from ranvier.infer.sample import run_of
    from ranvier.train import report

    folder = Path(_one("report", "a run", words))
    run_of(folder)
    print(report.write(folder))
    return 0


def _profile(words: Sequence[str]) -> int:
    from ranvier.infer.sample import run_of

    names, _ = split(words)
    if names and os.path.isdir(names[0]):
        run_of(Path(names[0]))
    settings = filled(Profile, "profile RUN", words)
    origin = Path(_one("profile", "a run or a TOML file", names))
    from ranvier.train import profile

    own = {name: getattr(settings, name) for name in ("steps", "warm", "top", "out")}
    return profile.profile(_run(settings), origin, **own)


def _simulate(words: Sequence[str]) -> int:
    settings = filled(Simulate, "simulate [run.toml | RUN]", words)
    from ranvier.train import simulate

    names = [field.name for field in dataclasses.fields(simulate.Wanted)]
    wanted = simulate.Wanted(**{name: getattr(settings, name) for name in names})
    return simulate.simulate(_run(settings), wanted)


def _doctor(words: Sequence[str]) -> int:
    settings = asked(Doctor, Doctor(), "doctor", words, flags=True)
    if settings.matmuls:
        from ranvier.train import matmuls

        return matmuls.show(size=settings.size, tokens=settings.tokens, dtype=settings.dtype)
    if settings != Doctor():
        raise PlanError("size, tokens and dtype are those of --matmuls. Add --matmuls.")
    from ranvier import doctor

    return doctor.show(doctor.examine())


def _one(verb: str, what: str, words: Sequence[str]) -> str:
    """The only word a verb takes."""
    names, options = split(words)
    if options:
        asked(Nothing, Nothing(), f"{verb} PATH", options)
    if len(names) != 1:
        raise PlanError(
            f"{verb} was given {len(names)} paths. It reads {what}. Write: ranvier {verb} PATH."
        )
    return names[0]


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "generate": _generate,
    "report": _report,
    "profile": _profile,
    "simulate": _simulate,
    "data": _data,
    "verify": _verify,
    "doctor": _doctor,
}
