"""Train: a run from the first line it prints to the last."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import IO, Any

import torch

from ranvier.checkpoint.directory import found as checkpoints_in
from ranvier.comm.consensus import differences, largest, together, told
from ranvier.config.run import Run
from ranvier.data.dataset import Data, open_data
from ranvier.errors import STOPPED, DataError, PlanError, RanvierError, WriteError
from ranvier.grid import Grid
from ranvier.infer.generate import Speaker
from ranvier.launch import (
    Pulse,
    Ranks,
    Stop,
    age,
    environment,
    grow_segments,
    keep_compiled,
    keep_freed_memory,
    triton,
    watched,
)
from ranvier.nn import float8
from ranvier.nn.compile import found
from ranvier.parallel.parallelize import Parallel, parallel_of
from ranvier.system.terminal import command_line, escape_controls, print
from ranvier.train import import_export, lora, prepare_data, pruning
from ranvier.train.build_model import DTYPES
from ranvier.train.health.determinism import check_exact, compiles_exactly
from ranvier.train.loggers import sinks
from ranvier.train.memory import breakdown
from ranvier.train.memory.resolve import foreseen
from ranvier.train.prediction import Comparison, Foretold
from ranvier.train.report import report
from ranvier.train.resume import checkpointing
from ranvier.train.resume import run_directory as folders
from ranvier.train.resume.open_directory import held_open
from ranvier.train.trainer import Trainer

SAMPLED = 300_000_000
"""Parameters up to which a run ends with a sample of text."""


def device_of(run: Run, me: Ranks) -> torch.device:
    """The device of this rank."""
    kind = run.train.device
    if kind == "cuda" and not torch.cuda.is_available():
        raise PlanError("train.device='cuda', but torch sees no CUDA device. Use 'cpu' or 'auto'.")
    if kind == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", me.local_rank % torch.cuda.device_count())


def backend_of(run: Run, me: Ranks, device: torch.device) -> str:
    """The backend of the process groups: nccl needs a device for each rank, or leave to share."""
    backend = run.train.backend
    if backend == "nccl" and device.type != "cuda":
        raise PlanError(f"train.backend='nccl' on {device}. nccl needs CUDA devices. Use 'gloo'.")
    if backend == "gloo" or device.type != "cuda":
        return "gloo"
    # A launcher may show each rank a device of its own and no other.
    count = torch.cuda.device_count()
    own = me.local_world <= count or (me.launcher not in ("", "torchrun") and count == 1)
    if own or run.launch.share_gpu:
        return "nccl"
    if backend == "nccl":
        raise PlanError(
            f"train.backend='nccl' for {me.local_world} ranks on {count} GPU(s). NCCL refuses two "
            "ranks of one host on a GPU, and ranks that share one are slow. Use at most "
            f"{count} rank(s) a node or train.backend='gloo'; launch.share_gpu=True lets them "
            "share it over NCCL, as a test bed."
        )
    return "gloo"


def settled(run: Run, device: torch.device, backend: str = "auto") -> Run:
    """The run with the device, the backend and the type that `auto` means here, and the settings
    of the adapter that it starts from."""
    has = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = run.train.dtype
    if dtype == "auto":
        dtype = "fp32" if device.type == "cpu" else "bf16" if has else "fp16"
    if dtype == "bf16" and not has:
        raise PlanError(
            f"train.dtype='bf16', but {torch.cuda.get_device_name(device)} does not compute in "
            "bf16. It would be emulated, slowly. Use 'fp16' (with its loss scale) or 'fp32'."
        )
    if run.train.fp8 != "off" and device.type == "cuda" and dtype != "bf16":
        raise PlanError(
            f"train.fp8={run.train.fp8!r} with train.dtype={dtype!r}. On cuda products in 8 bits "
            "give bf16. Use train.dtype='bf16' or train.fp8='off'."
        )
    if run.train.fp8 != "off" and not float8.supported(device):
        raise PlanError(
            f"train.fp8={run.train.fp8!r}, but {torch.cuda.get_device_name(device)} does not "
            "multiply in 8 bits. That needs compute capability 8.9 or more. Use train.fp8='off'."
        )
    if run.plan.graph and device.type != "cuda":
        raise PlanError(f"plan.graph=True on {device}. CUDA records graphs. Use plan.graph=False.")
    compiled = run.plan.compile
    if compiled == "auto":
        able = device.type == "cuda" and triton()
        whole = run.plan.depth * run.plan.row * run.plan.col == 1
        repeats = not run.train.deterministic or compiles_exactly()
        compiled = "on" if able and whole and repeats else "off"
    elif compiled == "on" and not (triton() if device.type == "cuda" else _builds()):
        raise PlanError(
            f"plan.compile='on', but nothing compiles for {device.type} here. That needs Triton "
            "and a C compiler on cuda, g++ on cpu. Install them, or use plan.compile='off'."
        )
    if device.type == "cuda":
        check_exact(run)
    words: dict[str, Any] = {"dtype": dtype, "device": device.type, "backend": backend}
    plan = replace(run.plan, compile=compiled)
    return lora.settled(replace(run, plan=plan, train=replace(run.train, **words)))


def _builds() -> bool:
    """Whether there is a C++ compiler, which torch uses on a CPU."""
    return any(shutil.which(name) for name in (*environment("CXX").values(), "g++", "clang++"))


def opened(run: Run, stored: list[str]) -> Data:
    """The tokenized corpora of a run as samples, if the model can name all their tokens."""
    data = open_data(
        stored,
        weights=run.data.weights,
        seq=run.data.seq,
        seed=run.train.seed,
        held_out=run.data.held_out,
        packed=run.data.packed,
        truncate=run.data.truncate,
        learn=run.data.learn,
    )
    words = max((c.manifest.vocab for c in data.corpora if c.manifest.tokenizer), default=0)
    if words > run.model.vocab:
        raise DataError(
            f"model.vocab={run.model.vocab} is smaller than the {words} tokens of the tokenizer. "
            f"The model must name each. Use model.vocab={words} or more."
        )
    data.check(run.model.vocab)
    return data


def ranks_of(run: Run) -> int:
    """Local ranks where nobody has said how many: what the plan needs, in all devices there are."""
    known = math.prod(size for size in run.plan.degrees.values() if size > 0)
    cuda = run.train.device != "cpu" and torch.cuda.is_available()
    there = torch.cuda.device_count() if cuda else 1  # one process with all cores is the fastest
    inferred = any(size == -1 for size in run.plan.degrees.values())
    return known * max(there // known, 1) if inferred else known


def check_memory(run: Run, me: Ranks, device: torch.device) -> None:
    """Refuse a model whose weights and states alone cannot fit: a bound from below."""
    plan, memory, width = run.plan, run.memory, DTYPES[run.train.dtype].itemsize
    split = plan.pipe * plan.depth * plan.row * plan.col
    tokens = max(plan.micro_batch, 1) * run.data.seq
    wide, free = max(width, 4), memory.fit == "auto"
    trained = run.trained * run.prune.share
    moment = {"bf16": 2, "int8": 1}.get(run.optim.moments, wide)
    state = 0.0
    if memory.weights == "device" and not free:  # weights and gradients
        state += (run.model.parameters + trained) * width / split
    if memory.states == "device" and not free:
        state += trained * (2 * moment + (wide if width < 4 else 0)) / plan.world
    layers = run.model.layers / plan.pipe
    kept = tokens * run.model.embed * layers * width / (plan.row * plan.col)
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // me.local_world
    there = min(there, int(memory.limit * 2**30)) if memory.limit > 0.0 else there
    if state + kept > there:
        raise PlanError(
            f"A rank needs {(state + kept) / 2**30:,.2f} GiB at least ({state / 2**30:,.2f} for "
            f"weights, gradients and moments, {kept / 2**30:,.2f} for activations), but has "
            f"{there / 2**30:,.2f} GiB. They must fit. Use a smaller model.size, data.seq or "
            f"plan.batch, {'a larger memory.limit, ' if memory.limit > 0.0 else ''}"
            f"{'' if free else 'memory.fit=auto, '}or more ranks on depth, row or col."
        )


def agree(run: Run, grid: Grid, device: torch.device) -> None:
    """Refuse ranks with different settings. Communicates: a digest over all axes."""
    mine = {
        f"{section.name}.{key}": repr(value)
        for section in fields(run)
        for key, value in asdict(getattr(run, section.name)).items()
    }
    lines = differences(mine, grid, device)
    if lines:
        rule = "All ranks of a run have the same settings. Give each the same file and options."
        raise PlanError([*lines, rule])


def train(
    run: Run, me: Ranks, stored: list[str] | None = None, said: Foretold | None = None
) -> int:
    """Train as one rank; the exit code. Communicates: all of it.

    stored: tokenized corpora; None: the first rank of each machine sees to them. said: what the
    planner says of the run.
    """
    began, device = time.perf_counter(), device_of(run, me)
    if device.type == "cuda":
        grow_segments()
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    run = settled(run, device, backend_of(run, me, device))
    torch.manual_seed(run.train.seed)  # a layer may draw from torch: it begins alike each time
    if run.plan.compile == "on":
        keep_compiled()
    grid = Grid.of(
        run.plan, rank=me.rank, connected=me.world > 1, timeout_seconds=run.train.timeout
    )
    grid.trace.check = run.train.debug
    agree(run, grid, device)
    if stored is None:
        here = together(
            lambda: prepare_data.stored(run) if me.local_rank == 0 else [], grid, device
        )
        stored = json.loads(told(json.dumps(here), grid, device))
    assert stored is not None
    data = opened(run, stored)
    restarted = me.attempt > 0
    if restarted and _is_over(run, grid, device):
        return 0  # a rank was lost when all was done
    folder, candidates, lines, handle = _claimed(run, grid, device, restarted=restarted)
    pulse, alone = Pulse(me.pulse), me.world > 1 and not me.pulse
    grid.trace.heard = pulse.began
    watching = watched(pulse, me.rank, run.launch.watchdog) if alone else nullcontext()
    with handle or nullcontext(), watching:
        placed, local = folders.placed(run, folder), me.local_world
        trainer = Trainer.assemble(placed, grid, device, data, local_ranks=local)
        if device.type == "cuda" and trainer.account.case is None:
            trainer.account = foreseen(trainer.run, trainer.model, trainer.optimizer, device, local)
        trainer.notes += lines if said is None else [f"plan: {said.why}", *lines]
        trainer.compared = None if said is None else Comparison(said)
        held = [folder]
        if run.checkpoint.every >= 0:
            held += [trainer.saver.folder]  # where it cannot write it need not begin
        if run.train.start and not candidates:
            checkpointing.start(trainer, Path(run.train.start))
            trainer.notes += [f"it begins with the weights of {run.train.start}"]
            if me.rank == 0:
                import_export.carried(run.train.start, folder)
        elif run.lora.rank and not candidates:
            line = "adapters are trained beside random weights: give train.start, or import a model"
            trainer.notes += [line]
        if candidates:
            trainer.notes += trainer.resume(*candidates)
            trainer.meter.phases = dict(folders.facts(folder).get("phases", {}))
        trainer.notes += pruning.told(trainer)
        trainer.meter.pulse = pulse
        if me.rank == 0:
            folders.launched(folder, me)
        trainer.meter.spend("start-up", time.perf_counter() - began)
        grid.seal()
        with (
            held_open(*held if me.rank == 0 else ()) as directory,
            Stop(quiet=me.rank > 0, patient=bool(me.pulse)) as stop,  # from here on it is saved
        ):
            trainer.watch_directory(directory)
            _run(trainer, folder, stop, origin=candidates[0] if candidates else None)
            largest(0, grid, device)  # a launcher may end all ranks once one has ended
    return STOPPED if trainer.stopping and trainer.step < run.train.steps else 0


def _run(trainer: Trainer, folder: Path, stop: Stop, *, origin: Path | None) -> None:
    """From the announcement to the farewell; how it ended is written down in any case."""
    first = trainer.grid.rank == 0
    try:
        together(lambda: _announce(trainer, folder, origin), trainer.grid, trainer.device)
        with trainer.account.explained(trainer.device):
            _loop(trainer, folder, stop)
        trainer.meter.pulse.beat("end")
    except BaseException as error:
        if first and trainer.directory.missing() != folder:  # else it is no place of ours
            _close(trainer, folder, f"failed: {_reason(error)}")
        raise
    if first:
        _farewell(trainer, folder)


def _is_over(run: Run, grid: Grid, device: torch.device) -> bool:
    """Whether the run has ended well before. Communicates: what rank 0 sees, to all."""
    here = grid.rank == 0 and bool(run.train.out) and folders.is_finished(Path(run.train.out))
    return largest(int(here), grid, device) > 0


def _claimed(
    run: Run, grid: Grid, device: torch.device, *, restarted: bool
) -> tuple[Path, list[Path], list[str], IO[str] | None]:
    """What rank 0 has claimed and its lock. Communicates: a text over all axes."""

    def claim() -> tuple[Any, IO[str] | None]:
        if grid.rank > 0:
            return None, None
        there = run.train.out and Path(run.train.out).is_dir()
        held = folders.lock(Path(run.train.out)) if there else None  # before anything is renamed
        try:
            folder, candidates, lines = folders.claim(run, restarted=restarted)
        except BaseException:
            if held is not None:
                held.close()
            raise
        return [str(folder), [*map(str, candidates)], lines], held or folders.lock(folder)

    words, handle = together(claim, grid, device)
    name, paths, lines = json.loads(told(json.dumps(words), grid, device))
    return Path(name), [*map(Path, paths)], lines, handle


def _loop(trainer: Trainer, folder: Path, stop: Stop) -> None:
    """Take all steps, write their metrics, save at the end."""
    if trainer.grid.rank > 0:
        for _ in trainer.steps(stop):
            pass
    else:
        with sinks(trainer.run, folder) as sink:
            for count, row in enumerate(trainer.steps(stop), 1):
                sink(row)
                if trainer.compared is not None:
                    trainer.compared.say(row, counted=trainer.device.type == "cuda")
                if count == 2:
                    _started(trainer, folder)
    trainer.save()
    trainer.write_timeline()


def _started(trainer: Trainer, folder: Path) -> None:
    """Say how long it took to get going: the first two steps are done."""
    seconds, compiled = age(), ""
    if trainer.run.plan.compile == "on":
        compiled = "found in the cache" if found() else "compiled anew"
    if seconds > 0.0:
        words = f" (blocks {compiled})" if compiled else ""
        print(f"  two steps were done {seconds:.1f} s after launch{words}", flush=True)
    if trainer.account.predicted is not None:
        print(*(f"  {line}" for line in breakdown.lines(_memory(trainer))), sep="\n", flush=True)
    with suppress(OSError, WriteError):  # no reason to end a run
        trainer.directory.check()
        folders.record(folder, seconds_to_step_2=seconds, compiled=compiled)


def _memory(trainer: Trainer) -> dict[str, Any]:
    return trainer.account.facts(trainer.optimizer, trainer.device)


def _announce(trainer: Trainer, folder: Path, origin: Path | None) -> None:
    """On rank 0, print and write down what is about to be trained.

    origin: a checkpoint it goes on from.
    """
    if trainer.grid.rank > 0:
        return
    run, parallel, data = trainer.run, parallel_of(trainer.model), trainer.data
    resumed = origin is not None
    trainer.directory.check()
    lines = folders.begin(folder, run, trainer.step, _other(origin, folder))
    if data.tokenizer is not None:
        data.tokenizer.save(folder / "tokenizer.json")
    if data.chat is not None:
        data.chat.template.save(folder)
    groups = groups_of(parallel, run)
    print(describe(trainer))
    fingerprint = f"fingerprint of the data: {data.fingerprint}"
    for line in (*data.lines, fingerprint, *groups, *trainer.notes, *lines):
        print(f"  {line}")
    if resumed:
        verb = f"Going on after step {trainer.step}" if trainer.step else "Beginning"
        print(f"{verb} of {run.train.steps} in {folder}")
    sys.stdout.flush()
    before = folders.facts(folder) if resumed else {}
    folders.record(
        folder,
        title=folder.name,
        model=run.model.size,
        parameters=parameters_of(parallel),
        device=device_name(trainer.device),
        world=trainer.grid.world,
        grid=grid_of(run),
        versions={"python": platform.python_version(), "torch": torch.__version__},
        fingerprint=data.fingerprint,
        corpora=data.lines,
        groups=groups,
        command=command_line("ranvier", *sys.argv[1:]),
        started=before.get("started", now()),
        finished=None,
        status=folders.UNFINISHED,
        restarts=[*_list(before.get("restarts")), trainer.step] if resumed else [],
    )


def _other(origin: Path | None, folder: Path) -> Path | None:
    """The run of a checkpoint, if it is another than this."""
    run = origin.absolute().parent.parent if origin is not None else None
    return run if run is not None and run != folder.absolute() else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    if isinstance(error, RanvierError | OSError) and lines:
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _beside(what: str, work: Callable[[], object]) -> str:
    """Do something that a run can do without; if it fails, why, as a line."""
    try:
        work()
    except Exception as error:  # whatever it is: all steps are taken, and what was saved is saved
        return f"No {what}: {_reason(error)}"
    return ""


def _close(trainer: Trainer, folder: Path, status: str) -> list[str]:
    """Write down how the run ended, then what else is known of it, and its report, as lines.

    The status comes first and alone: nothing that may go wrong behind it makes it untrue.
    """

    def record_status() -> None:
        folders.record(folder, status=status, finished=now())

    def record_facts() -> None:
        counts = zip(("bad", "spikes", "skips", "rewinds"), trainer.guard.counts, strict=True)
        more: dict[str, Any] = {**dict(counts), **folders.account(folder)}
        folders.record(folder, phases=trainer.meter.phases, **more)
        folders.record(folder, memory=_memory(trainer))
        if trainer.compared is not None:
            folders.record(folder, foretold=trainer.compared.facts())

    lines = [
        _beside("status in run.json", record_status),
        _beside("account of the run in run.json", record_facts),
        _beside("report", lambda: report.write(folder)) or f"Report: {folder / 'report.html'}",
    ]
    return [line for line in lines if line]


def _farewell(trainer: Trainer, folder: Path) -> None:
    """How the run ended, a sample of text, the report, and what to do next."""
    run, saved = trainer.run, list[Path]()
    with suppress(RanvierError, OSError):
        saved = checkpoints_in(trainer.checkpoints)
    stopped = trainer.stopping and trainer.step < run.train.steps
    status = f"stopped by signal {trainer.stopping}" if stopped else "finished"
    lines = _close(trainer, folder, status)  # before the sample: that may even end the process
    small = parameters_of(parallel_of(trainer.model)) <= SAMPLED
    words = run.train.prompt and (folder / "tokenizer.json").exists()
    if saved and small and words and not trainer.stopping:
        lines.insert(0, _beside("sample of text", lambda: _show_sample(trainer, folder)))
    print("", *filter(None, lines), sep="\n")
    for line in folders.restarted(folders.facts(folder)):
        print(line)
    if stopped:
        where = f"saved in {saved[-1]}" if saved else "not saved, as checkpoint.every=-1"
        print(f"Stopped after step {trainer.step} of {run.train.steps}; {where}.")
        print(f"Go on with:\n  {command_line('ranvier', 'train', folder)}")
        return
    print("Try next:")
    if saved:
        prompt = f"{run.train.prompt.strip()} "
        asks = [f"--prompt={prompt}"] if prompt[0] == "-" else ["--prompt", prompt]
        asks = ["--chat", "YOUR QUESTION"] if trainer.data.chat else asks
        more = ("--train.steps", 2 * run.train.steps)
        print(f"  {command_line('ranvier', 'generate', folder, *asks)}")
        print(f"  {command_line('ranvier', 'train', folder, *more)}")
    print("  ranvier train --data.corpus YOUR.txt --plan.row 2")
    print("  ranvier train --help")


def _show_sample(trainer: Trainer, folder: Path) -> None:
    """Print what the newest checkpoint says, and have it in run.json and the report."""
    prompt, text = trainer.run.train.prompt, said(folder, trainer)
    print("\nA sample of text:\n")
    print("\n".join(f"  {line}" for line in escape_controls(prompt + text).splitlines()))
    folders.record(folder, sample={"prompt": prompt, "text": text})
    report.write(folder)


def said(folder: Path, trainer: Trainer) -> str:
    """What the run's newest checkpoint says after the prompt."""
    speaker = Speaker.of(folder, trainer.device)
    pieces = speaker.speak(
        trainer.run.train.prompt, tokens=80, temperature=0.7, top_k=40, seed=trainer.run.train.seed
    )
    return "".join(pieces)


