"""The command line: one verb, one line to a function."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ranvier import launch
from ranvier.cli.parsing import USAGE_ERROR, asked, filled, given, one, split, two, without
from ranvier.config.run import Run
from ranvier.config.sections import nearest
from ranvier.errors import PlanError
from ranvier.launch import Ranks
from ranvier.system.terminal import print, quote_word

if TYPE_CHECKING:
    from ranvier.config.arguments import Arguments
    from ranvier.train.prediction import Foretold

USAGE = """\
usage: ranvier VERB ...

  train [run.toml | RUN]     train a model; without arguments a small one on the texts of Python's
                             standard library; a RUN (its directory) is continued
  import SRC --to RUN        make a run of a published model (safetensors and config.json)
  export RUN --to DIR        write its weights as transformers and other engines read them
  convert SRC --upcycle 8    make a run of a mixture of experts from a dense run or model
  generate RUN --prompt ...  text from the newest checkpoint of a run; --chat: an answer
  eval RUN --tasks ...       what it is worth: tasks, perplexity, programs that it writes
  report RUN                 write report.html of a run again
  profile RUN | run.toml     where the time of its steps goes, kernel by kernel, on one rank
  simulate [run.toml | RUN]  play a step of its pipeline: time, bubble, what stages wait for; drawn
  plan [run.toml]            the fastest layouts on a cluster, predicted, and why
  dryrun [run.toml | RUN]    one rank of --world many, without devices: its shards, messages, memory
  data prepare FILE ...      tokenize corpora once, into memory-mapped shards
  data show DIR              what a prepared corpus holds
  checkpoint ls RUN          its checkpoints: step, size, grid, state
  checkpoint verify PATH     read every byte of checkpoints and compare checksums
  checkpoint diff A B        settings, facts and tensors in which two checkpoints differ
  checkpoint convert A OUT   write a checkpoint anew, or its weights as plain safetensors
  verify [run.toml]          compare the configured grid with one process, shrunk, in float64: steps
                             and a run that is saved, reloaded and continued
  measure [--to FILE]        how fast this machine computes and communicates, for the planner
  doctor [run.toml | RUN]    what this machine has, what is missing and how to get it; of a plan its
                             communicators

`ranvier VERB --help` lists all settings. Examples:
  ranvier train
  ranvier train --data.corpus my.jsonl --train.steps 500
  ranvier train --plan.row 2 --plan.col 2 --plan.depth 2 --train.steps 5
  ranvier generate runs/tiny --prompt "def main("
  torchrun --nproc-per-node 8 -m ranvier train --plan.row 8
  srun ranvier train run.toml
