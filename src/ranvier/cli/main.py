"""The command line: one function for each command.

Modules that import torch are imported inside the commands, if possible after their options are
parsed, so that help and usage errors appear quickly.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ranvier import __version__, launch
from ranvier.cli.parsing import (
    USAGE_ERROR,
    drop_options,
    given_settings,
    load_run_with_options,
    one_path,
    parse_options,
    split_words,
    two_paths,
)
from ranvier.config import run as runs
from ranvier.config.resolved_run import ResolvedRun, decision_lines
from ranvier.config.run import RunConfig
from ranvier.config.sections import suggest_nearest
from ranvier.errors import CheckpointError, DataError, PlanError
from ranvier.launch import ProcessInfo
from ranvier.system.terminal import print, quote_word

if TYPE_CHECKING:
    from ranvier.config.arguments import RunOptions, TrainOptions
    from ranvier.train.resolve import ResolveContext

USAGE = """\
usage: ranvier COMMAND ...

  train [run.toml | RUN]     train a model, or resume a RUN (the directory of a run); without
                             arguments, a small model on the text of Python's standard library
  import SRC --output RUN    create a run from a pretrained model (safetensors and config.json)
  export RUN --output DIR    write the weights of a run in Hugging Face format
  upcycle SRC --experts 8    create a mixture of experts, a ladder or streams from a dense run or
                             model
  extend-context SRC --max-position N
                             create a run with a longer context and the same weights
  generate RUN --prompt ...  generate text with a run or a model: continue a prompt, chat in the
                             terminal, or answer a file of prompts
  serve [RUN | DIR]          serve a model over HTTP with the API of OpenAI, and a chat page
  eval RUN --tasks ...       evaluate a model: lm-eval tasks, needles in a haystack, perplexity,
                             memorized canaries, code generation
  bench URL                  benchmark a server with the API of OpenAI: latency, throughput, goodput
  scaling-laws RUN ...       fit scaling laws to the losses of runs and prescribe shapes and tokens,
                             or design runs to fit
  report RUN                 write report.html of a run again
  profile RUN | run.toml     profile the steps of a run on one rank, kernel by kernel
  simulate pipeline [run.toml | RUN]
                             simulate a step of the pipeline: time, bubble, waits, timeline
  simulate serving [run.toml | RUN]
                             simulate serving a model: latencies, tokens per second, KV cache
  plan [run.toml]            predict the fastest layouts on a cluster, and explain the choice
  dry-run [run.toml | RUN]   show shards, messages and memory of one of --world ranks, without
                             devices
  data prepare FILE ...      tokenize corpora once, into memory-mapped shards
  data needles [FILE ...]    write a training corpus with facts that are hidden in long texts
  data canaries [FILE ...]   write a file of documents to measure what a run memorizes of them
  data show DIR              show the contents of a prepared corpus
  checkpoint ls RUN          list checkpoints with step, size, grid and state
  checkpoint verify PATH     read every byte of checkpoints and compare checksums
  checkpoint diff A B        compare settings, metadata and tensors of two checkpoints
  checkpoint convert A OUT   rewrite a checkpoint, or write its weights as plain safetensors
  verify [run.toml]          compare the configured grid with one process, with a small model in
                             float64: training steps, and a run that is saved and resumed
  measure [--output FILE]    benchmark compute and communication of this machine for the planner
  doctor [run.toml | RUN]    check what this machine has, what is missing and how to install it;
                             list the communicators of a plan
  completion bash | zsh      print the shell completion script

Use `ranvier COMMAND --help` for the options of a command, `--help SECTION` for one section of its
settings, `--help-all` for all settings, and `ranvier --version` for the version. Options in the
environment variable RANVIER_ADDOPTS are appended to those of train, verify and profile.

Examples:
  ranvier train
  ranvier train --data.sources my.jsonl --train.steps 500
  ranvier train --plan.row 2 --plan.col 2 --plan.depth 2 --train.steps 5
  ranvier generate runs/tiny --prompt "def main("
  torchrun --nproc-per-node 8 -m ranvier train --plan.row 8
  srun ranvier train run.toml
