"""Saves and restores everything a run resumes from, on the same grid or another.

Tensors (master weights, moments, torch's RNG states) are saved by name with their shard of the
global tensor; the rest are a few facts. The data position is one number, as samples are numbered.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ranvier.buckets.sparsity import CompressedTensor
from ranvier.checkpoint import directory as folders
from ranvier.checkpoint import load, rank_file
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.hf.model import PublishedModel
from ranvier.checkpoint.manifest import CheckpointManifest
from ranvier.comm.consensus import broadcast_first_error, run_and_raise_together
from ranvier.config.run import SETTINGS_FORMAT, RunConfig, check_settings_format
from ranvier.config.sections import OptimConfig
from ranvier.errors import CheckpointError, DamageError, DataError, WriteError
from ranvier.grid import Grid
from ranvier.optim.matrix_update import SIDES
from ranvier.optim.optimizer import STATE_KINDS, Optimizer
from ranvier.parallel.parallel_model import ParallelModel
from ranvier.sharding import Shard, ShardedStateDict
from ranvier.system.terminal import print
from ranvier.train import lora
from ranvier.train.collective_algorithms import find_algorithm_changes
from ranvier.train.pruning import MaskLoader, fill_weights
from ranvier.train.state import TrainState

RNG_PREFIX = "random."
"""Prefix of the names of RNG states."""
FIXED_SETTINGS = (
    *(
        "model",
        "data.seq_len",
        "data.document_mask",
        "data.validation_fraction",
        "train.seed",
        "train.dtype",
    ),
    *(f"lora.{key}" for key in lora.FIXED_LORA_SETTINGS),
    *("optim.state_dtype", "data.loss_on", "data.truncate", "data.packing", "prune"),
)
"""Settings that must not change when a run is resumed; corpora are compared by fingerprint.

Rotary positions have no weights, so with them model.max_seq may change.
"""


EARLIER_DATA_SETTINGS = {"balance": "none", "packing": "full"}
"""What runs did that were saved before these settings of data existed."""


def state_tensors(state: TrainState) -> ShardedStateDict:
    """All tensors that the run resumes from."""
    weights = {
        **state.optimizer.sharded_state(),
        **_frozen_weights(state.parallel),
        **_router_biases(state.parallel),
    }
    return {
        **weights,
        **_rng_states(state.grid, state.device),
        **_device_counters(state.optimizer),
    }


def tensors_to_write(state: TrainState) -> tuple[ShardedStateDict, dict[str, CompressedTensor]]:
    """The tensors that this rank writes, and the ones that it stores compressed (pruned)."""
    tensors, sparse = state.optimizer.sparse_state()
    parallel = state.parallel
    grid = state.grid
    # Replicas split optimizer states. They all have frozen weights, which the first one writes.
    owners = {
        weight.name: weight.bucket.owns_states(weight)
        if weight.trainable
        else weight.bucket.owns_weight(weight)
        for weight in parallel.weights.values()
    }
    tensors |= _frozen_weights(parallel)
    mine = {name: x for name, x in tensors.items() if owners[name.rpartition(".")[0]]}
    if grid.rank == 0:
        more = _device_counters(state.optimizer)
    else:
        more = {}
    if not any(at for axis, at in grid.index.items() if axis != "pipe"):
        # All ranks of a stage have them; the first one writes them.
        more |= _router_biases(parallel)
    # Each matrix has one owner, which alone has its states.
    mine |= state.optimizer.owner_states()
    return {**mine, **_rng_states(grid, state.device), **more}, sparse


def state_parts(state: TrainState) -> Iterator[ShardedStateDict]:
    """The tensors to restore, one part at a time; see `Optimizer.iter_restore_parts`."""
    rest = {
        **_frozen_weights(state.parallel),
        **_router_biases(state.parallel),
        **_rng_states(state.grid, state.device),
        **_device_counters(state.optimizer),
    }
    for part in state.optimizer.iter_restore_parts():
        yield {**part, **rest}
        # Everything other than the optimizer state is restored with the first part only.
        rest = {}


def _frozen_weights(parallel: ParallelModel) -> ShardedStateDict:
    """Weights that are not trained, under the names of master weights."""
    weights = parallel.weights.values()
    return {f"{w.name}.master": (w.storage, w.shard) for w in weights if not w.trainable}


def _router_biases(parallel: ParallelModel) -> ShardedStateDict:
    """The expert biases of MoE routers (auxiliary-loss-free balancing)."""
    balance = parallel.load_balancer
    if balance is None:
        return {}
    return {f"{n}.master": x for n, x in balance.sharded_state.items()}


def _device_counters(optimizer: Optimizer) -> ShardedStateDict:
    """Counters that are stored on the device, so that saving them needs no synchronization."""
    place = Shard((), (), (), ())
    found = {"run.updates": (optimizer.num_updates, place)}
    if optimizer.grad_scaler is not None:
        found["run.scale"] = (optimizer.grad_scaler.scale, place)
        found["run.good"] = (optimizer.grad_scaler.growth_tracker, place)
    return found


def _rng_states(grid: Grid, device: torch.device) -> ShardedStateDict:
    """torch's RNG states, one row per rank."""
    rows = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rows["cuda"] = torch.cuda.get_rng_state(device)
    world = grid.world_size
    rank = grid.rank
    return {
        f"{RNG_PREFIX}{kind}": (
            row[None],
            Shard((world, len(row)), (rank, 0), *((1, len(row)),) * 2),
        )
        for kind, row in rows.items()
    }


