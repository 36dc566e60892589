"""Shrinks the model of a run to the smallest that its grid allows, for `verify`.

Shrinking keeps everything that parallel correctness depends on: the ratio of heads, kv heads and
ranks that split them, the remainder of the vocabulary modulo row·col·depth, tying, biases, norms,
positions, packing, and what col splits inside of blocks. Each kind of model has a function here or
in its own files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import DecoderModelConfig
from ranvier.models.config import DecoderConfig
from ranvier.sharding import (
    EXPERT_HIDDEN_AXES,
    WEIGHT_RULE,
    ShardingTable,
    count_parts,
    round_up,
)


@dataclass(frozen=True)
class ShrunkSizes:
    """Sizes of the shrunk model of a run that do not depend on its kind."""

    table: ShardingTable
    layers: int
    """Every virtual stage gets at least one block."""
    seq: int
    """At least 8 tokens, at least 2 of them on each rank."""
    prune_group: int
    """M of an N:M pruning pattern, which needs whole groups in the rows of each rank; otherwise
    1.
    """
    outer_multiple: int
    """The number of features of the residual stream is a multiple of this."""
    inner_multiple: int
    """The number of features inside of blocks is a multiple of this."""

    @classmethod
    def from_run(cls, run: RunConfig) -> ShrunkSizes:
        """Returns the sizes that the grid of a run allows."""
        plan = run.plan.without_measuring
        table = ShardingTable.from_plan(plan)
        multiple = table.seq_multiple(plan.degrees)
        group = run.prune.pattern_n_m[1] if run.prune.pattern_n_m else 1
        return cls(
            table=table,
            layers=min(run.model.layers, max(2, plan.pipe * plan.virtual_stages)),
            seq=max(round_up(8, multiple), 2 * multiple),
            prune_group=group,
            outer_multiple=table.num_parts("embed", "embed", plan.degrees) * group,
            inner_multiple=table.num_parts("mlp", "mlp", plan.degrees) * group,
        )

    def vocab(self, size: int, plan: Plan) -> int:
        """Returns a small vocabulary with the padding of one of `size` entries."""
        # Padding depends on the remainder modulo the ranks that split it.
        period = self.table.padded_vocab(1, plan.degrees) * plan.depth
        vocab = size % period
        while vocab < 24:
            vocab += period
        return vocab


def shrink_decoder(run: RunConfig, sizes: ShrunkSizes) -> DecoderModelConfig:
    """Returns a decoder as small as the grid of its run allows."""
    plan = run.plan.without_measuring
    model = run.decoder
    inside = sizes.table.num_parts("mlp", "mlp", plan.degrees)
    heads, kv_heads = _shrink_heads(
        model.heads, model.kv_heads, count_parts(WEIGHT_RULE["heads"], plan.degrees), inside
    )
    head_dim = math.lcm(4, sizes.prune_group)
    depth = _shrink_recurrence(model)
    return replace(
        model,
        **({"layers": sizes.layers} | depth),
        embed=round_up(16, sizes.outer_multiple),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=round_up(24, sizes.inner_multiple),
        vocab=sizes.vocab(model.vocab, plan),
        max_seq=max(sizes.seq, 1),
        parscale_prefix_tokens=min(model.parscale_prefix_tokens, 3),
        # Its random numbers differ between the two models.
        dropout=0.0,
        ladder_layers=_shrink_ladder(model, sizes.layers),
        **_shrink_experts(model, plan, sizes),
        **_shrink_positions(model, sizes, head_dim),
    )


def _shrink_recurrence(model: DecoderConfig) -> dict[str, Any]:
    """Returns a prelude, a core and a coda of at most one, two and one layers; empty without."""
    if not model.is_recurrent:
        return {}
    parts = {
        "prelude_layers": min(model.prelude_layers, 1),
        "core_layers": min(model.core_layers, 2),
        "coda_layers": min(model.coda_layers, 1),
    }
    depths = {
        "mean_recurrence": min(model.mean_recurrence, 3),
        "backprop_depth": min(model.backprop_depth, 2),
    }
    return {"layers": sum(parts.values()), **parts, **depths}


def _shrink_ladder(model: DecoderConfig, layers: int) -> tuple[int, ...]:
    """Returns the ladder layers of a model of few layers; empty for all of them, or for none."""
    bounds = [i * model.layers // layers for i in range(layers + 1)]
    chosen = tuple(
        i
        for i, (start, stop) in enumerate(pairwise(bounds))
        if any(model.is_ladder_layer(layer) for layer in range(start, max(stop, start + 1)))
    )
    return () if len(chosen) == layers else chosen


def _shrink_positions(model: DecoderConfig, sizes: ShrunkSizes, head_dim: int) -> dict[str, Any]:
    """Returns sliding windows and RoPE settings that a short text tests, for small heads."""
    layers = sizes.layers
    seq = sizes.seq
    # Shorter than the text; otherwise the window would mask nothing.
    window = min(model.sliding_window, max(seq // 3, 1))
    slide = tuple(i for i in range(layers) if model.window_of_layer(i * model.layers // layers))
    # RoPE rotates pairs of features: an even number of them, at least one pair.
    turned = max(int(head_dim * model.partial_rotary_factor) // 2 * 2, 2)
    return {
        "sliding_window": window if slide else 0,
        "window_layers": () if len(slide) == layers else slide,
        "original_max_position": min(model.original_max_position, max(seq // 2, 2)),
        "partial_rotary_factor": turned / head_dim,
        "rope_short": model.rope_short[: turned // 2],
        "rope_long": model.rope_long[: turned // 2],
    }


def _shrink_experts(model: DecoderConfig, plan: Plan, sizes: ShrunkSizes) -> dict[str, Any]:
    """Returns settings with few experts, at least one per rank; the pattern of MoE layers is
    kept.
    """
    if model.experts == 0:
        return {}
    experts = plan.expert * -(-min(model.experts, 8) // plan.expert)
    ranks = count_parts(EXPERT_HIDDEN_AXES, plan.degrees) * sizes.prune_group
    layers = sizes.layers
    return {
        "experts": experts,
        "experts_per_token": min(model.experts_per_token, experts),
        "expert_mlp": ranks * -(-24 // ranks),
        "shared_expert_mlp": ranks * -(-16 // ranks) if model.shared_expert_mlp else 0,
        "moe_layer_interval": min(model.moe_layer_interval, layers),
        "dense_first_layers": min(model.dense_first_layers, layers - 1),
        # Jitter is random noise that the serial model would not reproduce.
        "router_jitter": 0.0,
    }


def _shrink_heads(heads: int, kv_heads: int, row: int, inside: int) -> tuple[int, int]:
    """Returns the fewest heads with the same ratio and number of ranks that share a kv head."""
    common = math.gcd(heads, kv_heads)
    # Multiples of the reduced ratio, smallest first; the full counts are always valid.
    for times in range(1, common + 1):
        h = heads // common * times
        kv = kv_heads // common * times
        same = all(
            _kv_head_sharing(kv, ranks) == _kv_head_sharing(kv_heads, ranks)
            for ranks in (row, inside)
        )
        if same and h % inside == 0:
            return h, kv
    return heads, kv_heads


def _kv_head_sharing(kv_heads: int, ranks: int) -> tuple[int, bool]:
    """Returns how many ranks share a kv head, and whether the split is even."""
    return max(ranks // kv_heads, 1), kv_heads % ranks == 0 or ranks % kv_heads == 0
