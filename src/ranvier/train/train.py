"""`ranvier train` on one rank: set-up, resume, training loop, and the records of how it ended."""

from __future__ import annotations

import datetime
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from ranvier.checkpoint.directory import find_checkpoints as checkpoints_in
from ranvier.comm.consensus import (
    broadcast_text,
    find_rank_differences,
    max_over_ranks,
    run_and_raise_together,
)
from ranvier.config.resolved_run import ResolvedRun, decisions_to_json
from ranvier.config.run import SETTINGS_FORMAT, RunConfig
from ranvier.data.run_data import data_source
from ranvier.errors import STOPPED_EXIT_CODE, PlanError, RanvierError, WriteError
from ranvier.grid import Grid
from ranvier.html.number_format import format_number
from ranvier.launch import (
    GracefulStop,
    Heartbeat,
    ProcessInfo,
    cache_compiled_kernels,
    keep_freed_memory,
    process_age_seconds,
    read_added_options,
    use_expandable_segments,
    watch_for_hangs,
)
from ranvier.nn.compile import has_cached_graphs
from ranvier.parallel.parallel_model import ParallelModel, WeightSummary
from ranvier.system.terminal import command_line, print
from ranvier.train import import_export, pruning
from ranvier.train.collective_algorithms import (
    describe_algorithms,
    find_nodes,
    make_algorithm_table,
)
from ranvier.train.finish import run_finish
from ranvier.train.loggers import open_loggers
from ranvier.train.memory import breakdown
from ranvier.train.memory.resolve import predict_memory
from ranvier.train.prediction import PredictionCheck
from ranvier.train.report import report
from ranvier.train.resolve import ResolveContext, resolve_device, resolve_run
from ranvier.train.resume import checkpointing
from ranvier.train.resume import run_directory as folders
from ranvier.train.resume.open_directory import hold_open
from ranvier.train.trainer import Trainer, canary_notes


def check_same_settings(run: RunConfig, grid: Grid, device: torch.device) -> None:
    """Raise if ranks have different settings. Communicates: a digest over all axes."""
    mine = {
        f"{section.name}.{key}": repr(value)
        for section in fields(RunConfig)
        for key, value in asdict(getattr(run, section.name)).items()
    }
    lines = find_rank_differences(mine, grid, device)
    if lines:
        rule = "All ranks must have the same settings. Pass the same file and options to each."
        raise PlanError([*lines, rule])