def checkpoint_facts(run: RunConfig, state: TrainState, fingerprint: str) -> dict[str, Any]:
    """The facts of a checkpoint other than tensors; the guard state is added when it is known."""
    return {
        "samples": state.samples,
        "fingerprint": fingerprint,
        "held_out_loss": state.val_loss,
        "threads": torch.get_num_threads(),
        "algorithms": state.grid.algorithms.to_json(),
        "config": run_to_dict(run),
    }


def run_to_dict(run: RunConfig) -> dict[str, Any]:
    """A run config as JSON represents it."""
    # A round trip through JSON, so that it compares equal to a stored config (tuples become lists).
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(run.settings), default=str))
    return {"format": SETTINGS_FORMAT, **found}


def stored_settings(manifest: CheckpointManifest, checkpoint: Path) -> dict[str, Any]:
    """The settings of the run that saved a checkpoint; raises if they have another format."""
    stored = manifest.facts.get("config")
    if not isinstance(stored, dict):
        return {}
    check_settings_format(stored, checkpoint)
    data = stored.get("data")
    if isinstance(data, dict):
        return {**stored, "data": {**EARLIER_DATA_SETTINGS, **data}}
    return stored


def load_first_undamaged(
    run: RunConfig, state: TrainState, fingerprint: str, candidates: Sequence[Path]
) -> tuple[Path, list[str]]:
    """Load the first undamaged checkpoint; returns its path, and notes on damaged ones before it.

    fingerprint: of the data of the run.
    Communicates: a text for each damaged one; all-gather of weights over replicas.
    """
    damaged: list[str] = []
    for checkpoint in candidates:
        why = _try_checkpoint(run, state, fingerprint, checkpoint)
        if not why:
            return checkpoint, [f"skipped a damaged checkpoint: {line}" for line in damaged]
        damaged.append(f"{checkpoint}: {why}")
    raise CheckpointError(
        "No checkpoint can be used. "
        + " ".join(damaged)
        + " A run only resumes from an undamaged checkpoint. Restore one, or start over with "
        "checkpoint.resume=never."
    )


def set_aside_checkpoints(
    checkpoint_dir: Path, after: int, grid: Grid, device: torch.device
) -> list[Path]:
    """Rename the checkpoints after step `after`, on rank 0; returns their new paths there.

    Communicates: the exit code of a failure over all axes.
    """

    def rename() -> list[Path]:
        try:
            if grid.rank == 0:
                return folders.set_aside(checkpoint_dir, after)
            return []
        except OSError as error:
            raise WriteError(
                f"{error.filename}: {error.strerror}. Checkpoints after the step that a run "
                "resumes from are renamed. Make their directory writable, or choose another "
                "train.output_dir."
            ) from None

    return run_and_raise_together(rename, grid, device)


