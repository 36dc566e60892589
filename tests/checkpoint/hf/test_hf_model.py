"""Published models: equal to `transformers` on every grid, back as they came, or refused."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pool import Pool
from published_models import (
    BASE,
    CASES,
    GPT2,
    LLAMA3,
    VOCAB,
    computed,
    on_grid,
    save,
    theirs,
    tokens,
)
from ranvier.checkpoint.hf.model import PublishedModel, entries_of
from ranvier.errors import RanvierError
from ranvier.models import MODEL_SIZES, Decoder, DecoderConfig
from ranvier.models.hf.family import UnsupportedModelError
from ranvier.models.hf.registry import FAMILIES, find_fitting_family
from ranvier.train.import_export import export_model, import_model
from states import assemble

CUBE = {"depth": 2, "row": 2, "col": 2}
MANY = {"expert": 2, "row": 2, "col": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All cases, saved."""
    folder = tmp_path_factory.mktemp("published")
    return {
        name: save(theirs(*case), folder / name.replace(" ", "-")) for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    """What `transformers` computes."""
    return {name: computed(theirs(*case)) for name, case in CASES.items()}


def compare(models: dict[str, Path], wanted: dict[str, Any], results: list[Any]) -> list[str]:
    """What differs: logits by 1e-5, gradients by 1e-4 of the largest of their tensor."""
    lines = []
    for name, (logits, loss, grads) in wanted.items():
        with PublishedModel.open(models[name]) as source:
            mixed = source.config.experts > 0  # in memory they are in one tensor
            entries = entries_of(source.family, source.config, fused=mixed)
        ours = assemble(result[name][2] for result in results)
        for rank, result in enumerate(results):
            error = (result[name][0] - logits).abs().max().item()
            if not error <= 1e-5 * max(logits.abs().max().item(), 1.0):
                lines.append(f"{name}: logits of rank {rank} differ by {error:.2e}")
            if not abs(result[name][1] - loss) <= 1e-5 * loss:
                lines.append(f"{name}: loss {result[name][1]}, not {loss}")
        floor = max(grad.abs().max().item() for grad in grads.values())
        for entry in entries:
            have = torch.cat([ours[one] for one in entry.our_names], entry.concat_dim)
            want = grads[entry.name].T if entry.is_transposed else grads[entry.name]
            error = (have.reshape(want.shape) - want).abs().max().item()
            if not error <= 1e-4 * max(want.abs().max().item(), 1e-6 * floor):
                lines.append(f"{name}: gradient of {entry.name} differs by {error:.2e}")
    return lines


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("degrees", "inner"),
    [({}, "samples"), (CUBE, "samples"), ({"pipe": 2, "row": 2}, "features"), (MANY, "samples")],
    ids=["one", "cube", "pipe", "experts"],
)
def test_every_family_equals_transformers(
    pool: Pool,
    models: dict[str, Path],
    wanted: dict[str, Any],
    degrees: dict[str, int],
    inner: str,
    request: pytest.FixtureRequest,
) -> None:
    some = models
    if degrees and not request.config.getoption("--full"):  # on grids one of each family
        some = {name: models[name] for name in {n.split()[0]: n for n in sorted(models)}.values()}
    if "expert" in degrees:
        some = {name: some[name] for name in some if "num_experts_per_tok" in CASES[name][1]}
        assert len(some) >= 3
    results = pool.on_grid(degrees, on_grid, some, inner, timeout=300.0)
    assert compare(models, {name: wanted[name] for name in some}, results) == []


@pytest.mark.full
@pytest.mark.parametrize(
    "degrees",
    [{"pipe": 2}, {"row": 4}, {"col": 4}, {"pipe": 2, "depth": 2, "col": 2}, {"row": 2, "col": 2}],
)
@pytest.mark.parametrize("inner", ["samples", "features"])
def test_every_family_on_more_grids(
    pool: Pool, models: dict[str, Path], wanted: dict[str, Any], degrees: Any, inner: str
) -> None:
    results = pool.on_grid(degrees, on_grid, models, inner, timeout=300.0)
    assert compare(models, wanted, results) == []


