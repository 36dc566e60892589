"""Pruning of a run: where its masks come from, when they are renewed, and how they come back.

Masks are made once, from the weights that a run begins with (or read from a file), and again at the
steps of a schedule. A run that goes on has those of its checkpoint, whatever its grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ranvier.buckets.bucket import Weight
from ranvier.buckets.sparsity import packed, unpacked
from ranvier.checkpoint import directory, load
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.hf.model import copy
from ranvier.checkpoint.manifest import Manifest
from ranvier.comm import collectives
from ranvier.comm.consensus import everyone, together
from ranvier.config.run import Run
from ranvier.errors import PlanError
from ranvier.optim import pruning
from ranvier.optim.optimizer import MASK
from ranvier.optim.pruning import Choice
from ranvier.parallel.parallelize import Parallel, parallel_of
from ranvier.sharding import State
from ranvier.train import lora

if TYPE_CHECKING:
    from ranvier.train.trainer import Trainer


def all_stay(weight: Weight) -> Tensor | None:
    """Nothing is pruned."""
    return None


def chosen(run: Run, parallel: Parallel, step: int) -> Choice:
    """What stays after so many steps, from the weights as they are. Communicates: counts."""
    config, queue = run.prune, parallel.queue
    if config.masks:
        return together(
            lambda: from_file(Path(config.masks), parallel), parallel.grid, queue.device
        )
    if config.groups is not None:
        return pruning.by_pattern(queue, *config.groups)
    return pruning.by_magnitude(queue, pruning.sparsity_at(step, config.sparsity, config.until))


def begin(run: Run, parallel: Parallel) -> None:
    """Prune the weights of a run before it has states. Communicates: counts, bits over depth.

    A run that goes on gets its masks from a checkpoint later and needs no file of masks any more.
    """
    config = run.prune
    if not config.on:
        return
    own = directory.found(Path(run.train.out) / "checkpoints") if run.train.out else []
    goes_on = bool(own) or run.checkpoint.resume not in ("auto", "never")
    if config.masks and goes_on and not Path(config.masks).exists():
        return
    pruning.prune(parallel.queue, chosen(run, parallel, 0))


# ---- schedule ---------------------------------------------------------------------------


def due(run: Run, step: int) -> bool:
    """Whether masks are renewed before the step after so many."""
    every, until = run.prune.every, run.prune.until
    return 0 < step <= until and (step % every == 0 or step == until)


def renew(trainer: Trainer) -> None:
    """Prune further if it is time. Communicates: counts, bits over depth, states over data."""
    if not due(trainer.run, trainer.step):
        return
    with trainer.meter.phase("pruning"):
        choice = chosen(trainer.run, parallel_of(trainer.model), trainer.step)
        trainer.optimizer.prune(choice)


def told(trainer: Trainer) -> list[str]:
    """A line on how much is pruned. Communicates: two numbers over all axes."""
    config, parallel = trainer.run.prune, parallel_of(trainer.model)
    if not config.on:
        return []
    counts = torch.zeros(2, dtype=torch.int64, device=trainer.device)
    for weight in parallel.weights.values():
        bucket = weight.bucket
        if pruning.prunable(weight) and bucket.owned(weight) and trainer.grid.index["data"] == 0:
            every = torch.Size(weight.place.valid).numel()
            kept, end = bucket.kept, weight.offset + weight.elements
            stay = every if kept is None else kept.at(end) - kept.at(weight.offset)
            counts += torch.tensor([stay, every], device=trainer.device)
    stay, every = collectives.all_reduce(counts, everyone(trainer.grid)).wait().tolist()
    experts = any(weight.dims[:1] == ("expert",) for weight in parallel.weights.values())
    line = f"pruned: {1.0 - stay / max(every, 1):.2%} of {every:,} numbers in matrices"
    line += ", each expert's of their own" if experts else ""
    grows = f", to be {config.sparsity:.2%} after step {config.until}" if config.every else ""
    return [line + grows]


# ---- before a state is loaded -----------------------------------------------------------


@dataclass
class Masks:
    """The masks of a run that is about to be filled: states are as many as stay.

    What it is filled from has them, or its weights are read first, as a run's masks follow them.
    """

    trainer: Trainer
    choice: Choice | None = None

    def weights(self) -> State:
        """Where the weights rest, to be filled, by their names in checkpoints.

        Masks follow what they are filled with: those of the values before are let go, as the new
        ones would lie inside of them. Who calls this calls `adopt` next.
        """
        parallel = parallel_of(self.trainer.model)
        parallel.queue.settle()
        for bucket in parallel.queue.buckets:
            bucket.prune(None)
        return {f"{n}.master": (w.rest, w.place) for n, w in parallel.weights.items()}

    def read(self, checkpoint: Path) -> None:
        """Read the masks of a checkpoint, or its weights where it has no masks."""
        run, manifest = self.trainer.run, manifests.read(checkpoint)
        if not manifest.facts.get("weights"):
            self.choice = stored(checkpoint, manifest, parallel_of(self.trainer.model))
        if self.choice is None and run.prune.every:
            self.choice = all_stay  # until the first step that prunes
        if self.choice is None:
            fill_weights(run, checkpoint, manifest, self.weights())

    def adopt(self) -> None:
        """Prune the weights; states begin anew. Communicates: as `Optimizer.prune`."""
        trainer = self.trainer
        choice = self.choice or chosen(trainer.run, parallel_of(trainer.model), 0)
        trainer.optimizer.prune(choice, keep=False)


def fill_weights(run: Run, checkpoint: Path, manifest: Manifest, state: State) -> None:
    """Fill the weights among these tensors from a checkpoint."""
    weights = {name: x for name, x in state.items() if name.endswith(".master")}
    if lora.is_base(manifest, run):
        weights = {name: x for name, x in weights.items() if lora.INSIDE not in name}
    load.load(checkpoint, weights, partial=run.checkpoint.partial, cast=True)


# ---- from files -------------------------------------------------------------------------


def stored(checkpoint: Path, manifest: Manifest, parallel: Parallel) -> Choice | None:
    """The masks of a checkpoint, any grid's; None: it has none."""
    if not any(name.endswith(f".{MASK}") for name in manifest.tensors):
        return None
    bits: dict[str, Tensor] = {}
    for weight in parallel.weights.values():
        name = f"{weight.name}.{MASK}"
        if name in manifest.tensors:
            mask = torch.zeros(weight.place.local, dtype=torch.uint8)
            load.load(checkpoint, {name: (mask, weight.place)})
            bits[weight.name] = packed(mask.view(-1) > 0)

    def choice(weight: Weight) -> Tensor | None:
        found = bits.get(weight.name)
        return None if found is None else unpacked(found)[: weight.elements]

    return choice


