"""Hugging Face models equal themselves on one process, or are refused with reasons."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import hf_cases
from equivalence import Serial, batch_of, compare, run_case
from grids import label
from hf_cases import HfCase
from hf_models import HF_MODELS, MODELS_OF_CORE, SHAPE, gpt2, llama, qwen3
from hf_models import serial as as_reference
from pool import Pool
from ranvier.config.plan import Plan
from ranvier.errors import ShardingError
from ranvier.grid import Grid
from ranvier.nn.norm import RMSNorm
from ranvier.parallel import huggingface
from ranvier.parallel.parallelize import parallelize

LR, CLIP = 1e-2, 0.5


@functools.cache
def reference(case: HfCase) -> Serial:
    """One process."""
    batch = batch_of(case.model, samples=8, packed=case.packed)
    return hf_cases.serial(case, batch, LR, CLIP)


def check(pool: Pool, degrees: dict[str, int], case: HfCase) -> None:
    """Everything equals one process, and the communication is the predicted one."""
    whole = reference(HfCase(case.model, packed=case.packed, changes=case.changes))
    results = pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP)
    assert compare(whole, results) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("hf-llama", {"pad_token_id": 3, "attention_bias": True, "mlp_bias": True}),
        ("hf-gpt2", {"attn_implementation": "eager", "scale_attn_by_inverse_layer_idx": True}),
        ("hf-gpt2", {"tie_word_embeddings": False}),
    ],
)
def test_options_of_models(pool: Pool, model: str, changes: dict[str, Any], fast: bool) -> None:
    check(pool, {"row": 2, "col": 2}, HfCase(model, changes=tuple(changes.items()), fast=fast))


WINDOWS = (("use_sliding_window", True), ("sliding_window", 3), ("max_window_layers", 1))
CONTEXT_CASES = [
    ({"context": 2}, HfCase("hf-gemma2", token_order="zigzag")),
    ({"context": 2, "row": 2}, HfCase("hf-qwen3", packed=True, recompute="full", changes=WINDOWS)),
    ({"context": 2}, HfCase("hf-mistral", packed=True, recompute="full")),
    ({"context": 2}, HfCase("hf-llama", packed=True)),
    ({"context": 2, "col": 2}, HfCase("hf-gemma2", packed=True)),
    ({"context": 2, "depth": 2}, HfCase("hf-llama-tied", packed=True, context_attention="ring")),
    ({"context": 4}, HfCase("hf-qwen3", packed=True, context_attention="ulysses")),
    ({"row": 2}, HfCase("hf-gemma2", packed=True)),
    ({"row": 2}, HfCase("hf-mistral")),
]


@pytest.mark.parametrize(
    ("degrees", "case"),
    [
        pytest.param(degrees, case, id=f"{label(degrees)}-{case.label}", marks=marks)
        for degrees, case, marks in (
            (*row, [pytest.mark.full] if i > 1 else []) for i, row in enumerate(CONTEXT_CASES)
        )
    ],
)
def test_models_over_context_windows_and_caps(
    pool: Pool, degrees: dict[str, int], case: HfCase
) -> None:
    check(pool, degrees, case)


def test_a_window_of_a_model_matters_over_context(pool: Pool) -> None:
    batch = batch_of("hf-mistral", samples=8, packed=False)
    wide = hf_cases.serial(HfCase("hf-mistral", changes=(("sliding_window", 8),)), batch, LR, CLIP)
    losses = pool.on_grid({"context": 2}, hf_cases.loss_of, HfCase("hf-mistral"), batch)
    assert abs(losses[0] - wide.losses[0]) > 1e-6 * wide.losses[0]


def test_padding_token_gets_no_gradient(pool: Pool) -> None:
    case = HfCase("hf-llama", changes=(("pad_token_id", 3),))
    whole = reference(case)
    assert (whole.batch.tokens == 3).any()
    name = "model.embed_tokens.weight"
    for result in pool.on_grid({"row": 2}, run_case, case, whole.batch, LR, CLIP):
        part, place = result["grads"][name]
        grad = torch.zeros(place.global_shape, dtype=part.dtype)
        place.write_into(grad, part)
        assert grad[3].abs().max() == 0.0


def test_positions_that_restart_do_not_make_documents(pool: Pool) -> None:
    case = HfCase("hf-llama")
    packed = batch_of(case.model, samples=8, packed=True)
    batch = replace(packed, documents=None)
    want = hf_cases.serial(case, batch, LR, CLIP).losses[0]
    losses = pool.on_grid({"row": 2}, hf_cases.loss_of, case, batch)
    assert losses == pytest.approx([want] * 2, rel=1e-12)
    other = hf_cases.serial(case, packed, LR, CLIP).losses[0]
    assert abs(other - want) > 1e-6 * abs(want)


def test_logits_are_the_columns_of_one_process(pool: Pool) -> None:
    case = HfCase("hf-llama-tied")
    batch = reference(case).batch
    with torch.no_grad():
        want = case.build()(batch.tokens)
    for logits, first in pool.on_grid({"row": 2, "col": 2}, hf_cases.logits_of, case, batch.tokens):
        here = want[..., first : first + logits.shape[-1]]
        assert (logits - here).abs().max() <= 1e-12 * want.abs().max()


def test_dropout_is_the_same_on_every_grid(pool: Pool) -> None:
    case = HfCase("hf-gpt2", changes=(("resid_pdrop", 0.2), ("embd_pdrop", 0.3)))
    batch = batch_of(case.model, samples=8, packed=False)
    (one,) = pool.on_grid({"data": 1}, hf_cases.loss_of, case, batch)
    many = pool.on_grid({"depth": 2, "row": 2, "col": 2}, hf_cases.loss_of, case, batch)
    assert many == pytest.approx([one] * 8, rel=1e-12)
    (kept,) = pool.on_grid({"data": 1}, hf_cases.loss_of, HfCase("hf-gpt2"), batch)
    assert abs(one - kept) > 1e-3 * kept


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", [*HF_MODELS, *MODELS_OF_CORE])
def test_model_without_values_gets_equal_ones_on_every_grid(pool: Pool, model: str) -> None:
    case = HfCase(model)
    batch = batch_of(model, samples=8, packed=False)
    ((one, names),) = pool.on_grid({"data": 1}, hf_cases.from_meta, case, batch)
    many = pool.on_grid({"row": 2, "col": 2}, hf_cases.from_meta, case, batch)
    assert [loss for loss, _ in many] == pytest.approx([one] * 4, rel=1e-12)
    assert names == [name for name, _ in case.build().named_parameters()]


# ---- negative controls ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", HF_MODELS)
def test_swapping_layers_alone_is_not_enough(pool: Pool, model: str) -> None:
    case = HfCase(model)
    batch = batch_of(model, samples=8, packed=False, seq=4)
    want = hf_cases.serial(case, batch, LR, CLIP).losses[0]
    (one,) = pool.on_grid({"data": 1}, hf_cases.naive, case, batch)
    assert one == pytest.approx(want, rel=1e-12), "on one rank it is"
    for loss in pool.on_grid({"row": 2}, hf_cases.naive, case, batch):
        if model == "hf-gpt2":  # it takes shapes from its layers: wrong without an error
            assert abs(loss - want) > 1e-6 * want
        else:
            assert "shapes cannot be multiplied" in loss


@pytest.mark.parametrize("model", ["hf-llama", "hf-gpt2"])
def test_positions_of_a_part_give_other_numbers(pool: Pool, model: str) -> None:
    case = HfCase(model)
    whole = reference(case)
    for loss in pool.on_grid({"row": 2}, hf_cases.restarted, case, whole.batch):
        assert abs(loss - whole.losses[0]) > 1e-6 * whole.losses[0]


# ---- refusals ------------------------------------------------------------------------------------


def refused(
    model: Any, *words: str, degrees: dict[str, int] | None = None, **settings: Any
) -> None:
    """The model is refused for reasons that contain these words."""
    grid = Grid(degrees or {"row": 2})
    plan = replace(Plan(col_splits="features"), **settings).with_degrees(grid.degrees)
    with pytest.raises(ShardingError) as error:
        parallelize(model, grid, plan)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize("model", HF_MODELS)
def test_samples_over_col_are_refused(model: str) -> None:
    words = (
        "col_splits='samples' with col=2",
        "col must split features",
        "Use col_splits='features'",
    )
    refused(HF_MODELS[model](), *words, degrees={"col": 2}, col_splits="samples")


def test_attention_dropout_is_refused() -> None:
    refused(llama(attention_dropout=0.1), "self_attn", "attention_dropout=0.1", "=0.0")
    refused(qwen3(attention_dropout=0.1), "self_attn", "attention_dropout=0.1", "=0.0")
    refused(gpt2(attn_pdrop=0.25), "transformer.h.0.attn", "attn_pdrop=0.25", "=0.0")


def test_all_problems_come_at_once() -> None:
    shape = {key: SHAPE[key] for key in SHAPE if key != "head_dim"}
    window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4}
    window["max_window_layers"] = 0
    how: dict[str, Any] = {"attention_dropout": 0.1, "attn_implementation": "flex_attention"}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, **how, **window))
    words = ("sliding", "'flex_attention'", "attention_dropout", "context=2")
    refused(model, *words, degrees={"context": 2})


def test_model_without_our_attention_is_refused_over_context() -> None:
    words = ("GPT2LMHeadModel", "'gpt2'", "context=2", "llama, qwen3, mistral, gemma2", "context=1")
    refused(gpt2(), *words, degrees={"context": 2})


def test_angles_that_depend_on_the_batch_are_refused_over_context() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = llama(rope_parameters=rope)
    refused(model, "rope_type='dynamic'", "largest position", "context=1", degrees={"context": 2})


def test_model_without_head_is_refused() -> None:
    model = LlamaForSequenceClassification(llama().config)  # type: ignore[arg-type]
    refused(model, "no language-model head", "ForCausalLM")


def test_unknown_type_is_refused() -> None:
    model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2))
    refused(model, "MixtralForCausalLM", "'mixtral'", "llama", "dims=")


def test_unknown_style_is_refused() -> None:
    model: Any = llama()
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.up_proj": "packed_colwise"}
    refused(model, "'packed_colwise'", "model.layers.0.mlp.up_proj", "colwise", "dims=")


def test_weight_that_no_table_names_is_refused() -> None:
    refused(gpt2(add_cross_attention=True), "crossattention.c_attn.weight", "dims")


# ---- detection -----------------------------------------------------------------------------------


def test_unknown_type_runs_with_a_table_of_its_dims() -> None:
    shape = {key: SHAPE[key] for key in SHAPE if key != "head_dim"} | {"hidden_size": 32}
    torch.manual_seed(1)
    model: Any = as_reference(Qwen2ForCausalLM(Qwen2Config(**shape))).double()
    tokens = torch.randint(0, 29, (2, 8))
    want = model(tokens)
    names = huggingface.derive_dims(_as_type(model, "qwen3"))
    _as_type(model, "qwen2")
    norm = type(model.model.norm)
    names |= {path: ("embed",) for path, m in model.named_modules() if type(m) is norm}
    refused(model, "'qwen2'", degrees={})
    plan = Plan(col_splits="features")
    parallelize(model, Grid({}), plan, dims=names, layers={norm: RMSNorm})
    assert (model(tokens) - want).abs().max() <= 1e-12 * want.abs().max()


def _as_type(model: Any, kind: str) -> Any:
    model.config.model_type = kind
    return model


def test_transformers_is_not_imported() -> None:
    code = "import sys, ranvier.parallel.parallelize; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
