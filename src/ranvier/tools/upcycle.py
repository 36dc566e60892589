"""Upcycle: turns a dense model into a mixture of experts with the same output before training.

Every expert of a layer is a copy of its MLP, and the router is new. The weights of the chosen
experts sum to 1 (router_norm), so that

    y = Σ_k w_k · mlp(x) = mlp(x)

for any output of the router. An MLP is a sum over its hidden units, so a shared expert gets the
first units and the experts get copies of the rest; together they equal the MLP. Without router_norm
the weights sum to less than 1, by a different amount for each token, which no constant scale
compensates: such mixtures are not supported. Experts with a fraction of the width (fine-grained)
would need all the pieces of an MLP among the chosen experts, and are not supported either.
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
from ranvier.checkpoint.convert import open_checkpoint
from ranvier.checkpoint.hf.model import PublishedModel, RowPart, shapes_of
from ranvier.config.run import RunConfig
from ranvier.errors import PlanError
from ranvier.infer.load import find_checkpoint, load_config_from_dir
from ranvier.models.config import DecoderConfig
from ranvier.sharding import Shard
from ranvier.system import safe_files
from ranvier.system.model_hub import find_model
from ranvier.train import import_export

AUX_LOSS_COEFF = 0.01
"""Coefficient of the load-balancing loss in the new run."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    "chat_template.jinja",
)
"""Files of the origin that are copied to the new run."""


@dataclass(frozen=True)
class DenseModel:
    """A dense model whose weights are read on demand."""

    config: DecoderConfig
    read_tensor: Callable[[str], Tensor]
    dtype_of: Callable[[str], torch.dtype]


@dataclass(frozen=True)
class UpcycledWeights:
    """The weights of the mixture, made one by one from the weights of the dense model."""

    config: DecoderConfig
    dense: DenseModel
    seed: int

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its tensors."""
        return shapes_of(self.config)

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor, which is the dtype of its origin."""
        return self.dense.dtype_of(self._origin_name(name) or "embed.weight")

    def num_bytes(self, name: str) -> int:
        """Returns the size of a tensor in bytes."""
        return math.prod(self.shapes[name]) * self.dtype_of(name).itemsize

    def row_parts(self, name: str) -> Iterator[RowPart]:
        """Yields the rows of a tensor; each expert has the same rows."""
        origin = self._origin_name(name)
        shape = self.shapes[name]
        # A router does not exist in the dense model: it is initialized.
        if not origin:
            place = Shard(shape, (0,) * len(shape), shape, shape)
            std = self.config.init_std
            dtype = self.dtype_of(name)
            yield 0, counter_rng.init_shard(place, seed=self.seed, name=name, std=std, dtype=dtype)
            return
        whole = self.dense.read_tensor(origin)
        # Neither experts nor hidden units: copied unchanged.
        if ".mlp." not in name or len(shape) == 1:
            yield 0, whole
            return
        # The dim of hidden units: inputs of `down`, outputs of all others.
        if origin.endswith("down.weight"):
            hidden = 1
        else:
            hidden = 0
        shared = self.config.shared_expert_mlp
        if len(shape) == 3:
            width = whole.shape[hidden] - shared
            one = whole.narrow(hidden, shared, width).contiguous().unsqueeze(0)
            yield from ((e, one) for e in range(shape[0]))
        # A shared expert takes the first hidden units, a dense layer all of them.
        else:
            yield 0, whole.narrow(hidden, 0, shape[hidden]).contiguous()

    def _origin_name(self, name: str) -> str:
        """Returns the name of the dense tensor that a tensor is made from; empty if it is new."""
        if ".mlp.router." in name:
            return ""
        # The average of streams also has three dims.
        if ".mlp." in name and len(self.shapes[name]) == 3:
            block, _, layer = name.rpartition(".mlp.")
            # A gated MLP has its up and gate projections below `enter`, a plain one does not.
            gated = f"{block}.mlp.enter.gate.weight" in self._dense_shapes
            if gated and layer != "down":
                enter = "enter."
            else:
                enter = ""
            return f"{block}.mlp.{enter}{layer}.weight"
        return name.replace(".mlp.shared.", ".mlp.", 1)

    @cached_property
    def _dense_shapes(self) -> dict[str, tuple[int, ...]]:
        return shapes_of(self.dense.config)


