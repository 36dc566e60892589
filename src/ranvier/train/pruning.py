"""Pruning of a run: where its masks come from, when they are updated, and how they are restored.

Masks are computed once, from the initial weights (or read from a file), and updated at the steps of
a schedule. A resumed run uses the masks of its checkpoint, on any grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ranvier.buckets.bucket import ShardedParameter
from ranvier.buckets.sparsity import pack_bits, unpack_bits
from ranvier.checkpoint import directory, load
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.hf.model import copy_rows
from ranvier.checkpoint.manifest import CheckpointManifest
from ranvier.comm import collectives
from ranvier.comm.consensus import run_and_raise_together, world_axis
from ranvier.config.run import RunConfig
from ranvier.errors import PlanError
from ranvier.models.lora import ADAPTER_INFIX
from ranvier.optim import pruning
from ranvier.optim.optimizer import MASK, Optimizer
from ranvier.optim.pruning import MaskFunction
from ranvier.parallel.parallel_model import ParallelModel
from ranvier.sharding import ShardedStateDict
from ranvier.train import lora
from ranvier.train.state import TrainState


def keep_all(weight: ShardedParameter) -> Tensor | None:
    """Mask function that prunes nothing."""
    return None


def choose_masks(run: RunConfig, parallel: ParallelModel, step: int) -> MaskFunction:
    """The mask function after `step` steps, from the current weights. Communicates: counts."""
    config = run.prune
    queue = parallel.bucket_scheduler
    if config.mask_file:
        return run_and_raise_together(
            lambda: load_mask_file(Path(config.mask_file), parallel), parallel.grid, queue.device
        )
    if config.pattern_n_m is not None:
        return pruning.by_pattern(queue, *config.pattern_n_m)
    return pruning.by_magnitude(
        queue, pruning.sparsity_at(step, config.sparsity, config.final_step)
    )


def init_masks(run: RunConfig, parallel: ParallelModel) -> None:
    """Prune the weights before optimizer states exist. Communicates: counts, bits over depth.

    A resumed run gets its masks from a checkpoint later and no longer needs the mask file.
    """
    config = run.prune
    if not config.is_enabled:
        return
    if run.train.output_dir:
        own = directory.find_checkpoints(Path(run.train.output_dir) / "checkpoints")
    else:
        own = []
    goes_on = bool(own) or run.checkpoint.resume not in ("auto", "never")
    # The file may be gone by the time a run is resumed.
    if config.mask_file and goes_on and not Path(config.mask_file).exists():
        return
    pruning.prune_buckets(parallel.bucket_scheduler, choose_masks(run, parallel, 0))


# ---- schedule ---------------------------------------------------------------------------


def is_update_due(run: RunConfig, step: int) -> bool:
    """Whether masks are updated after `step` steps."""
    every = run.prune.update_interval
    until = run.prune.final_step
    return 0 < step <= until and (step % every == 0 or step == until)


def update_masks(run: RunConfig, state: TrainState) -> None:
    """Prune further. Communicates: counts, bits over depth, states over replicas."""
    choice = choose_masks(run, state.parallel, state.step)
    state.optimizer.prune_weights(choice)


def sparsity_lines(run: RunConfig, parallel: ParallelModel) -> list[str]:
    """A line on the sparsity. Communicates: two numbers over all axes."""
    config = run.prune
    grid = parallel.grid
    device = parallel.bucket_scheduler.device
    if not config.is_enabled:
        return []
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for weight in parallel.weights.values():
        bucket = weight.bucket
        # Count every element once: skip replicas.
        if pruning.is_prunable(weight) and bucket.owns_weight(weight):
            every = torch.Size(weight.shard.valid_shape).numel()
            kept = bucket.sparsity_mask
            end = weight.offset + weight.num_elements
            if kept is None:
                stay = every
            else:
                stay = kept.compressed_offset(end) - kept.compressed_offset(weight.offset)
            counts += torch.tensor([stay, every], device=device)
    stay, every = collectives.all_reduce(counts, world_axis(grid)).wait().tolist()
    experts = any(weight.dims[:1] == ("expert",) for weight in parallel.weights.values())
    line = f"pruned: {1.0 - stay / max(every, 1):.2%} of {every:,} elements of matrices"
    line += ", each expert separately" if experts else ""
    if config.update_interval:
        grows = f", growing to {config.sparsity:.2%} by step {config.final_step}"
    else:
        grows = ""
    return [line + grows]


# ---- before a state is loaded -----------------------------------------------------------


@dataclass
class MaskLoader:
    """Restores the masks of a run before its states, which contain only the remaining elements.

    The source has masks, or its weights are loaded first and the masks are computed from them.
    """

    run: RunConfig
    parallel: ParallelModel
    optimizer: Optimizer
    mask_function: MaskFunction | None = None

    def weights_to_fill(self) -> ShardedStateDict:
        """The storage of all weights to load, by their names in checkpoints.

        Current masks are dropped, as new ones could only prune further. Call `apply_masks` next.
        """
        scheduler = self.parallel.bucket_scheduler
        scheduler.wait_for_updates()
        for bucket in scheduler.buckets:
            bucket.set_sparsity_mask(None)
        return {f"{n}.master": (w.storage, w.shard) for n, w in self.parallel.weights.items()}

    def read_masks(self, checkpoint: Path) -> None:
        """Read the masks of a checkpoint, or its weights if it has no masks."""
        manifest = manifests.read_manifest(checkpoint)
        if not manifest.facts.get("weights"):
            self.mask_function = load_checkpoint_masks(checkpoint, manifest, self.parallel)
        if self.mask_function is None and self.run.prune.update_interval:
            # With a schedule nothing is pruned before its first update.
            self.mask_function = keep_all
        if self.mask_function is None:
            fill_weights(self.run, checkpoint, manifest, self.weights_to_fill())

    def apply_masks(self) -> None:
        """Prune the weights and reset the states. Communicates: as `Optimizer.prune_weights`."""
        choice = self.mask_function or choose_masks(self.run, self.parallel, 0)
        self.optimizer.prune_weights(choice, keep=False)


def fill_weights(
    run: RunConfig, checkpoint: Path, manifest: CheckpointManifest, state: ShardedStateDict
) -> None:
    """Load the weights among these tensors from a checkpoint."""
    weights = {name: x for name, x in state.items() if name.endswith(".master")}
    if lora.is_base_checkpoint(manifest, run):
        # A base checkpoint has no adapters; they are initialized afterwards.
        weights = {name: x for name, x in weights.items() if ADAPTER_INFIX not in name}
    load.load_checkpoint(checkpoint, weights, strict=run.checkpoint.strict, cast=True)


# ---- from files -------------------------------------------------------------------------


def load_checkpoint_masks(
    checkpoint: Path, manifest: CheckpointManifest, parallel: ParallelModel
) -> MaskFunction | None:
    """The masks of a checkpoint of any grid; None if it has none."""
    if not any(name.endswith(f".{MASK}") for name in manifest.tensors):
        return None
    bits: dict[str, Tensor] = {}
    for weight in parallel.weights.values():
        name = f"{weight.name}.{MASK}"
        if name in manifest.tensors:
            mask = torch.zeros(weight.shard.local_shape, dtype=torch.uint8)
            load.load_checkpoint(checkpoint, {name: (mask, weight.shard)})
            # One bit per element until the masks are applied.
            bits[weight.name] = pack_bits(mask.view(-1) > 0)

    def choice(weight: ShardedParameter) -> Tensor | None:
        found = bits.get(weight.name)
        if found is None:
            return None
        return unpack_bits(found)[: weight.num_elements]

    return choice


def load_mask_file(path: Path, parallel: ParallelModel) -> MaskFunction:
    """The masks of a user's safetensors file, reduced to the shards of this rank."""
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")
        names = {*file.keys()}
    except (OSError, SafetensorError) as error:
        raise PlanError(
            f"prune.mask_file={str(path)!r} cannot be read: {error!s:.200}. It must be a "
            "safetensors file with one mask per pruned weight, under its name. Check the path."
        ) from None
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    _check_mask_shapes(path, shapes, parallel)

    def choice(weight: ShardedParameter) -> Tensor | None:
        if weight.name not in names:
            return None
        # One full mask in memory at a time.
        whole = file.get_tensor(weight.name).reshape(weight.shard.global_shape)
        mine = torch.zeros(weight.shard.local_shape, dtype=whole.dtype)
        copy_rows(whole, mine, weight.shard)
        return mine.view(-1) != 0

    return choice


