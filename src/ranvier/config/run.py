"""Run config: everything that defines a training run, as a tree of frozen dataclasses.

It is read from TOML, overridden by dotted options, validated as a whole before any work, and saved
with the results. Each value is stored in one place only.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from ranvier.config.kinds import ModelKind, find_kind, named_model
from ranvier.config.plan import Plan
from ranvier.config.refusals import find_refusals
from ranvier.config.sections import (
    IMPORTED_SIZE,
    CheckpointConfig,
    CommConfig,
    DataConfig,
    DecoderModelConfig,
    GuardConfig,
    LaunchConfig,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    PruneConfig,
    TrainConfig,
    suggest_nearest,
)
from ranvier.errors import PlanError
from ranvier.setting import SettingInfo, setting_info
from ranvier.system import safe_files

ConfigT = TypeVar("ConfigT")
FINETUNING_LR = 2e-5
"""Learning rate of pretrained models."""
SGD_LR = 0.1
MUON_LR = 0.02
GEMSTONE_LR = 5.0
"""lr_eff of AdamW with optim.lr_rule gemstone, as in the Gemstones suite."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run."""

    model: ModelConfig = field(default_factory=named_model)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    plan: Plan = field(default_factory=Plan)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    prune: PruneConfig = field(default_factory=PruneConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)

    @property
    def settings(self) -> RunConfig:
        """The settings alone, without command options or decisions that subclasses add."""
        names = [section.name for section in dataclasses.fields(RunConfig)]
        return RunConfig(**{name: getattr(self, name) for name in names})

    def check_and_resolve(self, world: int) -> RunConfig:
        """Returns the config with all values resolved for `world` ranks; raises all problems at
        once."""
        problems = list(self.find_problems())
        sizes = (*self.model.dim_units.values(), self.data.seq_len, *self.plan.degrees.values())
        sizes += (self.plan.global_batch, self.plan.micro_batch)
        # The checks of the plan divide by these sizes and enumerate divisors, so stop here if they
        # are zero or extremely large.
        if problems and (min(self.model.dim_units.values()) < 1 or max(sizes) > 2**31):
            raise PlanError(problems)
        try:
            sizes_of = {
                **self.model.dim_units,
                "seq": self.data.seq_len,
                "layers": self.model.layers,
            }
            plan = self.plan.check_and_resolve(sizes_of, world, fitted=self.memory.auto)
        except PlanError as error:
            raise PlanError([*problems, *error.problems]) from None
        if problems:
            raise PlanError(problems)
        warmup = self.optim.warmup_steps
        steps = self.train.steps
        # 10% of all steps, at least 10.
        if warmup == -1:
            warmup = min(max(steps // 10, 10), steps)
        optim = dataclasses.replace(self.optim, lr=self.lr_setting, warmup_steps=warmup)
        return dataclasses.replace(self, plan=plan, optim=optim)

    @property
    def model_kind(self) -> ModelKind:
        """The kind of the model."""
        return find_kind(self.model.kind)

    @property
    def decoder(self) -> DecoderModelConfig:
        """The settings of the model, if it is a decoder; raises for other kinds."""
        if not isinstance(self.model, DecoderModelConfig):
            raise PlanError(
                f"model.kind={self.model.kind!r} is not a decoder. Text generation, adapters, "
                "evaluation, import and export require a decoder. Use a run with a decoder."
            )
        return self.model

    @property
    def peak_lr(self) -> float:
        """Learning rate after warm-up: that of the setting, scaled by `optim.lr_rule`."""
        return self.lr_setting * self.lr_rule_factor

    @property
    def lr_setting(self) -> float:
        """The configured `optim.lr`, or one that suits the optimizer."""
        if self.optim.lr is not None:
            return self.optim.lr
        if self.optim.name in ("sgd", "jorge"):
            return SGD_LR
        if self.optim.name == "muon" and self.optim.muon_adjust_lr == "original":
            return MUON_LR
        return self._default_adamw_lr

    @property
    def lr_rule_factor(self) -> float:
        """Factor of learning rates by `optim.lr_rule`: 1, or 1 / (embed · sqrt(layers))."""
        if self.optim.lr_rule == "none":
            return 1.0
        # Sizes below 1 are reported with all other problems of the settings.
        return 1.0 / (max(self.model.embed, 1) * math.sqrt(max(self.model.layers, 1)))

    @property
    def adamw_peak_lr(self) -> float:
        """Learning rate after warm-up of the parameters that muon or jorge leave to AdamW."""
        if self.optim.adamw_lr is not None:
            return self.optim.adamw_lr * self.lr_rule_factor
        if self.optim.name == "jorge" or (
            self.optim.name == "muon" and self.optim.muon_adjust_lr == "original"
        ):
            return self._default_adamw_lr * self.lr_rule_factor
        return self.peak_lr

    @property
    def momentum(self) -> float:
        """Decay rate of the momentum of muon, jorge or sgd."""
        if self.optim.momentum is not None:
            return self.optim.momentum
        return 0.95 if self.optim.name == "muon" else 0.9

    @property
    def weight_decay(self) -> float:
        """Weight decay of matrices."""
        if self.optim.weight_decay is not None:
            return self.optim.weight_decay
        return 1e-4 if self.optim.name in ("sgd", "jorge") else 0.1

    @property
    def _default_adamw_lr(self) -> float:
        """The learning rate of AdamW, derived from the width of the model, or lr_eff."""
        if self.optim.lr_rule == "gemstone":
            return GEMSTONE_LR
        if self.starts_from_trained_weights:
            # Adapters use 10 times the learning rate.
            return FINETUNING_LR * (10.0 if self.lora.rank > 0 or self.lora.init_from else 1.0)
        embed = self.model.embed
        tokens = max(self.plan.global_batch * self.data.seq_len, 1)
        # Rounded to three digits, as it is printed and saved.
        return float(f"{0.576 / embed * min(1.0, 6.0 * math.sqrt(tokens) / embed):.3g}")

    @property
    def starts_from_trained_weights(self) -> bool:
        """Whether the run fine-tunes a pretrained model."""
        return bool(self.train.init_from) or self.model.size == IMPORTED_SIZE

    @property
    def trainable_parameters(self) -> int:
        """Number of trained parameters in matrices and embeddings."""
        if self.lora.rank == 0:
            return self.model.num_parameters
        # Imported here: it needs torch, whose import takes a second.
        from ranvier.models.lora import adapted_weights

        found = adapted_weights(self.decoder, self.lora).values()
        sizes = {own.b: own.shape[0] for own in found} | {own.a: own.shape[1] for own in found}
        return self.lora.rank * sum(sizes.values())

    def find_problems(self) -> Iterator[str]:
        """Yields all problems of the settings that do not depend on ranks and degrees."""
        yield from self._number_problems()
        yield from self._text_problems()
        yield from self.model.find_problems()
        yield from find_refusals(self)

    def _number_problems(self) -> Iterator[str]:
        for name, info, value in self._setting_values():
            # bool is a subclass of int.
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                problem = info.find_problem(name, value)
                if problem is not None:
                    yield problem

    def _text_problems(self) -> Iterator[str]:
        for name, info, value in self._setting_values():
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and not text.isprintable() and not info.is_free_text:
                    yield (
                        f"{name}={text!r} contains unprintable characters. Paths and names must be "
                        "printable. Remove them."
                    )
                # Unpaired surrogates cannot be encoded as UTF-8.
                elif isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
                    yield (
                        f"{name}={text!r} contains an unpaired surrogate and is not valid UTF-8. "
                        "Remove it."
                    )

    def _setting_values(self) -> Iterator[tuple[str, SettingInfo, Any]]:
        """Yields the dotted name, the bounds and the value of every setting."""
        for section in dataclasses.fields(RunConfig):
            config = getattr(self, section.name)
            for one in dataclasses.fields(config):
                yield f"{section.name}.{one.name}", setting_info(one), getattr(config, one.name)


SETTINGS_FORMAT = 2
"""Format of the settings in config.toml and in checkpoints, and of run.json and metrics.jsonl.

It increases when names change. Format 1 is stored without a number.
"""


def check_settings_format(table: Mapping[str, Any], where: Path | str) -> None:
    """Raises if stored settings were written in another format."""
    found = table.get("format", 1)
    if found != SETTINGS_FORMAT:
        raise PlanError(
            f"{where} was written by another version of Ranvier: its settings have format "
            f"{found!r:.20}, and this version reads format {SETTINGS_FORMAT} only. Resume or "
            "export the run with that version, or start a new run."
        )


def check_is_run(folder: Path) -> None:
    """Raises an error that lists nearby runs if `folder` is not a run directory."""
    if (folder / "config.toml").exists():
        return
    near = sorted(folder.parent.glob("*/config.toml"))
    others = ", ".join(str(path.parent) for path in near) or "none"
    raise PlanError(
        f"{folder} is not a run: it has no config.toml. A run is a directory created by "
        f"`ranvier train`. Runs nearby: {others}."
    )


def load_run_config(
    path: Path, *, model: Mapping[str, str] | None = None, in_run: bool = False
) -> RunConfig:
    """Returns the run config of a TOML file; settings that are missing keep their defaults.

    model: a size or kind that overrides the one in the file, and determines the model's defaults.

    in_run: whether the file is the config.toml of a run, which may be untrusted, instead of a file
    of the user.
    """
    try:
        if in_run:
            # A run directory may come from another user, so its files are read with the checks of
            # safe_files.
            read = safe_files.read_text
        else:
            read = partial(Path.read_text, encoding="utf-8")
        table = tomllib.loads(read(path))
    except OSError as error:
        raise PlanError(
            f"{path} cannot be read: {error.strerror}. Pass a TOML file, or the directory of a run."
        ) from None
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{path} is not valid TOML: byte {error.start} is not UTF-8. Save the file as UTF-8."
        ) from None
    # ValueError also covers integers with too many digits.
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not valid TOML: {str(error)[:200]}. Fix that line.") from None
    if in_run:
        check_settings_format(table, path.parent)
    if model and isinstance(table.get("model", {}), dict):
        table["model"] = {**table.get("model", {}), **model}
    return run_from_tables(table)


def run_from_tables(tables: Mapping[str, Any]) -> RunConfig:
    """Returns a run config from nested tables; `plan = "auto"` lets the planner choose the
    layout."""
    if "format" in tables:
        check_settings_format(tables, "The settings table")
        tables = {name: section for name, section in tables.items() if name != "format"}
    if tables.get("plan") == "auto":
        tables = {**tables, "plan": {"auto": True}}
    section = tables.get("model")
    given = section if isinstance(section, dict) else {}
    size, kind = (None if (x := given.get(key)) is None else str(x) for key in ("size", "kind"))
    return apply_overrides(RunConfig(model=named_model(size, kind)), tables)


def apply_overrides(config: ConfigT, table: Mapping[str, Any], path: str = "") -> ConfigT:
    """Returns `config` with the values of `table`; raises for unknown keys and wrong types."""
    types_of = typing.get_type_hints(type(config))
    changes = {}
    for key, value in table.items():
        if key not in types_of:
            near = suggest_nearest(key, types_of)
            noun = "setting"
            if isinstance(config, RunConfig):
                noun = "section"
                homes = [name for name in types_of if hasattr(getattr(config, name), key)]
                if homes:
                    near = f" It is a setting of [{homes[0]}]."
            raise PlanError(
                f"{path}{key} is not a {noun}.{near} Valid {noun}s are {', '.join(types_of)}."
            )
        old = getattr(config, key)
        if dataclasses.is_dataclass(old):
            if not isinstance(value, Mapping):
                raise PlanError(
                    f"{path}{key}={value!r} is not a table. Write [{path}{key}] with its settings "
                    "below it."
                )
            changes[key] = apply_overrides(old, value, f"{path}{key}.")
        else:
            changes[key] = _check_type(value, types_of[key], f"{path}{key}")
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def _check_type(value: Any, kind: Any, path: str) -> Any:
    """Returns `value` if it has the type `kind`; raises otherwise."""
    # `X | None` is a value that is derived if it is not given.
    if isinstance(kind, types.UnionType):
        (kind,) = (one for one in typing.get_args(kind) if one is not types.NoneType)
    origin = typing.get_origin(kind)
    if origin is Literal:
        good = value in typing.get_args(kind)
        example = "one of them"
        rule = f"one of {', '.join(map(repr, typing.get_args(kind)))}"
    elif origin is tuple:
        inner = typing.get_args(kind)[0]
        if not isinstance(value, (list, tuple)):
            raise PlanError(
                f"{path}={value!r} is not a list. Write {path} = [{_format_toml_value(value)}]."
            )
        length = len(typing.get_args(kind))
        if Ellipsis not in typing.get_args(kind) and len(value) != length:
            raise PlanError(
                f"{path}={value!r} has {len(value)} values. It must have {length}. Write a list of "
                f"{length} values."
            )
        return tuple(_check_type(one, inner, path) for one in value)
    elif kind is float:
        # TOML distinguishes 1 from 1.0; both are accepted here.
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        rule = "a number"
        example = "a value such as 0.5"
        # A larger integer overflows float(); inf is then reported as not finite.
        if good and abs(value) < 2**1000:
            value = float(value)
        elif good:
            value = math.inf
    else:
        # Not isinstance: true is not a valid integer.
        good = type(value) is kind
        rule = {int: "an integer", str: "a string", bool: "true or false"}[kind]
        example = {int: "a value such as 2", str: "quotes around it", bool: "one of them"}[kind]
    if not good:
        raise PlanError(f"{path}={value!r} is invalid. It must be {rule}. Use {example}.")
    return value


def to_toml(run: RunConfig) -> str:
    """Returns the config as TOML, with all values written out."""
    tables = {
        section.name: dataclasses.asdict(getattr(run, section.name))
        for section in dataclasses.fields(RunConfig)
    }
    return f"format = {SETTINGS_FORMAT}\n\n{tables_to_toml(tables)}"


def tables_to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns sections with their settings as TOML."""
    lines = []
    for section, table in tables.items():
        lines.append(f"[{section}]")
        for key, value in table.items():
            # TOML has no null: a missing key means "derived".
            if value is not None:
                lines.append(f"{key} = {_format_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _format_toml_value(value: Any) -> str:
    """Returns a value in TOML syntax."""
    if isinstance(value, tuple):
        value = list(value)
    # JSON literals are valid TOML, except that TOML forbids an unescaped DEL character.
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
