"""Upcycle: a dense model becomes a mixture of experts that computes the same, until it is trained.

Every expert of a layer is a copy of its MLP, the router is new. The weights of the chosen experts
sum to 1 (router_norm), so that

    y = Σ_k w_k · mlp(x) = mlp(x)

whatever the router says. An MLP is a sum over its hidden units; so a shared expert gets the first
of them, the experts copies of the rest, and both together are the MLP again. Without router_norm
the weights sum to less than 1, by another amount for each token, which no one scale makes up for:
such mixtures are not made. Experts of a fraction of the width (fine-grained) would need all the
pieces of an MLP among the chosen, and are not made either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ranvier import counter_rng
from ranvier.checkpoint.convert import opened
from ranvier.checkpoint.hf.model import Part, Published, shapes_of
from ranvier.config.run import Run
from ranvier.errors import PlanError
from ranvier.infer.generate import checkpoint_of, run_of
from ranvier.models.config import DecoderConfig
from ranvier.sharding import Place
from ranvier.system import safe_files
from ranvier.train import import_export

BALANCE = 0.01
"""Factor of the balancing loss that the new run begins with."""
BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    "chat_template.jinja",
)
"""Files of a run that go along."""


@dataclass(frozen=True)
class Dense:
    """A dense model whose weights are read when they are asked for."""

    config: DecoderConfig
    read: Callable[[str], Tensor]
    type: Callable[[str], torch.dtype]


@dataclass(frozen=True)
class Mixture:
    """The weights of the mixture, made from those of the dense model one by one."""

    config: DecoderConfig
    dense: Dense
    seed: int

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its tensors."""
        return shapes_of(self.config)

    def type(self, name: str) -> torch.dtype:
        """The type of a tensor: that of what it is made from."""
        return self.dense.type(self._origin(name) or "embed.weight")

    def bytes(self, name: str) -> int:
        """The size of a tensor."""
        return math.prod(self.shapes[name]) * self.type(name).itemsize

    def parts(self, name: str) -> Iterator[Part]:
        """The rows of a tensor: of one with experts the same rows for each of them."""
        origin, shape = self._origin(name), self.shapes[name]
        if not origin:
            place = Place(shape, (0,) * len(shape), shape, shape)
            std, dtype = self.config.init_std, self.type(name)
            yield 0, counter_rng.value(place, seed=self.seed, name=name, std=std, dtype=dtype)
            return
        whole = self.dense.read(origin)
        if (len(shape) == 2 and ".mlp." not in name) or len(shape) == 1:
            yield 0, whole
            return
        hidden = 1 if origin.endswith("down.weight") else 0  # the dim of hidden units
        shared = self.config.shared_mlp
        if len(shape) == 3:
            width = whole.shape[hidden] - shared
            one = whole.narrow(hidden, shared, width).contiguous().unsqueeze(0)
            yield from ((e, one) for e in range(shape[0]))
        else:  # of the shared expert, or of a dense layer
            yield 0, whole.narrow(hidden, 0, shape[hidden]).contiguous()

    def _origin(self, name: str) -> str:
        """The tensor of the dense model that one is made from; empty: it is new."""
        if ".mlp.router." in name:
            return ""
        if len(self.shapes[name]) == 3:
            block, _, layer = name.rpartition(".mlp.")
            gated = f"{block}.mlp.enter.gate.weight" in self._dense
            enter = "enter." if gated and layer != "down" else ""
            return f"{block}.mlp.{enter}{layer}.weight"
        return name.replace(".mlp.shared.", ".mlp.", 1)

    @cached_property
    def _dense(self) -> dict[str, tuple[int, ...]]:
        return shapes_of(self.dense.config)


def mixed(
    config: DecoderConfig, experts: int, *, top: int = 2, shared: int = 0, every: int = 1
) -> DecoderConfig:
    """The config of the mixture; what cannot be is refused.

    shared: hidden units of the MLP that become a shared expert. every: of so many layers the last.
    """
    problems = []
    if experts < 2:
        problems.append(f"upcycle={experts}. A mixture has several experts. Use 8.")
    if config.experts:
        problems.append(
            f"It has experts={config.experts} already. A dense model becomes a mixture. Use one."
        )
    if config.has_bias("mlp"):
        problems.append(
            "Its MLPs have biases. Experts have none, so it would not stay the same. Use a model "
            "without, such as those of llama or qwen3."
        )
    if not 0 <= shared < config.mlp:
        problems.append(
            f"shared={shared} of the mlp={config.mlp} hidden units. Some are left for the experts. "
            f"Use 0 to {config.mlp - 1}."
        )
    made = replace(
        config,
        experts=max(experts, 0),
        experts_top=top,
        expert_mlp=config.mlp - shared if shared else 0,
        shared_mlp=shared,
        moe_every=every,
        moe_first=0,
        router_norm=True,
        router_scale=1.0,
        balance=BALANCE,
    )
    problems += made.problems()
    if problems:
        raise PlanError(problems)
    return made


def upcycled(
    source: str,
    out: Path,
    *,
    upcycle: int,
    top: int = 2,
    shared: int = 0,
    every: int = 1,
    seed: int = 0,
    step: int = -1,
) -> list[str]:
    """Make a run of a mixture from a dense run or published model; lines on it."""
    path = import_export.found(source)
    if (path / "config.toml").exists():
        run = run_of(path)
        there = opened(checkpoint_of(path, None if step < 0 else step))
        read = import_export.weights_of(there, run)
        dense = Dense(run.model, read, lambda name: there.kinds[f"{name}.master"][0])
        config = mixed(run.model, upcycle, top=top, shared=shared, every=every)
        return _made(path, out, dense, run, config, seed)
    with Published.open(path) as model:
        run = import_export.run_for(
            model, out, tokenizer=(model.folder / "tokenizer.json").exists()
        )
        dense = Dense(model.config, model.tensor, model.type)
        config = mixed(model.config, upcycle, top=top, shared=shared, every=every)
        return _made(model.folder, out, dense, run, config, seed)


def _made(
    origin: Path, out: Path, dense: Dense, run: Run, config: DecoderConfig, seed: int
) -> list[str]:
    mixture = Mixture(config, dense, seed)
    run = Run(model=import_export.as_model(config), data=run.data)
    with import_export.appearing(out) as here:
        for name in BESIDE:
            if safe_files.exists(origin / name):
                safe_files.copy(origin / name, here / name)
        import_export.carried(str(origin), here)
        import_export.begin(here, run, mixture, str(origin))
    return [
        f"{config.experts} experts, {config.experts_top} for each token: "
        f"{run.model.parameters:,} weights, of which a token meets {run.model.active:,}, in {out}"
    ]
