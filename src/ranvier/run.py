"""Run: everything that defines a training run, as one tree of frozen dataclasses.

A run is read from TOML, overridden by dotted options, checked as a whole before any work, and
saved with its results. Each value has one owner; nobody else keeps a copy.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ranvier.errors import PlanError
from ranvier.models import SIZES, DecoderConfig
from ranvier.plan import Plan


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """The model: a named size, any field of which can be changed."""

    size: str = "tiny"
    """tiny, gpt2, llama3-1b, llama3-8b, llama3-70b, llama3-405b, qwen3-0.6b or qwen3-8b."""

    @classmethod
    def of(cls, size: str) -> ModelConfig:
        """The config of a named size."""
        if size not in SIZES:
            raise PlanError(
                f"model.size={size!r} is not known.{_nearest(size, SIZES)} "
                f"Sizes are {', '.join(SIZES)}."
            )
        return cls(size=size, **dataclasses.asdict(SIZES[size]))

    @property
    def sizes(self) -> dict[str, int]:
        """Units of each named dim."""
        return {
            name: getattr(self, name) for name in ("embed", "heads", "kv_heads", "mlp", "vocab")
        }


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the model reads."""

    corpus: Literal["stdlib"] = "stdlib"
    """stdlib: the sources of the running Python's standard library, as bytes."""
    seq: int = 128
    """Tokens of a sample."""
    packed: bool = True
    """Attention and positions stay inside a document where a sample holds several."""
    max_bytes: int = 4_000_000
    """How much of the corpus is read."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 3e-3
    """Learning rate after warm-up."""
    warmup: int = 10
    """Steps in which the learning rate rises to lr; then it falls as a cosine to a tenth."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    decay: float = 0.1
    """Weight decay of matrices other than embeddings."""
    clip: float = 1.0
    """Largest gradient norm; 0 is no clipping."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, where and with which numbers."""

    steps: int = 100
    """Optimizer steps."""
    seed: int = 0
    """Of initial weights, data order and dropout."""
    out: str = ""
    """Directory of the run; empty: a new one under runs/."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one."""
    dtype: Literal["auto", "fp64", "fp32", "bf16"] = "auto"
    """Of weights and activations. auto: fp32 on cpu, bf16 on cuda."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on cuda with a device for each rank, else gloo."""
    trace: bool = False
    """Record the communication of the last step: a table, and trace-rank*.json for Perfetto."""
    debug: bool = False
    """Compare every collective between its ranks before it runs (slow)."""
    timeout: float = 600.0
    """Seconds after which a collective that waits for a lost rank is an error."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig.of("tiny"))
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    plan: Plan = field(default_factory=Plan)
    train: TrainConfig = field(default_factory=TrainConfig)

    def check(self, world: int) -> Run:
        """The run with its plan resolved for `world` ranks, or a PlanError with every problem."""
        problems = list(self._problems())
        if any(value < 1 for value in self.model.sizes.values()):
            raise PlanError(problems)
        try:
            plan = self.plan.check({**self.model.sizes, "seq": self.data.seq}, world)
        except PlanError as error:
            raise PlanError([*problems, *error.problems]) from None
        if problems:
            raise PlanError(problems)
        return dataclasses.replace(self, plan=plan)

    def _problems(self) -> Iterator[str]:
        for name, least in LEAST.items():
            section, _, key = name.partition(".")
            value = getattr(getattr(self, section), key)
            if not value >= least:  # not a number is not
                yield f"{name}={value} is too small. It is at least {least}. Use {least} or more."
        for name, value in (("beta1", self.optim.beta1), ("beta2", self.optim.beta2)):
            if not 0.0 <= value < 1.0:
                yield f"optim.{name}={value} is no share. It lies in [0, 1). Use 0.9."
        model = self.model
        if not 0.0 <= model.dropout < 1.0:
            yield f"model.dropout={model.dropout} is no share. It lies in [0, 1). Use 0.1."
        if model.kv_heads > 0 and model.heads % model.kv_heads:
            yield (
                f"kv_heads={model.kv_heads} does not divide heads={model.heads}. Each kv head "
                f"serves the same number of heads. Use a divisor of {model.heads}."
            )
        if model.head_dim % 2 and model.positions == "rope":
            yield (
                f"head_dim={model.head_dim} is odd. Rotary positions turn pairs. "
                f"Use {model.head_dim + 1}."
            )
        if model.positions == "learned" and self.data.seq > model.max_seq:
            yield (
                f"data.seq={self.data.seq} is longer than model.max_seq={model.max_seq}. Learned "
                f"positions have a row for each. Use data.seq={model.max_seq} or a larger max_seq."
            )


LEAST: dict[str, float] = {
    **{f"model.{dim}": 1 for dim in ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp")},
    "model.vocab": 1,
    "data.seq": 1,
    "data.max_bytes": 1,
    "optim.lr": 0.0,
    "optim.warmup": 0,
    "optim.eps": 0.0,
    "optim.decay": 0.0,
    "optim.clip": 0.0,
    "train.steps": 1,
    "train.timeout": 1.0,
}
"""The smallest value of each number that has one."""


def load(path: Path, *, size: str | None = None) -> Run:
    """The run of a TOML file, perhaps with another size; the rest keeps its defaults."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise PlanError(
            f"{path} cannot be read: {error.strerror}. Give the path of a TOML file."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is no TOML: {error}. Mend that line.") from None
    if size is not None and isinstance(table.get("model", {}), dict):
        table["model"] = {**table.get("model", {}), "size": size}
    return from_tables(table)


