"""Run: everything that defines a training run, as one tree of frozen dataclasses.

A run is read from TOML, overridden by dotted options, checked as a whole before any work, and
saved with its results. Each value has one owner; nobody else keeps a copy.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ranvier.errors import PlanError
from ranvier.models import SIZES, DecoderConfig
from ranvier.plan import AXES, Plan


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
                f"model.size={size!r} is not known.{nearest(size, SIZES)} "
                f"Sizes are {', '.join(SIZES)}."
            )
        return cls(size=size, **dataclasses.asdict(SIZES[size]))

    @property
    def parameters(self) -> int:
        """Weights of all matrices and embeddings; vectors are too few to matter."""
        width, attended = self.head_dim, self.heads + self.kv_heads
        attention = 2 * self.embed * attended * width
        mlp = (3 if self.activation == "swiglu" else 2) * self.embed * self.mlp
        words = self.vocab * self.embed * (1 if self.tied else 2)
        places = self.max_seq * self.embed if self.positions == "learned" else 0
        return self.layers * (attention + mlp) + words + places

    @property
    def sizes(self) -> dict[str, int]:
        """Units of each named dim."""
        return {
            name: getattr(self, name) for name in ("embed", "heads", "kv_heads", "mlp", "vocab")
        }


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the model reads."""

    corpus: tuple[str, ...] = ("stdlib",)
    """Files (.txt, .md, .py, .rst, .txt.gz, .jsonl, .jsonl.gz, .json, .json.gz, .parquet), Megatron
    pairs (.bin/.idx), directories of these or what `ranvier data prepare` made; stdlib: the texts
    of the running Python's own library."""
    weights: tuple[float, ...] = ()
    """Share of the samples that comes from each corpus; empty: by their number of tokens."""
    tokenizer: str = "standard"
    """standard: byte pairs learnt from the standard library; bytes; or a tokenizer.json. Corpora
    that are tokenized already keep theirs."""
    field: str = "text"
    """Key of a .jsonl record, or column of a .parquet file, that holds the text."""
    seq: int = 96
    """Tokens of a sample."""
    packed: bool = True
    """Attention and positions stay inside a document where a sample holds several."""
    held_out: float = 0.02
    """Share of the documents, chosen by their hash, that is kept from training for evaluation."""
    max_bytes: int = 4_000_000
    """How much of the corpus stdlib is read."""
    verify: bool = True
    """Read tokenized corpora once at the start and compare digests (about 1 s a gigabyte)."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float | None = None
    """Learning rate after warm-up. Not given: 0.576 / embed, which is 3e-3 for tiny and 2.8e-4 for
    llama3-1b, times the share min(1, 6 · sqrt(tokens of a step) / embed)."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After warm-up: a cosine down, or stable and then linearly down (warm-up, stable, decay)."""
    warmup: int = -1
    """Steps in which the learning rate rises to lr. -1: a tenth of all, but 10 at least."""
    cooldown: float = 0.2
    """Share of the steps after warm-up in which wsd falls."""
    floor: float = 0.1
    """Share of lr at the end."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    moments: Literal["master", "bf16"] = "master"
    """Type of both moments. master: that of the master weights (fp32, or fp64 in runs in fp64);
    bf16: half the memory of fp32, rounded up or down at random so that small changes count."""
    decay: float = 0.1
    """Weight decay of matrices: parameters with two named dims or more that are no embeddings."""
    clip: float = 1.0
    """Largest gradient norm; 0 is no clipping."""
    matrix_lr: float = 1.0
    """Factor of the learning rate of matrices."""
    embedding_lr: float = 1.0
    """Factor of the learning rate of embeddings (and of a head tied to one)."""
    vector_lr: float = 1.0
    """Factor of the learning rate of norms and biases."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, where and with which numbers."""

    steps: int = 100
    """Optimizer steps."""
    seed: int = 0
    """Of initial weights, data order and dropout."""
    out: str = ""
    """Directory of the run; empty: a new one under runs/. One that holds a run is continued."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda (also AMD's ROCm) if there is one."""
    dtype: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    """Of weights and activations. auto: fp32 on cpu, on cuda bf16 or, on devices without it, fp16
    with a dynamic loss scale."""
    fp8: Literal["off", "tensorwise", "rowwise"] = "off"
    """Multiply in 8 bits (e4m3; tensorwise gradients e5m2), scaled by the largest number of each
    tensor, or of each of its rows, as it is now; weights stay as they are. Needs bf16 and a device
    that has it (H100 and later)."""
    fp8_layers: tuple[str, ...] = ("qkv", "o", "enter", "up", "down")
    """Linear layers that do so: those with one of these words in their name (also: head)."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on cuda with a device for each rank, else gloo."""
    evaluate: int = 50
    """Steps between evaluations of the held-out loss (also at both ends); 0: none."""
    evaluate_samples: int = 64
    """Held-out samples of an evaluation."""
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides metrics.jsonl; needs the extra `log`."""
    prompt: str = "def "
    """What the sample of text at the end begins with; empty: no sample."""
    trace: bool = False
    """Record the communication of the last step: a table, and trace-rank*.json for Perfetto."""
    debug: bool = False
    """Compare every collective between its ranks before it runs (slow)."""
    timeout: float = 600.0
    """Seconds after which a collective that waits for a lost rank is an error."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept to go on from."""

    every: int = 0
    """Steps between checkpoints; 0: only at the end and when stopped; -1: never."""
    keep: int = 2
    """Newest checkpoints that are kept; 0: all."""
    other_data: bool = False
    """Go on from a checkpoint although the data has another fingerprint."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig.of("tiny"))
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    plan: Plan = field(default_factory=Plan)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def check(self, world: int) -> Run:
        """The run with all that is derived resolved for `world` ranks, or every problem at once."""
        problems = list(self._problems())
        sizes = (*self.model.sizes.values(), self.data.seq, *self.plan.degrees.values())
        if problems and (min(self.model.sizes.values()) < 1 or max(sizes) > 2**31):
            raise PlanError(problems)
        try:
            sizes_of = {**self.model.sizes, "seq": self.data.seq, "layers": self.model.layers}
            plan = self.plan.check(sizes_of, world)
        except PlanError as error:
            raise PlanError([*problems, *error.problems]) from None
        if problems:
            raise PlanError(problems)
        warmup, steps = self.optim.warmup, self.train.steps
        warmup = min(max(steps // 10, 10), steps) if warmup == -1 else warmup
        optim = dataclasses.replace(self.optim, lr=self.lr, warmup=warmup)
        return dataclasses.replace(self, plan=plan, optim=optim)

    @property
    def lr(self) -> float:
        """The learning rate after warm-up: as given, or from the width of the model."""
        if self.optim.lr is not None:
            return self.optim.lr
        embed, tokens = self.model.embed, max(self.plan.batch * self.data.seq, 1)
        return float(f"{0.576 / embed * min(1.0, 6.0 * math.sqrt(tokens) / embed):.3g}")

    def _problems(self) -> Iterator[str]:
        yield from self._number_problems()
        yield from self._text_problems()
        if self.optim.lr == 0.0:
            yield "optim.lr=0.0 trains nothing. A learning rate is above 0. Use 3e-4."
        yield from self._model_problems()
        yield from self._data_problems()
        if self.plan.graph and self.data.packed:
            yield (
                "plan.graph=True with data.packed=True. A recorded step is always the same work, "
                "but documents differ. Use data.packed=False or plan.graph=False."
            )
        if self.optim.warmup > self.train.steps:
            yield (
                f"optim.warmup={self.optim.warmup} is longer than train.steps={self.train.steps}. "
                f"The learning rate must get where it rises to. Use at most {self.train.steps}."
            )

    def _number_problems(self) -> Iterator[str]:
        for name, value in self._values():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            whole = isinstance(value, int)
            least, most = LEAST.get(name), MOST.get(name, LARGEST if whole else math.inf)
            if isinstance(value, float) and not math.isfinite(value):
                usual = {**SHARES, "optim.lr": 3e-4, "plan.memory": 0.0}.get(name, least or 1.0)
                yield f"{name}={value} is no finite number. It must be one. Use {usual}."
            elif name in SHARES and not 0.0 <= value < 1.0:
                yield f"{name}={value} is no share. It lies in [0, 1). Use {SHARES[name]}."
            elif least is not None and value < least:
                yield f"{name}={value} is too small. It is at least {least}. Use {least} or more."
            elif value > most:
                shown = str(value) if len(str(value)) < 30 else f"{str(value)[:30]}..."
                yield f"{name}={shown} is too large. It is at most {most}. Use {most} or less."

    def _text_problems(self) -> Iterator[str]:
        for name, value in self._values():
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and not text.isprintable() and name not in FREE:
                    yield f"{name}={text!r} has characters that no path or name has. Remove them."
                elif isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
                    yield f"{name}={text!r} is no text. It has half a character. Remove it."

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Dotted name and value of every setting."""
        for section in dataclasses.fields(Run):
            for key, value in dataclasses.asdict(getattr(self, section.name)).items():
                yield f"{section.name}.{key}", value

    def _data_problems(self) -> Iterator[str]:
        data = self.data
        if not data.corpus or not all(data.corpus):
            yield (
                f"data.corpus={list(data.corpus)} names no corpus. A run needs one at least. "
                "Use data.corpus=['stdlib'] or paths."
            )
        if data.weights and len(data.weights) != len(data.corpus):
            yield (
                f"data.weights has {len(data.weights)} numbers for {len(data.corpus)} corpora. "
                "Each corpus has its weight. Give as many, or none."
            )
        if data.weights and not all(0.0 <= weight < math.inf for weight in data.weights):
            yield (
                f"data.weights={list(data.weights)} are no shares. A weight is a finite number "
                "from 0. Use for example 0.7 0.3."
            )
        elif data.weights and not any(data.weights):
            yield "data.weights are all 0. One corpus must be read. Give one a weight above 0."

    def _model_problems(self) -> Iterator[str]:
        model = self.model
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
    "model.max_seq": 1,
    "model.rope_theta": 1.0,
    "model.rope_scale": 1.0,
    "model.norm_eps": 0.0,
    "model.init_std": 0.0,
    "data.seq": 1,
    "data.max_bytes": 1,
    "optim.lr": 0.0,
    "optim.warmup": -1,
    "optim.eps": 1e-30,
    "optim.decay": 0.0,
    "optim.clip": 0.0,
    "optim.matrix_lr": 0.0,
    "optim.embedding_lr": 0.0,
    "optim.vector_lr": 0.0,
    "train.steps": 1,
    "train.seed": 0,
    "train.evaluate": 0,
    "train.evaluate_samples": 1,
    "train.timeout": 1.0,
    "checkpoint.every": -1,
    "checkpoint.keep": 0,
}
"""The smallest value of each number that has one."""
SHARES: dict[str, float] = {
    "optim.beta1": 0.9,
    "optim.beta2": 0.95,
    "optim.cooldown": 0.2,
    "optim.floor": 0.1,
    "model.dropout": 0.1,
    "data.held_out": 0.02,
}
"""Numbers in [0, 1), and a usual value of each."""