def test_a_grid_of_wrong_slices_is_seen(
    pool: Pool, models: dict[str, Path], wanted: dict[str, Any]
) -> None:
    """The comparison can fail: another model's weights are not this one's."""
    swapped = {**models, "llama": models["llama linear"]}
    results = pool.on_grid({}, on_grid, {"llama": swapped["llama"]})
    lines = compare(models, {"llama": wanted["llama"]}, results)
    assert any("logits" in line for line in lines), lines


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_comes_in_goes_out_to_the_bit(
    tmp_path: Path, models: dict[str, Path], dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    names = CASES if dtype == torch.float32 else ("llama tied, biases", "gpt2 untied", "phi3")
    for i, name in enumerate(names):
        source = save(theirs(*CASES[name]).to(dtype), tmp_path / f"in{i}")
        import_model(str(source), tmp_path / f"run{i}")
        export_model(tmp_path / f"run{i}", tmp_path / f"out{i}")
        before, after = (load_file(tmp_path / f"{x}{i}/model.safetensors") for x in ("in", "out"))
        assert before.keys() == after.keys(), name
        for key, value in before.items():
            assert after[key].dtype == value.dtype, (name, key)
            assert torch.equal(after[key], value), (name, key)
        back, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / f"out{i}", output_loading_info=True, attn_implementation="eager"
        )
        assert not any(info.values()), (name, info)
        assert back.dtype == dtype
        with torch.no_grad():
            # read again, as their tables of positions were rounded, too
            same = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
            have, want = (x.eval().float()(tokens()).logits for x in (back, same))
            assert torch.equal(have, want), name


def test_models_of_ours_load_in_transformers(tmp_path: Path) -> None:
    """A config that was never theirs, through the family that has such models."""
    from transformers import AutoModelForCausalLM

    from ranvier.checkpoint import directory, rank_file
    from ranvier.checkpoint.rank_file import FileLayout
    from ranvier.config import run as runs
    from ranvier.config.plan import AXES
    from ranvier.sharding import Shard
    from ranvier.train.import_export import to_model_config

    shape: dict[str, Any] = {"layers": 2, "embed": 32, "mlp": 48, "vocab": VOCAB, "head_dim": 8}
    for i, (kind, more) in enumerate(
        {
            "llama": {"rope_scale": 8.0, "original_max_position": 16},
            "gpt2": {"kv_heads": 4, "position_embedding": "learned", "norm": "layer"}
            | {"activation": "gelu", "bias": True, "tie_embeddings": True, "max_seq": 128},
            "qwen3": {"qk_norm": "per_head", "sliding_window": 4, "window_layers": (1,)},
        }.items()
    ):
        config = DecoderConfig(**shape, **more)
        torch.manual_seed(i)
        model = Decoder(config).eval()
        here = tmp_path / f"run{i}"
        inside = here / "checkpoints" / "step-00000003"
        inside.mkdir(parents=True)
        run = runs.RunConfig(model=to_model_config(config))
        (here / "config.toml").write_text(runs.to_toml(run))
        state = {
            f"{n}.master": (
                p.detach(),
                Shard(tuple(p.shape), (0,) * p.dim(), *(tuple(p.shape),) * 2),
            )
            for n, p in model.named_parameters()
        }
        layout = FileLayout.from_state(state)
        data = [memoryview(state[n][0].numpy().tobytes()) for n in layout.offsets]
        rank_file.write_rank_file(inside, 0, state, layout, data)
        directory.write_manifest(
            inside, 3, dict.fromkeys(AXES, 1), {"samples": 0, "fingerprint": ""}, files=1
        )
        export_model(here, tmp_path / f"out{i}", max_shard_bytes=10_000)
        table = json.loads((tmp_path / f"out{i}/config.json").read_text())
        assert table["model_type"] == kind
        assert (tmp_path / f"out{i}/model.safetensors.index.json").exists()
        back, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / f"out{i}", output_loading_info=True
        )
        assert not any(info.values()), info
        with torch.no_grad():
            error = (back.eval()(tokens()).logits - model(tokens())).abs().max().item()
        assert error < 1e-5, (kind, error)