def from_tables(tables: Mapping[str, Any]) -> Run:
    """A run from nested tables of values."""
    size = (
        tables.get("model", {}).get("size", "tiny")
        if isinstance(tables.get("model"), dict)
        else "tiny"
    )
    run: Run = _fill(Run(model=ModelConfig.of(str(size))), tables, "")
    return run


def _fill(config: Any, table: Mapping[str, Any], path: str) -> Any:
    """`config` with the values of `table`; unknown keys and wrong types are errors."""
    types_of = typing.get_type_hints(type(config))
    changes = {}
    for key, value in table.items():
        if key not in types_of:
            raise PlanError(
                f"{path}{key} is not a setting.{_nearest(key, types_of)} "
                f"Settings here are {', '.join(types_of)}."
            )
        old = getattr(config, key)
        if dataclasses.is_dataclass(old):
            if not isinstance(value, Mapping):
                raise PlanError(
                    f"{path}{key}={value!r} is no table. Write [{path}{key}] and settings below it."
                )
            changes[key] = _fill(old, value, f"{path}{key}.")
        else:
            changes[key] = _typed(value, types_of[key], f"{path}{key}")
    return dataclasses.replace(config, **changes)


def _typed(value: Any, kind: Any, path: str) -> Any:
    """`value` if it is of the type `kind`."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        good, rule = (
            value in typing.get_args(kind),
            f"one of {', '.join(map(repr, typing.get_args(kind)))}",
        )
    elif origin is tuple:
        inner = typing.get_args(kind)[0]
        if not isinstance(value, (list, tuple)):
            raise PlanError(f'{path}={value!r} is no list. Write ["dx", "dw"].')
        return tuple(_typed(one, inner, path) for one in value)
    elif kind is float:
        good, rule = isinstance(value, (int, float)) and not isinstance(value, bool), "a number"
        value = float(value) if good else value
    else:
        good, rule = (
            type(value) is kind,
            {int: "a whole number", str: "a text", bool: "true or false"}[kind],
        )
    if not good:
        raise PlanError(f"{path}={value!r} is not valid. It must be {rule}. Change it.")
    return value


def _nearest(key: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def to_toml(run: Run) -> str:
    """The run as TOML, all values written out."""
    lines = []
    for section in dataclasses.fields(run):
        lines.append(f"[{section.name}]")
        for key, value in dataclasses.asdict(getattr(run, section.name)).items():
            text = json.dumps(list(value) if isinstance(value, tuple) else value)
            lines.append(f"{key} = {text}")
        lines.append("")
    return "\n".join(lines)