def from_file(path: Path, parallel: Parallel) -> Choice:
    """The masks of a user's file; only my elements of them are read."""
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")
        names = {*file.keys()}
    except (OSError, SafetensorError) as error:
        raise PlanError(
            f"prune.masks={str(path)!r} cannot be read: {error!s:.200}. It is a file of "
            "safetensors, with a mask by the name of each weight that is pruned. Mend the path."
        ) from None
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    _refuse_odd(path, shapes, parallel)

    def choice(weight: Weight) -> Tensor | None:
        if weight.name not in names:
            return None
        whole = file.get_tensor(weight.name).reshape(weight.place.whole)
        mine = torch.zeros(weight.place.local, dtype=whole.dtype)
        copy(whole, mine, weight.place)
        return mine.view(-1) != 0

    return choice


def _refuse_odd(path: Path, shapes: Mapping[str, tuple[int, ...]], parallel: Parallel) -> None:
    """Refuse masks of what the model has not or what is not pruned, and of other shapes."""
    odd = []
    for name, shape in shapes.items():
        weight, known = parallel.weights.get(name), parallel.shapes.get(name)
        if known is None:
            odd.append(f"{name}, which the model has not")
        elif known[:2] != ("matrix", True) or (weight is not None and not pruning.prunable(weight)):
            odd.append(f"{name}, which is not pruned")
        elif weight is not None and shape != _whole(weight):
            odd.append(f"{name} of the shape {list(shape)}, not {list(_whole(weight))}")
    if odd or not shapes:
        more = f" ({len(odd)} in all)" if len(odd) > 5 else ""
        raise PlanError(
            f"prune.masks={str(path)!r} has {'; '.join(odd[:5]) or 'no mask'}{more}. Masks are of "
            "matrices of layers, by their names in the checkpoints of the run (without .master). "
            "Mend the file."
        )


def _whole(weight: Weight) -> tuple[int, ...]:
    """The shape of a whole weight, packed dims as one."""
    sizes = iter(weight.sharding.shape)
    return tuple(
        next(sizes) if isinstance(dim, str) else next(sizes) * next(sizes) for dim in weight.dims
    )
