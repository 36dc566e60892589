"""Refusals: combinations of settings that cannot run, one row each.

A row says when it applies, what is wrong, which rule that breaks and what to do. Texts name
settings in braces, as `{plan.pipe}`, which are replaced by their values. The reference page prints
the rows.
Rules about ranks and sizes are in `config.plan`, those of a model in `models.config`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranvier.models.config import DecoderConfig

if TYPE_CHECKING:
    from ranvier.config.run import RunConfig


def _no_values(run: RunConfig) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Refusal:
    """A combination of settings that cannot run."""

    when: Callable[[RunConfig], bool]
    says: str
    """What is wrong, with the values."""
    rule: str
    remedy: str
    values: Callable[[RunConfig], Mapping[str, Any]] = _no_values
    """Values in the texts that are no settings."""

    def message(self, run: RunConfig) -> str:
        """The message about a run to which it applies."""
        sections = vars(run.settings)
        text = f"{self.says}. {self.rule}. {self.remedy}."
        return text.format(**sections, **self.values(run))


def find_refusals(run: RunConfig) -> Iterator[str]:
    """The messages of all refusals that apply to a run."""
    return (refusal.message(run) for refusal in REFUSALS if refusal.when(run))


def _has_pruning_schedule(run: RunConfig) -> bool:
    return bool(run.prune.update_interval or run.prune.final_step)


def _has_whole_schedule(run: RunConfig) -> bool:
    return bool(run.prune.update_interval and run.prune.final_step)


def _pattern_sparsity(run: RunConfig) -> float | None:
    """The sparsity that a pattern implies; None without a valid one."""
    groups = run.prune.pattern_n_m
    if groups is None:
        return None
    return 1.0 - groups[0] / groups[1]


def _unknown_targets(run: RunConfig) -> list[str]:
    return [word for word in run.lora.target_modules if word not in run.model.adapter_targets]


def _changed_lora_settings(run: RunConfig) -> list[str]:
    return [
        f"lora.{field.name}={getattr(run.lora, field.name)!r}"
        for field in dataclasses.fields(run.lora)
        if getattr(run.lora, field.name) != field.default
    ]


def _first_offloaded(run: RunConfig) -> str:
    """The first setting that offloads something; empty without one."""
    memory = run.memory
    if memory.optimizer_states != "device":
        return f"memory.optimizer_states={memory.optimizer_states!r}"
    if memory.parameters == "host":
        return "memory.parameters='host'"
    if memory.activation_offload_fraction != 0.0:
        return f"memory.activation_offload_fraction={memory.activation_offload_fraction}"
    return ""


def _are_finite_weights(run: RunConfig) -> bool:
    return all(0.0 <= weight < math.inf for weight in run.data.mixture_weights)


def _longer_positions(run: RunConfig) -> dict[str, str]:
    if isinstance(run.model, DecoderConfig) and run.model.position_embedding == "rope":
        return {"longer": "extend its rotary positions with model.max_seq={0}"}
    return {"longer": "train a model with model.max_seq={0} from its start"}


PRUNING_SCHEDULE = (
    "prune.update_interval={prune.update_interval}, prune.final_step={prune.final_step}"
)

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda run: run.optim.lr == 0.0,
        "optim.lr=0.0 trains nothing",
        "A learning rate is above 0",
        "Use 3e-4",
    ),
    Refusal(
        lambda run: run.data.seq_len > run.model.sequence_limit,
        "data.seq_len={data.seq_len} is longer than model.max_seq={model.max_seq}",
        "A model reads as many tokens as it has positions",
        "Use data.seq_len={model.max_seq} or less, or {longer}",
        lambda run: {
            name: text.format(run.data.seq_len) for name, text in _longer_positions(run).items()
        },
    ),
    Refusal(
        lambda run: bool(
            _changed_lora_settings(run) and run.lora.rank == 0 and not run.lora.init_from
        ),
        "{given}, but lora.rank=0: all weights would be trained",
        "Adapters have a rank",
        "Add lora.rank=16, or leave these out",
        lambda run: {"given": ", ".join(_changed_lora_settings(run))},
    ),
    Refusal(
        lambda run: not run.model.adapter_targets and bool(run.lora.rank or run.lora.init_from),
        "lora.rank={lora.rank}, lora.init_from={lora.init_from!r} with model.kind={model.kind!r}",
        "This kind of model has no adapters",
        "Use lora.rank=0 and no lora.init_from: all weights are trained",
    ),
    Refusal(
        lambda run: (
            bool(run.model.adapter_targets)
            and (bool(_unknown_targets(run)) or not run.lora.target_modules)
        ),
        "lora.target_modules={targets} names no layer of this model with {unknown}",
        "Layers are named by dims or by their own names",
        "Words are {words}",
        lambda run: {
            "targets": list(run.lora.target_modules),
            "unknown": _unknown_targets(run) or "nothing",
            "words": ", ".join(run.model.adapter_targets),
        },
    ),
    Refusal(
        lambda run: any(not 0 <= block < run.model.layers for block in run.lora.layers),
        "lora.layers={blocks}",
        "Blocks are numbered from 0 to {last}",
        "Use these numbers, or none for all",
        lambda run: {"blocks": list(run.lora.layers), "last": run.model.layers - 1},
    ),
    Refusal(
        lambda run: len(set(run.lora.layers)) < len(run.lora.layers),
        "lora.layers={blocks} names a block twice",
        "A block has one adapter",
        "Name each once",
        lambda run: {"blocks": list(run.lora.layers)},
    ),
    Refusal(
        lambda run: not run.data.sources or not all(run.data.sources),
        "data.sources={sources} names no corpus",
        "A run needs one at least",
        "Use data.sources=['stdlib'] or paths",
        lambda run: {"sources": list(run.data.sources)},
    ),
    Refusal(
        lambda run: bool(
            run.data.mixture_weights and len(run.data.mixture_weights) != len(run.data.sources)
        ),
        "data.mixture_weights has {weights} numbers for {sources} corpora",
        "Each corpus has its weight",
        "Give as many, or none",
        lambda run: {
            "weights": len(run.data.mixture_weights),
            "sources": len(run.data.sources),
        },
    ),
    Refusal(
        lambda run: not _are_finite_weights(run),
        "data.mixture_weights={weights} are no shares",
        "A weight is a finite number from 0",
        "Use for example 0.7 0.3",
        lambda run: {"weights": list(run.data.mixture_weights)},
    ),
    Refusal(
        lambda run: bool(
            run.data.mixture_weights
            and _are_finite_weights(run)
            and not any(run.data.mixture_weights)
        ),
        "data.mixture_weights are all 0",
        "One source must be read",
        "Use a weight above 0",
    ),
    Refusal(
        lambda run: run.plan.cuda_graph and run.data.document_mask,
        "plan.cuda_graph=True with data.document_mask=True",
        "A recorded step is always the same work, but documents differ",
        "Use data.document_mask=False or plan.cuda_graph=False",
    ),
    Refusal(
        lambda run: run.memory.optimizer_states == "disk" and not run.memory.offload_dir,
        "memory.optimizer_states='disk' without memory.offload_dir",
        "States on disk need a directory",
        "Give one on a fast disk, or use memory.optimizer_states='host'",
    ),
    Refusal(
        lambda run: bool(run.memory.offload_dir) and run.memory.optimizer_states != "disk",
        "memory.offload_dir={memory.offload_dir!r} with "
        "memory.optimizer_states={memory.optimizer_states!r}",
        "Only states in a file have a directory",
        "Use memory.optimizer_states='disk', or leave memory.offload_dir out",
    ),
    Refusal(
        lambda run: bool(
            run.memory.optimizer_states_on_device_gib and run.memory.optimizer_states != "split"
        ),
        "memory.optimizer_states_on_device_gib={memory.optimizer_states_on_device_gib} with "
        "memory.optimizer_states={memory.optimizer_states!r}",
        "Only states that are split stay in part",
        "Use memory.optimizer_states='split', or leave it out",
    ),
    Refusal(
        lambda run: run.plan.cuda_graph and bool(_first_offloaded(run)),
        "{offloaded} with plan.cuda_graph=True",
        "A recorded step copies nothing from the host",
        "Use plan.cuda_graph=False",
        lambda run: {"offloaded": _first_offloaded(run)},
    ),
    Refusal(
        lambda run: -1.0 < run.memory.activation_offload_fraction < 0.0,
        "memory.activation_offload_fraction={memory.activation_offload_fraction} is no share",
        "It lies in [0, 1], or is -1 for as little as fits",
        "Use for example 0.5",
    ),
    Refusal(
        lambda run: (
            run.memory.recompute_collectives == "auto"
            and run.memory.device_limit_gib > 0.0
            and run.plan.pipe > 1
        ),
        "memory.recompute_collectives='auto' with "
        "memory.device_limit_gib={memory.device_limit_gib} and a pipeline",
        "What is worth saving is measured by all ranks together, but stages recompute other blocks",
        "Use 'save' or 'rerun', or memory.device_limit_gib=0",
    ),
    Refusal(
        lambda run: run.memory.parameters == "host" and run.guard.replay_interval > 0,
        "memory.parameters='host' with guard.replay_interval={guard.replay_interval}",
        "Gradients on the host are not compared",
        "Use guard.replay_interval=0",
    ),
    Refusal(
        lambda run: run.memory.auto and run.plan.cuda_graph,
        "memory.auto=True with plan.cuda_graph=True",
        "A recorded step has memory of its own, and states that come and go are not recorded",
        "Use memory.auto=False",
    ),
    Refusal(
        lambda run: bool(run.prune.n_m_pattern) and run.prune.pattern_n_m is None,
        "prune.n_m_pattern={prune.n_m_pattern!r} is no pattern",
        "Of each M numbers N stay, and 0 < N < M",
        "Use 2:4",
    ),
    Refusal(
        # A sparsity that repeats what the pattern implies is harmless.
        lambda run: (
            _pattern_sparsity(run) is not None
            and run.prune.sparsity not in (0.0, _pattern_sparsity(run))
        ),
        "prune.sparsity={prune.sparsity} with prune.n_m_pattern={prune.n_m_pattern!r}",
        "The pattern says it: {sparsity:g}",
        "Leave prune.sparsity out",
        lambda run: {"sparsity": _pattern_sparsity(run)},
    ),
    Refusal(
        lambda run: bool(run.prune.mask_file and (run.prune.sparsity or run.prune.n_m_pattern)),
        "prune.mask_file={prune.mask_file!r} with a sparsity or a pattern",
        "The file says which numbers stay",
        "Leave the others out",
    ),
    Refusal(
        lambda run: run.prune.is_enabled and bool(run.lora.rank or run.lora.init_from),
        "prune with lora",
        "Beside adapters all matrices are frozen: nothing is pruned",
        "Prune in a run of its own, or leave one of them out",
    ),
    Refusal(
        lambda run: _has_pruning_schedule(run) and not _has_whole_schedule(run),
        PRUNING_SCHEDULE,
        "Masks are renewed each so many steps up to a step",
        "Give both, or none",
    ),
    Refusal(
        lambda run: (
            _has_whole_schedule(run)
            and not run.prune.update_interval <= run.prune.final_step <= run.train.steps
        ),
        PRUNING_SCHEDULE + ", train.steps={train.steps}",
        "Sparsity grows in steps, and reaches its end before the run does",
        "Use update_interval <= final_step <= steps",
    ),
    Refusal(
        lambda run: (
            _has_pruning_schedule(run)
            and bool(run.prune.n_m_pattern or run.prune.mask_file or not run.prune.sparsity)
        ),
        PRUNING_SCHEDULE + " without prune.sparsity alone",
        "Only sparsity grows; patterns and masks of a file are fixed",
        "Use prune.sparsity, or leave these out",
    ),
    Refusal(
        lambda run: _has_pruning_schedule(run) and run.plan.cuda_graph,
        PRUNING_SCHEDULE + " with plan.cuda_graph=True",
        "A recorded step has the same masks for ever",
        "Use plan.cuda_graph=False or fixed masks",
    ),
    Refusal(
        lambda run: run.guard.replay_interval > 0 and run.plan.cuda_graph,
        "guard.replay_interval={guard.replay_interval} with plan.cuda_graph=True",
        "A recorded step is taken as a whole",
        "Use guard.replay_interval=0 or plan.cuda_graph=False",
    ),
    Refusal(
        lambda run: run.optim.warmup_steps > run.train.steps,
        "optim.warmup_steps={optim.warmup_steps} is longer than train.steps={train.steps}",
        "The learning rate must get where it rises to",
        "Use at most {train.steps}",
    ),
)