def _try_checkpoint(run: RunConfig, state: TrainState, fingerprint: str, checkpoint: Path) -> str:
    """Load a checkpoint on all ranks; returns the reason if it is damaged for any rank."""
    why = ""

    # Damage on one rank rejects the checkpoint on all of them; any other error is raised on all.
    def tried(work: Callable[[], None]) -> bool:
        def mine() -> None:
            nonlocal why
            try:
                work()
            except DamageError as error:
                why = str(error)

        nonlocal why
        run_and_raise_together(mine, state.grid, state.device)
        why = broadcast_first_error(why, state.grid, state.device)
        return not why

    masks = MaskLoader(run, state.parallel, state.optimizer)
    if run.prune.is_enabled:
        if not tried(lambda: masks.read_masks(checkpoint)):
            return why
        masks.apply_masks()
    # Masks come first: compressed states have as many elements as the masks keep.
    if tried(lambda: _load_checkpoint(run, state, fingerprint, checkpoint)):
        state.optimizer.finish_restore()
        if lora.is_base_checkpoint(manifests.read_manifest(checkpoint), run):
            lora.init_adapters(run, state.model, state.optimizer)
    return why


def _load_checkpoint(run: RunConfig, state: TrainState, fingerprint: str, checkpoint: Path) -> None:
    """Load the tensors of this rank and the facts of a checkpoint."""
    manifest = manifests.read_manifest(checkpoint)
    config = run.checkpoint
    _check_facts(manifest, checkpoint)
    # An imported model has weights only: optimizer, data and step start from zero.
    if manifest.facts.get("weights"):
        return load_weights_only(run, state, checkpoint, manifest)
    check_same_data(manifest, checkpoint, fingerprint, allowed=config.allow_data_mismatch)
    _check_weight_names(run, state.parallel, manifest, checkpoint)
    left: list[str] = []
    anew: ShardedStateDict = {}
    kept: set[str] = set()
    random: ShardedStateDict = {}
    for part in state_parts(state):
        new = _take_new_states(run, part, manifest)
        for name, (_, place) in list(part.items()):
            entry = manifest.tensors.get(name)
            if name.startswith(RNG_PREFIX) and (entry is None or entry.shape != place.global_shape):
                # Saved by another number of ranks: these states cannot be mapped.
                del part[name]
        left += load.load_checkpoint(
            checkpoint, part, strict=config.strict, cast=config.allow_config_mismatch
        )
        random |= {name: x for name, x in part.items() if name.startswith(RNG_PREFIX)}
        # Loaded anyway, but with a warning.
        if not bool(rank_file.max_magnitude(x for x, _ in part.values()).isfinite()):
            print(
                f"Warning: {checkpoint} has values that are not finite, so the loss may be NaN. To "
                "use an earlier checkpoint, set checkpoint.resume=PATH.",
                file=sys.stderr,
            )
        _start_second_moments(part, new)
        anew |= new
        kept |= part.keys()
    saved = _saved_optimizer(manifest)
    if state.optimizer.matrix_update is not None and any(name.endswith(SIDES) for name in anew):
        state.optimizer.matrix_update.has_new_sides = True
    if (anew or saved["name"] != run.optim.name) and state.grid.rank == 0:
        print(_describe_new_optimizer(checkpoint, saved, run.optim, kept, anew), file=sys.stderr)
    if left and state.grid.rank == 0:
        print(
            f"{checkpoint} does not contain {', '.join(left)}; with checkpoint.strict=False they "
            "keep their initial values.",
            file=sys.stderr,
        )
    # States or facts of the wrong form mean that the checkpoint is damaged; the next one is tried.
    try:
        for name, (row, _) in random.items():
            if name == f"{RNG_PREFIX}cpu":
                torch.set_rng_state(row[0])
            elif name == f"{RNG_PREFIX}cuda":
                torch.cuda.set_rng_state(row[0].cpu(), state.device)
        _restore_facts(state, manifest)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamageError(
            f"The training state in the manifest of {checkpoint} (counters, random states) cannot "
            f"be restored: {error!r:.200}. Use another checkpoint with checkpoint.resume=PATH."
        ) from None


def _describe_new_optimizer(
    checkpoint: Path,
    saved: Mapping[str, Any],
    optim: OptimConfig,
    kept: Iterable[str],
    new: Iterable[str],
) -> str:
    """Returns what continues if another optimizer loads a checkpoint.

    saved: settings of the optimizer that saved it. kept, new: names of the tensors that were
    loaded, and of the states that were not saved.
    """
    kinds = (*STATE_KINDS, *SIDES)
    kept_kinds, new_kinds = (
        sorted({one.rpartition(".")[2] for one in names}.intersection(kinds))
        for names in (kept, new)
    )
    key = "name" if saved["name"] != optim.name else "max_preconditioner_dim"
    text = f"{checkpoint} was saved with optim.{key}={saved[key]!r}. Weights continue"
    if kept_kinds:
        text += f", and the states {', '.join(kept_kinds)} where optim.name={optim.name!r} has them"
    if new_kinds:
        text += f". Its states {', '.join(new_kinds)} start from their initial values"
    return f"{text}. Other saved states are not used."


