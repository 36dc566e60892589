"""Kinds of models: for each kind, its settings and references to the code that implements it.

A run looks up here how its model is built, where its samples come from and how a batch is formed;
no other module knows the list of kinds. Objects that need torch are references that are imported on
use, so that settings can be checked without torch. To add a kind, add an entry here and its own
files.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranvier.config.sections import (
    IMPORTED_SIZE,
    DecoderModelConfig,
    ModelConfig,
    suggest_nearest,
)
from ranvier.errors import PlanError
from ranvier.models.config import (
    GEMSTONE_PREFIX,
    MODEL_SIZES,
    AdapterConfig,
    DecoderConfig,
    gemstone_size,
)

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Reference:
    """An object that is imported on use."""

    path: str
    """`module:attribute`."""

    def load(self) -> Any:
        """Import the module and return the object."""
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class ModelKind:
    """A kind of model."""

    name: str
    config: type[ModelConfig]
    """Class of its settings, the section `model` of a run."""
    sizes: Mapping[str, Any]
    """Its named sizes, dataclasses with fields of `config`; the first is the default."""
    unit: str
    """Unit of `data.seq_len` and of the throughput, in the plural."""
    builder: Reference
    """Function (config, adapters) -> model in plain PyTorch."""
    batch: Reference
    """Its `data.batch.SampleBatch`."""
    data_source: Reference
    """Its `data.run_data.DataSource`: how samples are prepared and opened."""
    shrink: Reference
    """Function (run, `tools.shrink.ShrunkSizes`) -> the config that `ranvier verify` compares."""
    finish: Reference | None = None
    """Its `train.finish.RunFinish`: what to show when a run has finished; None shows nothing
    more."""
    size_rules: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)
    """Sizes that are not listed but built from their name, by the start of the name. A function
    raises ValueError with value, rule and remedy."""

    def size_rule(self, size: str) -> Callable[[str], Any] | None:
        """Returns the rule that builds a size from its name; None if the name has none."""
        found = (rule for start, rule in self.size_rules.items() if size.startswith(start))
        return next(found, None)

    def config_of_size(self, size: str) -> ModelConfig:
        """Returns the config of a named size."""
        rule = self.size_rule(size)
        try:
            named = self.sizes[size] if rule is None else rule(size)
        except ValueError as error:
            raise PlanError(str(error)) from None
        settings: dict[str, Any] = {**dataclasses.asdict(named)}
        return self.config(**{**settings, "kind": self.name, "size": size})

    def build_model(self, config: ModelConfig, adapters: AdapterConfig) -> nn.Module:
        """Returns the model in plain PyTorch, with adapters if their rank is not 0."""
        model: nn.Module = self.builder.load()(config, adapters)
        return model


MODEL_KINDS: dict[str, ModelKind] = {
    "decoder": ModelKind(
        name="decoder",
        config=DecoderModelConfig,
        sizes={**MODEL_SIZES, IMPORTED_SIZE: DecoderConfig()},
        unit="tokens",
        builder=Reference("ranvier.models.lora:build_decoder"),
        batch=Reference("ranvier.data.batch:Batch"),
        data_source=Reference("ranvier.train.text:TextSource"),
        shrink=Reference("ranvier.tools.shrink:shrink_decoder"),
        finish=Reference("ranvier.train.text:TextFinish"),
        size_rules={GEMSTONE_PREFIX: gemstone_size},
    ),
}
"""All kinds of models; the first is the default."""


def find_kind(name: str) -> ModelKind:
    """Returns the kind with this name."""
    if name not in MODEL_KINDS:
        raise PlanError(
            f"model.kind={name!r} is unknown.{suggest_nearest(name, MODEL_KINDS)} "
            f"Known kinds are {', '.join(MODEL_KINDS)}."
        )
    return MODEL_KINDS[name]


def kind_of_size(size: str) -> ModelKind:
    """Returns the kind that has a named size."""
    for kind in MODEL_KINDS.values():
        if kind.size_rule(size) is not None:
            return kind
    owners = {name: kind for kind in MODEL_KINDS.values() for name in kind.sizes}
    if size not in owners:
        raise PlanError(
            f"model.size={size!r} is unknown.{suggest_nearest(size, owners)} "
            f"Known sizes are {', '.join([*owners, *_rule_names()])}."
        )
    return owners[size]


def _rule_names() -> list[str]:
    return [f"{start}*" for kind in MODEL_KINDS.values() for start in kind.size_rules]


def named_model(size: str | None = None, kind: str | None = None) -> ModelConfig:
    """Returns the config of a named size, of a kind's default size, or of the default kind.

    If both are given, the size must belong to the kind.
    """
    if size is None:
        row = find_kind(kind or next(iter(MODEL_KINDS)))
        return row.config_of_size(next(iter(row.sizes)))
    row = kind_of_size(size)
    if kind is not None and find_kind(kind) is not row:
        raise PlanError(
            f"model.kind={kind!r} has no model.size={size!r}, which belongs to kind {row.name!r}. "
            f"Remove model.kind, or use one of {', '.join(find_kind(kind).sizes)}."
        )
    return row.config_of_size(size)