def train(run: ResolvedRun, me: ProcessInfo, stored: list[str] | None = None) -> int:
    """Train as one rank and return the exit code. Communicates: all of a run.

    stored: prepared data; None if the first rank of each machine has to prepare it.
    """
    began = time.perf_counter()
    device = resolve_device(run, me)
    context = ResolveContext(world_size=me.world_size, process=me, device=device)
    run = resolve_run(run, context)
    if device.type == "cuda":
        use_expandable_segments()
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    # Layers may draw from torch's generators: seed them so that every run starts alike.
    torch.manual_seed(run.train.seed)
    if run.plan.compile == "on":
        cache_compiled_kernels()
    grid = Grid.from_plan(
        run.plan,
        rank=me.rank,
        connected=me.world_size > 1,
        ranks_per_node=max(me.local_world_size, 1),
        node_of_rank=find_nodes(me),
        algorithms=make_algorithm_table(run.comm.algorithm, me, device),
        share_gpu=run.launch.share_gpu,
        timeout_seconds=run.train.comm_timeout_seconds,
    )
    grid.trace.check_collectives = run.train.check_collectives
    check_same_settings(run, grid, device)
    source = data_source(run.model)
    if stored is None:
        here = run_and_raise_together(
            lambda: source.prepare(run) if me.local_rank == 0 else [], grid, device
        )
        stored = json.loads(broadcast_text(json.dumps(here), grid, device))
    assert stored is not None
    data = source.open(run, stored)
    restarted = me.attempt > 0
    # The launcher restarts all ranks when one of them is lost, even at the very end.
    if restarted and _is_already_finished(run, grid, device):
        return 0
    folder, candidates, lines, handle = _acquire_dir(run, grid, device, restarted=restarted)
    pulse = Heartbeat(me.heartbeat_file)
    # With a heartbeat file the launcher watches this rank; otherwise it watches itself.
    alone = me.world_size > 1 and not me.heartbeat_file
    grid.trace.on_issue = pulse.record_collective
    watching = (
        watch_for_hangs(pulse, me.rank, run.launch.watchdog_seconds) if alone else nullcontext()
    )
    with handle or nullcontext(), watching:
        run = resolve_run(run, replace(context, output_dir=folder))
        local = me.local_world_size
        trainer = Trainer.from_run(run, grid, device, data, local_ranks=local)
        # `memory.auto` has made a prediction already.
        if device.type == "cuda" and trainer.memory_tracker.fit_problem is None:
            trainer.memory_tracker = predict_memory(
                trainer.run, trainer.state.model, trainer.state.optimizer, device, local
            )
        if run.prediction is not None:
            trainer.notes.append(f"plan: {run.prediction.why}")
            trainer.prediction_check = PredictionCheck(run.prediction)
        trainer.notes += lines
        held = [folder]
        if run.checkpoint.interval >= 0:
            # Creating the saver now also fails early if its directory cannot be written.
            held += [trainer.checkpointer.saver.folder]
        if run.train.init_from and not candidates:
            checkpointing.load_initial_weights(
                trainer.run, trainer.state, Path(run.train.init_from)
            )
            trainer.notes += [f"starting from the weights of {run.train.init_from}"]
            if me.rank == 0:
                import_export.copy_origin_files(run.train.init_from, folder)
        elif run.lora.rank and not candidates:
            line = "adapters are trained on random weights: set train.init_from or import a model"
            trainer.notes += [line]
        if candidates:
            trainer.notes += trainer.checkpointer.resume_from(*candidates)
            # Continue the sums of the earlier launches of this run.
            trainer.meter.phases = dict(folders.read_run_json(folder).get("phases", {}))
            trainer.meter.supervised = folders.read_last_count(
                _other_run_dir(candidates[0], folder) or folder,
                trainer.state.step,
                trainer.meter.supervised_key,
            )
        trainer.notes += canary_notes(run, step=trainer.state.step, samples=trainer.state.samples)
        trainer.notes += pruning.sparsity_lines(trainer.run, trainer.state.parallel)
        trainer.meter.heartbeat = pulse
        if me.rank == 0:
            folders.record_launch(folder, me)
        trainer.meter.add_seconds("start-up", time.perf_counter() - began)
        # All groups exist by now; creating one during a step would block its ranks and is reported.
        grid.seal_groups()
        with (
            hold_open(*held if me.rank == 0 else ()) as directory,
            # From here on a signal to stop leads to a checkpoint, not to an immediate exit.
            GracefulStop(quiet=me.rank > 0, patient=bool(me.heartbeat_file)) as stop,
        ):
            trainer.checkpointer.watch_directory(directory)
            _train_and_record(trainer, folder, stop, origin=candidates[0] if candidates else None)
            # A barrier: a launcher may kill all ranks once one of them has exited.
            max_over_ranks(0, grid, device)
    if trainer.stop_signal and trainer.state.step < run.train.steps:
        return STOPPED_EXIT_CODE
    return 0


def _train_and_record(
    trainer: Trainer, folder: Path, stop: GracefulStop, *, origin: Path | None
) -> None:
    """Announce and run the training; the end of the run is recorded in run.json in any case."""
    first = trainer.grid.rank == 0
    try:
        run_and_raise_together(
            lambda: _announce_run(trainer, folder, origin), trainer.grid, trainer.device
        )
        with trainer.memory_tracker.explain_out_of_memory(trainer.device):
            _training_loop(trainer, folder, stop)
        trainer.meter.heartbeat.begin_section("end")
    except BaseException as error:
        # If the directory was replaced meanwhile, it is not ours to write to.
        if first and trainer.checkpointer.directory.find_missing() != folder:
            _record_end(trainer, folder, f"failed: {_error_line(error)}")
        raise
    if first:
        _print_farewell(trainer, folder)


def _is_already_finished(run: RunConfig, grid: Grid, device: torch.device) -> bool:
    """Whether the run has finished before. Communicates: rank 0's answer, to all."""
    here = (
        grid.rank == 0
        and bool(run.train.output_dir)
        and folders.is_finished(Path(run.train.output_dir))
    )
    return max_over_ranks(int(here), grid, device) > 0


