"""`ranvier serve`: starts the HTTP front and the engine processes of a model.

The front runs in this process, and each replica (a coordinate of data) in another one, which starts
the ranks of that replica (`run_replica`). Under a launcher such as torchrun or srun the ranks exist
already: the first one starts the front (`run_front`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ranvier import launch
from ranvier.cli.inference import (
    engine_arguments,
    find_option_problems,
    resolve_inference_plan,
    with_engine_prefix,
)
from ranvier.config.arguments import InferenceOptions
from ranvier.config.plan import Plan
from ranvier.errors import PlanError
from ranvier.infer.server.config import ServeConfig
from ranvier.launch import ProcessInfo

if TYPE_CHECKING:
    from ranvier.infer.model_source import ModelSource
    from ranvier.infer.server.engine_worker import SignalHandler
    from ranvier.infer.server.serve import ServerOptions


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """The model whose weights are drawn with --random."""

    size: str = ""
    """Name of a built-in model, such as llama3-8b."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(InferenceOptions):
    """Serve a model over HTTP with the OpenAI API, and a chat page at /.

    The path is the directory of a run, or of a model in Hugging Face format. Requires the extra
    `serve`. Of the plan, only the degrees, row_splits, col_splits, stage_starts, virtual_stages and
    rank_order are used.
    """

    adapter: tuple[str, ...] = ()
    """LoRA adapters of the model that requests choose by the name of their `model`, as name=PATH of
    a run with adapters or of a directory in PEFT's format. Can be repeated."""
    random: bool = False
    """Serve seeded random weights of --model.size with a made-up tokenizer, for benchmarks."""
    dry_run: bool = False
    """Print the memory of weights and KV cache on a rank, the longest request and how many of them
    fit, without loading the model."""
    cluster: str = ""
    """Machine that --dry-run assumes: the name of a built-in cluster (such as dgx-h200), or a TOML
    file from `ranvier measure`. If empty, this machine."""
    model: RandomModel = field(default_factory=RandomModel)
    serve: ServeConfig = field(default_factory=ServeConfig)


def parse_serve_options(words: Sequence[str]) -> tuple[list[str], ServeOptions]:
    """Returns the paths and the options of the command."""
    from ranvier.cli.parsing import parse_options, split_words

    names, options = split_words(with_engine_prefix(with_joined_values(words, "--adapter")))
    return names, parse_options(ServeOptions, ServeOptions(), "serve [RUN | DIR]", options)


def with_joined_values(words: Sequence[str], option: str) -> list[str]:
    """Returns the words with all values of an option that is repeated after its first use."""
    found: list[str] = []
    values: list[str] = []
    place = None
    is_inside = False
    for word in words:
        name, sign, value = word.partition("=")
        if name == option:
            place = len(found) if place is None else place
            values += [value] if sign else []
            is_inside = not sign
        elif is_inside and not word.startswith("--"):
            values.append(word)
        else:
            is_inside = False
            found.append(word)
    if place is not None:
        found[place:place] = [option, *values]
    return found


def serve_model(path: str, options: ServeOptions, words: Sequence[str]) -> int:
    """Starts the front and the engines. Returns the exit code.

    path: of the model; empty for random weights. words: the words of the command, with which the
    engine processes are started.
    """
    _check_options(path, options)
    me = launch.read_process_info()
    with ExitStack() as stack:
        source = _find_source(path, options, stack)
        plan = resolve_inference_plan(options, source.load_config(), me)
        if options.dry_run:
            from ranvier.infer.serving_memory import DeviceMemory, print_memory

            memory = DeviceMemory.find(options.device, options.cluster)
            return print_memory(source, plan, options.engine, dtype=options.dtype, memory=memory)
        from ranvier.infer.server.serve import check_serve_extra

        check_serve_extra()
        if me is not None:
            return _serve_under_launcher(source, plan, options, words, me)
        return _serve_here(source, plan, options, words)


def _check_options(path: str, options: ServeOptions) -> None:
    """Raises for options that are invalid or contradict each other."""
    problems = [*options.serve.find_problems(), *find_option_problems(options)]
    if options.random == bool(path):
        given = f"{path!r} and --random are" if path else "Neither a path nor --random is"
        problems.append(
            f"{given} given. `ranvier serve` needs the directory of a run or a model, or --random "
            "with --model.size. Give one of them."
        )
    if problems:
        raise PlanError(problems)


def _find_source(path: str, options: ServeOptions, stack: ExitStack) -> ModelSource:
    from ranvier.infer.adapters import AdapterSource, check_adapters
    from ranvier.infer.model_source import ModelSource, write_random_model

    if options.random:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ranvier-model-"))
        source = write_random_model(Path(folder), options.model.size)
    else:
        source = ModelSource.find(Path(path), step=None if options.step < 0 else options.step)
    adapters = [AdapterSource.parse(text) for text in options.adapter]
    check_adapters(adapters, _model_name(source, options))
    return source.with_adapters(adapters)


def _model_name(source: ModelSource, options: ServeOptions) -> str:
    """Returns the name of the model in requests."""
    default = source.size if source.kind == "random" else source.folder.resolve().name
    return options.serve.served_model_name or default


