"""Several LoRA adapters of one base, which requests choose by name.

The adapters are stored as one adapter whose rank is the sum of their ranks, sharded as a single one
(`TokenAdapters`). Where an adapter does not adapt a layer that another one adapts, its part of B is
zero. An adapter is a run with adapters, or a directory in PEFT's format. Not supported: DoRA, whose
factors scale the output of the base.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ranvier.checkpoint.hf.peft_read import CONFIG_FILE, read_adapter
from ranvier.checkpoint.load import load_checkpoint
from ranvier.comm.consensus import run_and_raise_together
from ranvier.errors import PlanError
from ranvier.infer.load import (
    MASTER_SUFFIX,
    find_checkpoint,
    find_saved_adapters,
    load_config_from_dir,
)
from ranvier.models import AdapterConfig, DecoderConfig
from ranvier.models.lora import (
    ADAPTER_INFIX,
    AdaptedWeight,
    TokenAdapters,
    adapted_weights,
    named_adapters,
)
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.sharding import Shard, ShardedStateDict

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
MAX_TOTAL_RANK = 2**16
SAME_WEIGHTS = 0.02
"""Relative difference up to which weights are the same, as they may be stored in bf16."""


@dataclass(frozen=True)
class AdapterSource:
    """An adapter by name: a run with adapters, or a directory in PEFT's format."""

    name: str
    folder: Path

    @classmethod
    def parse(cls, text: str) -> AdapterSource:
        """Returns the adapter of `name=PATH`."""
        name, sign, path = text.partition("=")
        if not sign or not path or not ADAPTER_NAME.fullmatch(name):
            raise PlanError(
                f"--adapter {text[:200]!r} is not valid. It must be a name of letters, digits and "
                "`.`, `_`, `:`, `/`, `-`, then `=` and a directory. Use --adapter name=runs/mine."
            )
        return cls(name, Path(path))

    @property
    def is_run(self) -> bool:
        """Whether it is a run; otherwise it is in PEFT's format."""
        return (self.folder / "config.toml").exists()

    def load_config(self, model: DecoderConfig) -> AdapterConfig:
        """Returns the settings of the adapter; raises if it does not fit the model."""
        if not self.is_run:
            if not (self.folder / CONFIG_FILE).exists():
                raise PlanError(
                    f"--adapter {self.name}={self.folder} is not an adapter. It must be a run with "
                    f"adapters, or have {CONFIG_FILE}. Check the path."
                )
            lora = read_adapter(self.folder, model).lora
            self._check_kind(lora)
            return lora
        run = load_config_from_dir(self.folder)
        lora = find_saved_adapters(find_checkpoint(self.folder), run.lora)
        self._check_kind(lora)
        if adapted_weights(run.decoder, lora) != adapted_weights(model, lora):
            raise PlanError(
                f"--adapter {self.name}={self.folder} adapts layers of other shapes than the "
                "model has. An adapter only fits the model that it was trained for. Serve that "
                "model."
            )
        return lora

    def _check_kind(self, lora: AdapterConfig) -> None:
        """Raises if such adapters cannot be served by name."""
        if lora.rank == 0:
            raise PlanError(
                f"--adapter {self.name}={self.folder} is a run without adapters. All its weights "
                "were trained. Serve it by itself: ranvier serve RUN."
            )
        if lora.dora:
            raise PlanError(
                f"--adapter {self.name}={self.folder} has DoRA magnitudes. Adapters that share a "
                "base must be LoRA adapters. Serve the run by itself: ranvier serve RUN."
            )

    def read_weights(
        self, model: DecoderConfig, names: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Returns the whole tensors of some of its parameters; names: their shapes."""
        state = {
            name: (torch.zeros(shape, dtype=dtype), Shard(shape, (0,) * len(shape), shape, shape))
            for name, shape in names.items()
        }
        if self.is_run:
            stored = {f"{name}{MASTER_SUFFIX}": part for name, part in state.items()}
            load_checkpoint(find_checkpoint(self.folder), stored, cast=True)
        else:
            read_adapter(self.folder, model).fill_state(state)
        return {name: tensor for name, (tensor, _) in state.items()}

    def check_base(self, state: ShardedStateDict) -> None:
        """Raises if a run was trained on another base; state: weights of the base on this rank.

        One matrix is compared. PEFT's directories have no weights of the base.
        """
        matrices = (name for name, (_, place) in state.items() if len(place.global_shape) == 2)
        name = next(matrices, None)
        if not self.is_run or name is None:
            return
        mine, place = state[name]
        theirs = torch.zeros_like(mine, device="cpu")
        stored = {f"{name}{MASTER_SUFFIX}": (theirs, place)}
        load_checkpoint(find_checkpoint(self.folder), stored, cast=True)
        difference = (theirs.double() - mine.cpu().double()).norm()
        if difference > SAME_WEIGHTS * theirs.double().norm():
            raise PlanError(
                f"--adapter {self.name}={self.folder} was trained on other weights: {name} "
                "differs. An adapter only fits the model that it was trained for. Serve that "
                "model."
            )


def check_adapters(adapters: Sequence[AdapterSource], model_name: str) -> None:
    """Raises if names of adapters are not unique."""
    names = [model_name, *(one.name for one in adapters)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PlanError(
            f"The name {twice[0]!r} is used twice. The base and its adapters need different names, "
            "by which requests choose them. Change the name of the adapter."
        )


def stack_configs(configs: Sequence[AdapterConfig]) -> AdapterConfig:
    """Returns the settings of one adapter that holds several, with a scale of 1."""
    rank = sum(one.rank for one in configs)
    if rank > MAX_TOTAL_RANK:
        raise PlanError(
            f"The adapters have a rank of {rank:,} together. At most {MAX_TOTAL_RANK:,} are "
            "supported. Serve fewer adapters."
        )
    targets = dict.fromkeys(name for one in configs for name in one.target_modules)
    layers: set[int] = set()
    if all(one.layers for one in configs):
        layers = {i for one in configs for i in one.layers}
    return AdapterConfig(
        rank=rank,
        alpha=float(rank),
        target_modules=tuple(targets),
        layers=tuple(sorted(layers)),
    )


def fill_adapters(
    model: nn.Module,
    config: DecoderConfig,
    adapters: Sequence[AdapterSource],
    configs: Sequence[AdapterConfig],
) -> None:
    """Reads the weights of adapters into a model that was built with `stack_configs`.

    An error of one rank is raised on all ranks. Communicates: one number over all axes.
    """
    parallel = get_parallel_model(model)
    device = parallel.pipeline.executor.device
    dtype = parallel.bucket_scheduler.buckets[0].data.dtype
    state = parallel.sharded_state()
    own = {name: part for name, part in state.items() if ADAPTER_INFIX in name}
    base = {name: part for name, part in state.items() if name not in own}
    stacked = adapted_weights(config, stack_configs(configs))

    def fill() -> None:
        start = 0
        for adapter, lora in zip(adapters, configs, strict=True):
            adapter.check_base(base)
            places = [*_find_places(adapted_weights(config, lora), stacked, lora.rank, start, own)]
            shapes = {place.source: place.shape for place in places}
            values = adapter.read_weights(config, shapes, dtype)
            for place in places:
                _copy_overlap(values[place.source], place.start, *own[place.target])
            start += lora.rank

    with torch.no_grad():
        for tensor, _ in own.values():
            tensor.zero_()
        run_and_raise_together(fill, parallel.grid, device)
    parallel.bucket_scheduler.load_count += 1
    parallel.bucket_scheduler.begin_step("")
    chosen = TokenAdapters(_factor_table(configs).to(device, dtype))
    for _, module, _ in named_adapters(model):
        module.token_adapters = chosen


@dataclass(frozen=True)
class _StackedPlace:
    """Where a parameter of one adapter is in the parameter of all."""

    source: str
    shape: tuple[int, int]
    target: str
    start: tuple[int, int]


def _find_places(
    weights: Mapping[str, AdaptedWeight],
    stacked: Mapping[str, AdaptedWeight],
    rank: int,
    start: int,
    here: ShardedStateDict,
) -> Iterator[_StackedPlace]:
    """Yields the parameters on this rank of an adapter whose ranks begin at `start`."""
    for name, one in weights.items():
        out, into = one.shape
        all_of_them = stacked[name]
        if all_of_them.a in here:
            yield _StackedPlace(one.a, (rank, into), all_of_them.a, (start, 0))
            yield _StackedPlace(one.b, (out, rank), all_of_them.b, (0, start))


def _copy_overlap(whole: Tensor, start: Sequence[int], into: Tensor, place: Shard) -> None:
    """Copies the part of a tensor that a shard holds; start: of the tensor in the global one."""
    assert place.flat_range is None, place
    source = []
    target = []
    for first, size, low, count in zip(
        start, whole.shape, place.global_offset, place.valid_shape, strict=True
    ):
        begin = max(first, low)
        end = max(begin, min(first + size, low + count))
        source.append(slice(begin - first, end - first))
        target.append(slice(begin - low, end - low))
    into[tuple(target)].copy_(whole[tuple(source)])


def _factor_table(configs: Sequence[AdapterConfig]) -> Tensor:
    """Returns the factors of each adapter, `[n + 1, R]`; row 0 is 0."""
    total = sum(one.rank for one in configs)
    table = torch.zeros(len(configs) + 1, total, dtype=torch.float64)
    start = 0
    for i, lora in enumerate(configs, 1):
        table[i, start : start + lora.rank] = lora.scale
        start += lora.rank
    return table


def find_token_adapters(model: nn.Module) -> TokenAdapters | None:
    """Returns what selects the adapters of tokens; None if this rank has no adapters by name."""
    found = (adapter.token_adapters for _, adapter, _ in named_adapters(model))
    return next(found, None)