def _check_mask_shapes(
    path: Path, shapes: Mapping[str, tuple[int, ...]], parallel: ParallelModel
) -> None:
    """Raise on masks of unknown or unprunable weights, or of other shapes."""
    odd = []
    for name, shape in shapes.items():
        weight = parallel.weights.get(name)
        known = parallel.weight_summaries.get(name)
        if known is None:
            odd.append(f"{name}, which the model does not have")
        elif known[:2] != ("matrix", True) or (
            weight is not None and not pruning.is_prunable(weight)
        ):
            odd.append(f"{name}, which is not pruned")
        elif weight is not None and shape != _full_shape(weight):
            odd.append(f"{name} of shape {list(shape)}, not {list(_full_shape(weight))}")
    if odd or not shapes:
        if len(odd) > 5:
            more = f" ({len(odd)} in all)"
        else:
            more = ""
        raise PlanError(
            f"prune.mask_file={str(path)!r} has {'; '.join(odd[:5]) or 'no mask'}{more}. Masks "
            "must be for matrices of layers, under their names in the checkpoints of the run "
            "(without .master). Fix the file."
        )


def _full_shape(weight: ShardedParameter) -> tuple[int, ...]:
    """The global shape of a weight, with packed dims as one."""
    sizes = iter(weight.sharding.shape)
    return tuple(
        next(sizes) if isinstance(dim, str) else next(sizes) * next(sizes) for dim in weight.dims
    )
