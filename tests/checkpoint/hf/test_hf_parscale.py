"""`qwen2_parscale`: published weights give the logits of their equations, and go out to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from commands import call
from equivalence import worst
from pool import Pool
from ranvier import call_on_full_batch
from ranvier.checkpoint.hf.model import PublishedModel
from ranvier.grid import Grid
from ranvier.infer.load import load_model
from ranvier.models import Decoder
from ranvier.models.hf.family import parameter_shapes
from ranvier.models.hf.registry import find_family

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_parscale",
    "architectures": ["Qwen2ParScaleForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_qwen2_parscale.Qwen2ParScaleForCausalLM"},
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 29,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_theta": 1000.0,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "parscale_n": 3,
    "parscale_n_tokens": 5,
    "parscale_attn_smooth": 0.02,
}
TOKENS = torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(2))


def random_weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Tensors with the names and shapes of the published models."""
    generator = torch.Generator().manual_seed(4)
    streams, prefix = CONFIG["parscale_n"], CONFIG["parscale_n_tokens"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (29, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (29, 16),
        "model.aggregate_layer.0.weight": (16, streams * 16),
        "model.aggregate_layer.0.bias": (16,),
        "model.aggregate_layer.2.weight": (streams, 16),
        "model.aggregate_layer.2.bias": (streams,),
    }
    for i in range(2):
        layer = f"model.layers.{i}."
        for name, rows in (("q", 16), ("k", 8), ("v", 8)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, 16)
            shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
            if name != "q":
                shapes[f"{layer}self_attn.prefix_{name}"] = (streams, 2, prefix, 4)
        shapes[f"{layer}self_attn.o_proj.weight"] = (16, 16)
        shapes |= {f"{layer}mlp.{name}_proj.weight": (24, 16) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (16, 24)
        for name in ("input", "post_attention"):
            shapes[f"{layer}{name}_layernorm.weight"] = (16,)
    return {
        name: (torch.randn(shape, generator=generator).double() * 0.4).to(dtype)
        for name, shape in shapes.items()
    }


def save(path: Path, config: dict[str, Any] = CONFIG, dtype: torch.dtype = torch.float64) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(random_weights(dtype), path / "model.safetensors", metadata={"format": "pt"})
    return path


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of x `[n, h, s, k]`: the first half of a head with the second."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * CONFIG["rope_theta"] ** (
        -torch.arange(half).double() / half
    )
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def restate(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits by the equations of the authors, with streams before samples, as they have them."""
    w = weights
    streams = CONFIG["parscale_n"]
    samples, seq = tokens.shape
    x = F.embedding(tokens, w["model.embed_tokens.weight"]).repeat(streams, 1, 1)  # (P·b, s, d)
    unseen = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    unseen = F.pad(unseen, (CONFIG["parscale_n_tokens"], 0))
    for i in range(2):
        layer = f"model.layers.{i}."
        y = rms(x, w[f"{layer}input_layernorm.weight"])
        q, k, v = (
            F.linear(y, *(w[f"{layer}self_attn.{n}_proj.{end}"] for end in ("weight", "bias")))
            .unflatten(-1, (-1, 4))
            .transpose(1, 2)
            for n in "qkv"
        )
        prefixes = (w[f"{layer}self_attn.prefix_{n}"].repeat_interleave(samples, 0) for n in "kv")
        k = torch.cat([next(prefixes), rotate(k)], 2).repeat_interleave(2, 1)
        v = torch.cat([next(prefixes), v], 2).repeat_interleave(2, 1)
        scores = rotate(q) @ k.transpose(-1, -2) / 2.0
        attended = scores.masked_fill(unseen, float("-inf")).softmax(-1) @ v
        attended = attended.transpose(1, 2).flatten(2)
        x = x + attended @ w[f"{layer}self_attn.o_proj.weight"].T
        y = rms(x, w[f"{layer}post_attention_layernorm.weight"])
        gate, up = (y @ w[f"{layer}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T
    x = rms(x, w["model.norm.weight"]).unflatten(0, (streams, samples))  # (P, b, s, d)
    # Feature by feature: all streams of the first, then all of the second.
    together = x.permute(1, 2, 3, 0).flatten(2)
    inner = F.linear(together, *(w[f"model.aggregate_layer.0.{end}"] for end in ("weight", "bias")))
    inner = F.silu(inner)
    scores = F.linear(inner, *(w[f"model.aggregate_layer.2.{end}"] for end in ("weight", "bias")))
    smooth = CONFIG["parscale_attn_smooth"]
    share = scores.softmax(-1) * (1 - smooth) + smooth / streams  # (b, s, P)
    mean = (x * share.permute(2, 0, 1).unsqueeze(-1)).sum(0)
    return mean @ w["lm_head.weight"].T


def test_published_weights_give_the_logits_of_the_authors(tmp_path: Path) -> None:
    with PublishedModel.open(save(tmp_path / "in")) as source:
        assert source.config.parscale_streams == 3 and source.config.parscale_prefix_tokens == 5
        assert source.config.parscale_smoothing == 0.02
        model = Decoder(source.config).double()
        state = {name: source.load_tensor(name) for name in source.shapes}
    model.load_state_dict(
        {name: x.reshape_as(model.state_dict()[name]) for name, x in state.items()}
    )
    want = restate(random_weights(), TOKENS)
    assert worst("logits", model(TOKENS), want, 1e-12) == []
    # In the order of the file, the columns belong to other streams.
    with torch.no_grad():
        model.aggregation.hidden.weight.copy_(  # type: ignore[union-attr]
            random_weights()["model.aggregate_layer.0.weight"]
        )
    assert worst("logits", model(TOKENS), want, 1e-6) != []


def logits_on(grid: Grid, path: str) -> Tensor:
    model = load_model(Path(path), grid, "cpu")
    with torch.no_grad():
        logits: Tensor = call_on_full_batch(model, TOKENS)
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_comes_in_goes_out_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    source, run, out = (tmp_path / name for name in ("in", "run", "out"))
    save(source, dtype=dtype)
    assert call("import", str(source), "--output", str(run)) == 0
    assert call("export", str(run), "--output", str(out)) == 0
    before, after = (load_file(path / "model.safetensors") for path in (source, out))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype and torch.equal(after[name], value), name
    table = json.loads((out / "config.json").read_text())
    assert table["model_type"] == "qwen2_parscale"
    keys = ("parscale_n", "parscale_n_tokens", "parscale_attn_smooth")
    assert {key: table[key] for key in keys} == {key: CONFIG[key] for key in keys}


def test_an_imported_run_loads_on_a_grid(pool: Pool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert call("import", str(save(tmp_path / "in")), "--output", str(run)) == 0
    want = restate(random_weights(), TOKENS)
    for logits in pool.on_grid({"row": 2, "col": 2}, logits_on, str(run)):
        assert worst("logits", logits, want, 1e-12) == []


@pytest.mark.parametrize("prefix_tokens", [0, 48])
def test_a_model_with_one_stream_is_dense(prefix_tokens: int) -> None:
    table = {**CONFIG, "parscale_n": 1, "parscale_n_tokens": prefix_tokens}
    config = find_family("qwen2_parscale").config_from_hf(table)
    assert config.streams == 1 and config.find_problems() == []
    assert not [name for name in parameter_shapes(config) if "prefix" in name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"parscale_n": 0}, "parscale_n=0"),
        ({"parscale_n": "4"}, "parscale_n='4'"),
        ({"parscale_n_tokens": -1}, "parscale_n_tokens=-1"),
        ({"parscale_attn_smooth": 1.0}, "parscale_attn_smooth=1.0"),
    ],
)
def test_configs_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save(tmp_path / "in", {**CONFIG, **changes})
    assert call("import", str(source), "--output", str(tmp_path / "run")) != 0
    assert words in capsys.readouterr().err
