"""RanvierStrategy: runs a training loop with Lightning Fabric on a grid.

    fabric = Fabric(strategy=RanvierStrategy(row=2, col=2), devices=4, accelerator="cpu")
    fabric.launch()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(loader)

The rest of the loop is unchanged; `training_loop` describes how model, optimizer and loader are
wrapped. Fabric starts and connects the processes; collectives use the grid.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.comm.consensus import broadcast_text, max_over_ranks, world_axis
from ranvier.config.plan import InnerSplit
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.integrations import training_loop
from ranvier.integrations.training_loop import AdamW, GridModel
from ranvier.launch.external_launch import resolve_axes

PRECISIONS = ("32-true", "64-true", "bf16-true")
"""Precisions with one dtype for all weights; bf16 weights always have fp32 master weights."""


def _import_fabric_strategy() -> Any:
    """Returns Fabric's DDP strategy, from the package that the loop has imported."""
    # Both packages ship the same classes, but a strategy of one is not accepted by the other.
    names = ("lightning.fabric", "lightning_fabric")
    try:
        name = next((name for name in names if name in sys.modules), names[1])
        return importlib.import_module(f"{name}.strategies").DDPStrategy
    except ImportError:
        raise PlanError(
            "lightning-fabric is not installed. RanvierStrategy is a Fabric strategy. Install the "
            "extra: pip install 'ranvier[fabric]'."
        ) from None


class _NoBackwardSync:
    """Gradients are reduced at the step, so backward has no synchronization to skip."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a null context."""
        return nullcontext()


