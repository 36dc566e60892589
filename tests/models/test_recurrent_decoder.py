"""Recurrent depth: equal to a restatement of the published algorithm, imported and exported.

The restatement follows the published names and layout: an adapter of concatenated states, packed
queries, keys and values, rotary pairs that are neighbours, one norm that is used twice.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ranvier.checkpoint.hf.model import PublishedModel, entries_of
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.models import MODEL_SIZES, DecoderConfig, RecurrentDecoder, counter_random
from ranvier.models.hf.family import UnsupportedModelError, rotary_neighbours
from ranvier.models.hf.registry import FAMILIES, find_fitting_family
from ranvier.models.recurrence import Recurrence, expected_calls
from ranvier.models.recurrent_decoder import INITIAL_STD, draw_recurrence
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.train.import_export import export_model, import_model

THETA = 50000.0
HEADS = 4
CONFIG_JSON: dict[str, Any] = {
    "model_type": "huginn_raven",
    "architectures": ["RavenForCausalLM"],
    "n_embd": 32,
    "n_heads": HEADS,
    "n_layers": 5,
    "n_layers_in_prelude": 1,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "padded_vocab_size": 64,
    "block_size": 32,
    "mean_recurrence": 5,
    "mean_backprop_depth": 2,
    "rope_base": THETA,
    "norm_eps": 1e-6,
    "qk_bias": True,
    "bias": False,
    "tie_embeddings": True,
    "block_class_name": "SandwichBlock",
    "injection_type": "linear",
    "nonlin_name": "SiLU",
    "init_values": {"embed_scale": math.sqrt(32)},
    "torch_dtype": "float32",
}
TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))


# ---- the restatement -----------------------------------------------------------------------------


def restated_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def rotate_neighbours(x: Tensor) -> Tensor:
    """Rotates the pairs (2i, 2i + 1) of each head, by angles in fp32; x: `[b, s, h, k]`."""
    k = x.shape[3]
    frequencies = 1.0 / THETA ** (torch.arange(0, k, 2, dtype=torch.float32) / k)
    positions = torch.arange(x.shape[1], dtype=torch.float32)
    angle = (positions[:, None] * frequencies).to(x.dtype)  # (s, k/2)
    pairs = torch.view_as_complex(x.unflatten(3, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[None, :, None]
    return torch.view_as_real(turned).flatten(3)


def restated_layer(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    def get(key: str) -> Tensor:
        return weights[f"{name}.{key}"]

    y = restated_norm(x, get("norm_1.weight")) @ get("attn.Wqkv.weight").T
    q, k, v = (part.unflatten(2, (HEADS, -1)) for part in y.chunk(3, 2))  # (b, s, h, k)
    q = rotate_neighbours(q + get("attn.qk_bias")[0])
    k = rotate_neighbours(k + get("attn.qk_bias")[1])
    scores = torch.einsum("bshk,bthk->bhst", q, k) / math.sqrt(q.shape[3])
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    shares = scores.masked_fill(hidden, -math.inf).softmax(-1)
    attended = torch.einsum("bhst,bthk->bshk", shares, v).flatten(2)
    x = restated_norm(x + attended @ get("attn.proj.weight").T, get("norm_2.weight"))
    gate, up = (restated_norm(x, get("norm_3.weight")) @ get("mlp.fc.weight").T).chunk(2, 2)
    return restated_norm(x + (F.silu(gate) * up) @ get("mlp.proj.weight").T, get("norm_4.weight"))


def restated_logits(
    weights: dict[str, Tensor], state: Tensor, recurrence: Recurrence, parts: tuple[int, int, int]
) -> Tensor:
    prelude, core, coda = parts
    table = weights["transformer.wte.weight"]
    e = table[TOKENS] * math.sqrt(table.shape[1])
    for i in range(prelude):
        e = restated_layer(e, weights, f"transformer.prelude.{i}")

    def iterate(state: Tensor) -> Tensor:
        x = torch.cat([state, e], 2) @ weights["transformer.adapter.weight"].T
        for i in range(core):
            x = restated_layer(x, weights, f"transformer.core_block.{i}")
        return x

    with torch.no_grad():
        for _ in range(recurrence.without_grad):
            state = iterate(state)
    for _ in range(recurrence.with_grad):
        state = iterate(state)
    x = restated_norm(state, weights["transformer.ln_f.weight"])
    for i in range(coda):
        x = restated_layer(x, weights, f"transformer.coda.{i}")
    return restated_norm(x, weights["transformer.ln_f.weight"]) @ table.T


def published_weights(dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights with the published names and shapes."""
    draw = torch.Generator().manual_seed(0)
    d = CONFIG_JSON["n_embd"]
    f = CONFIG_JSON["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (CONFIG_JSON["vocab_size"], d),
        "transformer.adapter.weight": (d, 2 * d),
        "transformer.ln_f.weight": (d,),
    }
    parts = {"prelude": 1, "core_block": 2, "coda": 2}
    for name in (f"transformer.{part}.{i}" for part, n in parts.items() for i in range(n)):
        shapes |= {
            f"{name}.attn.Wqkv.weight": (3 * d, d),
            f"{name}.attn.qk_bias": (2, 1, HEADS, d // HEADS),
            f"{name}.attn.proj.weight": (d, d),
            f"{name}.mlp.fc.weight": (2 * f, d),
            f"{name}.mlp.proj.weight": (d, f),
            **{f"{name}.norm_{i}.weight": (d,) for i in (1, 2, 3, 4)},
        }
    return {
        name: (torch.randn(shape, generator=draw, dtype=torch.float64) * 0.3).to(dtype)
        for name, shape in shapes.items()
    }


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A random model as it is published, with its table of rotations."""
    folder = tmp_path / "huginn"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON))
    table = {"freqs_cis": torch.ones(1, 32, 1, 4, 2)}
    save_file({**published_weights(torch.float32), **table}, folder / "model.safetensors")
    return folder


def load(folder: Path, dtype: torch.dtype) -> tuple[RecurrentDecoder, list[Any]]:
    """The model of a directory, and how its tensors are stored there."""
    with PublishedModel.open(folder) as source:
        model = RecurrentDecoder(source.config).to(dtype)
        state = {name: source.load_tensor(name).to(dtype) for name in source.shapes}
        missing = model.load_state_dict(state, strict=False).missing_keys
        assert missing == ["head.weight"], missing
        return model, entries_of(source.family, source.config)


def stored_grad(entry: Any, model: nn.Module) -> Tensor:
    """The gradient of a published tensor, from the gradients of ours."""
    parts = []
    for name in entry.our_names:
        grad = model.get_parameter(name).grad
        assert grad is not None, name
        k = entry.rotary_dim(name)
        parts.append(rotary_neighbours(grad, k) if k else grad)
    return torch.cat(parts, entry.concat_dim)


# ---- parity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_logits_and_gradients_equal_the_restatement(published: Path, iterations: int) -> None:
    """With all iterations having gradients, and with some that have none."""
    model, entries = load(published, torch.float64)
    model.recurrence = Recurrence.split(iterations, model.config.backprop_depth)
    weights = {n: w.double().requires_grad_() for n, w in published_weights(torch.float32).items()}
    state = model.initial_state(torch.zeros(*TOKENS.shape, 32, dtype=torch.float64))
    want = restated_logits(weights, state, model.recurrence, (1, 2, 2))
    have = model(TOKENS)
    assert (have - want).abs().max() <= 1e-12 * want.abs().max()
    upstream = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).view(want.shape)
    (want * upstream).sum().backward()
    (have * upstream).sum().backward()
    for entry in entries:
        grad = weights[entry.name].grad
        assert grad is not None and grad.abs().max() > 0, entry.name
        found = stored_grad(entry, model).reshape(grad.shape)
        assert (found - grad).abs().max() <= 1e-12 * grad.abs().max(), entry.name


def test_an_imported_model_gives_the_logits_of_the_restatement(published: Path) -> None:
    model, _ = load(published, torch.float32)
    model.eval()
    assert model.eval_recurrence == CONFIG_JSON["mean_recurrence"]
    state = model.initial_state(torch.zeros(*TOKENS.shape, 32))
    with torch.no_grad():
        want = restated_logits(published_weights(torch.float32), state, Recurrence(0, 5), (1, 2, 2))
        have = model(TOKENS)
    assert (have - want).abs().max() <= 1e-5 * want.abs().max()


def test_a_wrong_order_of_rotary_pairs_is_caught(published: Path) -> None:
    """Queries that are left in the published order give other logits."""
    model, _ = load(published, torch.float64)
    state = model.initial_state(torch.zeros(*TOKENS.shape, 32, dtype=torch.float64))
    weights = {n: w.double() for n, w in published_weights(torch.float32).items()}
    with torch.no_grad():
        want = restated_logits(weights, state, Recurrence(0, 5), (1, 2, 2))
        q = model.get_parameter("blocks.0.attention.qkv.q.weight")
        q.copy_(rotary_neighbours(q, 8))
        have = model(TOKENS)
    assert (have - want).abs().max() > 1e-3 * want.abs().max()


def test_export_of_an_imported_model_is_bitwise_the_same(published: Path, tmp_path: Path) -> None:
    import_model(str(published), tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "again")
    before = load_file(published / "model.safetensors")
    after = load_file(tmp_path / "again" / "model.safetensors")
    # The table of rotations is not a weight.
    assert after.keys() == before.keys() - {"freqs_cis"}
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]), name


def test_configs_convert_both_ways() -> None:
    family = FAMILIES["huginn_raven"]
    tiny = MODEL_SIZES["recurrent-tiny"]
    # Embeddings may have another factor than sqrt(embed).
    sizes = [tiny, MODEL_SIZES["recurrent-0.5b"], replace(tiny, embed_scale=1.0)]
    for config in (*sizes, MODEL_SIZES["huginn-3.5b"]):
        found, theirs = find_fitting_family(config)
        assert found is family
        again = family.config_from_hf(theirs)
        assert again == replace(config, init_std=again.init_std)
    huginn = family.config_from_hf({"model_type": "huginn_raven"})
    assert (huginn.embed, huginn.heads, huginn.core_layers) == (5280, 55, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": 4}, "n_layers=4.*sum of the layers of its parts, 5"),
        ({"mean_recurrence": 0}, "mean_recurrence=0.*from 1"),
        ({"injection_type": "add"}, "injection_type='add'.*'linear'"),
        ({"test_time_noise": 0.1}, "test_time_noise=0.1"),
        ({"padded_vocab_size": 128}, "padded_vocab_size=128.*vocab_size=64"),
        ({"qk_bias": "yes"}, "qk_bias='yes'"),
    ],
)
def test_other_models_of_the_family_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        FAMILIES["huginn_raven"].config_from_hf({**CONFIG_JSON, **changes})


# ---- random numbers ------------------------------------------------------------------------------


def test_drawn_iterations_have_the_published_distribution() -> None:
    """Mean 33.05, median 29 and 95th percentile 67 for a mean recurrence of 32."""
    config = MODEL_SIZES["huginn-3.5b"]
    drawn = [draw_recurrence(0, step, config) for step in range(4000)]
    counts = torch.tensor([one.iterations for one in drawn], dtype=torch.float64)
    assert counts.mean().item() == pytest.approx(33.0, abs=1.0)
    assert counts.median().item() == pytest.approx(29, abs=1.5)
    assert counts.quantile(0.95).item() == pytest.approx(67, abs=5)
    assert counts.min() >= 1
    assert all(one.with_grad == min(one.iterations, 8) for one in drawn)
    expected = expected_calls(32, 8)
    assert expected.total == pytest.approx(33.0)
    with_grad = sum(one.with_grad for one in drawn) / len(drawn)
    assert expected.with_grad == pytest.approx(with_grad, abs=0.02)


def test_iterations_are_a_function_of_seed_and_step() -> None:
    config = MODEL_SIZES["recurrent-tiny"]
    assert [draw_recurrence(0, n, config) for n in range(50)] == [
        draw_recurrence(0, n, config) for n in range(50)
    ]
    assert [draw_recurrence(1, n, config) for n in range(50)] != [
        draw_recurrence(0, n, config) for n in range(50)
    ]


def test_initial_states_are_truncated_normal_and_depend_on_every_number() -> None:
    table = counter_random.truncated_normal_quantiles(3.0)
    assert table.abs().max() < 3.0 and torch.equal(table, -table.flip(0))
    # A standard normal distribution truncated at 3 has this standard deviation.
    assert table.std(correction=0).item() == pytest.approx(0.98658, abs=1e-4)
    layer = RecurrentDecoder(MODEL_SIZES["recurrent-tiny"]).initial_state
    x = torch.zeros(4, 16, 128)
    state = layer(x)
    assert state.abs().max() <= 3 * INITIAL_STD
    assert state.std().item() == pytest.approx(0.98658 * INITIAL_STD, rel=0.03)
    layer.samples = torch.tensor([2, 0, 9, 1])
    assert torch.equal(layer(x)[0], state[2]) and not torch.equal(layer(x)[2], state[2])
    assert torch.equal(layer(x[:, :5]), layer(x)[:, :5])
    layer.seed = 1
    assert not torch.equal(layer(x)[1], state[0])


# ---- memory and refusals -------------------------------------------------------------------------


def saved_bytes(recurrence: Recurrence, recompute: str) -> int:
    """Bytes that a forward pass saves for backward."""
    from ranvier.config.plan import Plan

    model = RecurrentDecoder(MODEL_SIZES["recurrent-tiny"])
    plan = Plan(recompute=recompute)  # type: ignore[arg-type]
    model = parallelize(model, Grid({}), plan)
    model.recurrence = recurrence
    get_parallel_model(model).step_context.samples = torch.arange(2)
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return x

    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(tokens, tokens)
    assert loss.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_does_not_depend_on_the_recurrence(recompute: str) -> None:
    usual = saved_bytes(Recurrence(2, 2), recompute)
    assert saved_bytes(Recurrence(30, 2), recompute) == usual
    assert saved_bytes(Recurrence(0, 4), recompute) > usual


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean_recurrence": 0}, "mean_recurrence=0.*at least once.*mean_recurrence=32"),
        ({"backprop_depth": 0}, "backprop_depth=0.*last iteration has gradients"),
        ({"layers": 5}, "layers=5 with prelude_layers=1, core_layers=2.*Use layers=4"),
        ({"core_layers": 0}, "prelude_layers=1.*with core_layers=0"),
        ({"experts": 4}, "core_layers=2 with experts=4.*Use experts=0"),
        ({"bias": True}, "qk_bias=True with biases"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    import re

    config = DecoderConfig(**{**vars(MODEL_SIZES["recurrent-tiny"]), **changes})
    assert re.search(message, " ".join(config.find_problems()))


def test_more_gradients_than_iterations_are_allowed() -> None:
    config = DecoderConfig(**{**vars(MODEL_SIZES["recurrent-tiny"]), "backprop_depth": 64})
    assert config.find_problems() == []
    drawn = draw_recurrence(0, 0, config)
    assert drawn.without_grad == 0


def test_a_pipeline_is_refused() -> None:
    grid = Grid({"pipe": 2}, rank=0, connected=False)
    model = RecurrentDecoder(MODEL_SIZES["recurrent-tiny"])
    with pytest.raises(
        PlanError, match=r"RecurrentDecoder cannot be split into stages.*use pipe=1"
    ):
        parallelize(model, grid, materialize=False)
