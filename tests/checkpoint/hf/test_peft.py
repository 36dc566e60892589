"""Adapters against PEFT itself: training from one of its own, and files each reads of the other."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import adapter_cases as cases
from pool import Pool
from ranvier.checkpoint.hf import peft_write
from ranvier.checkpoint.hf.peft_read import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from ranvier.errors import CheckpointError, UnsafeInputError
from ranvier.models import AdapterConfig, DecoderConfig
from ranvier.models.hf.registry import find_family
from ranvier.models.lora import adapted_weights

CUBE = {"depth": 2, "row": 2, "col": 2}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    "llama dora": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "o_proj", "up_proj"]}
    | {"use_dora": True},
    "qwen2": {"r": 3, "target_modules": ["v_proj", "k_proj", "down_proj"], "use_rslora": True}
    | {"layers_to_transform": [1], "use_dora": True},
    "phi3": {"r": 2, "target_modules": ["qkv_proj", "gate_up_proj"]},
    "gpt2": {"r": 2, "target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}
    | {"use_dora": True},
    "gemma2": {"r": 2, "target_modules": "all-linear"},
}
GRIDS = {
    "llama": [{}, CUBE, {"pipe": 2, "row": 2}],
    "llama dora": [CUBE, {"data": 2, "col": 2}],
}


class Made:
    """A published model with an adapter that PEFT made and saved, and its training."""

    def __init__(self, name: str, path: Path) -> None:
        from peft import LoraConfig, get_peft_model

        model = cases.published(name.split()[0])
        self.config, self.base = cases.converted(model)
        self.family = find_family(model.config.to_dict())
        torch.manual_seed(9)
        theirs = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **OPTIONS[name]))
        theirs.save_pretrained(path)
        self.path, self.lora = path, read_adapter(path, self.config).lora
        self.losses = cases.trained_by_peft(theirs)
        with torch.no_grad():
            self.logits = theirs.eval()(cases.batch().tokens).logits


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("adapters")
    return functools.cache(lambda name: Made(name, folder / name.replace(" ", "-")))


def saved(weights: Mapping[str, Tensor]) -> peft_write.ReadTensors:
    """Weights as a checkpoint would give them."""
    return lambda names: {name: weights[name] for name in names}


def written(
    monkeypatch: pytest.MonkeyPatch, one: Any, lora: AdapterConfig, weights: Any, out: Path
) -> None:
    monkeypatch.setattr(peft_write, "weight_reader", lambda _: saved(weights))
    peft_write.write_adapter(Path("unused"), one.config, lora, one.family, out)


SLOW = ("gemma2", "llama", "llama dora", "phi3", "qwen2")
"""Only with --full; DoRA is that of gpt2 otherwise."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if n in SLOW else ()) for n in OPTIONS]
)
def test_training_equals_pefts_and_files_go_both_ways(
    pool: Pool, made: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(name)
    for i, degrees in enumerate(GRIDS.get(name, [{"row": 2, "col": 2}])):
        inner = ("samples", "features")[(i + len(name)) % 2]
        inputs = (one.config, one.lora, one.base, str(one.path), inner)
        results = pool.on_grid(degrees, cases.train, *inputs)
        for losses, _ in results:
            assert losses == pytest.approx(one.losses, abs=2e-5), (degrees, inner)
    weights = cases.whole(results)
    torch.testing.assert_close(
        cases.logits(one.config, one.lora, weights), one.logits, rtol=0, atol=2e-4
    )
    written(monkeypatch, one, one.lora, weights, tmp_path / "ours")
    back = read_adapter(tmp_path / "ours", one.config)
    assert back.lora == one.lora
    torch.testing.assert_close(loaded(one, name, tmp_path / "ours"), one.logits, rtol=0, atol=2e-4)
    merged = {
        n: peft_write.merge_adapter(
            n, saved(weights), one.lora, adapted_weights(one.config, one.lora)
        )
        for n in one.base
    }
    assert any(not torch.equal(merged[n], one.base[n]) for n in merged)
    torch.testing.assert_close(
        cases.logits(one.config, AdapterConfig(), merged), one.logits, rtol=0, atol=2e-4
    )


def loaded(one: Any, name: str, path: Path) -> Tensor:
    """What the published model says with an adapter of ours; warnings are errors."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(cases.published(name.split()[0]), path)
    with torch.no_grad():
        logits: Tensor = model.eval()(cases.batch().tokens).logits
    return logits


@pytest.mark.parametrize("on", [("q", "v", "mlp"), ("heads", "kv_heads")])
@pytest.mark.parametrize("rslora", [False, True])
def test_an_a_for_each_packed_layer_is_written_as_blocks(
    made: Any, on: tuple[str, ...], rslora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only part of a packed layer, or all of it: PEFT computes the same, and we read it back."""
    one, lora = made("phi3"), AdapterConfig(rank=2, alpha=6.0, target_modules=on, rslora=rslora)
    weights = {**one.base, **drawn(one.config, lora)}
    written(monkeypatch, one, lora, weights, tmp_path)
    want = cases.logits(one.config, lora, weights)
    torch.testing.assert_close(loaded(one, "phi3", tmp_path), want, rtol=0, atol=1e-4)
    back = read_adapter(tmp_path, one.config)
    assert not back.lora.shared and back.lora.scale == pytest.approx(lora.scale)
    blank = {n: torch.zeros(piece.shape) for n, piece in back.slices.items()}
    back.fill_state({n: (x, whole_place(x)) for n, x in blank.items()})
    assert all(torch.equal(blank[n], weights[n]) for n in weights if ".adapters." in n)
    table = load_file(tmp_path / WEIGHTS_FILE)
    name = next(n for n in table if n.endswith("qkv_proj.lora_B.weight"))
    table[name][-1, 0] = 1.0
    save_file(table, tmp_path / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match="nonzero values outside of the 3 blocks"):
        read_adapter(tmp_path, one.config)


def drawn(config: DecoderConfig, lora: AdapterConfig) -> dict[str, Tensor]:
    torch.manual_seed(3)
    found = {}
    for own in adapted_weights(config, lora).values():
        found[own.a] = torch.randn(lora.rank, own.shape[1])
        found[own.b] = torch.randn(own.shape[0], lora.rank)
    return found


def whole_place(x: Tensor) -> Any:
    from ranvier.sharding import Shard

    shape = tuple(x.shape)
    return Shard(shape, (0,) * x.dim(), shape, shape)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("bias", "all", "bias='all'"),
        ("bias", "lora_only", "bias='lora_only'"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("init_lora_weights", "pissa", "init_lora_weights='pissa'"),
        ("peft_type", "IA3", "peft_type='IA3'"),
        ("lora_bias", True, "lora_bias=True"),
        ("use_qalora", True, "use_qalora=True"),
        ("trainable_token_indices", [1], "trainable_token_indices"),
        ("a_new_key", 3, "a_new_key=3"),
        ("rank_pattern", {"q_proj": 2}, "rank_pattern={'q_proj': 2}"),
        ("alpha_pattern", {"q_proj": 2}, "alpha_pattern={'q_proj': 2}"),
        ("r", 5, "rank_pattern"),
        ("r", "8", "r='8'"),
        ("target_modules", [*ALL, "lm_head"], "no adapter of lm_head"),
        ("target_modules", "(", r"target_modules='\('"),
    ],
)
def test_what_cannot_be_ours_is_refused_with_key_and_value(
    made: Any, tmp_path: Path, key: str, value: object, words: str
) -> None:
    one = made("llama")
    table = json.loads((one.path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**table, key: value}))
    (tmp_path / WEIGHTS_FILE).write_bytes((one.path / WEIGHTS_FILE).read_bytes())
    with pytest.raises(CheckpointError, match=words):
        read_adapter(tmp_path, one.config)


def test_adapters_of_other_models_and_pickles_are_refused(made: Any, tmp_path: Path) -> None:
    one = made("llama")
    with pytest.raises(CheckpointError, match=r"shape \[16, 4\] instead of \[32, 4\]"):
        read_adapter(one.path, DecoderConfig(**{**one.config.__dict__, "embed": 32}))
    with pytest.raises(CheckpointError, match="is a directory with"):
        read_adapter(tmp_path, one.config)
    (tmp_path / CONFIG_FILE).write_text((one.path / CONFIG_FILE).read_text())
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UnsafeInputError, match="which is a pickle"):
        read_adapter(tmp_path, one.config)
