"""Losses of runs as a table: shape, tokens, FLOPs, device seconds and held-out loss.

A table has one row per loss. Losses before the learning rate decays (hot) and after a cooldown
(cooled) follow different laws and are kept apart. Rows come from the directories of runs, or from
JSONL files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.config.run import RunConfig, check_is_run, load_run_config
from ranvier.config.sections import DecoderModelConfig, suggest_nearest
from ranvier.errors import DataError
from ranvier.scaling.flops import GEMSTONE_SEQ, GEMSTONE_VOCAB, FlopShape, gemstone_parameters
from ranvier.scaling.minimize import Array
from ranvier.system import safe_files

COLUMNS = ("width", "depth", "parameters", "tokens", "flops", "device_seconds", "loss")
ALIASES = {
    "run_name": "run",
    "params_active_precise": "parameters",
    "final_loss": "loss",
}
"""Names in the files of the Gemstones suite."""
ROW_KEYS = (
    "run",
    "width",
    "depth",
    "parameters",
    "tokens",
    "loss",
    "flops_per_token",
    "device_seconds_per_token",
    "vocab",
    "seq_len",
    "cooled",
    "seconds_per_step",
    "num_nodes",
    "step",
)
DEVICES_PER_NODE = 8
"""Devices of a node in rows with num_nodes and seconds_per_step (one Frontier node)."""
LARGEST_NUMBER = 1e30
"""Largest number of a row."""
HOT_TOLERANCE = 1e-6
"""A learning rate this close to its peak, relatively, has not begun to decay."""


@dataclass(frozen=True)
class LossTable:
    """Losses of runs, one per row."""

    runs: tuple[str, ...]
    """Names of the runs."""
    run_index: np.ndarray[Any, np.dtype[np.int64]]
    """Index of the run of each row."""
    values: Mapping[str, Array]
    """Columns by name; device seconds are nan where unknown."""

    def __len__(self) -> int:
        return len(self.run_index)

    def column(self, name: str) -> Array:
        """Returns a column by name."""
        return self.values[name]

    @property
    def loss(self) -> Array:
        """Held-out losses."""
        return self.values["loss"]

    @property
    def has_seconds(self) -> bool:
        """Whether the time of all rows is known."""
        return bool(np.isfinite(self.values["device_seconds"]).all())

    def select(self, rows: np.ndarray[Any, Any]) -> LossTable:
        """Returns the table with these rows only."""
        return LossTable(
            self.runs, self.run_index[rows], {k: v[rows] for k, v in self.values.items()}
        )

    def to_records(self, *, cooled: bool) -> list[dict[str, Any]]:
        """Returns one JSON object per row."""
        found = []
        for i in range(len(self)):
            record: dict[str, Any] = {"run": self.runs[int(self.run_index[i])]}
            for name in ("width", "depth", "parameters", "tokens"):
                record[name] = int(self.values[name][i])
            tokens = record["tokens"]
            record["loss"] = float(self.values["loss"][i])
            record["flops_per_token"] = float(self.values["flops"][i]) / tokens
            seconds = float(self.values["device_seconds"][i])
            if math.isfinite(seconds):
                record["device_seconds_per_token"] = seconds / tokens
            record["cooled"] = cooled
            found.append(record)
        return found


class TableBuilder:
    """Collects rows into a table."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.index: list[int] = []
        self.rows: list[tuple[float, ...]] = []

    def add(self, run: str, values: Mapping[str, float]) -> None:
        """Adds a loss of a run; values: all of `COLUMNS`."""
        if run not in self.runs:
            self.runs.append(run)
        self.index.append(self.runs.index(run))
        self.rows.append(tuple(float(values[name]) for name in COLUMNS))

    def build(self) -> LossTable:
        """Returns the table."""
        columns = np.array(self.rows, dtype=np.float64).reshape(len(self.rows), len(COLUMNS))
        return LossTable(
            tuple(self.runs),
            np.array(self.index, dtype=np.int64),
            {name: columns[:, i].copy() for i, name in enumerate(COLUMNS)},
        )


