"""Training loop: wrappers with which a loop for one process runs on a grid.

The loop keeps its model, its AdamW and its data loader; each gets a wrapper with the same
interface:

    GridModel      the model on the grid; called as before, it returns full losses and logits
    AdamW          the optimizer's own param_groups (schedulers keep working), our sharded update
    shard_loader   the loader; each (data, expert, depth) coordinate gets its part of every batch

A batch of the loop is the batch of the whole grid, and its losses equal those of one process.
Gradients are in buckets until the step, so `p.grad` stays empty. Pipeline parallelism (pipe > 1)
and optimizers other than AdamW are not supported.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from ranvier.buckets.scheduler import BucketScheduler
from ranvier.buckets.spec import ParamGroup
from ranvier.checkpoint import async_saver, directory
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.load import load_checkpoint as load_parts
from ranvier.comm import collectives
from ranvier.comm.autograd import reduce_from_axis
from ranvier.comm.consensus import find_rank_differences, run_and_raise_together, world_axis
from ranvier.config.plan import InnerSplit, Plan
from ranvier.data.loader import rank_rows
from ranvier.errors import CheckpointError, DataError, NumericError, PlanError
from ranvier.grid import Grid
from ranvier.infer.load import MASTER_SUFFIX
from ranvier.integrations.hf_forward import (
    compute_logits,
    hf_forward,
    pad_inputs,
    pad_to_grid,
    scale_gradient,
)
from ranvier.launch.external_launch import AxisSizes, resolve_axes
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel import huggingface
from ranvier.parallel.context_inputs import split_over_context
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.sharding import REPLICA_AXES, Shard, ShardedStateDict

STEP_KIND = "loop"
"""Kind of step for the bucket scheduler; its blocks have the same order each time."""
HF_INPUTS = ("input_ids", "attention_mask", "position_ids", "labels")
"""Arguments with which a transformers model may be called."""
ACCEPTED_ARGUMENTS = {
    "use_cache": (None, False),
    "return_dict": (None, True),
    "past_key_values": (None,),
}
"""Further arguments, with the values that are accepted because they do not change anything."""


class GridModel(nn.Module):
    """A model on a grid, called by a loop that is not aware of it.

    A transformers model returns loss and logits as in `hf_forward`. One of our models returns the
    sum of the losses of my coordinate, or its logits `[b, s, v]`. Their gradient is the gradient of
    the mean over the coordinates, so a loop that divides by its own tokens optimizes the mean of
    all.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.is_huggingface = model, huggingface.is_huggingface_model(model)
        self.samples_seen = 0
        """Number of training samples so far, of all coordinates; dropout depends on it."""

    @property
    def parallel(self) -> ParallelModel:
        """The `ParallelModel` of the model."""
        return get_parallel_model(self.model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model. Communicates: as the model, and to gather the result."""
        if self.is_huggingface:
            return self._call_like_hf(*args, **kwargs)
        return self._call_directly(*args, **kwargs)

    def _sample_numbers(self, count: int) -> Tensor | None:
        """Returns the indices of my samples in the run, in training mode."""
        if not self.training:
            return None
        grid = self.parallel.grid
        whole = count * grid.axis(*REPLICA_AXES).size
        found = torch.tensor([self.samples_seen + row for row in rank_rows(whole, grid)])
        self.samples_seen += whole
        return found

    def _call_like_hf(self, input_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Calls it like transformers."""
        odd = [
            f"{name}={value!r:.40}"
            for name, value in kwargs.items()
            if name not in HF_INPUTS
            and value is not None
            and value not in ACCEPTED_ARGUMENTS.get(name, ())
        ]
        if args or odd or input_ids is None:
            raise PlanError(
                f"{type(self.model).__name__} was called with {', '.join(odd) or 'other inputs'}. "
                f"On a grid it accepts {', '.join(HF_INPUTS)}, by name. Remove the others."
            )
        known = {name: kwargs[name] for name in HF_INPUTS if kwargs.get(name) is not None}
        return hf_forward(
            self.model, input_ids, samples=self._sample_numbers(len(input_ids)), **known
        )

    def _call_directly(self, *args: Any, **kwargs: Any) -> Tensor:
        """Calls one of our models: tokens, targets, positions, documents, all `[b, s]`."""
        signature = inspect.signature(type(self.model).forward)
        bound = signature.bind(self.model, *args, **kwargs)
        inputs = {k: x for k, x in bound.arguments.items() if isinstance(x, Tensor)}
        parallel = self.parallel
        shape = inputs["tokens"].shape
        even = pad_inputs(inputs, parallel)
        even = {name: x for name, x in even.items() if name in signature.parameters}
        numbers = self._sample_numbers(shape[0])
        if numbers is not None:
            numbers = pad_to_grid(numbers, parallel)
        if "targets" not in even:
            return compute_logits(self.model, even, shape, numbers)
        parallel.step_context.samples = numbers
        loss: Tensor = self.model(**split_over_context(even, parallel)[0])
        # Losses of the ranks of this coordinate that hold different samples or parts of a sequence.
        table = parallel.table
        inside = (table.axes_inside_replica("vocab", name) for name in ("batch", "seq"))
        axis = parallel.grid.axis(*chain.from_iterable(inside))
        return scale_gradient(
            reduce_from_axis(loss, axis), 1.0 / parallel.grid.axis(*REPLICA_AXES).size
        )


def put_on_grid(
    model: nn.Module, grid: Grid, *, inner: InnerSplit | None = None, device: torch.device | str
) -> GridModel:
    """Returns a model on a grid, with the values of rank 0.

    Communicates: creation of process groups; weight after weight over all axes.
    """
    theirs = huggingface.is_huggingface_model(model)
    sizes = dict(huggingface.dim_units(model.config) if theirs else getattr(model, "sizes", {}))
    if grid.degrees["pipe"] > 1:
        raise PlanError(
            f"pipe={grid.degrees['pipe']} with your own training loop. A pipeline needs its own "
            "schedule of micro-batches. Use pipe=1, or `ranvier train`."
        )
    if not theirs and "vocab" not in sizes:
        raise PlanError(
            f"{type(model).__name__} is neither a transformers language model nor a model with "
            "`dims` and `sizes`. Ranvier cannot know which of its outputs are split over ranks. "
            "Use ranvier.parallelize and ranvier.call_on_full_batch for it."
        )
    how: AxisSizes = grid.degrees
    if theirs:
        inner = "features"
    else:
        inner = resolve_axes(how, grid.world_size, sizes, inner=inner).col_splits
    with torch.no_grad():
        for param in model.parameters():
            if not param.is_meta and grid.world_size > 1:
                # Ranks may have different random values. One weight at a time limits the memory.
                param.copy_(collectives.broadcast(param.detach(), world_axis(grid)).wait())
    plan = Plan(col_splits=inner).with_degrees(grid.degrees)
    return GridModel(parallelize(model, grid, plan, device=device))


# ---- optimizer ----------------------------------------------------------------------------------


class AdamW(torch.optim.Optimizer):
    """The loop's AdamW, with its own param_groups and our update of sharded weights."""

    def __init__(
        self, theirs: torch.optim.Optimizer, kinds: Mapping[ParamGroup, int], lent: GridModel
    ):
        """kinds: index of the param group that holds each kind of parameter."""
        self.bucket_scheduler: BucketScheduler = lent.parallel.bucket_scheduler
        self.torch_optimizer, self.group_indices, self.grid_model = theirs, dict(kinds), lent
        first = theirs.param_groups[0]
        super().__init__([dict(group) for group in theirs.param_groups], theirs.defaults)
        # The same list object, because learning rate schedulers of the loop write to it.
        self.param_groups = theirs.param_groups
        # Clipping is off until the loop calls `clip_grad_norm`.
        self.sharded_optimizer = Optimizer(
            self.bucket_scheduler, betas=tuple(first["betas"]), eps=float(first["eps"]), clip=0.0
        )
        self.bucket_scheduler.begin_step(STEP_KIND)

    @classmethod
    def from_optimizer(
        cls, theirs: torch.optim.Optimizer, members: Mapping[str, int], lent: GridModel
    ) -> AdamW:
        """Returns our AdamW for an optimizer; members: index of the param group of each parameter
        name."""
        kinds = dict[ParamGroup, int]()
        odd = list[str]()
        weights = lent.parallel.weights.values()
        for weight in (w for w in weights if w.trainable):
            number = members.get(weight.name, -1)
            if kinds.setdefault(weight.param_group, number) != number or number < 0:
                odd.append(f"{weight.name} ({weight.param_group})")
        if odd:
            raise PlanError(
                f"The param groups of AdamW are not supported: {', '.join(odd[:5])}"
                f"{' ...' * (len(odd) > 5)}. Every trained weight must be in a group, and all "
                "matrices, all embeddings and all vectors (norms, biases) must each be in the same "
                "group. Group them so, and freeze the other weights."
            )
        held = {weight.name: weight.param for weight in weights}
        # Replacing the parameters releases the full weights.
        for number, group in enumerate(theirs.param_groups):
            group["params"] = [held[name] for name, at in members.items() if at == number]
        return cls(theirs, kinds, lent)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the weights and drops the gradients. Communicates: as `Optimizer.step`."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        # Read at every step, because a scheduler may have changed them. With a base rate of 1, the
        # factors are the rates themselves.
        groups = {kind: self.param_groups[number] for kind, number in self.group_indices.items()}
        self.sharded_optimizer.lr_factors = {
            kind: float(group["lr"]) for kind, group in groups.items()
        }
        self.sharded_optimizer.weight_decays = {
            kind: float(group["weight_decay"]) for kind, group in groups.items()
        }
        self.sharded_optimizer.step(1.0)
        self.sharded_optimizer.clip = 0.0
        # Schedulers check this flag and warn if it is not set.
        self.torch_optimizer._opt_called = True  # type: ignore[attr-defined]
        self.bucket_scheduler.begin_step(STEP_KIND)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients."""
        self.sharded_optimizer.clip = 0.0
        buckets = self.bucket_scheduler.buckets
        # Only if there are any: right after `step`, an empty order of blocks would be recorded.
        if any(
            b.grad or b.unsharded_grads is not None or b.reduced_grads or b.final_grads
            for b in buckets
        ):
            self.bucket_scheduler.begin_step(STEP_KIND)

    def clip_grad_norm(self, limit: float, *, finite: bool = False) -> Tensor:
        """Returns the norm of the gradients; the next step clips it to `limit`.

        finite: raise if the norm is not finite. Communicates: as `Optimizer.grad_norm`.
        """
        norm = self.sharded_optimizer.grad_norm()
        self.sharded_optimizer.clip = float(limit)
        if finite and not bool(norm.isfinite()):
            raise NumericError(
                f"The gradient norm is {float(norm)}. An update needs finite gradients. Lower the "
                "learning rate or check the data, or use error_if_nonfinite=False to skip the step."
            )
        return norm

    def group_settings(self) -> list[dict[str, Any]]:
        """Returns the settings of each group without its weights, with the current learning
        rates."""
        kept = [{k: x for k, x in g.items() if k != "params"} for g in self.param_groups]
        return [{k: float(x) if isinstance(x, Tensor) else x for k, x in g.items()} for g in kept]

    def state_dict(self) -> dict[str, Any]:
        """Raises, because each rank has only a part of it."""
        raise PlanError(
            "state_dict() is not supported by an optimizer on a grid. Each rank has only a part of "
            "its state. Save model and optimizer together with fabric.save or "
            "accelerator.save_state."
        )


def param_group_indices(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Returns the index of the optimizer's param group of each parameter of a model, by name."""
    groups = optimizer.param_groups
    wrong = [key for key in ("amsgrad", "maximize") if any(group.get(key) for group in groups)]
    same = all(
        (group["betas"], group["eps"]) == (groups[0]["betas"], groups[0]["eps"])
        for group in groups
        if "betas" in group and "eps" in group
    )
    if type(optimizer) is not torch.optim.AdamW or wrong or not same or optimizer.state:
        what = ", ".join(wrong) or ("" if same else "several betas or eps")
        what = what or ("an existing state" if optimizer.state else "")
        raise PlanError(
            f"{type(optimizer).__name__}{' with ' * bool(what)}{what} is not supported. A grid "
            "updates weights with AdamW, and all its groups must have the same betas and eps. Use "
            "a new torch.optim.AdamW, and load its state afterwards."
        )
    numbers = {id(p): n for n, group in enumerate(groups) for p in group["params"]}
    return {n: numbers[id(p)] for n, p in model.named_parameters() if id(p) in numbers}


# ---- data ---------------------------------------------------------------------------------------


class ShardedBatchSampler:
    """A batch sampler that yields this rank's part of each batch."""

    def __init__(self, sampler: Any, grid: Grid, device: torch.device | str) -> None:
        self.full_sampler = sampler
        self.grid = grid
        self.device = device
        self.sampler = getattr(sampler, "sampler", sampler)
        self.batch_size = getattr(sampler, "batch_size", None)
        self.drop_last = getattr(sampler, "drop_last", False)

    def __len__(self) -> int:
        return len(self.full_sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        """Yields my part of each batch, in the order that rank 0 draws.

        Communicates: the RNG state over all axes, and whether ranks agree.
        """
        # A random sampler draws its seed from the global generator, which may differ between ranks.
        state = torch.get_rng_state().to(self.device)
        torch.set_rng_state(collectives.broadcast(state, world_axis(self.grid)).wait().cpu())
        first = True
        for batch in self.full_sampler:
            if first:
                # The broadcast does not cover a sampler with its own generator, so compare its
                # first batch.
                odd = find_rank_differences(
                    {"first batch": str(batch)[:999]}, self.grid, self.device
                )
                if odd:
                    raise DataError(
                        f"Ranks draw different samples: {odd[0][:300]}. All ranks must draw the "
                        "same samples, of which each takes its part. Seed the generator of the "
                        "sampler."
                    )
            first = False
            indices = list(batch)
            yield [indices[row] for row in local_rows(len(indices), self.grid)]


def local_rows(batch: int, grid: Grid) -> range:
    """Returns the rows of a batch that belong to this rank."""
    replicas = grid.degrees["data"] * grid.degrees["expert"] * grid.degrees["depth"]
    if batch % replicas:
        raise DataError(
            f"A batch of {batch} samples cannot be split over data·expert·depth={replicas} "
            "coordinates. Each batch, including the last one, must be a multiple of it. Use "
            "another batch_size, and drop_last=True."
        )
    return rank_rows(batch, grid)


class ShardedIterable:
    """A loader without indexed samples: every rank reads all batches and keeps its part of each."""

    def __init__(self, loader: Iterable[Any], grid: Grid) -> None:
        self.loader = loader
        self.grid = grid

    def __len__(self) -> int:
        # Only called for loaders that have a length.
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return (take_local_rows(batch, self.grid) for batch in self.loader)


def take_local_rows(batch: Any, grid: Grid) -> Any:
    """Returns this rank's part of a batch: some rows of every tensor."""
    if isinstance(batch, Tensor):
        mine = local_rows(batch.shape[0], grid)
        return batch[mine.start : mine.stop]
    if isinstance(batch, Mapping):
        return {key: take_local_rows(x, grid) for key, x in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return [take_local_rows(x, grid) for x in batch]
    return batch


def shard_loader(loader: Any, grid: Grid, device: torch.device | str) -> Any:
    """Returns the loader of my coordinate, with its part of each batch of the loop's loader."""
    if grid.axis(*REPLICA_AXES).size == 1 and grid.world_size == 1:
        return loader
    # A loader without a batch sampler has no indices to split.
    streamed = isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None
    if streamed or not isinstance(loader, DataLoader):
        return ShardedIterable(loader, grid)
    sampler: Any = ShardedBatchSampler(loader.batch_sampler, grid, device)
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        generator=loader.generator,
    )


# ---- checkpoints --------------------------------------------------------------------------------


def checkpoint_tensors(
    lent: GridModel, optimizer: AdamW | None
) -> tuple[ShardedStateDict, ShardedStateDict]:
    """Returns the tensors a loop resumes from, and those of them that this rank writes."""
    parallel = lent.parallel
    weights = parallel.weights
    if optimizer is not None:
        state = optimizer.sharded_optimizer.sharded_state()
    else:
        state = {}
    # Weights without optimizer states: frozen, or without an optimizer.
    rest = {
        f"{w.name}{MASTER_SUFFIX}": (w.storage, w.shard)
        for w in parallel.weights.values()
        if f"{w.name}{MASTER_SUFFIX}" not in state
    }

    def is_written(name: str) -> bool:
        weight = weights[name.rpartition(".")[0]]
        # Replicas split optimizer states; the first of them writes weights without states.
        owns = weight.bucket.owns_weight if name in rest else weight.bucket.owns_states
        return owns(weight)

    mine = {name: x for name, x in {**state, **rest}.items() if is_written(name)}
    numbers: ShardedStateDict = {
        "loop.samples": (torch.tensor(lent.samples_seen), Shard((), (), (), ()))
    }
    if optimizer is not None:
        numbers["loop.updates"] = (optimizer.sharded_optimizer.num_updates, Shard((), (), (), ()))
    mine |= numbers if parallel.grid.rank == 0 else {}
    return {**state, **rest, **numbers}, mine


def save_checkpoint(
    where: Path, lent: GridModel, optimizer: AdamW | None, facts: Mapping[str, Any]
) -> None:
    """Saves to a directory that any grid can load. Communicates: as `async_saver.save_and_wait`."""
    if optimizer is None:
        groups = []
    else:
        groups = optimizer.group_settings()
    try:
        # The round trip rejects values that JSON does not support before any file is written.
        told = json.loads(json.dumps({"facts": dict(facts), "groups": groups}))
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"The state next to model and optimizer is not valid JSON: {error}. Checkpoints "
            "contain tensors and JSON values, not pickles. Pass numbers, strings, lists and dicts."
        ) from None
    grid = lent.parallel.grid
    queue = lent.parallel.bucket_scheduler
    async_saver.save_and_wait(
        where, 0, checkpoint_tensors(lent, optimizer)[1], {"loop": told}, grid, queue.device
    )


def load_checkpoint(where: Path, lent: GridModel, optimizer: AdamW | None) -> dict[str, Any]:
    """Resumes from a checkpoint of any grid; returns the facts stored with the tensors.

    Communicates: one number over all axes; all-gather of weights over replicas.
    """
    paths = directory.find_checkpoints(where)
    if not paths:
        raise CheckpointError(
            f"{where} has no checkpoint. A checkpoint is a directory saved by a loop on a grid. "
            "Pass the path it was saved to."
        )
    parallel, (state, _) = lent.parallel, checkpoint_tensors(lent, optimizer)
    queue = parallel.bucket_scheduler
    run_and_raise_together(
        lambda: load_parts(paths[-1], state, cast=True), parallel.grid, queue.device
    )
    lent.samples_seen = int(state["loop.samples"][0])
    # Counted before `finish_restore`, which stores the count. A later change would make the next
    # step overwrite the restored master weights.
    queue.load_count += 1
    told = manifests.read_manifest(paths[-1]).facts.get("loop", {})
    if optimizer is not None:
        optimizer.sharded_optimizer.finish_restore()
        for group, numbers in zip(optimizer.param_groups, told.get("groups", []), strict=False):
            group |= {key: tuple(x) if key == "betas" else x for key, x in numbers.items()}
    queue.begin_step(STEP_KIND)
    return dict(told.get("facts", {}))