def mixture_config(
    config: DecoderConfig,
    experts: int,
    *,
    experts_per_token: int = 2,
    shared_expert_mlp: int = 0,
    moe_layer_interval: int = 1,
) -> DecoderConfig:
    """Returns the config of the mixture; raises if it is not possible.

    shared_expert_mlp: hidden units of the MLP that become a shared expert. moe_layer_interval: one
    of this many layers, the last, is an MoE layer.
    """
    problems = []
    if experts < 2:
        problems.append(f"experts={experts} is too small. A mixture has at least 2 experts. Use 8.")
    if config.experts:
        problems.append(
            f"The model already has experts={config.experts}. Only a dense model can be upcycled. "
            "Use a dense model."
        )
    if config.has_bias("mlp"):
        problems.append(
            "The MLPs of the model have biases. Experts have none, so the output would change. Use "
            "a model without biases, such as Llama or Qwen3."
        )
    if not 0 <= shared_expert_mlp < config.mlp:
        problems.append(
            f"shared_expert_mlp={shared_expert_mlp} is out of range for mlp={config.mlp} hidden "
            f"units. Some units must remain for the experts. Use 0 to {config.mlp - 1}."
        )
    made = replace(
        config,
        experts=max(experts, 0),
        experts_per_token=experts_per_token,
        expert_mlp=config.mlp - shared_expert_mlp if shared_expert_mlp else 0,
        shared_expert_mlp=shared_expert_mlp,
        moe_layer_interval=moe_layer_interval,
        dense_first_layers=0,
        router_norm=True,
        router_scale=1.0,
        aux_loss_coeff=AUX_LOSS_COEFF,
    )
    problems += made.find_problems()
    if problems:
        raise PlanError(problems)
    return made


def upcycle_model(
    source: str,
    out: Path,
    *,
    experts: int,
    experts_per_token: int = 2,
    shared_expert_mlp: int = 0,
    moe_layer_interval: int = 1,
    seed: int = 0,
    step: int = -1,
) -> list[str]:
    """Creates a run of a mixture from a dense run or published model; returns a summary in
    lines.
    """
    path = find_model(source)
    # A directory with config.toml is a run; anything else must be a published model.
    if (path / "config.toml").exists():
        run = load_config_from_dir(path)
        there = open_checkpoint(find_checkpoint(path, None if step < 0 else step))
        read = import_export.weight_reader(there, run)
        dense = DenseModel(run.decoder, read, lambda name: there.tensor_specs[f"{name}.master"][0])
        config = mixture_config(
            run.decoder,
            experts,
            experts_per_token=experts_per_token,
            shared_expert_mlp=shared_expert_mlp,
            moe_layer_interval=moe_layer_interval,
        )
        return _write_run(path, out, dense, run, config, seed)
    with PublishedModel.open(path) as model:
        run = import_export.build_imported_run(
            model, out, tokenizer=(model.folder / "tokenizer.json").exists()
        )
        dense = DenseModel(model.config, model.load_tensor, model.dtype_of)
        config = mixture_config(
            model.config,
            experts,
            experts_per_token=experts_per_token,
            shared_expert_mlp=shared_expert_mlp,
            moe_layer_interval=moe_layer_interval,
        )
        return _write_run(model.folder, out, dense, run, config, seed)


def _write_run(
    origin: Path, out: Path, dense: DenseModel, run: RunConfig, config: DecoderConfig, seed: int
) -> list[str]:
    mixture = UpcycledWeights(config, dense, seed)
    run = RunConfig(model=import_export.to_model_config(config), data=run.data)
    # The run directory appears only once it is complete.
    with import_export.write_atomically(out) as here:
        for name in TOKENIZER_FILES:
            if safe_files.path_exists(origin / name):
                safe_files.copy_file(origin / name, here / name)
        import_export.copy_origin_files(str(origin), here)
        import_export.write_initial_run(here, run, mixture, str(origin))
    return [
        f"{config.experts} experts, {config.experts_per_token} per token: "
        f"{run.model.num_parameters:,} parameters, {run.model.num_active_parameters:,} active per "
        f"token, in {out}"
    ]