def _acquire_dir(
    run: RunConfig, grid: Grid, device: torch.device, *, restarted: bool
) -> tuple[Path, list[Path], list[str], IO[str] | None]:
    """Claim and lock the run directory on rank 0; returns it, the checkpoints to resume from,
    lines to print, and the lock. Communicates: a text over all axes.
    """

    def claim() -> tuple[Any, IO[str] | None]:
        if grid.rank > 0:
            return None, None
        there = run.train.output_dir and Path(run.train.output_dir).is_dir()
        # An existing directory is locked before anything in it is renamed.
        if there:
            held = folders.lock_dir(Path(run.train.output_dir))
        else:
            held = None
        try:
            folder, candidates, lines = folders.acquire_dir(run, restarted=restarted)
        except BaseException:
            if held is not None:
                held.close()
            raise
        return [str(folder), [*map(str, candidates)], lines], held or folders.lock_dir(folder)

    words, handle = run_and_raise_together(claim, grid, device)
    name, paths, lines = json.loads(broadcast_text(json.dumps(words), grid, device))
    return Path(name), [*map(Path, paths)], lines, handle


def _training_loop(trainer: Trainer, folder: Path, stop: GracefulStop) -> None:
    """Run all steps, write their metrics, and save a checkpoint at the end."""
    if trainer.grid.rank > 0:
        # Every rank has to consume the generator: it drives the steps.
        for _ in trainer.run_steps(stop):
            pass
    else:
        with open_loggers(trainer.run, folder) as sink:
            for count, row in enumerate(trainer.run_steps(stop), 1):
                sink(row)
                if trainer.prediction_check is not None:
                    trainer.prediction_check.report_step(row, counted=trainer.device.type == "cuda")
                # Both steps include work that is done once, such as compilation.
                if count == 2:
                    _report_startup(trainer, folder)
    trainer.save_checkpoint()
    trainer.write_timeline()


def _report_startup(trainer: Trainer, folder: Path) -> None:
    """Print the time from launch to the end of the second step, and the memory usage."""
    seconds = process_age_seconds()
    compiled = ""
    if trainer.run.plan.compile == "on":
        if has_cached_graphs():
            compiled = "found in the cache"
        else:
            compiled = "newly compiled"
    if seconds > 0.0:
        if compiled:
            words = f" (blocks {compiled})"
        else:
            words = ""
        print(f"  two steps completed {seconds:.1f} s after launch{words}", flush=True)
    if trainer.memory_tracker.predicted_usage is not None:
        facts = trainer.memory_tracker.to_dict(trainer.state.optimizer, trainer.device)
        print(*(f"  {line}" for line in breakdown.memory_lines(facts)), sep="\n", flush=True)
    # This must not end a run.
    with suppress(OSError, WriteError):
        trainer.checkpointer.directory.check_present()
        folders.update_run_json(folder, seconds_to_step_2=seconds, compiled=compiled)


def _announce_run(trainer: Trainer, folder: Path, origin: Path | None) -> None:
    """On rank 0, print what is about to be trained and record it in run.json.

    origin: the checkpoint it resumes from.
    """
    if trainer.grid.rank > 0:
        return
    run = trainer.run
    parallel = trainer.state.parallel
    data = trainer.data
    resumed = origin is not None
    trainer.checkpointer.directory.check_present()
    lines = folders.write_header(folder, run, trainer.state.step, _other_run_dir(origin, folder))
    data.save_files(folder)
    groups = describe_groups(parallel, run)
    print(describe_run(run, parallel, trainer.device))
    fingerprint = f"data fingerprint: {data.fingerprint}"
    collectives = describe_algorithms(trainer.grid)
    for line in (*data.summary_lines, fingerprint, *groups, *collectives, *trainer.notes, *lines):
        print(f"  {line}")
    if resumed:
        if trainer.state.step:
            verb = f"Resuming after step {trainer.state.step}"
        else:
            verb = "Starting at step 0"
        print(f"{verb} of {run.train.steps} in {folder}")
    sys.stdout.flush()
    if resumed:
        # A resumed run keeps the time of its first start and its list of restarts.
        before = folders.read_run_json(folder)
    else:
        before = {}
    folders.update_run_json(
        folder,
        format=SETTINGS_FORMAT,
        title=folder.name,
        model=run.model.size,
        unit=run.model_kind.unit,
        parameters=count_parameters(parallel),
        device=device_name(trainer.device),
        world=trainer.grid.world_size,
        grid=describe_grid(run),
        decisions=[*_as_list(before.get("decisions")), *decisions_to_json(run)],
        versions={"python": platform.python_version(), "torch": torch.__version__},
        fingerprint=data.fingerprint,
        algorithms=trainer.grid.algorithms.to_json(),
        corpora=data.summary_lines,
        groups=groups,
        flops_per_step=trainer.meter.flops[0],
        command=command_line("ranvier", *sys.argv[1:], *read_added_options()),
        # The wall time of a run includes the start-up of its trainer.
        started=before.get("started", current_time(ago=trainer.meter.phases.get("start-up", 0.0))),
        finished=None,
        status=folders.UNFINISHED,
        restarts=[*_as_list(before.get("restarts")), trainer.state.step] if resumed else [],
    )


