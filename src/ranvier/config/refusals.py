"""Refusals: combinations of settings that cannot run.

Each entry has a condition, what is wrong, the rule and the remedy. Settings in braces, such as
`{plan.pipe}`, are replaced by their values. The reference page lists all entries. Rules about ranks
and sizes are in `config.plan`, rules about a model in `models.config`.
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
    """Values in the texts that are not settings."""

    def message(self, run: RunConfig) -> str:
        """Returns the message for a run to which it applies."""
        sections = vars(run.settings)
        text = f"{self.says}. {self.rule}. {self.remedy}."
        return text.format(**sections, **self.values(run))


def find_refusals(run: RunConfig) -> Iterator[str]:
    """Yields the messages of all refusals that apply to a run."""
    return (refusal.message(run) for refusal in REFUSALS if refusal.when(run))


def _has_pruning_schedule(run: RunConfig) -> bool:
    return bool(run.prune.update_interval or run.prune.final_step)


def _has_whole_schedule(run: RunConfig) -> bool:
    return bool(run.prune.update_interval and run.prune.final_step)


def _pattern_sparsity(run: RunConfig) -> float | None:
    """Returns the sparsity that a valid pattern implies; None without one."""
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
    """Returns the first setting that offloads something; empty without one."""
    memory = run.memory
    if memory.optimizer_states != "device":
        return f"memory.optimizer_states={memory.optimizer_states!r}"
    if memory.parameters == "host":
        return "memory.parameters='host'"
    if memory.activation_offload_fraction != 0.0:
        return f"memory.activation_offload_fraction={memory.activation_offload_fraction}"
    return ""


def _short_windows(run: RunConfig) -> list[int]:
    """Returns the sliding windows that are shorter than a sequence."""
    model = run.model
    if not isinstance(model, DecoderConfig):
        return []
    windows = (model.window_of_layer(layer) for layer in range(model.layers))
    return [window for window in windows if 0 < window < run.data.seq_len]


def _are_finite_weights(run: RunConfig) -> bool:
    return all(0.0 <= weight < math.inf for weight in run.data.mixture_weights)


def _longer_positions(run: RunConfig) -> dict[str, str]:
    if isinstance(run.model, DecoderConfig) and run.model.position_embedding == "rope":
        return {"longer": "extend its rotary positions with model.max_seq={0}"}
    return {"longer": "train a model with model.max_seq={0} from its start"}


def _setting_against_chunks(run: RunConfig) -> str:
    """Returns a setting with which blocks cannot run in chunks of tokens; "" if there is none."""
    model = run.model
    if not isinstance(model, DecoderConfig):
        return f"model.kind={run.model_kind.name!r}"
    if model.experts:
        return f"model.experts={model.experts}"
    if model.dropout:
        return f"model.dropout={model.dropout}"
    if run.lora.dropout:
        return f"lora.dropout={run.lora.dropout}"
    return ""


def _is_recurrent(run: RunConfig) -> bool:
    return isinstance(run.model, DecoderConfig) and run.model.is_recurrent


def _missing_effective_lr(run: RunConfig) -> dict[str, str]:
    """Returns a learning rate that has no default lr_eff, and why; nothing if there is none."""
    optim = run.optim
    own_scale = optim.name in ("sgd", "jorge") or (
        optim.name == "muon" and optim.muon_adjust_lr == "original"
    )
    if optim.lr is None and own_scale:
        return {"setting": "lr", "case": f"optim.name={optim.name!r}"}
    if optim.lr is None and run.starts_from_trained_weights:
        return {"setting": "lr", "case": "pretrained weights"}
    leaves_some_to_adamw = own_scale and optim.name != "sgd"
    if optim.adamw_lr is None and leaves_some_to_adamw and run.starts_from_trained_weights:
        return {"setting": "adamw_lr", "case": "pretrained weights"}
    return {}


PRUNING_SCHEDULE = (
    "prune.update_interval={prune.update_interval}, prune.final_step={prune.final_step}"
)

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda run: run.plan.row_splits == "none",
        "plan.row_splits='none' in a run",
        "Training splits tokens over row; only steps of `ranvier serve` may not",
        "Use plan.row_splits='auto'",
    ),
    Refusal(
        lambda run: run.plan.context > 1 and not isinstance(run.model, DecoderConfig),
        "plan.context={plan.context} with model.kind={model.kind!r}",
        "Only the tokens of a decoder can be split over context",
        "Use plan.context=1",
    ),
    Refusal(
        lambda run: (
            run.plan.context > 1
            and run.plan.context_attention == "ring"
            and bool(_short_windows(run))
        ),
        "plan.context_attention='ring' with a sliding window of {window} tokens",
        "A ring has no kernel for layers with a window shorter than data.seq_len={data.seq_len}",
        "Use plan.context_attention='auto' or 'kv_gather'",
        lambda run: {"window": min(_short_windows(run))},
    ),
    Refusal(
        lambda run: run.plan.token_chunk > 0 and bool(_setting_against_chunks(run)),
        "plan.token_chunk={plan.token_chunk} with {setting}",
        "Chunks need a decoder that treats all tokens alike: no experts and no dropout",
        "Use plan.token_chunk=0",
        lambda run: {"setting": _setting_against_chunks(run)},
    ),
    Refusal(
        lambda run: _is_recurrent(run) and run.plan.pipe > 1,
        "plan.pipe={plan.pipe} with model.core_layers={model.core_layers}",
        "The recurrent core of a model cannot be split into stages",
        "Use plan.pipe=1",
    ),
    Refusal(
        lambda run: _is_recurrent(run) and run.plan.cuda_graph,
        "plan.cuda_graph=True with model.core_layers={model.core_layers}",
        "A CUDA graph repeats the same work in each step, but the iterations of a recurrent core "
        "are drawn for each",
        "Use plan.cuda_graph=False",
    ),
    Refusal(
        lambda run: (
            _is_recurrent(run) and run.plan.compile == "on" and run.plan.gather_ranks not in (0, 1)
        ),
        "plan.compile='on' with model.core_layers={model.core_layers} and weights that are split "
        "over {ranks} ranks",
        "A compiled block gathers its weights in each call, and a recurrent core is called in each "
        "iteration",
        "Use plan.compile='off'",
        lambda run: {"ranks": run.plan.gather_ranks},
    ),
    Refusal(
        lambda run: _is_recurrent(run) and bool(run.lora.rank or run.lora.init_from),
        "lora.rank={lora.rank}, lora.init_from={lora.init_from!r} with "
        "model.core_layers={model.core_layers}",
        "Adapters are not defined for layers that run several times",
        "Use lora.rank=0 without lora.init_from to train all weights",
    ),
    Refusal(
        lambda run: run.optim.lr == 0.0,
        "optim.lr=0.0 trains nothing",
        "The learning rate must be greater than 0",
        "Use 3e-4",
    ),
    Refusal(
        lambda run: run.optim.lr_rule == "gemstone" and bool(_missing_effective_lr(run)),
        "optim.lr_rule='gemstone' with {case} and without optim.{setting}",
        "An lr_eff is known for AdamW from random weights only: other learning rates are divided "
        "by model.embed · sqrt(model.layers) = {divisor:.4g} as well",
        "Set optim.{setting} to the learning rate times {divisor:.4g}, or use optim.lr_rule='none'",
        lambda run: {
            **_missing_effective_lr(run),
            "divisor": 1.0 / run.lr_rule_factor,
        },
    ),
    Refusal(
        lambda run: not all(map(math.isfinite, run.optim.muon_coefficients)),
        "optim.muon_coefficients={coefficients}",
        "The coefficients of an iteration must be finite numbers",
        "Use 3.4445 -4.775 2.0315",
        lambda run: {"coefficients": list(run.optim.muon_coefficients)},
    ),
    Refusal(
        lambda run: run.optim.needs_whole_matrices and run.prune.is_enabled,
        "optim.name={optim.name!r} with pruned training",
        "The update of a whole matrix is not zero where the matrix is pruned",
        "Use optim.name='adamw', or prune nothing",
    ),
    Refusal(
        lambda run: run.optim.name != "adamw" and run.optim.state_dtype == "int8",
        "optim.name={optim.name!r} with optim.state_dtype='int8'",
        "Only the moments of AdamW can have 8 bits",
        "Use optim.state_dtype='bf16' or 'master'",
    ),
    Refusal(
        lambda run: run.optim.needs_whole_matrices and bool(run.lora.rank or run.lora.init_from),
        "optim.name={optim.name!r} with adapters (lora.rank={lora.rank})",
        "The factors of an adapter are not hidden matrices, so that nothing is left to update",
        "Use optim.name='adamw', or lora.rank=0",
    ),
    Refusal(
        lambda run: run.optim.needs_whole_matrices and run.plan.cuda_graph,
        "optim.name={optim.name!r} with plan.cuda_graph=True",
        "A CUDA graph of a step is built for elementwise updates only",
        "Use plan.cuda_graph=False",
    ),
    Refusal(
        lambda run: (
            run.optim.name == "jorge"
            and run.optim.max_preconditioner_dim & (run.optim.max_preconditioner_dim - 1) != 0
        ),
        "optim.max_preconditioner_dim={optim.max_preconditioner_dim}",
        "The side of a tile must be a power of two",
        "Use {nearest}",
        lambda run: {"nearest": 1 << (run.optim.max_preconditioner_dim.bit_length() - 1)},
    ),
    Refusal(
        lambda run: run.data.seq_len > run.model.sequence_limit,
        "data.seq_len={data.seq_len} is longer than model.max_seq={model.max_seq}",
        "A sequence cannot be longer than the number of positions of the model",
        "Use data.seq_len={model.max_seq} or less, or {longer}",
        lambda run: {
            name: text.format(run.data.seq_len) for name, text in _longer_positions(run).items()
        },
    ),
    Refusal(
        lambda run: bool(
            _changed_lora_settings(run) and run.lora.rank == 0 and not run.lora.init_from
        ),
        "{given} with lora.rank=0, which trains all weights",
        "Adapters require a rank",
        "Set lora.rank=16, or remove these settings",
        lambda run: {"given": ", ".join(_changed_lora_settings(run))},
    ),
    Refusal(
        lambda run: not run.model.adapter_targets and bool(run.lora.rank or run.lora.init_from),
        "lora.rank={lora.rank}, lora.init_from={lora.init_from!r} with model.kind={model.kind!r}",
        "This kind of model does not support adapters",
        "Use lora.rank=0 without lora.init_from to train all weights",
    ),
    Refusal(
        lambda run: (
            bool(run.model.adapter_targets)
            and (bool(_unknown_targets(run)) or not run.lora.target_modules)
        ),
        "lora.target_modules={targets}: {unknown} does not match a layer of this model",
        "Layers are selected by their dims or by their names",
        "Use one or more of {words}",
        lambda run: {
            "targets": list(run.lora.target_modules),
            "unknown": _unknown_targets(run) or "an empty list",
            "words": ", ".join(run.model.adapter_targets),
        },
    ),
    Refusal(
        lambda run: any(not 0 <= block < run.model.layers for block in run.lora.layers),
        "lora.layers={blocks} names a block that does not exist",
        "Blocks are numbered from 0 to {last}",
        "Use these numbers, or an empty list for all blocks",
        lambda run: {"blocks": list(run.lora.layers), "last": run.model.layers - 1},
    ),
    Refusal(
        lambda run: len(set(run.lora.layers)) < len(run.lora.layers),
        "lora.layers={blocks} names a block twice",
        "Each block has one adapter",
        "Name each block once",
        lambda run: {"blocks": list(run.lora.layers)},
    ),
    Refusal(
        lambda run: not run.data.sources or not all(run.data.sources),
        "data.sources={sources} does not name a corpus",
        "A run needs at least one corpus, and a path cannot be empty",
        "Use data.sources=['stdlib'] or paths of corpora",
        lambda run: {"sources": list(run.data.sources)},
    ),
    Refusal(
        lambda run: bool(
            run.data.mixture_weights and len(run.data.mixture_weights) != len(run.data.sources)
        ),
        "data.mixture_weights has length {weights}, but data.sources has length {sources}",
        "Each corpus needs one weight",
        "Change one of them, or remove data.mixture_weights",
        lambda run: {
            "weights": len(run.data.mixture_weights),
            "sources": len(run.data.sources),
        },
    ),
    Refusal(
        lambda run: not _are_finite_weights(run),
        "data.mixture_weights={weights} has an invalid weight",
        "Weights must be finite and at least 0",
        "Use weights such as 0.7 0.3",
        lambda run: {"weights": list(run.data.mixture_weights)},
    ),
    Refusal(
        lambda run: bool(
            run.data.mixture_weights
            and _are_finite_weights(run)
            and not any(run.data.mixture_weights)
        ),
        "data.mixture_weights are all 0",
        "At least one source must have a positive weight",
        "Use a weight greater than 0",
    ),
    Refusal(
        lambda run: run.data.goldfish_k == 1,
        "data.goldfish_k=1 drops every target",
        "One of goldfish_k targets is dropped, and the others are learned",
        "Use data.goldfish_k=4, or 0 to learn all targets",
    ),
    Refusal(
        lambda run: (
            run.data.goldfish_k > 1
            and run.data.goldfish_strategy in ("hash", "hash-table")
            and run.data.goldfish_context_width >= run.data.seq_len
        ),
        "data.goldfish_context_width={data.goldfish_context_width} with "
        "data.seq_len={data.seq_len} drops at most the last target of a sample",
        "Only targets with that many tokens before them in their sample are dropped",
        "Use a width of 13, or a larger data.seq_len",
    ),
    Refusal(
        lambda run: (
            bool(run.data.goldfish_k or run.data.canaries)
            and not isinstance(run.model, DecoderConfig)
        ),
        "data.goldfish_k={data.goldfish_k}, data.canaries={data.canaries!r} with "
        "model.kind={model.kind!r}",
        "Only a decoder learns documents of tokens",
        "Use data.goldfish_k=0 without data.canaries",
    ),
    Refusal(
        lambda run: run.train.canary_interval > 0 and not run.data.canaries,
        "train.canary_interval={train.canary_interval} without data.canaries",
        "An evaluation of canaries needs their file",
        "Set data.canaries, or use train.canary_interval=0",
    ),
    Refusal(
        lambda run: run.plan.cuda_graph and run.model.streams > 1,
        "plan.cuda_graph=True with model.parscale_streams={model.parscale_streams}",
        "Attention to the prefixes of streams may read sizes on the host, which a graph cannot",
        "Use plan.cuda_graph=False",
    ),
    Refusal(
        lambda run: run.plan.compile == "on" and run.plan.context > 1 and run.model.streams > 1,
        "plan.compile='on' and plan.context={plan.context} with "
        "model.parscale_streams={model.parscale_streams}",
        "A compiled block cannot merge attention over context with that to the prefix of a stream",
        "Use plan.compile='off', or plan.context=1",
    ),
    Refusal(
        lambda run: run.plan.cuda_graph and run.data.document_mask,
        "plan.cuda_graph=True with data.document_mask=True",
        "A CUDA graph repeats the same work in each step, but documents differ",
        "Use data.document_mask=False or plan.cuda_graph=False",
    ),
    Refusal(
        lambda run: run.memory.optimizer_states == "disk" and not run.memory.offload_dir,
        "memory.optimizer_states='disk' without memory.offload_dir",
        "Optimizer states on disk need a directory",
        "Set memory.offload_dir to a directory on a fast disk, or use "
        "memory.optimizer_states='host'",
    ),
    Refusal(
        lambda run: bool(run.memory.offload_dir) and run.memory.optimizer_states != "disk",
        "memory.offload_dir={memory.offload_dir!r} with "
        "memory.optimizer_states={memory.optimizer_states!r}",
        "Only optimizer states on disk use a directory",
        "Use memory.optimizer_states='disk', or remove memory.offload_dir",
    ),
    Refusal(
        lambda run: bool(
            run.memory.optimizer_states_on_device_gib and run.memory.optimizer_states != "split"
        ),
        "memory.optimizer_states_on_device_gib={memory.optimizer_states_on_device_gib} with "
        "memory.optimizer_states={memory.optimizer_states!r}",
        "It applies only to optimizer states that are split between device and host",
        "Use memory.optimizer_states='split', or remove it",
    ),
    Refusal(
        lambda run: run.plan.cuda_graph and bool(_first_offloaded(run)),
        "{offloaded} with plan.cuda_graph=True",
        "A CUDA graph cannot copy offloaded tensors from the host",
        "Use plan.cuda_graph=False",
        lambda run: {"offloaded": _first_offloaded(run)},
    ),
    Refusal(
        lambda run: -1.0 < run.memory.activation_offload_fraction < 0.0,
        "memory.activation_offload_fraction={memory.activation_offload_fraction} is not a fraction",
        "It must be in [0, 1], or -1 for the smallest fraction that fits",
        "Use a value such as 0.5",
    ),
    Refusal(
        lambda run: (
            run.memory.recompute_collectives == "auto"
            and run.memory.device_limit_gib > 0.0
            and run.plan.pipe > 1
        ),
        "memory.recompute_collectives='auto' with "
        "memory.device_limit_gib={memory.device_limit_gib} and a pipeline",
        "All ranks measure together which results to save, but each stage recomputes its own "
        "blocks",
        "Use 'save' or 'rerun', or memory.device_limit_gib=0",
    ),
    Refusal(
        lambda run: run.memory.parameters == "host" and run.guard.replay_interval > 0,
        "memory.parameters='host' with guard.replay_interval={guard.replay_interval}",
        "A replay check cannot compare gradients on the host",
        "Use guard.replay_interval=0",
    ),
    Refusal(
        lambda run: run.memory.auto and run.plan.cuda_graph,
        "memory.auto=True with plan.cuda_graph=True",
        "A CUDA graph has its own memory pool and cannot stream offloaded states",
        "Use memory.auto=False or plan.cuda_graph=False",
    ),
    Refusal(
        lambda run: bool(run.prune.n_m_pattern) and run.prune.pattern_n_m is None,
        "prune.n_m_pattern={prune.n_m_pattern!r} is not a valid pattern",
        "A pattern N:M keeps N of each M values, with 0 < N < M",
        "Use 2:4",
    ),
    Refusal(
        # A sparsity equal to the one that the pattern implies is harmless.
        lambda run: (
            _pattern_sparsity(run) is not None
            and run.prune.sparsity not in (0.0, _pattern_sparsity(run))
        ),
        "prune.sparsity={prune.sparsity} with prune.n_m_pattern={prune.n_m_pattern!r}",
        "The pattern already implies the sparsity {sparsity:g}",
        "Remove prune.sparsity",
        lambda run: {"sparsity": _pattern_sparsity(run)},
    ),
    Refusal(
        lambda run: bool(run.prune.mask_file and (run.prune.sparsity or run.prune.n_m_pattern)),
        "prune.mask_file={prune.mask_file!r} with a sparsity or a pattern",
        "The mask file alone determines which weights are pruned",
        "Remove prune.sparsity and prune.n_m_pattern",
    ),
    Refusal(
        lambda run: run.prune.is_enabled and bool(run.lora.rank or run.lora.init_from),
        "Both prune and lora are enabled",
        "A run with adapters freezes all matrices, so they cannot be pruned",
        "Prune in a separate run, or disable one of them",
    ),
    Refusal(
        lambda run: _has_pruning_schedule(run) and not _has_whole_schedule(run),
        PRUNING_SCHEDULE,
        "A pruning schedule needs both an interval and a final step",
        "Set both, or none",
    ),
    Refusal(
        lambda run: (
            _has_whole_schedule(run)
            and not run.prune.update_interval <= run.prune.final_step <= run.train.steps
        ),
        PRUNING_SCHEDULE + ", train.steps={train.steps}",
        "Sparsity must reach its final value before the run ends",
        "Use update_interval <= final_step <= train.steps",
    ),
    Refusal(
        lambda run: (
            _has_pruning_schedule(run)
            and bool(run.prune.n_m_pattern or run.prune.mask_file or not run.prune.sparsity)
        ),
        PRUNING_SCHEDULE + " without prune.sparsity, or with a pattern or a mask file",
        "Only an unstructured sparsity can grow; patterns and mask files are fixed",
        "Use prune.sparsity alone, or remove these settings",
    ),
    Refusal(
        lambda run: _has_pruning_schedule(run) and run.plan.cuda_graph,
        PRUNING_SCHEDULE + " with plan.cuda_graph=True",
        "A CUDA graph cannot change its masks",
        "Use plan.cuda_graph=False or fixed masks",
    ),
    Refusal(
        lambda run: run.guard.replay_interval > 0 and run.plan.cuda_graph,
        "guard.replay_interval={guard.replay_interval} with plan.cuda_graph=True",
        "A replay check runs before the update, but a CUDA graph contains the update",
        "Use guard.replay_interval=0 or plan.cuda_graph=False",
    ),
    Refusal(
        lambda run: run.optim.warmup_steps > max(run.train.steps, 0),
        "optim.warmup_steps={optim.warmup_steps} is longer than train.steps={train.steps}",
        "Warm-up must end before the run does",
        "Use at most {train.steps}",
    ),
)