LARGEST = 2**40
"""The largest value of a whole number that has no other."""
MOST: dict[str, float] = {
    **{f"plan.{axis}": 10**6 for axis in AXES},
    **{f"model.{dim}": 2**24 for dim in ("embed", "heads", "kv_heads", "head_dim", "mlp")},
    "model.layers": 10_000,
    "model.vocab": 2**31,
    "data.seq": 2**31,
    "plan.batch": 2**31,
    "train.seed": 2**63 - 1,
    "train.timeout": 1e7,
}
"""The largest value of numbers that have one."""
FREE = ("train.prompt", "data.field")
"""Texts that may hold any character."""


def load(path: Path, *, size: str | None = None) -> Run:
    """The run of a TOML file, perhaps with another size; the rest keeps its defaults."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"{path} cannot be read: {error.strerror}. Give the path of a TOML file."
        ) from None
    except (ValueError, RecursionError) as error:  # also of other encodings and endless numbers
        raise PlanError(f"{path} is no TOML: {str(error)[:200]}. Mend that line.") from None
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
                f"{path}{key} is not a setting.{nearest(key, types_of)} "
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
    if isinstance(kind, types.UnionType):  # a value that is derived where it is not given
        (kind,) = (one for one in typing.get_args(kind) if one is not types.NoneType)
    origin = typing.get_origin(kind)
    if origin is Literal:
        good, rule = (
            value in typing.get_args(kind),
            f"one of {', '.join(map(repr, typing.get_args(kind)))}",
        )
    elif origin is tuple:
        inner = typing.get_args(kind)[0]
        if not isinstance(value, (list, tuple)):
            raise PlanError(f"{path}={value!r} is no list. Write {path} = [{_quoted(value)}].")
        return tuple(_typed(one, inner, path) for one in value)
    elif kind is float:
        good, rule = isinstance(value, (int, float)) and not isinstance(value, bool), "a number"
        value = float(value) if good and abs(value) < 2**1000 else math.inf if good else value
    else:
        good, rule = (
            type(value) is kind,
            {int: "a whole number", str: "a text", bool: "true or false"}[kind],
        )
    if not good:
        raise PlanError(f"{path}={value!r} is not valid. It must be {rule}. Change it.")
    return value


def nearest(key: str, known: Iterable[str]) -> str:
    """A guess at what was meant, as a sentence."""
    close = difflib.get_close_matches(key, list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def to_toml(run: Run) -> str:
    """The run as TOML, all values written out."""
    lines = []
    for section in dataclasses.fields(run):
        lines.append(f"[{section.name}]")
        for key, value in dataclasses.asdict(getattr(run, section.name)).items():
            if value is not None:
                lines.append(f"{key} = {_quoted(value)}")
        lines.append("")
    return "\n".join(lines)


def _quoted(value: Any) -> str:
    """A value as TOML writes it."""
    value = list(value) if isinstance(value, tuple) else value
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
