"""Accelerator: runs a loop that was written for Hugging Face Accelerate on a grid.

    accelerator = ranvier.Accelerator({"row": 2, "col": 2})      # was: accelerate.Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

It has the methods that such loops call, with the same meaning; Accelerate itself is not needed. One
thing differs: a batch of the loader is the batch of the whole grid (split_batches=True in
Accelerate), so schedulers step once per step. Start it with torchrun, srun or `accelerate launch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.comm import collectives
from ranvier.comm.consensus import max_over_ranks
from ranvier.config.plan import InnerSplit, Plan
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.integrations import training_loop
from ranvier.integrations.training_loop import AdamW, GridModel
from ranvier.launch.external_launch import AxisSizes, build_grid
from ranvier.sharding import REPLICA_AXES


class Accelerator:
    """The interface of `accelerate.Accelerator` on a grid."""

    def __init__(
        self,
        plan: AxisSizes | None = None,
        *,
        grid: Grid | None = None,
        inner: InnerSplit | None = None,
        device: torch.device | str | None = None,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        """plan: ranks on each axis; the remaining ranks are data. grid: an existing grid.

        Communicates: with all ranks that the launcher has started, unless a grid is given.
        """
        if gradient_accumulation_steps < 1:
            raise PlanError(
                f"gradient_accumulation_steps={gradient_accumulation_steps} is too small. An "
                "update needs at least one batch. Use 1 or more."
            )
        if grid is None:
            self.grid, self.device = build_grid(plan, inner=inner, device=device)
        else:
            self.grid, self.device = grid, torch.device(device or "cpu")
        self.inner = plan.col_splits if inner is None and isinstance(plan, Plan) else inner
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.sync_gradients = True
        """Whether the current batch is the last one before an update."""
        self.is_last_batch = False
        """Whether it is the last batch of its loader, which is always followed by an update."""
        self._batch_count = 0
        self._grid_model: GridModel | None = None
        self._adamw: AdamW | None = None

    # ---- ranks ----------------------------------------------------------------------------------

    @property
    def process_index(self) -> int:
        """My rank."""
        return self.grid.rank

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return self.grid.world_size

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.grid.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.grid.rank % self.grid.ranks_per_node == 0

    def print(self, *words: Any) -> None:
        """Print on rank 0 only."""
        if self.is_main_process:
            print(*words)

    def wait_for_everyone(self) -> None:
        """Wait for all ranks. Communicates: one number over all axes."""
        max_over_ranks(0, self.grid, self.device)

    # ---- training loop --------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Wraps a model, its AdamW, loaders and schedulers; returns them in the same order.

        Communicates: as `training_loop.put_on_grid`.
        """
        models = [x for x in objects if isinstance(x, nn.Module)]
        adamws = [x for x in objects if isinstance(x, torch.optim.Optimizer)]
        if len(models) > 1 or len(adamws) > 1 or (adamws and not models):
            raise PlanError(
                f"prepare() was called with {len(models)} models and {len(adamws)} optimizers. A "
                "grid has one model and its AdamW, prepared together. Pass both, once."
            )
        twins: dict[int, Any] = {}
        if models:
            if adamws:
                # Before the model is put on the grid, which replaces its parameters.
                members = training_loop.param_group_indices(models[0], adamws[0])
            else:
                members = {}
            self._grid_model = training_loop.put_on_grid(
                models[0], self.grid, inner=self.inner, device=self.device
            )
            twins[id(models[0])] = self._grid_model
            if adamws:
                self._adamw = AdamW.from_optimizer(adamws[0], members, self._grid_model)
                twins[id(adamws[0])] = _StepAfterAccumulation(self, self._adamw)
        made = [self._prepare_object(x, twins) for x in objects]
        if len(made) == 1:
            return made[0]
        return tuple(made)

    def _prepare_object(self, x: Any, twins: Mapping[int, Any]) -> Any:
        if id(x) in twins:
            return twins[id(x)]
        # Schedulers have both attributes; anything else is treated as a loader.
        if hasattr(x, "optimizer") and hasattr(x, "step"):
            return _StepAfterAccumulation(self, x)
        return _DeviceLoader(training_loop.shard_loader(x, self.grid, self.device), self)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Context of one batch; only the last of several batches is followed by an update."""
        self._batch_count += 1
        self.sync_gradients = (
            self.is_last_batch or self._batch_count % self.gradient_accumulation_steps == 0
        )
        # The next epoch starts a new accumulation.
        if self.is_last_batch:
            self._batch_count = 0
        yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Returns a null context, because gradients are reduced at the step."""
        return nullcontext()

    def autocast(self) -> AbstractContextManager[None]:
        """Returns a null context: weights have one dtype, and the optimizer has master weights."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of a loss, divided by the number of accumulated batches."""
        (loss / self.gradient_accumulation_steps).backward()

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Returns the norm over the whole grid; the next step clips it to `max_norm`."""
        if self._adamw is None or float(norm_type) != 2.0:
            raise PlanError(
                f"clip_grad_norm_ with norm_type={norm_type}. It needs a model that was prepared "
                "with its optimizer, and the Euclidean norm. Prepare both, and use norm_type=2."
            )
        return self._adamw.clip_grad_norm(max_norm)

    # ---- collectives ----------------------------------------------------------------------------

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all coordinates, concatenated, with each sample once.

        Communicates: all-gather over the axes of samples.
        """
        if tensor.dim() == 0:
            whole = tensor.unsqueeze(0)
        else:
            whole = tensor
        # Only over coordinates with different samples; other axes would repeat them.
        axis = self.grid.axis(*REPLICA_AXES)
        return collectives.all_gather(whole.detach(), axis).wait()

    gather_for_metrics = gather

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        """Returns sum or mean over the coordinates. Communicates: all-reduce over the axes of
        samples."""
        axis = self.grid.axis(*REPLICA_AXES)
        found = collectives.all_reduce(tensor.detach(), axis).wait()
        if reduction == "mean":
            return found / axis.size
        return found

    # ---- checkpoints ----------------------------------------------------------------------------

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Returns the model itself, of which this rank holds a part."""
        if isinstance(model, GridModel):
            return model.model
        return model

    def save_state(self, path: str | Path) -> None:
        """Save model and optimizer to a directory that any grid can load."""
        training_loop.save_checkpoint(
            Path(path), self._require_model(), self._adamw, {"batches": self._batch_count}
        )

    def load_state(self, path: str | Path) -> None:
        """Resume from a checkpoint of this grid or another."""
        self._batch_count = int(
            training_loop.load_checkpoint(Path(path), self._require_model(), self._adamw).get(
                "batches", 0
            )
        )

    def _require_model(self) -> GridModel:
        if self._grid_model is None:
            raise PlanError("No model is prepared. Call accelerator.prepare(model, ...) first.")
        return self._grid_model

    def end_training(self) -> None:
        """Wait for all ranks."""
        self.wait_for_everyone()


class _StepAfterAccumulation:
    """An optimizer or scheduler that acts only after the last of several batches."""

    def __init__(self, accelerator: Accelerator, inner: Any) -> None:
        self._accelerator = accelerator
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, *args: Any) -> None:
        """Steps if the current batch is the last one accumulated."""
        if self._accelerator.sync_gradients:
            self._inner.step(*args)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients if they were used."""
        if self._accelerator.sync_gradients:
            self._inner.zero_grad(set_to_none)


class _DeviceLoader:
    """A loader whose batches are on the device, and which detects the last one."""

    def __init__(self, loader: Any, accelerator: Accelerator) -> None:
        self._loader = loader
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields batches one behind the loader, so that the last one is known when it is
        yielded."""
        self._accelerator.is_last_batch = False
        # Holds the one batch that was read but not yielded.
        before: list[Any] = []
        for batch in self._loader:
            yield from before
            before = [move_to_device(batch, self._accelerator.device)]
        self._accelerator.is_last_batch = True
        yield from before


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Returns a batch on a device, with all nested tensors."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move_to_device(x, device) for key, x in batch.items()}
    if isinstance(batch, list | tuple):
        return [move_to_device(x, device) for x in batch]
    return batch