def _serve_here(
    source: ModelSource, plan: Plan, options: ServeOptions, words: Sequence[str]
) -> int:
    """Runs the front, and one engine process for each replica."""
    from ranvier.infer.server.serve import run_server

    ranks = plan.world_size // plan.data

    def start_replica(socket_path: str, index: int) -> subprocess.Popen[bytes]:
        more = ("--plan.data", "1", "--nproc", str(ranks))
        return subprocess.Popen(_program("run_replica", socket_path, str(index), *words, *more))

    return run_server(_server_options(source, plan, options), start_replica)


def _program(function: str, *words: str) -> list[str]:
    """Returns the command that runs a function of this module with words."""
    text = f"import sys; from {__name__} import {function}; sys.exit({function}(sys.argv[1:]))"
    return [sys.executable, "-c", text, *words]


def _server_options(source: ModelSource, plan: Plan, options: ServeOptions) -> ServerOptions:
    from ranvier.infer.server.serve import ServerOptions

    config = dataclasses.replace(options.serve, served_model_name=_model_name(source, options))
    return ServerOptions(
        config=config,
        folder=source.folder,
        num_replicas=plan.data,
        adapters=tuple(adapter.name for adapter in source.adapters),
        seed=options.engine.seed,
    )


def run_replica(words: Sequence[str]) -> int:
    """Runs the ranks of one replica. Returns the exit code.

    words: the socket of the front, the index of the replica, and the words of the command.
    """
    launch.die_with_parent()
    # Ctrl-C and systemd signal all processes; the front decides when its engines end. The ranks
    # inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    path, options = _parse_words(words[2:])
    with ExitStack() as stack, launch.report_errors(ProcessInfo()):
        source = _find_source(path, options, stack)
        plan = resolve_inference_plan(options, source.load_config(), None)
        return _run_ranks(source, plan, options, None, words[0], int(words[1]))


def _parse_words(words: Sequence[str]) -> tuple[str, ServeOptions]:
    """Returns the path and the options of a command that was checked before."""
    names, settings = parse_serve_options(words)
    return names[0] if names else "", settings


def _run_ranks(
    source: ModelSource,
    plan: Plan,
    options: ServeOptions,
    me: ProcessInfo | None,
    socket_path: str,
    index: int = 0,
    on_signal: SignalHandler = signal.SIG_IGN,
) -> int:
    """Runs the ranks of one replica, or the rank that this process is."""
    from ranvier.infer.server import engine_process

    replica = engine_process.ReplicaOptions(
        socket_path=socket_path,
        replica=index,
        **engine_arguments(source, plan, options),
    )
    task = functools.partial(engine_process.run_replica_rank, replica, on_signal=on_signal)
    if me is None and plan.world_size > 1:
        return launch.launch_ranks(plan.world_size, task, preload=[engine_process.__name__])
    with launch.report_errors(me or ProcessInfo()):
        return task(me or ProcessInfo())


def _serve_under_launcher(
    source: ModelSource, plan: Plan, options: ServeOptions, words: Sequence[str], me: ProcessInfo
) -> int:
    """Runs one rank of the only replica; the first rank starts the front as another process."""
    if plan.data > 1:
        raise PlanError(
            f"plan.data={plan.data} under {me.launcher}, which starts one process group. Replicas "
            "must be independent of each other. Use --nproc instead of a launcher, or start one "
            "server for each replica."
        )
    if me.rank != 0:
        # Only the first rank has a connection to the front.
        return _run_ranks(source, plan, options, me, "")
    with tempfile.TemporaryDirectory(prefix="ranvier-") as folder:
        path = str(Path(folder) / "engine.sock")
        # In its own session, it gets the signals of this process only.
        front = subprocess.Popen(
            _program("run_front", path, *words),
            # The front is not a rank.
            env=launch.environment_without_ranks(),
            start_new_session=True,
        )

        def pass_on(number: int, _: FrameType | None) -> None:
            front.send_signal(number)

        try:
            _wait_for_socket(path, front)
            return _run_ranks(source, plan, options, me, path, on_signal=pass_on)
        finally:
            front.terminate()
            front.wait()


def run_front(words: Sequence[str]) -> int:
    """Runs the front of a server whose engine another process runs; words: socket, command."""
    from ranvier.infer.server.serve import run_server

    launch.die_with_parent()
    path, settings = _parse_words(words[1:])
    with ExitStack() as stack, launch.report_errors(ProcessInfo()):
        source = _find_source(path, settings, stack)
        found = _server_options(source, dataclasses.replace(settings.plan, data=1), settings)
        return run_server(dataclasses.replace(found, socket_path=words[0]), None)


def _wait_for_socket(path: str, front: subprocess.Popen[bytes]) -> None:
    """Waits until the front listens for its engine."""
    while not os.path.exists(path):
        if front.poll() is not None:
            raise PlanError(
                f"The front has ended with code {front.returncode}. It must run before its "
                "engine. See its message above."
            )
        time.sleep(0.05)