def _other_run_dir(origin: Path | None, folder: Path) -> Path | None:
    """The run directory of a checkpoint, if it is not this run's."""
    if origin is not None:
        run = origin.absolute().parent.parent
    else:
        run = None
    if run is not None and run != folder.absolute():
        return run
    return None


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return []


def _error_line(error: BaseException) -> str:
    """An error as one line."""
    lines = str(error).strip().splitlines()
    if isinstance(error, RanvierError | OSError) and lines:
        return lines[0]
    if lines:
        return f"{type(error).__name__}: {lines[0]}"
    return type(error).__name__


def _try_optional(what: str, work: Callable[[], object]) -> str:
    """Do something optional; if it fails, return the reason as a line."""
    try:
        work()
    # Any error: all steps are done and saved by now, so none of them may fail the run.
    except Exception as error:
        return f"{what} failed: {_error_line(error)}"
    return ""


def _record_end(trainer: Trainer, folder: Path, status: str) -> list[str]:
    """Record how the run ended, then its statistics and its report; returns lines to print.

    The status is written first and on its own, so that a later failure cannot prevent it.
    """

    def record_status() -> None:
        folders.update_run_json(folder, status=status, finished=current_time())

    def record_facts() -> None:
        counts = zip(
            ("nonfinite_steps", "spikes", "skipped_total", "rewinds"),
            trainer.state.guard.counts,
            strict=True,
        )
        more: dict[str, Any] = {**dict(counts), **folders.compute_goodput(folder)}
        folders.update_run_json(folder, phases=trainer.meter.phases, **more)
        memory = trainer.memory_tracker.to_dict(trainer.state.optimizer, trainer.device)
        folders.update_run_json(folder, memory=memory)
        if trainer.prediction_check is not None:
            folders.update_run_json(folder, prediction=trainer.prediction_check.to_dict())

    lines = [
        _try_optional("Writing the status to run.json", record_status),
        _try_optional("Writing the statistics to run.json", record_facts),
        _try_optional("Writing the report", lambda: report.write_report(folder))
        or f"Report: {folder / 'report.html'}",
    ]
    return [line for line in lines if line]


def _print_farewell(trainer: Trainer, folder: Path) -> None:
    """Print how the run ended, a sample, the report, and what to do next."""
    run = trainer.run
    saved = list[Path]()
    with suppress(RanvierError, OSError):
        saved = checkpoints_in(trainer.checkpointer.checkpoint_dir)
    stopped = trainer.stop_signal and trainer.state.step < run.train.steps
    if stopped:
        status = f"stopped by signal {trainer.stop_signal}"
    else:
        status = "finished"
    # Recorded before the sample, as generating one may even end the process.
    lines = _record_end(trainer, folder, status)
    finish = run_finish(run.model_kind)
    if saved and finish is not None and not trainer.stop_signal:
        count = count_parameters(trainer.state.parallel)
        show = partial(finish.show_sample, run, folder, trainer.device, count)
        lines.insert(0, _try_optional("Generating a sample", show))
    print("", *filter(None, lines), sep="\n")
    for line in folders.restart_lines(folders.read_run_json(folder)):
        print(line)
    if stopped:
        if saved:
            where = f"saved in {saved[-1]}"
        else:
            where = "not saved, because checkpoint.interval=-1"
        print(f"Stopped after step {trainer.state.step} of {run.train.steps}; {where}.")
        print(f"Resume with:\n  {command_line('ranvier', 'train', folder)}")
        return
    print("Try next:")
    if saved:
        more = ("--train.steps", 2 * run.train.steps)
        for command in [] if finish is None else finish.next_commands(run, folder, trainer.data):
            print(f"  {command}")
        print(f"  {command_line('ranvier', 'train', folder, *more)}")
    if finish is not None:
        print(f"  {finish.other_data_command}")
    print("  ranvier train --help")