def parameters_of(parallel: Parallel) -> int:
    """Parameters of the whole model."""
    return sum(elements for _, _, elements in parallel.shapes.values())


def trained_of(parallel: Parallel) -> int:
    """Parameters of the whole model that are trained."""
    return sum(elements for _, trained, elements in parallel.shapes.values() if trained)


def groups_of(parallel: Parallel, run: Run) -> list[str]:
    """One line for each group of weights: how many, learning rate, decay."""
    lines = []
    count, every = trained_of(parallel), parameters_of(parallel)
    if count < every:
        lines.append(f"trained: {count:,} of {every:,} parameters ({count / every:.2%})")
    for group in ("matrix", "embedding", "vector"):
        members = [n for kind, trained, n in parallel.shapes.values() if kind == group and trained]
        count = sum(members)
        decay = run.optim.decay if group == "matrix" else 0.0
        lr = run.lr * float(getattr(run.optim, f"{group}_lr"))
        if members:
            lines.append(
                f"group {group}: {len(members)} weights, {count:,} parameters, lr {lr:g}, "
                f"decay {decay:g}"
            )
    return lines


def grid_of(run: Run) -> str:
    """The axes that have several ranks."""
    return " · ".join(f"{a} {n}" for a, n in run.plan.degrees.items() if n > 1) or "one rank"


def device_name(device: torch.device) -> str:
    """A device as people call it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def describe(trainer: Trainer) -> str:
    """One line on what is about to be trained."""
    run, parallel = trainer.run, parallel_of(trainer.model)
    return (
        f"{run.model.size}: {parameters_of(parallel) / 1e6:.2f} M parameters in "
        f"{run.train.dtype}, on {device_name(trainer.device)}, grid: {grid_of(run)}"
        f"{f' over {run.train.backend}' if trainer.grid.world > 1 else ''}; "
        f"{run.plan.batch} x {run.data.seq} tokens a step in {run.plan.micro_batches} "
        "micro-batch(es)"
    )


def now() -> str:
    """The time, for people."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