"""
MOST_RANKS = 256
Verb = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb; exits with its code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        raise SystemExit(0 if words else USAGE_ERROR)
    trains = words[0] == "train"
    with launch.reported(Ranks(), quiet=launch.is_follower(), trains=trains):
        if words[0] not in VERBS:
            near = nearest(words[0], VERBS)
            raise PlanError(f"{words[0]!r} is no verb.{near} Verbs are {', '.join(VERBS)}.")
        code = VERBS[words[0]](words[1:])
        sys.stdout.flush()
    raise SystemExit(code)


def parse(verb: str, words: Sequence[str]) -> Arguments:
    """Settings from defaults, then the file or the run, then options."""
    from ranvier.config.arguments import (
        Arguments,  # options of all verbs take a fiftieth of a second
    )

    return filled(Arguments, f"{verb} [run.toml]", words)


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


def _nodes(arguments: Arguments, me: Ranks | None) -> launch.Nodes | None:
    """The nodes on each of which one command starts local ranks; None if that is not so."""
    wish, nproc = arguments.launch, arguments.nproc
    if me is not None and me.launcher == "srun" and me.local_world == 1 and nproc > 0:
        return launch.Nodes(me.world, me.rank, f"{me.address}:{me.port}")
    if wish.nodes == 1:
        return None
    if me is not None or not 0 < nproc <= MOST_RANKS:
        started = "" if me is None else f" under {me.launcher}, which has started {me.world} ranks"
        raise PlanError(
            f"launch.nodes={wish.nodes} with nproc={nproc}{started}. One command a node starts its "
            f"ranks. Give --nproc from 1 to {MOST_RANKS}, and start it once a node."
        )
    return launch.Nodes(wish.nodes, wish.node, wish.address)


def _run(arguments: Run) -> Run:
    return Run(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(Run)})


def _goes_on(words: Sequence[str]) -> bool:
    """Whether a run is continued whose micro-batch nobody has given now."""
    files, options = split(words)
    given = [word for word in options if word.replace("_", "-").startswith("--plan.micro-batch")]
    return bool(files) and os.path.isdir(files[0]) and not given


def _train(words: Sequence[str]) -> int:
    """Check, tokenize, then train here or start local ranks that do."""
    arguments = parse("train", words)
    from ranvier.train import loggers, prepare_data, train
    from ranvier.train.resume import elastic, run_directory

    run = _run(arguments)
    nodes = _nodes(arguments, launch.ranks())
    if nodes is None:
        me, world = _world(arguments, train.ranks_of(run))
    else:
        me, world = None, nodes.count * arguments.nproc
    run, said = _planned(words, run, world, me, nodes)
    run = elastic.fitted(run, world) if _goes_on(words) else run.check(world)
    choices = [run, *elastic.smaller(run)]
    loggers.check_log(run)
    run_directory.check_out(run)
    for choice in choices:
        who = me or Ranks(local_world=min(arguments.nproc or world, choice.plan.world))
        device = train.device_of(choice, who)
        backend = train.backend_of(choice, who, device)
        train.check_memory(train.settled(choice, device, backend), who, device)
    if me is not None:
        with launch.reported(me):
            return _train_rank([run], None, said, me)
    first = nodes is None or nodes.node == 0
    if first:
        run_directory.check_free(run)
    stored = prepare_data.stored(run)
    train.opened(run, stored)  # what is wrong with the data is said before any rank starts
    if world == 1:
        return _train_rank([run], stored, said, Ranks())
    if first and not run.train.out:  # a restarted run comes back to the same one
        out = run_directory.new(run.model.size)
        choices = [run_directory.placed(one, out) for one in choices]
    task = functools.partial(_train_rank, choices, stored, said)
    policy = launch.Policy(
        retries=run.launch.retries,
        faults=run.launch.faults,
        watchdog=run.launch.watchdog,
        grids=tuple((elastic.named(o.plan.degrees), o.plan.world) for o in choices),
    )
    where, began = Path(choices[0].train.out), time.time()
    return launch.start(
        arguments.nproc or world,
        task,
        preload=[train.__name__],
        policy=policy,
        nodes=nodes,
        timeout_seconds=run.train.timeout,
        ended=lambda code, message: run_directory.close_lost(where, began, code, message),
    )


def _planned(
    words: Sequence[str], run: Run, world: int, me: Ranks | None, nodes: launch.Nodes | None
) -> tuple[Run, Foretold | None]:
    """The run with the planner's layout, if it leaves that open, and what was foretold.

    A run that is continued keeps its layout, or has what was asked for now.
    """
    from ranvier.tools import auto_plan

    files, _ = split(words)
    count = nodes.count if nodes else me.world // me.local_world if me else 1
    if (files and os.path.isdir(files[0])) or not auto_plan.is_open(run, world):
        return auto_plan.kept(run), None
    return auto_plan.planned(run, world, nodes=count)


def _train_rank(
    choices: Sequence[Run], stored: list[str] | None, said: Foretold | None, me: Ranks
) -> int:
    """Train as a rank of the grid that the launcher has chosen."""
    from ranvier.tools import auto_plan
    from ranvier.train import train
    from ranvier.train.health import determinism
    from ranvier.train.resume import run_directory

    run = choices[me.grid]
    if me.attempt:
        run = run_directory.again(run, me.began)
    device = train.device_of(run, me)
    backend, share_gpu = train.backend_of(run, me, device), run.launch.share_gpu
    with (
        determinism.exact(run.train.deterministic and device.type == "cuda"),
        launch.joined(me, backend, run.train.timeout, share_gpu=share_gpu),
    ):
        if said is not None and me.grid == 0:
            run, said = auto_plan.agreed(run, said, me)
        return train.train(run, me, stored, said if me.grid == 0 else None)


def _verify(words: Sequence[str]) -> int:
    """Shrink, then compare on as many local ranks as the plan needs."""
    from ranvier.tools import verify

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
    if me is not None or world == 1:
        with launch.reported(me or Ranks()):
            return task(me or Ranks())
    # A rank that crashes or hangs is what is looked for: it is reported, not waited for.
    policy = launch.Policy(watchdog=run.launch.watchdog, grids=(("", world),))
    code = launch.start(world, task, preload=[verify.__name__], policy=policy)
    if code not in verify.OWN_CODES:
        print(
            f"FAILED: a rank crashed, hung or was lost (exit code {code}) in what the last line "
            "above names. The messages say which rank, and where."
        )
        return 1
    return code


def _verify_rank(run: Run, me: Ranks) -> int:
    from ranvier.tools import verify
    from ranvier.train import train

    backend = "gloo"
    if run.train.backend == "nccl":
        backend = train.backend_of(run, me, verify.device_of(run, me))
    with launch.joined(me, backend, run.train.timeout, share_gpu=run.launch.share_gpu):
        return verify.verify(run, me)


def _data(words: Sequence[str]) -> int:
    """prepare or show."""
    return _below("data", {"prepare": _prepare, "show": _data_show}, words)


def _below(name: str, verbs: dict[str, Verb], words: Sequence[str]) -> int:
    """Run a verb of a verb."""
    if not words or words[0] not in verbs:
        if words[:1] in (["--help"], ["-h"]):
            print(USAGE, end="")
            return 0
        near = nearest(words[0], verbs) if words else ""
        what = f"{name} {words[0]!r} is no verb.{near}" if words else f"{name} needs a verb."
        raise PlanError(f"{what} Verbs are {', '.join(verbs)}. See ranvier --help.")
    return verbs[words[0]](words[1:])


def _checkpoint(words: Sequence[str]) -> int:
    """ls, verify, diff or convert."""
    from ranvier.cli import checkpoint

    def ls(words: Sequence[str]) -> int:
        return checkpoint.listed(Path(one("checkpoint ls", "a run", words)))

    def verify(words: Sequence[str]) -> int:
        return checkpoint.verified(Path(one("checkpoint verify", "a run or a checkpoint", words)))

    def diff(words: Sequence[str]) -> int:
        return checkpoint.compared(*two("checkpoint diff A B", words))

    verbs: dict[str, Verb] = {"ls": ls, "verify": verify, "diff": diff, "convert": _convert}
    return _below("checkpoint", verbs, words)


def _convert(words: Sequence[str]) -> int:
    from ranvier.checkpoint import convert
    from ranvier.cli import checkpoint
    from ranvier.config.arguments import Convert

    paths, options = split(words)
    settings = asked(Convert, Convert(), "checkpoint convert A OUT", options)
    source, out = two("checkpoint convert A OUT", paths)
    origin = checkpoint.checkpoints(source)[-1]
    for name in convert.convert(origin, out, form=settings.form, dtype=settings.dtype):
        print(out / name)
    return 0


def _prepare(words: Sequence[str]) -> int:
    from ranvier.config.arguments import Prepare
    from ranvier.train import prepare_data

    inputs, options = split(words)
    settings = asked(Prepare, Prepare(), "data prepare FILE ...", options)
    return prepare_data.prepare(inputs, **dataclasses.asdict(settings))


def _data_show(words: Sequence[str]) -> int:
    from ranvier.train import prepare_data

    return prepare_data.show(Path(one("data show", "a prepared corpus", words)))


def _generate(words: Sequence[str]) -> int:
    from ranvier.config.arguments import Generate
    from ranvier.infer import generate

    folders, options = split(words)
    settings = asked(Generate, Generate(), "generate RUN", options)
    folder = Path(one("generate", "a run", folders))
    return generate.say(folder, **dataclasses.asdict(settings))


def _import(words: Sequence[str]) -> int:
    from ranvier.config.arguments import Import
    from ranvier.train import import_export

    names, options = split(words)
    settings = asked(Import, Import(), "import SRC --to RUN", options)
    source = one("import", "a published model", names)
    out = Path(settings.to or Path("runs") / Path(source).absolute().name)
    return import_export.say(import_export.imported(source, out))


def _upcycle(words: Sequence[str]) -> int:
    from ranvier.config.arguments import Upcycle
    from ranvier.tools import upcycle
    from ranvier.train import import_export

    names, options = split(words)
    settings = asked(Upcycle, Upcycle(), "convert SRC --upcycle 8", options)
    source = one("convert", "a dense run or a published model", names)
    out = Path(settings.to or Path("runs") / f"{Path(source).absolute().name}-moe")
    given = {k: v for k, v in dataclasses.asdict(settings).items() if k != "to"}
    return import_export.say(upcycle.upcycled(source, out, **given))


def _export(words: Sequence[str]) -> int:
    from ranvier.config.arguments import Export
    from ranvier.train import import_export

    names, options = split(words)
    wanted = asked(Export, Export(), "export RUN --to DIR", options)
    settings = dataclasses.asdict(wanted)
    origin = Path(one("export", "a run", names))
    out = Path(settings.pop("to") or f"{origin}-export")
    if settings.pop("adapter"):
        own = {name: settings[name] for name in ("step", "dtype")}
        return import_export.say(import_export.adapter_exported(origin, out, **own))
    return import_export.say(import_export.exported(origin, out, **settings))


def _eval(words: Sequence[str]) -> int:
    from ranvier.config.arguments import Eval
    from ranvier.eval import run as verb
    from ranvier.infer.generate import run_of
    from ranvier.tools import verify

    names, _ = split(words)
    if names:
        run_of(Path(names[0]))
    settings = filled(Eval, "eval RUN", words, verb.afresh)
    verb.check(settings, names[0] if names else None)
    if settings.samples:
        return verb.counted(settings)
    me, world = _world(settings, verify.world_of(settings.plan))
    run = verb.planned(_run(settings), world, settings)
    task = functools.partial(verb.ranked, run, Path(names[0]), settings)
    if me is None and world > 1:
        return launch.start(world, task, preload=[verb.__name__])
    with launch.reported(me or Ranks()):
        return task(me or Ranks())


def _report(words: Sequence[str]) -> int:
    from ranvier.infer.generate import run_of
    from ranvier.train.report import report

    folder = Path(one("report", "a run", words))
    run_of(folder)
    print(report.write(folder))
    return 0


def _profile(words: Sequence[str]) -> int:
    from ranvier.config.arguments import Profile
    from ranvier.infer.generate import run_of

    names, _ = split(words)
    if names and os.path.isdir(names[0]):
        run_of(Path(names[0]))
    settings = filled(Profile, "profile RUN", words)
    origin = Path(one("profile", "a run or a TOML file", names))
    from ranvier.tools.profiler import report as profile

    own = {name: getattr(settings, name) for name in ("steps", "warm", "top", "out")}
    return profile.profile(_run(settings), origin, **own)


def _plan(words: Sequence[str]) -> int:
    """Search layouts; torch is imported only for models without a name."""
    from ranvier.cli import plan
    from ranvier.planner import request

    settings = filled(plan.Planned, "plan [run.toml]", words)
    if settings.calibrate:
        from ranvier.tools.calibrate import calibrate

        return calibrate(Path(settings.calibrate), settings.cluster)
    own = {field.name for field in dataclasses.fields(settings)}
    chosen = {*request.CHOSEN, "memory.states"}
    carried = [quote_word(word) for word in without(words, own | chosen)]
    return plan.plan(settings, given(words), carried)


def _simulate(words: Sequence[str]) -> int:
    from ranvier.config.arguments import Simulate

    settings = filled(Simulate, "simulate [run.toml | RUN]", words)
    from ranvier.tools import simulate

    return simulate.simulate(_run(settings), settings)


def _measure(words: Sequence[str]) -> int:
    from ranvier.config.arguments import Measure

    settings = asked(Measure, Measure(), "measure", words)
    from ranvier.tools import benchmark_cluster

    me = launch.ranks()
    task = functools.partial(benchmark_cluster.rank, settings.to)
    count = benchmark_cluster.ranks_here(settings.nproc) if me is None else me.world
    if me is None and count > 1:
        return launch.start(count, task, preload=[benchmark_cluster.__name__])
    with launch.reported(me or Ranks()):
        return task(me or Ranks())


def _dryrun(words: Sequence[str]) -> int:
    from ranvier.config.arguments import DryRun

    settings = filled(DryRun, "dryrun [run.toml | RUN]", words)
    from ranvier.tools import dry_run
    from ranvier.tools.verify import world_of

    world = settings.world or world_of(settings.plan)
    run, rank, load = _run(settings), settings.rank, settings.load
    return dry_run.show(run, world=world, rank=rank, load=load, out=settings.json)


def _doctor(words: Sequence[str]) -> int:
    from ranvier.config.arguments import Doctor

    settings = filled(Doctor, "doctor [run.toml | RUN]", words)
    names, _ = split(words)
    run = _run(settings)
    from ranvier.cli import doctor

    asks = bool(names) or run != Run()
    return doctor.show(doctor.examine(doctor.resolve_run(run) if asks else None))


VERBS: dict[str, Verb] = {
    "train": _train,
    "import": _import,
    "export": _export,
    "convert": _upcycle,
    "generate": _generate,
    "eval": _eval,
    "report": _report,
    "profile": _profile,
    "simulate": _simulate,
    "plan": _plan,
    "dryrun": _dryrun,
    "data": _data,
    "checkpoint": _checkpoint,
    "verify": _verify,
    "measure": _measure,
    "doctor": _doctor,
}