@dataclass(frozen=True)
class Collection:
    """All losses that were found."""

    hot: LossTable
    cooled: LossTable
    notes: tuple[str, ...]
    """What was left out, and why."""
    vocab: int = GEMSTONE_VOCAB
    """Largest vocabulary of the runs."""
    seq: int = GEMSTONE_SEQ
    """Longest samples of the runs."""

    @property
    def tables(self) -> list[tuple[str, LossTable]]:
        """Hot and cooled losses, if they are of several runs."""
        both = (("hot", self.hot), ("cooled", self.cooled))
        return [(name, table) for name, table in both if len({*table.run_index.tolist()}) > 1]

    def to_records(self) -> list[dict[str, Any]]:
        """Returns one JSON object per loss."""
        records = [*self.hot.to_records(cooled=False), *self.cooled.to_records(cooled=True)]
        return [{**record, "vocab": self.vocab, "seq_len": self.seq} for record in records]


class Collector:
    """Reads runs and files of rows."""

    def __init__(self, *, allow_data_mismatch: bool = False) -> None:
        self.allow_data_mismatch = allow_data_mismatch
        self.hot = TableBuilder()
        self.cooled = TableBuilder()
        self.notes: list[str] = []
        self.places: set[Path] = set()
        """Resolved paths that were read."""
        self.fingerprints: dict[str, str] = {}
        """Fingerprint of the data by run."""
        self.vocabularies: list[int] = []
        self.lengths: list[int] = []

    def read(self, path: Path) -> None:
        """Adds the losses of a run directory, or of a JSONL file."""
        place = path.resolve()
        if place in self.places:
            raise DataError(
                f"{path} is given twice. Each run counts once, or intervals would be too narrow. "
                "Remove one of them."
            )
        self.places.add(place)
        if path.is_dir():
            self._read_run(path)
        elif path.exists():
            self._read_file(path)
        else:
            raise DataError(
                f"{path} does not exist. Losses are read from the directory of a run, or from a "
                "JSONL file of rows. Check the path."
            )

    def collect(self) -> Collection:
        """Returns all losses; raises if they cannot be compared or are from one run only."""
        self._check_same_data()
        lengths = sorted({*self.lengths})
        if len(lengths) > 1:
            self.notes.append(
                f"Runs have samples of {', '.join(map(str, lengths))} tokens: losses of longer "
                "samples are lower, whatever the model."
            )
        found = Collection(
            self.hot.build(),
            self.cooled.build(),
            tuple(self.notes),
            max(self.vocabularies, default=GEMSTONE_VOCAB),
            max(self.lengths, default=GEMSTONE_SEQ),
        )
        if not found.tables:
            names = sorted({*self.hot.runs, *self.cooled.runs})
            if len(names) == 1:
                only = f"Only one run, {names[0]}, has held-out losses."
            elif names:
                only = f"{' and '.join(names)} have hot and cooled losses, but not the same kind."
            else:
                only = "No run has held-out losses at its peak learning rate or after a cooldown."
            hints = "".join(f" {note}" for note in self.notes)
            raise DataError(
                f"{only}{hints} A law is fitted to runs of different sizes, at least two. Pass "
                "more runs, or let `ranvier scaling-laws --design 6` write them."
            )
        return found

    def _check_same_data(self) -> None:
        if len({*self.fingerprints.values()}) < 2 or self.allow_data_mismatch:
            return
        first, mark = next(iter(self.fingerprints.items()))
        other, theirs = next((k, v) for k, v in self.fingerprints.items() if v != mark)
        raise DataError(
            f"{first} was trained on data with the fingerprint {mark or 'unknown'}, but {other} on "
            f"data with {theirs or 'unknown'}. Losses on different data cannot be compared. Use "
            "runs of the same data, or --allow-data-mismatch to compare them anyway."
        )

    def _read_file(self, path: Path) -> None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"{path} cannot be read: {reason}. Pass the directory of a run, or a JSONL file of "
                "rows in UTF-8."
            ) from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            for name, row, is_cooled in parse_line(line, where):
                self.vocabularies.append(int(row["vocab"]))
                self.lengths.append(int(row["seq_len"]))
                (self.cooled if is_cooled else self.hot).add(name, row)

    def _read_run(self, folder: Path) -> None:
        check_is_run(folder)
        run = load_run_config(folder / "config.toml", in_run=True)
        facts = _read_json(folder / "run.json")
        self.fingerprints[str(folder)] = str(facts.get("fingerprint") or "")
        if not isinstance(run.model, DecoderModelConfig):
            raise DataError(
                f"{folder} is a run of kind {run.model.kind!r}. Laws are fitted to decoders. "
                "Pass other runs."
            )
        if run.model.is_recurrent:
            raise DataError(
                f"{folder} has recurrent depth (model.core_layers={run.model.core_layers}). Laws "
                "are fitted to models whose layers run once: width, depth and FLOPs would mean "
                "something else. Pass other runs."
            )
        if run.model.parscale_streams > 1:
            raise DataError(
                f"{folder} has model.parscale_streams={run.model.parscale_streams}. Laws are "
                "fitted to models that process a token once. Pass other runs."
            )
        rows = _read_metrics(folder)
        self.vocabularies.append(run.model.vocab)
        self.lengths.append(run.data.seq_len)
        shape = FlopShape.from_config(run.model, run.data.seq_len)
        world = facts.get("world")
        # Written since the first version; a run without it counts as one device.
        devices = world if isinstance(world, int) and world > 0 else 1
        parameters = facts.get("parameters")
        if not isinstance(parameters, int) or parameters < 1:
            parameters = run.model.num_active_parameters
        elif run.model.experts:
            parameters -= run.model.num_parameters - run.model.num_active_parameters
        seconds = 0.0
        last = max(rows, default=-1)
        is_evaluated = run.train.eval_interval > 0 and any(
            row.get("val_loss") is not None for row in rows.values()
        )
        left_out = 0
        for step in sorted(rows):
            row = rows[step]
            seconds += float(row.get("step_seconds") or 0.0) * devices
            loss = row.get("val_loss")
            # A finished run always ends with a held-out loss.
            is_lost = loss is None and is_evaluated and step == last and _is_cooled(run, step)
            if row.get("loss") is None or is_lost:
                raise DataError(
                    f"{folder} has a loss that is not finite at step {step}. A law needs finite "
                    "losses. Leave this run out, or train it with a lower optim.lr."
                )
            if not isinstance(loss, (int, float)):
                continue
            values = {
                "width": shape.width,
                "depth": shape.depth,
                "parameters": parameters,
                "tokens": float(row["tokens"]),
                "flops": shape.flops_per_token * float(row["tokens"]),
                "device_seconds": seconds,
                "loss": float(loss),
            }
            # The loss of step 0 is that of the initial weights.
            if step > 0 and float(row["lr"]) >= (1.0 - HOT_TOLERANCE) * run.peak_lr:
                self.hot.add(str(folder), values)
            elif step == last and _is_cooled(run, step):
                self.cooled.add(str(folder), values)
            else:
                left_out += 1
        if left_out:
            self.notes.append(
                f"{folder}: {left_out} losses during warm-up or while the learning rate decays "
                "are left out."
            )


