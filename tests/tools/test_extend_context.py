"""A model with a longer context has the same weights, and the rotary positions of transformers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from commands import call
from published_models import BASE, save, theirs
from ranvier.checkpoint.convert import open_checkpoint
from ranvier.errors import PlanError
from ranvier.infer.load import find_checkpoint, load_config_from_dir
from ranvier.models import Decoder, DecoderConfig
from ranvier.tools.extend_context import extend_model, extended_config
from ranvier.train.import_export import export_model, import_model

LENGTH = 200
"""Beyond the 64 positions of the model."""


def read_weights(run: Path) -> dict[str, Tensor]:
    source = open_checkpoint(find_checkpoint(run, None))
    found = source.read_tensors(list(source.tensor_specs))
    return {name: tensor.clone() for name, tensor in found.items()}


def compute_logits(run: Path) -> Tensor:
    model = Decoder(load_config_from_dir(run).model).eval()
    weights = read_weights(run)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[f"{name}.master"])
        found: Tensor = model(long_text())
    return found


def long_text() -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(BASE["vocab_size"], (2, LENGTH), generator=draw)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A small base, so that some frequencies are reduced and others are not within 64 positions.
    rope = {"rope_type": "default", "rope_theta": 100.0}
    model = theirs("qwen3", BASE | {"head_dim": 8, "rope_parameters": rope})
    return save(model, tmp_path_factory.mktemp("published") / "in")


@pytest.mark.parametrize("method", ["yarn", "theta"])
def test_the_exported_model_agrees_with_transformers_at_new_positions(
    published: Path, tmp_path: Path, method: Any
) -> None:
    from transformers import AutoModelForCausalLM

    import_model(str(published), tmp_path / "run")
    before = read_weights(tmp_path / "run")
    for source in (published, tmp_path / "run"):
        out = tmp_path / f"{source.name}-{method}"
        lines = extend_model(str(source), out, max_position=256, method=method)
        assert lines[0].startswith("64 -> 256 positions") and "--data.seq-len 256" in lines[1]
        after = read_weights(out)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    export_model(out, tmp_path / "theirs")
    table = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert table["max_position_embeddings"] == 256
    rope = table["rope_parameters"]
    if method == "yarn":
        assert (rope["rope_type"], rope["factor"]) == ("yarn", 4.0)
        assert rope["original_max_position_embeddings"] == 64
        # What transformers computes if the file does not give it.
        del rope["attention_factor"]
        (tmp_path / "theirs" / "config.json").write_text(json.dumps(table))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    with torch.no_grad():
        want = back(long_text()).logits
    found = compute_logits(out)
    assert torch.allclose(found, want, atol=2e-5)
    # The comparison can fail: the frequencies have an effect at these positions.
    assert float((compute_logits(tmp_path / "run") - want).abs().max()) > 1e-3


def test_factor_theta_and_attention_factor_follow_their_formulas() -> None:
    config = DecoderConfig(max_seq=1024, head_dim=64)
    yarn = extended_config(config, 8192)
    assert (yarn.rope, yarn.rope_scale, yarn.original_max_position) == ("yarn", 8.0, 1024)
    assert (yarn.low_freq_factor, yarn.high_freq_factor) == (1.0, 32.0)
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(8) + 1)
    # A second extension counts from the original length again.
    assert extended_config(yarn, 32768) == extended_config(config, 32768)
    theta = extended_config(config, 8192, method="theta")
    assert (theta.rope_scale, theta.max_seq) == (1.0, 8192)
    # The lowest frequency θ^(-(k-2)/k) is divided by 8.
    assert theta.rope_theta ** (-62 / 64) == pytest.approx(1e4 ** (-62 / 64) / 8)
    assert extended_config(config, 8192, method="theta", rope_theta=1e6).rope_theta == 1e6
    counted = extended_config(config, 8192, original_max_position=512)
    assert (counted.rope_scale, counted.original_max_position) == (16.0, 512)
    window = extended_config(replace(config, sliding_window=128), 8192)
    assert window == replace(config, sliding_window=128, max_seq=8192)


def test_what_cannot_be_extended_is_refused_with_value_rule_and_remedy() -> None:
    config = DecoderConfig(max_seq=1024)
    cases: list[tuple[DecoderConfig, int, dict[str, Any], str]] = [
        (config, 1024, {}, "max_position=1024 is not above .* 1024 .* Use --max-position 2048"),
        (config, 0, {}, "max_position=0 is not above"),
        (config, 8100, {}, "max_position=8100 is not a multiple of 128.* Use --max-position 8192"),
        (config, 1024 * 256, {}, "256 times .* Use --max-position 131072 or less"),
        (replace(config, position_embedding="learned"), 2048, {}, "1024 learned positions"),
        (replace(config, rope="longrope"), 2048, {}, "LongRoPE"),
        (replace(config, rope_scale=8.0), 2048, {}, "model.rope_scale=8.* Use --method theta"),
        (config, 2048, {"method": "theta", "rope_theta": 10.0}, "rope_theta=10 is not above"),
        (config, 2048, {"method": "theta", "rope_theta": math.nan}, "rope_theta=nan"),
        (config, 2048, {"rope_theta": 1e6}, "method='yarn'.* Use --method theta"),
        (config, 2048, {"original_max_position": 4096}, "original_max_position=4096 is invalid"),
        (replace(config, head_dim=2), 2048, {"method": "theta"}, "2 rotated elements"),
    ]
    for model, wanted, options, words in cases:
        with pytest.raises(PlanError, match=words):
            extended_config(model, wanted, **options)


def test_the_command_makes_a_run_or_nothing(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "long"
    words = ("extend-context", str(published), "--output", str(out))
    assert call(*words, "--max-position", "64") != 0
    assert "max_position=64 is not above the present maximum of 64" in capsys.readouterr().err
    assert not out.exists()
    assert call(*words, "--max-position", "128") == 0
    assert "YaRN with factor 2 from 64" in capsys.readouterr().out