class RanvierStrategy(_import_fabric_strategy()):  # type: ignore[misc]
    """A Fabric strategy whose processes form a grid."""

    def __init__(
        self,
        plan: Mapping[str, int] | None = None,
        *,
        inner: InnerSplit | None = None,
        grid: Grid | None = None,
        **axes: int,
    ) -> None:
        """plan, axes: ranks on each axis, such as `row=2`; the remaining ranks are data.

        grid: an existing grid. inner: what col splits inside the model (transformers models always
        split features).
        """
        super().__init__()
        self.axis_sizes = {**(plan or {}), **axes}
        self.inner = inner
        self._grid = grid
        self._backward_sync_control = _NoBackwardSync()
        self._grid_model: GridModel | None = None
        self._group_indices: dict[str, int] | None = None

    @property
    def grid(self) -> Grid:
        """The grid of all processes, once they have started."""
        if self._grid is None:
            raise PlanError(
                "The grid does not exist before the processes start. Call fabric.launch() first."
            )
        return self._grid

    def setup_environment(self) -> None:
        """Joins the other processes and builds the grid. Communicates: with all processes."""
        given = str(self.precision.precision)
        if given not in PRECISIONS:
            raise PlanError(
                f"precision={given!r} is not supported. On a grid all weights have one data type, "
                f"without autocast. Use one of {', '.join(PRECISIONS)}."
            )
        if self._grid is None:
            # Resolved first, so that an invalid plan fails before processes connect.
            plan = resolve_axes(
                self.axis_sizes, self.num_nodes * self.num_processes, {}, inner=self.inner
            )
            super().setup_environment()
            nodes = max(self.num_processes, 1)
            self._grid = Grid.from_plan(plan, connected=plan.world_size > 1, ranks_per_node=nodes)
        else:
            self.accelerator.setup_device(self.root_device)

    def _configure_launcher(self) -> None:
        # For a single process the launcher would only set environment variables.
        if self.num_nodes * self.num_processes > 1:
            super()._configure_launcher()

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        # A single rank needs no process group.
        if self.num_nodes * self.num_processes > 1:
            super()._setup_distributed()

    # ---- model, optimizer, data -----------------------------------------------------------------

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Any], Any]:
        """Puts model and AdamW on the grid."""
        if len(optimizers) != 1:
            raise PlanError(
                f"{len(optimizers)} optimizers for one model. A grid supports one optimizer. Use "
                "one."
            )
        # Before `setup_module` replaces the parameters that the groups refer to.
        members = training_loop.param_group_indices(module, optimizers[0])
        lent = self.setup_module(module)
        return lent, [AdamW.from_optimizer(optimizers[0], members, lent)], scheduler

    def setup_module(self, module: nn.Module) -> GridModel:
        """Returns the model on the grid. Communicates: as `training_loop.put_on_grid`."""
        self._grid_model = training_loop.put_on_grid(
            module, self.grid, inner=self.inner, device=self.root_device
        )
        return self._grid_model

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> AdamW:
        """Returns AdamW of the model that was set up last, built from its parameters."""
        if self._grid_model is None:
            raise PlanError(
                "An optimizer was set up without its model. Use fabric.setup(model, optimizer)."
            )
        members = training_loop.param_group_indices(self._grid_model.model, optimizer)
        return AdamW.from_optimizer(optimizer, members, self._grid_model)

    def module_to_device(self, module: nn.Module) -> None:
        """No-op: only the shards of a model are moved to their devices."""

    @property
    def distributed_sampler_kwargs(self) -> None:
        """None, because samplers are kept and each coordinate takes its part of a batch."""
        return None

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns the loader of my coordinate."""
        return training_loop.shard_loader(dataloader, self.grid, self.root_device)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Returns the norm over the whole grid; the next step clips it to `max_norm`."""
        if float(norm_type) != 2.0:
            raise PlanError(
                f"norm_type={norm_type} is not supported. Gradients are clipped by their Euclidean "
                "norm. Use norm_type=2."
            )
        adamw: AdamW = getattr(optimizer, "optimizer", optimizer)
        return adamw.clip_grad_norm(float(max_norm), finite=error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Raises, because gradients are reduced only at the step."""
        raise PlanError(
            f"clip_val={clip_val} is not supported. A grid clips by norm. Use max_norm=1.0."
        )

    # ---- collectives ----------------------------------------------------------------------------

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensors of all ranks, in rank order, along a new dim."""
        return collectives.all_gather(tensor.unsqueeze(0), world_axis(self.grid)).wait()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the mean or sum over all ranks; ranks of the same coordinate have equal
        values."""
        if not isinstance(tensor, Tensor):
            return tensor
        found = collectives.all_reduce(tensor, world_axis(self.grid)).wait()
        mean = str(reduce_op).lower().removeprefix("redoptype.") in ("mean", "avg")
        if mean:
            return found / self.grid.world_size
        return found

    def barrier(self, *_: Any, **__: Any) -> None:
        """Waits for all ranks."""
        if self._grid is not None:
            max_over_ranks(0, self.grid, self.root_device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of one rank on all ranks."""
        try:
            if self.grid.rank == src:
                text = json.dumps(obj, default=os.fspath)
            else:
                text = ""
        except TypeError:
            raise PlanError(
                f"fabric.broadcast of a {type(obj).__name__} is not supported. Objects are sent as "
                "JSON: numbers, strings, lists and dicts. Send one of these."
            ) from None
        return json.loads(broadcast_text(text, self.grid, self.root_device, rank=src))

    # ---- checkpoints ----------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Saves to a directory that any grid can load; other entries must be JSON values."""
        if filter:
            raise PlanError(
                "fabric.save with filter= is not supported. Checkpoints are complete. Remove "
                "filter."
            )
        lent, adamw, rest = self._split_state(state)
        facts = {k: x.state_dict() if hasattr(x, "state_dict") else x for k, x in rest.items()}
        training_loop.save_checkpoint(Path(path), lent, adamw, facts)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint of this grid or another into model, optimizer and other entries."""
        lent, adamw, rest = self._split_state(state if isinstance(state, dict) else {"": state})
        facts = training_loop.load_checkpoint(Path(path), lent, adamw)
        for key, held in rest.items():
            if key not in facts and strict:
                raise PlanError(
                    f"{path} has no {key!r}. It has {', '.join(facts) or 'no other entries'}. Use "
                    "one of these, or strict=False."
                )
            if hasattr(held, "load_state_dict"):
                held.load_state_dict(facts.pop(key))
            elif key in facts:
                state[key] = facts.pop(key)
        return facts

    def _split_state(
        self, state: Mapping[str, Any]
    ) -> tuple[GridModel, AdamW | None, dict[str, Any]]:
        """Returns model, optimizer and the rest of the state of a loop."""
        models = [x for x in state.values() if isinstance(x, GridModel)]
        adamws = [x for x in state.values() if isinstance(x, AdamW)]
        if len(models) != 1 or len(adamws) > 1:
            raise PlanError(
                f"{len(models)} models and {len(adamws)} optimizers to save or load. A checkpoint "
                "has one model from fabric.setup and its optimizer. Pass these."
            )
        rest = {k: x for k, x in state.items() if not isinstance(x, GridModel | AdamW)}
        return models[0], adamws[0] if adamws else None, rest