"""
MAX_LOCAL_RANKS = 256
Command = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        raise SystemExit(0 if words else USAGE_ERROR)
    if words[0] in ("--version", "-V", "version"):
        print(f"ranvier {__version__}")
        raise SystemExit(0)
    trains = words[0] == "train"
    with launch.report_errors(ProcessInfo(), quiet=launch.is_follower(), trains=trains):
        # Inside report_errors, so that an unknown command ends with the usual message and exit
        # code.
        if words[0] not in COMMANDS:
            near = suggest_nearest(words[0], COMMANDS)
            raise PlanError(
                f"{words[0]!r} is not a command.{near} Use one of {', '.join(COMMANDS)}."
            )
        if words[0] in MODEL_COMMANDS and not {"-h", "--help", "--help-all"} & {*words}:
            words += launch.read_added_options()
        _check_run_exists(words)
        code = COMMANDS[words[0]](words[1:])
        sys.stdout.flush()
    raise SystemExit(code)


MODEL_COMMANDS = {"train", "verify", "profile"}
"""Commands that run a model with settings, and to which RANVIER_ADDOPTS is appended."""
RUN_COMMANDS = {"eval", "export", "report"}
"""Commands whose first path is the directory of a run."""
PATH_COMMANDS = {"data show", "checkpoint ls", "checkpoint verify", "checkpoint diff"}
"""Subcommands whose paths must exist."""


def _check_run_exists(words: Sequence[str]) -> None:
    """Reports a missing path before torch is imported, which takes seconds."""
    files, _ = split_words(words[1:])
    if words[0] in RUN_COMMANDS:
        # Only `eval` takes several runs.
        for file in files if words[0] == "eval" else files[:1]:
            runs.check_is_run(Path(file))
    if " ".join(words[:2]) in PATH_COMMANDS:
        # The error classes, and exit codes, that the commands use for unreadable input.
        error = DataError if words[0] == "data" else CheckpointError
        for file in files[1:]:
            if not os.path.lexists(file):
                raise error(
                    f"{file} does not exist. `ranvier {words[0]} {words[1]}` reads an existing "
                    "path. Check the path."
                )


def parse_train_options(words: Sequence[str]) -> TrainOptions:
    """Returns settings from defaults, then the file or the run, then options."""
    # Imported here: the options of all commands take 20 ms to import.
    from ranvier.config.arguments import TrainOptions

    return load_run_with_options(TrainOptions, "train [run.toml | RUN]", words)


def _resolve_world(arguments: RunOptions, default: int) -> tuple[ProcessInfo | None, int]:
    """Returns the process as described by a launcher (None without one), and the number of
    ranks."""
    me = launch.read_process_info()
    in_range = 0 <= arguments.nproc <= MAX_LOCAL_RANKS
    if me is None and not in_range:
        raise PlanError(
            f"--nproc {arguments.nproc} is out of range. It is the number of ranks to start on "
            f"this machine, from 1 to {MAX_LOCAL_RANKS}. Use a number in this range, or leave "
            "--nproc out."
        )
    if me is not None and not (in_range and arguments.nproc in (0, me.world_size)):
        raise PlanError(
            f"--nproc {arguments.nproc}, but {me.launcher} has already started {me.world_size} "
            "ranks. --nproc only applies without a launcher. Remove it."
        )
    if me:
        world = me.world_size
    else:
        world = arguments.nproc or default
    # Prevents a typo in a degree from starting thousands of processes.
    if me is None and world > MAX_LOCAL_RANKS:
        raise PlanError(
            f"The plan needs {world} ranks. At most {MAX_LOCAL_RANKS} can be started on one "
            "machine. Use smaller degrees, or a launcher such as srun or torchrun."
        )
    return me, world


def _resolve_nodes(arguments: RunOptions, me: ProcessInfo | None) -> launch.NodeInfo | None:
    """Returns the node if one command per node starts the local ranks, else None."""
    wish = arguments.launch
    nproc = arguments.nproc
    # srun with one task per node and --nproc: each task starts the ranks of its node.
    if me is not None and me.launcher == "srun" and me.local_world_size == 1 and nproc > 0:
        return launch.NodeInfo(me.world_size, me.rank, f"{me.address}:{me.port}")
    if wish.nnodes == 1:
        return None
    if me is not None:
        raise PlanError(
            f"launch.nnodes={wish.nnodes}, but {me.launcher} has already started {me.world_size} "
            "ranks. launch.nnodes is for nodes on which `ranvier train --nproc` starts the ranks. "
            "Remove launch.nnodes."
        )
    if not 0 < nproc <= MAX_LOCAL_RANKS:
        raise PlanError(
            f"launch.nnodes={wish.nnodes} needs --nproc, which is {nproc}. The command on each "
            f"node starts --nproc ranks. Pass --nproc (1 to {MAX_LOCAL_RANKS}) on every node."
        )
    return launch.NodeInfo(wish.nnodes, wish.node_rank, wish.rdzv_endpoint)


def _train_command(words: Sequence[str]) -> int:
    """Resolves the settings, tokenizes, then trains here or starts local ranks."""
    arguments = parse_train_options(words)
    # Before torch is imported, which takes seconds.
    from ranvier.data.sources import check_sources_exist

    check_sources_exist(arguments.data.sources)
    from ranvier.data.run_data import data_source
    from ranvier.train import loggers, resolve, train
    from ranvier.train.resume import elastic, run_directory

    settings = arguments.settings
    nodes = _resolve_nodes(arguments, launch.read_process_info())
    if nodes is None:
        me, world = _resolve_world(arguments, resolve.default_local_ranks(settings))
    else:
        me = None
        world = nodes.num_nodes * arguments.nproc
    context = _launch_context(words, settings, world, me, nodes)
    run = resolve.resolve_run(settings, context)
    # The launcher may restart on a smaller grid after a failure, so every fallback is checked now.
    choices = [run, *resolve.resolve_fallback_runs(run, context)]
    loggers.check_loggers(run)
    run_directory.check_output_dir(run)
    for choice in choices:
        resolve.check_memory(choice, context)
    if arguments.dry_run:
        return _print_decisions(run, context)
    # Under a launcher this process is one rank; the first rank of each machine tokenizes.
    if me is not None:
        with launch.report_errors(me):
            return _train_rank([run], None, me)
    # With several nodes, the first one owns the run directory.
    first = nodes is None or nodes.node_rank == 0
    if first:
        run_directory.check_unlocked(run)
    source = data_source(run.model)
    stored = source.prepare(run)
    # Problems of the data are reported before any rank starts.
    source.open(run, stored)
    if world == 1:
        return _train_rank([run], stored, ProcessInfo())
    # Created here and not by the ranks, so that a restart finds the same directory.
    if first and not run.train.output_dir:
        claimed = replace(context, output_dir=run_directory.make_run_dir(run.model.size))
        choices = [resolve.resolve_output_dir(one, claimed) for one in choices]
    task = functools.partial(_train_rank, choices, stored)
    policy = launch.RestartPolicy(
        max_restarts=run.launch.max_restarts,
        restart_on_error=run.launch.restart_on_error,
        watchdog_seconds=run.launch.watchdog_seconds,
        grids=tuple((elastic.format_grid(o.plan.degrees), o.plan.world_size) for o in choices),
    )
    where = Path(choices[0].train.output_dir)
    began = time.time()
    return launch.launch_ranks(
        arguments.nproc or world,
        task,
        preload=[train.__name__],
        policy=policy,
        nodes=nodes,
        timeout_seconds=run.train.comm_timeout_seconds,
        ended=lambda code, message: run_directory.record_failure(where, began, code, message),
    )


def _launch_context(
    words: Sequence[str],
    settings: RunConfig,
    world: int,
    me: ProcessInfo | None,
    nodes: launch.NodeInfo | None,
) -> ResolveContext:
    """Returns the context in which a run is resolved before its ranks are started."""
    from ranvier.tools.local_cluster import find_local_cluster
    from ranvier.train import resolve

    files, options = split_words(words)
    resumes = bool(files) and os.path.isdir(files[0])
    changed = any(w.replace("_", "-").startswith("--plan.micro-batch") for w in options)
    if nodes:
        count = nodes.num_nodes
    elif me:
        count = me.world_size // me.local_world_size
    else:
        count = 1
    process = me or ProcessInfo(local_world_size=world // count)
    try:
        device = resolve.resolve_device(settings, process)
    except PlanError:
        # Report the problems of all other settings first, together.
        settings.check_and_resolve(world)
        raise
    return resolve.ResolveContext(
        world_size=world,
        process=process,
        device=device,
        find_cluster=functools.partial(find_local_cluster, device, world, count),
        resumes_run=resumes,
        adapts_micro_batch=resumes and not changed,
    )


def _print_decisions(run: ResolvedRun, context: ResolveContext) -> int:
    """Prints what was resolved for a run, and why."""
    from ranvier.train.memory.resolve import preview_choice, settings_to_choose
    from ranvier.train.resolve import resolve_run

    assert context.device is not None
    if settings_to_choose(run, context.device):
        local = context.process.local_world_size
        choice = preview_choice(run, context.device, local_ranks=local)
        run = resolve_run(run, replace(context, memory=choice))
    if not launch.is_follower():
        print(f"{run.model.size} on {run.plan.world_size} rank(s): resolved settings and reasons")
        for line in decision_lines(run):
            print(f"  {line}")
    return 0


def _train_rank(choices: Sequence[ResolvedRun], stored: list[str] | None, me: ProcessInfo) -> int:
    """Trains as one rank of the grid that the launcher chose."""
    from ranvier.train import layout, resolve, train
    from ranvier.train.health import determinism

    run = choices[me.grid_index]
    context = resolve.ResolveContext.for_process(run, me)
    run = resolve.resolve_run(run, context)
    repeats = run.train.deterministic and run.train.device == "cuda"
    with (
        determinism.deterministic_algorithms(repeats),
        launch.join_process_group(
            me,
            run.train.backend,
            run.train.comm_timeout_seconds,
            share_gpu=run.launch.share_gpu,
        ),
    ):
        return train.train(layout.broadcast_layout(run, me), me, stored)


def _verify_command(words: Sequence[str]) -> int:
    """Shrinks the model, then compares on as many local ranks as the plan needs."""
    from ranvier.config.arguments import RunOptions

    arguments = load_run_with_options(RunOptions, "verify [run.toml]", words)
    from ranvier.tools import verify
    from ranvier.train import resolve

    me, world = _resolve_world(arguments, verify.required_ranks(arguments.plan))
    run = resolve.resolve_run(arguments.settings, resolve.ResolveContext(world_size=world))
    if me is None and world > verify.MAX_RANKS:
        raise PlanError(
            f"The plan needs {world} ranks. verify starts at most {verify.MAX_RANKS} on one "
            "machine. Use smaller degrees: an axis behaves the same at 2 and at 200."
        )
    task = functools.partial(_verify_rank, run)
    if me is not None or world == 1:
        with launch.report_errors(me or ProcessInfo()):
            return task(me or ProcessInfo())
    # A crash or hang of a rank is a finding: it is reported and not retried.
    policy = launch.RestartPolicy(
        watchdog_seconds=run.launch.watchdog_seconds, grids=(("", world),)
    )
    code = launch.launch_ranks(world, task, preload=[verify.__name__], policy=policy)
    if code not in verify.EXPECTED_EXIT_CODES:
        print(
            f"FAILED: a rank crashed, hung or was lost (exit code {code}) during the check on the "
            "last line above. The messages above name the rank and where it failed."
        )
        return 1
    return code


def _verify_rank(run: ResolvedRun, me: ProcessInfo) -> int:
    from ranvier.tools import verify
    from ranvier.train import resolve

    # The comparison runs on the CPU unless NCCL is asked for.
    backend = "gloo"
    if run.train.backend == "nccl":
        backend = resolve.resolve_backend(run, me, verify.comparison_device(run, me))
    with launch.join_process_group(
        me, backend, run.train.comm_timeout_seconds, share_gpu=run.launch.share_gpu
    ):
        return verify.verify_grid(run, me)


def _run_subcommand(name: str, words: Sequence[str]) -> int:
    """Runs a subcommand of a command."""
    verbs = SUBCOMMANDS[name]
    if not words or words[0] not in verbs:
        if words[:1] in (["--help"], ["-h"]):
            print(USAGE, end="")
            return 0
        if words:
            near = suggest_nearest(words[0], verbs)
            what = f"'{name} {words[0]}' is not a command.{near}"
        else:
            what = f"{name} needs a subcommand."
        known = " or ".join(f"`ranvier {name} {verb}`" for verb in verbs)
        raise PlanError(f"{what} Use {known}.")
    return verbs[words[0]](words[1:])


def _checkpoint_ls_command(words: Sequence[str]) -> int:
    from ranvier.cli import checkpoint

    return checkpoint.list_checkpoints(
        Path(
            one_path(
                "checkpoint ls",
                "a run",
                words,
                about="List the checkpoints of a run with step, size, grid and state.",
            )
        )
    )


def _checkpoint_verify_command(words: Sequence[str]) -> int:
    from ranvier.cli import checkpoint

    path = Path(
        one_path(
            "checkpoint verify",
            "a run or a checkpoint",
            words,
            about="Read every byte of a checkpoint, or of all of a run, and compare checksums.",
        )
    )
    return checkpoint.verify_checkpoints(path)


def _checkpoint_diff_command(words: Sequence[str]) -> int:
    from ranvier.cli import checkpoint

    return checkpoint.diff_checkpoints(
        *two_paths(
            "checkpoint diff A B",
            words,
            about="Compare settings, metadata and tensors of two checkpoints or runs. The exit "
            "code is 1 if they differ.",
        )
    )


def _checkpoint_convert_command(words: Sequence[str]) -> int:
    from ranvier.checkpoint import convert
    from ranvier.cli import checkpoint
    from ranvier.config.arguments import ConvertOptions

    paths, options = split_words(words)
    settings = parse_options(ConvertOptions, ConvertOptions(), "checkpoint convert A OUT", options)
    source, out = two_paths("checkpoint convert A OUT", paths)
    origin = checkpoint.resolve_checkpoints(source)[-1]
    for name in convert.convert_checkpoint(origin, out, form=settings.form, dtype=settings.dtype):
        print(out / name)
    return 0


def _prepare_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import PrepareOptions
    from ranvier.data.sources import check_sources_exist

    inputs, options = split_words(words)
    settings = parse_options(PrepareOptions, PrepareOptions(), "data prepare FILE ...", options)
    check_sources_exist(inputs)
    from ranvier.train import prepare_data

    return prepare_data.prepare_corpus(inputs, **dataclasses.asdict(settings))


def _data_needles_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import NeedleCorpusOptions
    from ranvier.data.sources import check_sources_exist

    inputs, options = split_words(words)
    settings = parse_options(
        NeedleCorpusOptions, NeedleCorpusOptions(), "data needles [FILE ...]", options
    )
    check_sources_exist(inputs)
    from ranvier.train import prepare_needles

    return prepare_needles.prepare_needle_corpus(inputs, settings)


def _data_canaries_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import CanaryFileOptions
    from ranvier.data.sources import check_sources_exist

    inputs, options = split_words(words)
    settings = parse_options(
        CanaryFileOptions, CanaryFileOptions(), "data canaries [FILE ...]", options
    )
    check_sources_exist(inputs)
    from ranvier.train import prepare_canaries

    return prepare_canaries.write_canary_file(inputs, settings)


def _data_show_command(words: Sequence[str]) -> int:
    from ranvier.train import prepare_data

    return prepare_data.show_corpus(
        Path(
            one_path(
                "data show",
                "a prepared corpus",
                words,
                about="Show the contents of a corpus that `ranvier data prepare` has written.",
            )
        )
    )


def _generate_command(words: Sequence[str]) -> int:
    from ranvier.cli import generate

    path, options = generate.parse_generate_options(words)
    generate.check_is_model(Path(path))
    return generate.generate(path, options, words)


def _serve_command(words: Sequence[str]) -> int:
    from ranvier.cli.serve import parse_serve_options, serve_model

    names, settings = parse_serve_options(words)
    path = one_path("serve", "a run or a model", names) if names else ""
    return serve_model(path, settings, words)


def _import_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import ImportOptions
    from ranvier.system.model_hub import find_model

    names, options = split_words(words)
    settings = parse_options(ImportOptions, ImportOptions(), "import SRC --output RUN", options)
    source = one_path("import", "a pretrained model", names)
    out = Path(settings.output or Path("runs") / Path(source).absolute().name)
    find_model(source)
    from ranvier.train import import_export

    return import_export.print_lines(import_export.import_model(source, out))


def _upcycle_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import UpcycleOptions
    from ranvier.system.model_hub import find_model

    names, options = split_words(words)
    settings = parse_options(UpcycleOptions, UpcycleOptions(), "upcycle SRC --experts 8", options)
    source = one_path("upcycle", "a dense run or a pretrained model", names)
    chosen = [
        f"--{name.replace('_', '-')} {value}"
        for name in ("experts", "ladder_layers", "parscale_streams")
        if (value := getattr(settings, name))
    ]
    if len(chosen) > 1:
        raise PlanError(
            f"upcycle got {' and '.join(chosen)}. Each makes another model. Use one of them, and "
            "then the other one on its result."
        )
    if not chosen:
        raise PlanError(
            "upcycle got no number of experts, ladder layers or streams. One of them says what the "
            "model becomes. Use --experts 8, --ladder-layers 2 or --parscale-streams 4."
        )
    ending = "moe"
    if settings.ladder_layers:
        ending = "ladder"
    elif settings.parscale_streams:
        ending = "streams"
    out = Path(settings.output or Path("runs") / f"{Path(source).absolute().name}-{ending}")
    find_model(source)
    from ranvier.tools import upcycle, upcycle_ladder, upcycle_streams
    from ranvier.train import import_export

    if settings.ladder_layers:
        lines = upcycle_ladder.upcycle_to_ladder(
            source, out, ladder_layers=settings.ladder_layers, step=settings.step
        )
        return import_export.print_lines(lines)
    if settings.parscale_streams:
        lines = upcycle_streams.upcycle_to_streams(
            source,
            out,
            streams=settings.parscale_streams,
            seed=settings.seed,
            step=settings.step,
        )
        return import_export.print_lines(lines)
    # All other options have the names of the function's arguments.
    others = ("output", "ladder_layers", "parscale_streams")
    given = {k: v for k, v in dataclasses.asdict(settings).items() if k not in others}
    return import_export.print_lines(upcycle.upcycle_model(source, out, **given))


def _extend_context_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import ExtendContextOptions
    from ranvier.system.model_hub import find_model

    names, options = split_words(words)
    settings = parse_options(
        ExtendContextOptions,
        ExtendContextOptions(),
        "extend-context SRC --max-position 131072",
        options,
    )
    source = one_path("extend-context", "a run or a pretrained model", names, name="SRC")
    name = f"{Path(source).absolute().name}-{settings.max_position}"
    out = Path(settings.output or Path("runs") / name)
    find_model(source)
    from ranvier.tools import extend_context
    from ranvier.train import import_export

    # All other options have the names of the function's arguments.
    given = {k: v for k, v in dataclasses.asdict(settings).items() if k != "output"}
    return import_export.print_lines(extend_context.extend_model(source, out, **given))


def _export_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import ExportOptions
    from ranvier.train import import_export

    names, options = split_words(words)
    wanted = parse_options(ExportOptions, ExportOptions(), "export RUN --output DIR", options)
    settings = dataclasses.asdict(wanted)
    origin = Path(one_path("export", "a run", names))
    out = Path(settings.pop("output") or f"{origin}-export")
    if settings.pop("adapter"):
        own = {name: settings[name] for name in ("step", "dtype")}
        return import_export.print_lines(import_export.export_adapter(origin, out, **own))
    return import_export.print_lines(import_export.export_model(origin, out, **settings))


def _eval_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import EvalOptions
    from ranvier.eval import run as verb
    from ranvier.infer.load import load_config_from_dir
    from ranvier.tools import verify

    # Fails early with a clear message if a path is not a run.
    names, options = split_words(words)
    for name in names:
        load_config_from_dir(Path(name))
    # Each run has its own model and plan; the options are those of all.
    settings, *others = (
        load_run_with_options(EvalOptions, "eval RUN ...", some, verb.single_rank_run)
        for some in [[name, *options] for name in names] or [options]
    )
    verb.check_options(settings, *names)
    # Needs neither a model nor ranks.
    if settings.samples_file:
        return verb.score_samples(settings)
    me, world = _resolve_world(settings, verify.required_ranks(settings.plan))
    runs = [verb.resolve_plan(one.settings, world, one) for one in (settings, *others)]
    task = functools.partial(verb.eval_rank, runs, [Path(name) for name in names], settings)
    if me is None and world > 1:
        return launch.launch_ranks(world, task, preload=[verb.__name__])
    with launch.report_errors(me or ProcessInfo()):
        return task(me or ProcessInfo())


def _bench_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import BenchOptions

    names, options = split_words(words)
    settings = parse_options(BenchOptions, BenchOptions(), "bench URL", options)
    url = one_path("bench", "the URL of a server, such as http://127.0.0.1:8000", names, name="URL")
    from ranvier.infer import bench

    return bench.run_benchmark(url, settings)


def _scaling_laws_command(words: Sequence[str]) -> int:
    """Fits laws with numpy; imports torch only to examine this machine for a design."""
    from ranvier.config.arguments import ScalingLawsOptions

    paths, options = split_words(words)
    settings = parse_options(
        ScalingLawsOptions, ScalingLawsOptions(), "scaling-laws RUN ...", options
    )
    from ranvier.cli import scaling_laws

    return scaling_laws.run_scaling_laws(paths, settings)


def _report_command(words: Sequence[str]) -> int:
    from ranvier.infer.load import load_config_from_dir
    from ranvier.train.report import report

    folder = Path(one_path("report", "a run", words, about="Write report.html of a run again."))
    load_config_from_dir(folder)
    print(report.write_report(folder))
    return 0


def _profile_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import ProfileOptions

    names, _ = split_words(words)
    if names and os.path.isdir(names[0]):
        runs.check_is_run(Path(names[0]))
    settings = load_run_with_options(ProfileOptions, "profile RUN", words)
    origin = Path(one_path("profile", "a run or a TOML file", names))
    from ranvier.tools.profiler import report as profile

    own = {name: getattr(settings, name) for name in ("steps", "warmup_steps", "top", "output")}
    return profile.profile_run(settings.settings, origin, **own)


def _plan_command(words: Sequence[str]) -> int:
    """Searches layouts; imports torch only for models without a built-in name."""
    from ranvier.cli import plan
    from ranvier.planner import request

    settings = load_run_with_options(plan.PlanOptions, "plan [run.toml]", words)
    if settings.calibrate:
        from ranvier.tools.calibrate import calibrate_cluster

        return calibrate_cluster(Path(settings.calibrate), settings.cluster)
    # The printed train command repeats the user's options, without the options of `plan` itself
    # and without settings that the planner chooses.
    own = {field.name for field in dataclasses.fields(settings)}
    chosen = {*request.COMMAND_SETTINGS, "memory.optimizer_states"}
    carried = [quote_word(word) for word in drop_options(words, own | chosen)]
    return plan.run_plan_command(settings, given_settings(words), carried)


def _simulate_pipeline_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import SimulateOptions

    settings = load_run_with_options(SimulateOptions, "simulate pipeline [run.toml | RUN]", words)
    from ranvier.tools import simulate

    return simulate.simulate_run(settings.settings, settings)


def _simulate_serving_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import SimulateServingOptions

    settings = load_run_with_options(
        SimulateServingOptions, "simulate serving [run.toml | RUN]", words
    )
    from ranvier.tools import simulate_serving

    return simulate_serving.run_simulation(settings)


def _measure_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import MeasureOptions

    settings = parse_options(MeasureOptions, MeasureOptions(), "measure", words)
    from ranvier.tools import benchmark_cluster

    me = launch.read_process_info()
    task = functools.partial(benchmark_cluster.measure_as_rank, settings.output)
    if me is None:
        count = benchmark_cluster.count_local_ranks(settings.nproc)
    else:
        count = me.world_size
    if me is None and count > 1:
        return launch.launch_ranks(count, task, preload=[benchmark_cluster.__name__])
    with launch.report_errors(me or ProcessInfo()):
        return task(me or ProcessInfo())


def _dry_run_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import DryRunOptions

    settings = load_run_with_options(DryRunOptions, "dry-run [run.toml | RUN]", words)
    from ranvier.tools import dry_run, longest_sequence
    from ranvier.tools.verify import required_ranks

    world = settings.world or required_ranks(settings.plan)
    run = settings.settings
    if settings.longest_sequence or longest_sequence.uses_host_memory(run):
        resolved = dry_run.resolve_without_device(run, world=world)
        return longest_sequence.show_memory_prediction(resolved, longest=settings.longest_sequence)
    return dry_run.show_dry_run(
        run,
        world=world,
        rank=settings.rank,
        expert_imbalance=settings.expert_imbalance,
        output=settings.output,
    )


def _doctor_command(words: Sequence[str]) -> int:
    from ranvier.config.arguments import DoctorOptions

    settings = load_run_with_options(DoctorOptions, "doctor [run.toml | RUN]", words)
    names, _ = split_words(words)
    run = settings.settings
    from ranvier.cli import doctor

    # Communicators are listed only if a run or any setting was given.
    asks = bool(names) or run != RunConfig()
    return doctor.print_findings(
        doctor.examine_machine(doctor.resolve_ranks(run) if asks else None)
    )


def _completion_command(words: Sequence[str]) -> int:
    """Prints a script that completes commands and options."""
    from ranvier.cli import completion

    shell = one_path(
        "completion",
        "the name of a shell: bash or zsh",
        words,
        about="Print the completion script for SHELL: bash or zsh.",
        name="SHELL",
    )
    print(completion.completion_script(shell, COMMANDS, SUBCOMMANDS), end="")
    return 0


SUBCOMMANDS: dict[str, dict[str, Command]] = {
    "data": {
        "prepare": _prepare_command,
        "needles": _data_needles_command,
        "canaries": _data_canaries_command,
        "show": _data_show_command,
    },
    "checkpoint": {
        "ls": _checkpoint_ls_command,
        "verify": _checkpoint_verify_command,
        "diff": _checkpoint_diff_command,
        "convert": _checkpoint_convert_command,
    },
    "simulate": {
        "pipeline": _simulate_pipeline_command,
        "serving": _simulate_serving_command,
    },
}
COMMANDS: dict[str, Command] = {
    "train": _train_command,
    "import": _import_command,
    "export": _export_command,
    "upcycle": _upcycle_command,
    "extend-context": _extend_context_command,
    "generate": _generate_command,
    "serve": _serve_command,
    "eval": _eval_command,
    "bench": _bench_command,
    "scaling-laws": _scaling_laws_command,
    "report": _report_command,
    "profile": _profile_command,
    "simulate": functools.partial(_run_subcommand, "simulate"),
    "plan": _plan_command,
    "dry-run": _dry_run_command,
    "data": functools.partial(_run_subcommand, "data"),
    "checkpoint": functools.partial(_run_subcommand, "checkpoint"),
    "verify": _verify_command,
    "measure": _measure_command,
    "doctor": _doctor_command,
    "completion": _completion_command,
}