def _saved_optimizer(manifest: CheckpointManifest) -> dict[str, Any]:
    """Returns the settings of the optimizer that determine the states in a checkpoint."""
    stored = (manifest.facts.get("config") or {}).get("optim") or {}
    # Runs before these settings existed used AdamW.
    return {"name": "adamw", "max_preconditioner_dim": 1024} | {
        key: stored[key] for key in ("name", "max_preconditioner_dim") if key in stored
    }


def _take_new_states(
    run: RunConfig, part: ShardedStateDict, manifest: CheckpointManifest
) -> ShardedStateDict:
    """Removes and returns states of this optimizer that another one has not saved."""
    saved = _saved_optimizer(manifest)
    if all(getattr(run.optim, key) == value for key, value in saved.items()):
        return {}
    kinds = (*STATE_KINDS, *SIDES)
    names = [name for name in part if name.rpartition(".")[2] in kinds]
    entries = manifest.tensors
    sizes: tuple[int, int] = saved["max_preconditioner_dim"], run.optim.max_preconditioner_dim

    def is_saved(name: str) -> bool:
        if name not in entries or entries[name].shape != part[name][1].global_shape:
            return False
        weight, _, kind = name.rpartition(".")
        if kind not in SIDES or sizes[0] == sizes[1]:
            return True
        # Other tiles may have as many elements in all. A matrix within both sizes is one tile.
        return max(entries[f"{weight}.master"].shape) <= min(sizes)

    return {name: part.pop(name) for name in names if not is_saved(name)}


def _start_second_moments(part: ShardedStateDict, new: ShardedStateDict) -> None:
    """Begins new second moments with the squares of first moments that were kept.

    With zeros, the first updates would be too large: the first moment is that of many steps.
    """
    for name, (square, _) in new.items():
        mean = part.get(f"{name.removesuffix('.square')}.mean")
        if name.endswith(".square") and mean is not None:
            square.copy_(mean[0].to(square.dtype).square())


def _check_weight_names(
    run: RunConfig, parallel: ParallelModel, manifest: CheckpointManifest, checkpoint: Path
) -> None:
    """Raise if the checkpoint has weights that the model lacks."""
    known = {f"{name}.master" for name in parallel.weight_summaries}
    odd = sorted(n for n in manifest.tensors if n.endswith(".master") and n not in known)
    if odd and run.checkpoint.strict:
        raise CheckpointError(
            f"{checkpoint} does not match the model, which lacks {', '.join(odd[:5])}"
            f"{' ...' * (len(odd) > 5)} ({len(odd)} in all). A checkpoint only fits the model that "
            "saved it. Use the same settings, or checkpoint.strict=False to load the tensors that "
            "match."
        )


def load_weights_only(
    run: RunConfig, state: TrainState, checkpoint: Path, manifest: CheckpointManifest
) -> None:
    """Load only the weights of this rank from a checkpoint."""
    _check_weight_names(run, state.parallel, manifest, checkpoint)
    for part in state_parts(state):
        fill_weights(run, checkpoint, manifest, part)


def load_initial_weights(run: RunConfig, state: TrainState, source: Path) -> None:
    """Start with the weights of a run, a checkpoint or a Hugging Face model; all else is new.

    Communicates: all-gather of weights over replicas.
    """
    bare = True

    def fill(tensors: ShardedStateDict) -> None:
        nonlocal bare
        if (source / "config.json").exists() or source.is_file():
            # Published models have no optimizer state: only names of weights match.
            ours = {n.removesuffix(".master"): x for n, x in tensors.items()}
            with PublishedModel.open(source) as model:
                model.fill_state({n: x for n, x in ours.items() if n in model.shapes})
            return
        checkpoints = source / "checkpoints"
        found, _ = folders.newest_checkpoints(checkpoints if checkpoints.is_dir() else source)
        checkpoint = found[0] if found else source
        manifest = manifests.read_manifest(checkpoint)
        if run.checkpoint.strict:
            stored = stored_settings(manifest, checkpoint)
            lora.check_same_adapters(manifest, stored, run)
        _check_weight_names(run, state.parallel, manifest, checkpoint)
        fill_weights(run, checkpoint, manifest, tensors)
        bare = lora.is_base_checkpoint(manifest, run)

    def work() -> None:
        for part in state_parts(state):
            fill(part)

    masks = MaskLoader(run, state.parallel, state.optimizer)
    if run.prune.is_enabled:
        # Masks are computed from the loaded weights, so these are read twice.
        run_and_raise_together(lambda: fill(masks.weights_to_fill()), state.grid, state.device)
        masks.apply_masks()
    run_and_raise_together(work, state.grid, state.device)
    state.optimizer.finish_restore()
    if bare:
        lora.init_adapters(run, state.model, state.optimizer)