MIXED = {"Mixtral-8x7B-v0.1": "mixtral-8x7b", "Qwen3-30B-A3B": "qwen3-30b-a3b"}
OURS_ALONE = ("deepseek-moe-16b", "ted-6.7b-16e", "moe-tiny")
"""Sizes whose published models come with code of their own, or not at all."""


@pytest.mark.parametrize("size", sorted(MODEL_SIZES.keys() - OURS_ALONE))
def test_our_sizes_have_a_family(size: str) -> None:
    family, config = find_fitting_family(MODEL_SIZES[size])
    assert family.config_from_hf(config) == MODEL_SIZES[size]
    assert family.tensor_mappings(MODEL_SIZES[size])


ODD: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    ("llama", {"hidden_act": "mish"}, "hidden_act='mish'"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"num_key_value_heads": 3}, "kv_heads=3 does not divide heads=4"),
    ("llama", {"head_dim": 7}, "head_dim=7"),
    ("llama", {"hidden_size": "wide"}, "hidden_size='wide'"),
    ("llama", {"new_trick": True}, "new_trick=True"),
    ("llama", {"rope_parameters": {**LLAMA3, "surprise": 1}}, "rope_parameters.surprise=1"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("deepseek_v3", {}, "model_type='deepseek_v3'"),
    (
        "mixtral",
        {"num_local_experts": 2, "num_experts_per_tok": 3},
        "experts_per_token=3 is invalid for experts=2",
    ),
    ("mixtral", {"num_local_experts": "many"}, "num_local_experts='many'"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [2]}, "mlp_only_layers=[2]"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ("llama", {"is_causal": False}, "is_causal=False"),
    ("llama", {"some_switch": False}, "some_switch=False"),
    ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
    ("llama", {"attention_bias": "false"}, "attention_bias='false'"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false'"),
    ("llama", {"rope_theta": 0}, "rope_theta=0"),
    ("llama", {"rope_theta": True}, "rope_theta=True"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor=-2.0"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 0}}, "factor=0"),
    ("llama", {"vocab_size": 10**20}, "vocab_size"),
    ("llama", {"hidden_size": 34}, "hidden_size=34"),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("phi3", {"layer_types": 5}, "layer_types=5"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers='x'"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
    ("phi3", {"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    ("phi3", {"full_attn_mod": 2}, "full_attn_mod=2"),
    ("gpt2", {"n_head": 3}, "n_embd=32"),
]
SEEN: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B-v0.1": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "OLMoE-1B-7B-0924": {
        "model_type": "olmoe",
        "clip_qkv": None,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rope_theta": 10000.0,
        "vocab_size": 50304,
    },
    "Qwen2.5-0.5B-Instruct": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "vocab_size": 151936,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "use_sliding_window": False,
        "max_window_layers": 21,
        "sliding_window": 32768,
        "use_mrope": False,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "gemma-2-9b": {
        "model_type": "gemma2",
        "hidden_size": 3584,
        "num_hidden_layers": 42,
        "head_dim": 256,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
        "cache_implementation": "hybrid",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gpt2-medium": {
        "model_type": "gpt2",
        "n_embd": 1024,
        "n_layer": 24,
        "n_head": 16,
        "n_ctx": 1024,
        "n_special": 0,
        "predict_special_tokens": True,
        "summary_type": "cls_index",
    },
    "Phi-4-mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_hidden_layers": 2,
        "vocab_size": 200064,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.75,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "auto_map": {"AutoModel": "a.B"},
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    },
    "deepseek-coder-1.3b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "vocab_size": 32256,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "rope_theta": 100000,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
        "torch_dtype": "bfloat16",
    },
}


@pytest.mark.parametrize("name", SEEN)
def test_configs_as_they_are_published_are_read(name: str) -> None:
    """With the keys that they have and nobody needs."""
    table = SEEN[name]
    config = FAMILIES[table["model_type"]].config_from_hf(table)
    assert config.window_layers == (tuple(range(0, 42, 2)) if name == "gemma-2-9b" else ())
    assert config.sliding_window == (4096 if name == "gemma-2-9b" else 0)
    if name in MIXED:
        assert config == MODEL_SIZES[MIXED[name]]
    if name == "OLMoE-1B-7B-0924":
        assert (config.experts, config.experts_per_token, config.expert_width) == (64, 8, 1024)
    if name == "Phi-4-mini":
        assert (config.rope, config.partial_rotary_factor, config.original_max_position) == (
            "longrope",
            0.75,
            4096,
        )
    if name == "deepseek-coder-1.3b":
        assert (config.rope, config.rope_scale, config.rope_theta) == ("linear", 4.0, 1e5)


def test_a_document_is_as_long_as_it_is_wherever_it_is_packed() -> None:
    """LongRoPE's factors depend on the length of the text, not on what lies beside it."""
    shape: dict[str, Any] = {"layers": 1, "embed": 16, "mlp": 16, "head_dim": 4, "vocab": VOCAB}
    factors: dict[str, Any] = {"rope_short": (1.0, 2.0), "rope_long": (3.0, 9.0)}
    model = Decoder(
        DecoderConfig(**shape, rope="longrope", original_max_position=8, **factors)
    ).double()
    x = tokens()[:1]
    documents = torch.tensor([[0] * 8 + [1] * 12])
    positions = torch.cat([torch.arange(8), torch.arange(12)]).unsqueeze(0)
    with torch.no_grad():
        packed = model(x, positions=positions, documents=documents)
        apart = torch.cat([model(x[:, :8]), model(x[:, 8:])], 1)
        assert (model(x)[:, :8] - apart[:, :8]).abs().max() > 1e-3  # one text of 20 tokens
    assert torch.allclose(packed, apart, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "changes", "words"), ODD, ids=[w for *_, w in ODD])