def _is_cooled(run: RunConfig, step: int) -> bool:
    """Whether a step, counted from 0, is the last one of the schedule."""
    return step + 1 >= run.train.steps


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(safe_files.read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _read_metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns the rows of metrics.jsonl by step; of a repeated step, the last row."""
    path = folder / "metrics.jsonl"
    try:
        lines = safe_files.read_text(path).splitlines()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. A run writes its losses there. Pass a run "
            "that has trained."
        ) from None
    found: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            complete = {"step", "tokens", "lr", "loss"} <= row.keys()
        except (ValueError, AttributeError, RecursionError):
            complete = False
        # The last line of a run that was killed may be cut off.
        if not complete and number == len(lines):
            continue
        if not complete:
            raise DataError(
                f"{path}:{number} is not a row of metrics. Each line is a JSON object with step, "
                "tokens, lr and loss. Restore the file."
            )
        found[int(row["step"])] = row
    return found


# ---- JSONL files --------------------------------------------------------------------------


def parse_line(line: str, where: str) -> list[tuple[str, dict[str, float], bool]]:
    """Returns run, values and whether it is cooled, for each loss of a line.

    A line has one loss, or lists of tokens and losses of the same run.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not valid JSON: {str(error)[:100]}. Each line is a JSON object. Fix it."
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            f"{where} is not a JSON object. A row has width, depth, tokens and loss. Fix it."
        )
    record = {ALIASES.get(key, key): value for key, value in record.items()}
    for key in record:
        if key not in ROW_KEYS:
            raise DataError(
                f"{where}: {key!r} is not a key of a row.{suggest_nearest(key, ROW_KEYS)} Known "
                f"keys are {', '.join(ROW_KEYS)}. Remove it."
            )
    tokens = record.get("tokens")
    losses = record.get("loss")
    if not isinstance(tokens, list) and not isinstance(losses, list):
        tokens = [tokens]
        losses = [losses]
    if (
        not isinstance(tokens, list)
        or not isinstance(losses, list)
        or len(tokens) != len(losses)
        or not tokens
    ):
        raise DataError(
            f"{where} has tokens and losses of different length. A row has a number of tokens and "
            "a loss, or lists of both with as many elements. Fix it."
        )
    cooled = record.get("cooled", False)
    if not isinstance(cooled, bool):
        raise DataError(f"{where}: cooled={cooled!r} is invalid. It must be true or false. Fix it.")
    shape = _read_shape(record, where)
    found = []
    for count, loss in zip(tokens, losses, strict=True):
        amount = _read_positive({"tokens": count}, "tokens", where)
        value = _read_positive({"loss": loss}, "loss", where)
        seconds = _seconds_per_token(record, amount, where)
        values = {
            "width": shape.width,
            "depth": shape.depth,
            "parameters": shape.parameters,
            "tokens": amount,
            "flops": shape.flops_per_token * amount,
            "device_seconds": seconds * amount,
            "loss": value,
            "vocab": shape.vocab,
            "seq_len": shape.seq_len,
        }
        found.append((shape.run, values, cooled))
    return found


