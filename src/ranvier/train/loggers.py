"""Loggers of a run: metrics.jsonl, a progress display, TensorBoard, Weights & Biases.

Each is a sink: called with the metrics of a step, closed at the end. rich, tensorboard and wandb
are imported only where they are used; without rich, or without a terminal, lines are printed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ranvier.config import run as runs
from ranvier.config.run import RunConfig
from ranvier.errors import PlanError
from ranvier.system.terminal import print
from ranvier.train.report.memorization import MATCH_KEY

MetricsRow = dict[str, Any]
MetricsSink = Callable[[MetricsRow], None]
PRINTED_LINES = 20
"""Approximate number of lines that a run without a terminal prints."""

SHOWN_IMBALANCE = 0.1
"""Lost efficiency from which on a line shows that ranks have unequal work."""


def check_loggers(run: RunConfig) -> None:
    """Raise if the package of a logger is missing, before any work is done."""
    missing = [name for name in run.train.loggers if importlib.util.find_spec(name) is None]
    if missing:
        raise PlanError(
            f"train.loggers names {', '.join(missing)}, which is not installed. A logger needs its "
            "package. Install the extra: pip install -e '.[log]'."
        )


def format_metrics(row: MetricsRow, steps: int, unit: str) -> str:
    """The metrics of a step as one line; unit: what throughput counts."""
    parts = [f"step {row['step'] + 1:>5}/{steps}", f"loss {_format_number(row['loss'], '.4f')}"]
    if row["val_loss"] is not None:
        parts.append(f"val loss {row['val_loss']:.4f}")
    if row.get(MATCH_KEY):
        shares = ", ".join(f"{bucket}: {share:.0%}" for bucket, share in row[MATCH_KEY].items())
        parts.append(f"memorized {shares}")
    parts += [f"lr {row['lr']:.2e}", f"norm {_format_number(row['grad_norm'], '.3f')}"]
    parts.append(f"{row[f'{unit}_per_second']:,.0f} {unit}/s")
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%} (non-causal {row['mfu_noncausal']:.1%})")
    parts.append(f"{row['peak_memory_bytes'] / 2**30:.2f} GiB")
    lost = row.get("efficiency_lost_to_imbalance") or 0.0
    if lost > SHOWN_IMBALANCE:
        parts.append(f"{lost:.0%} lost to imbalance")
    if row["skipped_total"]:
        parts.append(f"{row['skipped_total']} skipped")
    return "  ".join(parts)


def _format_number(value: float | None, form: str) -> str:
    if value is None:
        return "not finite"
    return format(value, form)


@contextmanager
def open_loggers(run: RunConfig, folder: Path) -> Iterator[MetricsSink]:
    """Open all loggers of a run as one sink."""
    with ExitStack() as stack:
        # The file comes first, so that a failing display cannot lose a row.
        every: list[MetricsSink] = [stack.enter_context(metrics_file(folder / "metrics.jsonl"))]
        every.append(stack.enter_context(progress_display(run)))
        for name in run.train.loggers:
            every.append(stack.enter_context(tolerate_failures(name, LOGGERS[name](run, folder))))

        def sink(row: MetricsRow) -> None:
            for one in every:
                one(row)

        yield sink


@contextmanager
def tolerate_failures(name: str, log: AbstractContextManager[MetricsSink]) -> Iterator[MetricsSink]:
    """Wrap a logger so that a failure after its start is only a warning, printed once."""
    # An error at the start is raised, as it can still be fixed.
    sink = log.__enter__()
    failed = False

    def warn(error: Exception) -> None:
        nonlocal failed
        failed = True
        text = f"{name} has failed: {type(error).__name__}: {error}. The run continues without it."
        print(text, file=sys.stderr, flush=True)

    def write(row: MetricsRow) -> None:
        try:
            if not failed:
                sink(row)
        except Exception as error:
            warn(error)

    try:
        yield write
    finally:
        before = sys.exc_info()
        try:
            log.__exit__(*before)
        except Exception as error:
            # An exception of the run itself passes through unchanged.
            if error is not before[1]:
                warn(error)


@contextmanager
def metrics_file(path: Path) -> Iterator[MetricsSink]:
    """Append one JSON line per step to a file; a failure is only a warning, printed once."""
    warned = False

    def warn(error: OSError) -> None:
        nonlocal warned
        if not warned:
            text = f"{path} cannot be written: {error.strerror}. The run continues without it."
            print(text, file=sys.stderr, flush=True)
        warned = True

    with ExitStack() as stack:
        # Unbuffered: nothing is left to flush, and to fail, when the file is closed.
        try:
            file = stack.enter_context(path.open("ab", buffering=0))
        except OSError as error:
            warn(error)
            yield lambda row: None
            return

        def write(row: MetricsRow) -> None:
            try:
                file.write(json.dumps(row).encode() + b"\n")
            except OSError as error:
                warn(error)

        yield write


@contextmanager
def progress_display(run: RunConfig) -> Iterator[MetricsSink]:
    """A progress bar on a terminal, otherwise about twenty lines."""
    steps = run.train.steps
    unit = run.model_kind.unit
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield _line_printer(steps, unit)
        return
    from rich import progress

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn())
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    with progress.Progress(*columns, *times, refresh_per_second=4) as bar:
        task = bar.add_task("starting", total=steps)
        last: MetricsRow = {}

        def show(row: MetricsRow) -> None:
            # Keep the latest validation loss visible between evaluations.
            if row["val_loss"] is None:
                row = {**row, "val_loss": last.get("val_loss")}
            last.update(row)
            words = format_metrics(row, steps, unit)
            bar.update(task, completed=row["step"] + 1, description=words)

        yield show


def _line_printer(steps: int, unit: str) -> MetricsSink:
    every = max(steps // PRINTED_LINES, 1)

    def show(row: MetricsRow) -> None:
        step = row["step"]
        # In addition to the regular lines: the last step, evaluations, and skipped steps.
        evaluated = row["val_loss"] is not None or MATCH_KEY in row
        shown = step % every == 0 or step == steps - 1 or evaluated
        if shown or row["skipped"]:
            print(format_metrics(row, steps, unit), flush=True)

    return show


def scalar_metrics(row: MetricsRow) -> MetricsRow:
    """The scalar metrics that have a value, without the step number; of dicts, each value."""
    nested = {
        f"{key}/{name}": value
        for key, values in row.items()
        if isinstance(values, dict)
        for name, value in values.items()
    }
    return nested | {
        key: value
        for key, value in row.items()
        # Lists (such as the loads of experts) have no scalar plot.
        if value is not None and key != "step" and not isinstance(value, (list, dict))
    }


@contextmanager
def tensorboard_logger(run: RunConfig, folder: Path) -> Iterator[MetricsSink]:
    """TensorBoard event files in the run directory."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        writer.add_text("config", f"```\n{runs.to_toml(run)}\n```")

        def log(row: MetricsRow) -> None:
            for key, value in scalar_metrics(row).items():
                writer.add_scalar(key, value, row["step"])

        yield log


@contextmanager
def wandb_logger(run: RunConfig, folder: Path) -> Iterator[MetricsSink]:
    """A Weights & Biases run; its WANDB_* environment selects the account and the mode."""
    import tomllib

    import wandb

    config = tomllib.loads(runs.to_toml(run))
    try:
        log = wandb.init(project="ranvier", name=folder.name, dir=str(folder), config=config)
    except wandb.errors.Error as error:
        raise PlanError(
            f"train.loggers names wandb, which cannot start: {error}. It needs an account or "
            "offline mode. Run `wandb login`, or set WANDB_MODE=offline."
        ) from None
    with log:
        yield lambda row: log.log(scalar_metrics(row), step=row["step"])


LOGGERS: dict[str, Any] = {"tensorboard": tensorboard_logger, "wandb": wandb_logger}