def test_what_cannot_be_is_refused_before_weights_are_read(
    tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    """There are none to be read."""
    table = {"model_type": kind, **(GPT2 if kind == "gpt2" else BASE), **changes}
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(RanvierError, match=r"config\.json") as error:
        PublishedModel.open(tmp_path)
    assert words in str(error.value), str(error.value)


def invented(drawn: random.Random) -> tuple[str, dict[str, Any]]:
    """A config within a family that nobody has published."""
    # The last two are not part of transformers.
    others = ("gpt2", "huginn_raven", "qwen2_parscale")
    kind = drawn.choice([kind for kind in FAMILIES if kind not in others])
    heads = drawn.choice([1, 2, 3, 4, 5, 6])
    kv = drawn.choice([n for n in range(1, heads + 1) if heads % n == 0] + [2])
    table: dict[str, Any] = BASE | {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_size": heads * drawn.choice([4, 6, 8]),
        "intermediate_size": drawn.choice([7, 16, 33]),
        "num_hidden_layers": drawn.choice([1, 2, 3]),
        "tie_word_embeddings": drawn.random() < 0.5,
        "rms_norm_eps": drawn.choice([1e-6, 1e-3]),
    }
    if drawn.random() < 0.5 and kind != "phi3":
        table["head_dim"] = drawn.choice([2, 6, 10])
    if kind in ("qwen3", "gemma2") and "head_dim" not in table:
        table["head_dim"] = 8
    if kind in ("mistral", "phi3", "qwen2", "qwen3", "gemma2"):
        table["sliding_window"] = drawn.choice([1, 3, 8, 100])
    if kind in ("qwen2", "qwen3"):
        table |= {"use_sliding_window": drawn.random() < 0.7, "max_window_layers": 1}
    if kind != "phi3":
        ropes = [None, LLAMA3, {"rope_type": "linear", "rope_theta": 1e3, "factor": 2.5}]
        ropes += [{"rope_type": "yarn", "rope_theta": 1e5, "factor": 3.0, "beta_fast": 8}]
        table["rope_parameters"] = drawn.choice(ropes)
    if kind in ("mixtral", "qwen3_moe", "olmoe"):
        count = drawn.choice([2, 3, 5])
        table |= {"num_experts": count, "num_experts_per_tok": drawn.choice([1, 2])}
        if kind != "mixtral":
            table["norm_topk_prob"] = drawn.random() < 0.5
        if kind == "qwen3_moe":
            table |= {"moe_intermediate_size": 12, "decoder_sparse_step": drawn.choice([1, 2])}
    if kind in ("llama", "qwen3", "olmo2", "gemma2"):
        table["attention_bias"] = drawn.random() < 0.5
    return kind, table


@pytest.mark.parametrize("seed", range(24))
def test_an_invented_config_works_or_is_refused(tmp_path: Path, seed: int) -> None:
    kind, table = invented(random.Random(seed))
    try:
        model = theirs(kind, table)
        want = model(tokens(), use_cache=False).logits.detach()
    except Exception:  # what they cannot be need not be here
        with pytest.raises(UnsupportedModelError):
            FAMILIES[kind].config_from_hf({"model_type": kind, **table})
        return
    with PublishedModel.open(save(model, tmp_path / "in")) as source:
        ours = Decoder(source.config).eval()
        for name, param in ours.named_parameters():
            param.data.copy_(source.load_tensor(name))
    with torch.no_grad():
        error = (ours(tokens()) - want).abs().max().item()
    assert error <= 1e-5 * max(want.abs().max().item(), 1.0), (kind, table, error)


# ---- files ------------------------------------------------------------------------------


def opened(folder: Path) -> str:
    """Why a folder cannot be used; empty if it can."""
    try:
        PublishedModel.open(folder)
    except RanvierError as error:
        return str(error)
    return ""


def changed(source: Path, folder: Path, change: Any) -> Path:
    """A copy whose tensors were changed."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def test_files_that_do_not_fit_are_refused(tmp_path: Path, models: dict[str, Path]) -> None:
    llama, tied = models["llama"], models["llama tied, biases"]
    lost = changed(llama, tmp_path / "a", lambda t: t.pop("model.norm.weight"))
    assert "model.norm.weight is missing" in opened(lost)
    more = changed(llama, tmp_path / "b", lambda t: t.update(extra=torch.ones(2)))
    assert "extra is not a tensor of llama" in opened(more)
    wide = changed(llama, tmp_path / "c", lambda t: t.update({"lm_head.weight": torch.ones(3, 32)}))
    assert "has the shape [3, 32], not [61, 32]" in opened(wide)
    whole = changed(
        llama, tmp_path / "d", lambda t: t.update({"model.norm.weight": torch.ones(32).int()})
    )
    assert "unsupported dtype I32" in opened(whole)
    other = changed(
        tied, tmp_path / "e", lambda t: t.update({"lm_head.weight": torch.ones(VOCAB, 32)})
    )
    assert "lm_head.weight differs from the embedding" in opened(other)
    same = changed(
        tied,
        tmp_path / "f",
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    assert opened(same) == ""


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe mixed"])
def test_experts_in_one_tensor_are_read(tmp_path: Path, models: dict[str, Path], name: str) -> None:
    """As transformers has them in memory; and a lost expert is missed."""
    fused = dict(theirs(*CASES[name]).state_dict())
    if CASES[name][1].get("tie_word_embeddings"):
        del fused["lm_head.weight"]
    (tmp_path / "in").mkdir()
    shutil.copyfile(models[name] / "config.json", tmp_path / "in" / "config.json")
    save_file(fused, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    with PublishedModel.open(tmp_path / "in") as one, PublishedModel.open(models[name]) as apart:
        assert all(torch.equal(one.load_tensor(n), apart.load_tensor(n)) for n in apart.shapes)
    import_model(str(tmp_path / "in"), tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out")  # as the hub has them
    have, want = (load_file(x / "model.safetensors") for x in (tmp_path / "out", models[name]))
    assert have.keys() == want.keys() and all(torch.equal(have[n], want[n]) for n in want)
    gone = next(n for n in want if ".experts.3." in n)
    lost = changed(models[name], tmp_path / "lost", lambda tensors: tensors.pop(gone))
    assert f"{gone} is missing" in opened(lost)


def test_older_names_and_single_files_are_read(tmp_path: Path, models: dict[str, Path]) -> None:
    def bare(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)

    folder = changed(models["gpt2"], tmp_path / "old", bare)
    with PublishedModel.open(folder) as old, PublishedModel.open(models["gpt2"]) as new:
        assert all(torch.equal(old.load_tensor(n), new.load_tensor(n)) for n in new.shapes)
    with PublishedModel.open(models["llama"] / "model.safetensors") as one:
        assert one.family.model_type == "llama"
    shutil.copytree(models["llama"], tmp_path / "two")
    save_file({"extra": torch.ones(2)}, tmp_path / "two" / "consolidated.safetensors")
    with PublishedModel.open(
        tmp_path / "two"
    ) as two:  # as transformers, which reads the one it knows
        assert "extra" not in two.file_by_tensor
    os.rename(tmp_path / "two/model.safetensors", tmp_path / "two/a.safetensors")
    shutil.copyfile(tmp_path / "two/a.safetensors", tmp_path / "two/consolidated.safetensors")
    assert "must be in exactly one file" in opened(tmp_path / "two")
    assert "Pass " in opened(models["llama"] / "config.json")
    split = save(theirs(*CASES["phi3"]), tmp_path / "split", max_shard_size="20KB")
    assert len([*split.glob("*.safetensors")]) > 2
    with PublishedModel.open(split) as many, PublishedModel.open(models["phi3"]) as single:
        assert all(torch.equal(many.load_tensor(n), single.load_tensor(n)) for n in single.shapes)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "a/b.safetensors"])
def test_an_index_names_files_beside_it_only(
    tmp_path: Path, models: dict[str, Path], name: str
) -> None:
    folder = tmp_path / "in"
    shutil.copytree(models["llama"], folder)
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "It may only name files in the same directory" in opened(folder)


def test_files_elsewhere_pipes_and_pickles_are_refused(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    def with_file(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        shutil.copyfile(models["llama"] / "config.json", folder / "config.json")
        return folder

    link = with_file("link")
    os.symlink(models["llama"] / "model.safetensors", link / "model.safetensors")
    assert "is a symbolic link to" in opened(link)
    pipe = with_file("pipe")
    os.mkfifo(pipe / "model.safetensors")
    assert "is a pipe" in opened(pipe)
    pickled = with_file("pickled")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    assert "safetensors files only" in opened(pickled)
    for name, data in {
        "huge": (2**60).to_bytes(8, "little") + b"{}",
        "cut": (models["llama"] / "model.safetensors").read_bytes()[:-100],
        "empty": b"",
    }.items():
        folder = with_file(name)
        (folder / "model.safetensors").write_bytes(data)
        assert "damaged" in opened(folder), name


def test_a_snapshot_of_a_hub_is_read(tmp_path: Path, models: dict[str, Path]) -> None:
    """It holds links to blobs of its own cache."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, name in enumerate(("config.json", "model.safetensors")):
        shutil.copyfile(models["qwen3"] / name, blobs / f"{i}")
        os.symlink(f"../../blobs/{i}", snapshot / name)
    assert opened(snapshot) == ""