@dataclass(frozen=True)
class RowShape:
    """The run and the model of a line."""

    run: str
    width: float
    depth: float
    parameters: float
    flops_per_token: float
    vocab: int
    seq_len: int


def _read_shape(record: Mapping[str, Any], where: str) -> RowShape:
    width = _read_positive(record, "width", where)
    depth = _read_positive(record, "depth", where)
    run = record.get("run", f"{width:g}x{depth:g}")
    sizes = {"vocab": GEMSTONE_VOCAB, "seq_len": GEMSTONE_SEQ, **record}
    vocab, seq_len = (int(_read_positive(sizes, key, where)) for key in ("vocab", "seq_len"))
    if "flops_per_token" in record:
        flops = _read_positive(record, "flops_per_token", where)
    else:
        shape = FlopShape.gemstone(int(width), int(depth), vocab=vocab, seq=seq_len)
        flops = shape.flops_per_token
    if "parameters" in record:
        parameters = _read_positive(record, "parameters", where)
    else:
        try:
            parameters = float(gemstone_parameters(int(width), int(depth), vocab))
        except ValueError:
            raise DataError(
                f"{where} has no parameters, and width={width:g} is not one of the Gemstones "
                "suite, a multiple of 128. The number of parameters is needed. Add parameters."
            ) from None
    return RowShape(str(run), width, depth, parameters, flops, vocab, seq_len)


def _seconds_per_token(record: Mapping[str, Any], tokens: float, where: str) -> float:
    """Device seconds per token; nan if unknown."""
    if "device_seconds_per_token" in record:
        return _read_positive(record, "device_seconds_per_token", where)
    if not {"seconds_per_step", "num_nodes", "step"} <= record.keys():
        return math.nan
    per_step = _read_positive(record, "seconds_per_step", where)
    nodes = _read_positive(record, "num_nodes", where)
    steps = _read_positive(record, "step", where)
    return steps * per_step * nodes * DEVICES_PER_NODE / tokens


def _read_positive(record: Mapping[str, Any], key: str, where: str) -> float:
    value = record.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = value
    else:
        number = math.nan
    # Products of larger numbers overflow.
    if not 0.0 < number <= LARGEST_NUMBER:
        shown = "missing" if key not in record else f"{value!r:.40}"
        raise DataError(
            f"{where}: {key} is {shown}. It must be a number above 0 and at most "
            f"{LARGEST_NUMBER:g}. Fix or remove the row."
        )
    return float(number)


def collect_losses(paths: Sequence[Path], *, allow_data_mismatch: bool = False) -> Collection:
    """Returns the losses of runs and files."""
    collector = Collector(allow_data_mismatch=allow_data_mismatch)
    for path in paths:
        collector.read(path)
    return collector.collect()
