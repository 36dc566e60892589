"""Huginn (`huginn_raven`): published models with recurrent depth.

Their adapter is one matrix of the concatenated state and prelude output, `(embed, (2, embed))`,
where we have one matrix of each; rotary pairs of their queries and keys are neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ranvier.models.config import DecoderConfig
from ranvier.models.hf.family import (
    Family,
    TensorMapping,
    UnsupportedModelError,
    parameter_shapes,
    read_size,
)
from ranvier.models.hf.family_rope import HFConfig, describe_bad_key

LAYER_KEYS = ("n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda")
DEPTH_KEYS = ("mean_recurrence", "mean_backprop_depth")
NORMS = {"norm1": "norm_1", "after1": "norm_2", "norm2": "norm_3", "after2": "norm_4"}
"""Our norms of a block, and theirs."""
CONFIG_KEYS = {
    "n_layers": "layers",
    "n_embd": "embed",
    "n_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp",
    "vocab_size": "vocab",
    "block_size": "max_seq",
    "norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_embeddings": "tie_embeddings",
    "n_layers_in_prelude": "prelude_layers",
    "n_layers_in_recurrent_block": "core_layers",
    "n_layers_in_coda": "coda_layers",
    "mean_recurrence": "mean_recurrence",
    "mean_backprop_depth": "backprop_depth",
    "qk_bias": "qk_bias",
}
DEFAULT_CONFIG = {
    "n_layers": 8,
    "n_embd": 5280,
    "n_heads": 55,
    "intermediate_size": 17920,
    "vocab_size": 65536,
    "block_size": 4096,
    "norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_embeddings": True,
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 4,
    "n_layers_in_coda": 2,
    "mean_recurrence": 32,
    "mean_backprop_depth": 8,
    "qk_bias": True,
    "rope_theta": 50000.0,
    "nonlin_name": "SiLU",
    # Keys of initialization and training, and of sizes that follow from others.
    "init_strategy": "takase",
    "init_orthogonal": False,
    "init_values": {},
    "effective_expected_depth": 132,
    "activation_checkpoint_impl": "per-iteration",
    "test_time_noise": 0,
    "test_time_noise_type": "fixed",
    "padding_multiple": 1,
    "padded_vocab_size": None,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class HuginnFamily(Family):
    """The family of Huginn, whose layers have other names before, in and after the core."""

    @property
    def activation_names(self) -> dict[str, str]:
        """Names of their activations, and ours."""
        return {"SiLU": "swiglu"}

    def config_from_hf(self, config: HFConfig) -> DecoderConfig:
        """Converts their config to ours; raises `UnsupportedModelError` with all invalid keys."""
        theirs = {**self.default_config, **config}
        problems: list[str] = []
        layers = [read_size(theirs, key, "layers", problems) for key in LAYER_KEYS]
        for key in DEPTH_KEYS:
            read_size(theirs, key, "layers", problems)
        if not problems and sum(layers) != theirs["n_layers"]:
            rule = f"the sum of the layers of its parts, {sum(layers)}"
            problems.append(describe_bad_key("n_layers", theirs["n_layers"], rule))
        if theirs["test_time_noise"] not in (0, None):
            problems.append(describe_bad_key("test_time_noise", theirs["test_time_noise"], "0"))
        vocab = theirs["vocab_size"]
        if theirs["padded_vocab_size"] not in (None, vocab):
            padded = theirs["padded_vocab_size"]
            problems.append(describe_bad_key("padded_vocab_size", padded, f"vocab_size={vocab}"))
        if not isinstance(theirs["qk_bias"], bool):
            problems.append(describe_bad_key("qk_bias", theirs["qk_bias"], "true or false"))
        values = theirs["init_values"]
        scale: Any = values.get("embed_scale", 1.0) if isinstance(values, dict) else None
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < 1e6:
            problems.append(describe_bad_key("init_values", values, "a table with embed_scale"))
        if problems:
            raise UnsupportedModelError("\n".join(problems))
        made = super().config_from_hf(config)
        if "embed_scale" in values and not math.isclose(scale, made.embed_scale, rel_tol=1e-9):
            return replace(made, embed_scale=float(scale))
        return made

    def config_to_hf(self, config: DecoderConfig) -> dict[str, Any]:
        """Converts our config to theirs; raises `UnsupportedModelError` if that is impossible."""
        # The family's own scale, as `init_values` can hold any other one.
        theirs = super().config_to_hf(replace(config, embed_scale=float(config.embed) ** 0.5))
        theirs["rope_base"] = theirs.pop("rope_parameters")["rope_theta"]
        theirs["init_values"] = {"embed_scale": config.embed_scale}
        # Raises if the scale is out of range.
        self.config_from_hf(theirs)
        return theirs

    def tensor_mappings(self, config: DecoderConfig, *, fused: bool = False) -> list[TensorMapping]:
        """Returns their tensors, in model order."""
        core = f"blocks.{config.prelude_layers}"
        found = [TensorMapping("transformer.wte.weight", ("embed.weight",))]
        for i in range(config.prelude_layers):
            found += _layer_mappings(f"blocks.{i}", f"transformer.prelude.{i}", config)
        both = (f"{core}.adapter.weight", "inject.weight")
        found.append(TensorMapping("transformer.adapter.weight", both, concat_dim=1))
        for i in range(config.core_layers):
            found += _layer_mappings(f"{core}.layers.{i}", f"transformer.core_block.{i}", config)
        for i in range(config.coda_layers):
            ours = f"blocks.{config.prelude_layers + 1 + i}"
            found += _layer_mappings(ours, f"transformer.coda.{i}", config)
        found.append(TensorMapping("transformer.ln_f.weight", ("norm.weight",)))
        if not config.tie_embeddings:
            found.append(TensorMapping("lm_head.weight", ("head.weight",)))
        lost = set(parameter_shapes(config)) - {name for one in found for name in one.our_names}
        if lost:
            raise UnsupportedModelError(
                f"{self.model_type} has no tensors for {', '.join(sorted(lost)[:5])}."
            )
        return found


def _layer_mappings(ours: str, theirs: str, config: DecoderConfig) -> Iterator[TensorMapping]:
    """Yields the tensors of a layer, ours and theirs by the names of the layer."""
    k = config.head_dim
    q, key, v = (f"{ours}.attention.qkv.{name}" for name in "qkv")
    norms = {
        name: TensorMapping(f"{theirs}.{name}.weight", (f"{ours}.{own}.weight",))
        for own, name in NORMS.items()
    }
    yield norms["norm_1"]
    yield TensorMapping(
        f"{theirs}.attn.Wqkv.weight",
        (f"{q}.weight", f"{key}.weight", f"{v}.weight"),
        rotary_dims=(k, k, 0),
    )
    if config.qk_bias:
        yield TensorMapping(
            f"{theirs}.attn.qk_bias",
            (f"{q}.bias", f"{key}.bias"),
            rotary_dims=(k, k),
            stored_shape=(2, 1, config.heads, k),
        )
    yield TensorMapping(f"{theirs}.attn.proj.weight", (f"{ours}.attention.o.weight",))
    yield norms["norm_2"]
    yield norms["norm_3"]
    gated = (f"{ours}.mlp.enter.gate.weight", f"{ours}.mlp.enter.up.weight")
    yield TensorMapping(f"{theirs}.mlp.fc.weight", gated)
    yield TensorMapping(f"{theirs}.mlp.proj.weight", (f"{ours}.mlp.down.weight",))
    yield norms["norm_4"]


HUGINN = HuginnFamily(
    model_type="huginn_raven",
    architecture="RavenForCausalLM",
    token_ids=(65504, 65505, 65509),
    layer_names={},
    config_keys=CONFIG_KEYS,
    default_config=DEFAULT_CONFIG,
    # embed_scale is a marker; `Family.config_from_hf` replaces it by sqrt(n_embd).
    fixed_settings={"norm_position": "sandwich", "embed_scale": 0.0},
    required_values={
        "bias": False,
        "architecture_class_name": "RecurrentGPT",
        "block_class_name": "SandwichBlock",
        "norm_class_name": "RMSNorm_llama",
        "mlp_class_name": "GatedMLP",
        "injection_type": "linear",
        "state_init": "like-init",
        "sampling_scheme": "poisson-lognormal-filling",
    },
    activation_key="nonlin_name",
    body_prefix="transformer.",
    key_aliases={"rope_base": "rope_theta"},
    rope_types=("default",),
)