def _restore_facts(state: TrainState, manifest: CheckpointManifest) -> None:
    """Restore step, sample position, validation loss and guard state from a checkpoint."""
    facts = manifest.facts
    state.step, state.samples = manifest.step, int(facts["samples"])
    state.val_loss = facts.get("held_out_loss")
    if "guard" in facts:
        state.guard.load_state_dict(facts["guard"])
    threads = torch.get_num_threads()
    if facts.get("threads", threads) != threads and state.grid.rank == 0:
        print(
            f"The checkpoint was saved with {facts['threads']} threads per rank, not {threads}. "
            "The run continues, but sums have another order, so results are not bit-identical. "
            f"Set OMP_NUM_THREADS={facts['threads']} if they must be.",
            file=sys.stderr,
            flush=True,
        )
    changes = find_algorithm_changes(facts.get("algorithms"), state.grid)
    if changes and state.grid.rank == 0:
        print(changes, file=sys.stderr, flush=True)


def _check_facts(manifest: CheckpointManifest, checkpoint: Path) -> None:
    kinds: Mapping[str, Any] = {"samples": int, "fingerprint": str}
    odd = [key for key, kind in kinds.items() if not isinstance(manifest.facts.get(key), kind)]
    step = folders.CHECKPOINT_NAME.fullmatch(checkpoint.name)
    if odd:
        if len(odd) == 1:
            what = f"{odd[0]} is missing or has"
        else:
            what = f"{' and '.join(odd)} are missing or have"
        raise DamageError(
            f"The manifest of {checkpoint} is damaged: {what} the wrong type. Use another "
            "checkpoint."
        )
    if step and int(step[1]) != manifest.step:
        raise DamageError(
            f"{checkpoint} contains step {manifest.step}, which does not match its name. Restore "
            "the name, or use another checkpoint."
        )


def check_same_data(
    manifest: CheckpointManifest, checkpoint: Path, fingerprint: str, *, allowed: bool
) -> None:
    """Raise if the data differs from the data the checkpoint was trained on."""
    before = manifest.facts.get("fingerprint")
    if before != fingerprint and not allowed:
        raise DataError(
            f"The data has the fingerprint {fingerprint}, but {checkpoint} was trained on data "
            f"with {before}. A run must resume with the same corpora, tokenizer, mixture weights, "
            "canaries and goldfish mask. Restore them, or set checkpoint.allow_data_mismatch=True."
        )


def check_same_config(manifest: CheckpointManifest, checkpoint: Path, run: RunConfig) -> None:
    """Raise if settings differ that the checkpoint depends on."""
    if run.checkpoint.allow_config_mismatch:
        return
    fatal = [
        f"{name}={new!r}, but {checkpoint} has {old!r}."
        for name, old, new in setting_differences(
            stored_settings(manifest, checkpoint), run_to_dict(run)
        )
        if (name in FIXED_SETTINGS or name.partition(".")[0] in FIXED_SETTINGS)
        and name not in {f"model.{key}" for key in run.model.changeable_settings}
    ]
    if fatal:
        raise CheckpointError(
            "\n".join(fatal) + "\nA run must resume with the settings it started with. Use them, "
            "another train.output_dir, or checkpoint.allow_config_mismatch=True."
        )


def setting_differences(
    old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, Any, Any]]:
    """(name, old, new) of each setting that differs.

    Settings without an old value, or that were open, are ignored.
    """
    return [
        (f"{section}.{key}", value, new[section][key])
        for section, settings in (old.items() if isinstance(old, Mapping) else ())
        for key, value in (settings.items() if isinstance(settings, Mapping) else ())
        if section in new and key in new[section] and value not in ("auto", new[section][key])
    ]