def count_parameters(parallel: ParallelModel) -> int:
    """Number of parameters of the whole model."""
    return sum(weight.num_elements for weight in parallel.weight_summaries.values())


def count_trainable(parallel: ParallelModel) -> int:
    """Number of trainable parameters of the whole model."""
    return sum(x.num_elements for x in parallel.weight_summaries.values() if x.trainable)


def describe_groups(parallel: ParallelModel, run: RunConfig) -> list[str]:
    """One line per parameter group: number of weights, learning rate, weight decay."""
    lines = []
    count = count_trainable(parallel)
    every = count_parameters(parallel)
    if count < every:
        lines.append(f"trainable: {count:,} of {every:,} parameters ({count / every:.2%})")
    if run.optim.lr_rule == "gemstone":
        shape = f"({run.model.embed} · sqrt({run.model.layers}))"
        lines.append(f"learning rate: lr_eff {run.lr_setting:g} / {shape} = {run.peak_lr:.4g}")
    weights = [weight for weight in parallel.weight_summaries.values() if weight.trainable]
    for group in ("matrix", "embedding", "vector"):
        of_group = [weight for weight in weights if weight.param_group == group]
        decay = run.weight_decay if group == "matrix" else 0.0
        scale = float(getattr(run.optim, f"{group}_lr_scale"))
        hidden = [weight for weight in of_group if weight.is_hidden_matrix]
        if not run.optim.needs_whole_matrices:
            lines += _describe_group(group, of_group, run.peak_lr * scale, decay)
            continue
        lines += _describe_group(f"{group} ({run.optim.name})", hidden, run.peak_lr * scale, decay)
        rest = [weight for weight in of_group if not weight.is_hidden_matrix]
        lines += _describe_group(f"{group} (adamw)", rest, run.adamw_peak_lr * scale, decay)
    return lines


def _describe_group(
    name: str, weights: Sequence[WeightSummary], lr: float, decay: float
) -> list[str]:
    """A line about a parameter group; none if it is empty."""
    if not weights:
        return []
    count = sum(weight.num_elements for weight in weights)
    return [
        f"parameter group {name}: {count:,} parameters in {len(weights)} "
        f"{'tensor' if len(weights) == 1 else 'tensors'}, lr {lr:g}, weight decay {decay:g}"
    ]


def describe_grid(run: RunConfig) -> str:
    """The axes with more than one rank, as text."""
    return " · ".join(f"{a} {n}" for a, n in run.plan.degrees.items() if n > 1) or "one rank"


def device_name(device: torch.device) -> str:
    """Human-readable name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU"


def describe_run(run: RunConfig, parallel: ParallelModel, device: torch.device) -> str:
    """One line that describes the model, device, grid and batch."""
    passes = run.plan.num_micro_batches
    return (
        f"{run.model.size}: {format_number(count_parameters(parallel))} parameters in "
        f"{run.train.dtype} on {device_name(device)}, grid: {describe_grid(run)}"
        f"{f' over {run.train.backend}' if parallel.grid.world_size > 1 else ''}; "
        f"{run.plan.global_batch} x {run.data.seq_len} {run.model_kind.unit} per step in "
        f"{passes} {'micro-batch' if passes == 1 else 'micro-batches'}"
    )


def current_time(*, ago: float = 0.0) -> str:
    """Returns the local time `ago` seconds before now in ISO format, to the second."""
    now = datetime.datetime.now().astimezone()
    return (now - datetime.timedelta(seconds=ago)).isoformat(timespec="seconds")
