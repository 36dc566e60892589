"""A dense model that became a mixture of experts computes what it did, and can be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from commands import call
from published_models import BASE, save, theirs, tokens
from ranvier.checkpoint.convert import open_checkpoint
from ranvier.errors import PlanError
from ranvier.infer.load import find_checkpoint, load_config_from_dir
from ranvier.models import Decoder, DecoderConfig
from ranvier.tools.upcycle import mixture_config, upcycle_model
from ranvier.tools.upcycle_ladder import upcycle_to_ladder
from ranvier.tools.upcycle_streams import upcycle_to_streams
from ranvier.train.import_export import export_model, import_model


def logits(run: Path) -> Tensor:
    """What the newest checkpoint of a run says, in plain PyTorch."""
    config = load_config_from_dir(run).model
    model, source = Decoder(config).eval(), open_checkpoint(find_checkpoint(run, None))
    with torch.no_grad():
        for name, param in model.named_parameters():
            (value,) = source.read_tensors([f"{name}.master"]).values()
            # Packed dims are unpacked in a checkpoint.
            param.copy_(value.reshape_as(param))
        found: Tensor = model(tokens())
    return found


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(theirs("qwen3", BASE | {"head_dim": 8}), tmp_path_factory.mktemp("dense") / "in")


@pytest.mark.parametrize(
    "how",
    [
        {"experts": 4},
        {"experts": 3, "experts_per_token": 3, "moe_layer_interval": 2},
        {"experts": 2, "experts_per_token": 1, "shared_expert_mlp": 17},
    ],
    ids=str,
)
def test_it_says_what_the_dense_model_says(
    tmp_path: Path, dense: Path, how: dict[str, Any]
) -> None:
    import_model(str(dense), tmp_path / "run")
    want = logits(tmp_path / "run")
    for source in (dense, tmp_path / "run"):
        out = tmp_path / f"{source.name}-moe"
        (line,) = upcycle_model(str(source), out, **how)
        assert f"{how['experts']} experts" in line
        config = load_config_from_dir(out).model
        assert config.experts == how["experts"]
        error = float((logits(out) - want).abs().max())
        assert error <= 1e-5 * float(want.abs().max()), error
    if "shared_expert_mlp" not in how:
        from transformers import AutoModelForCausalLM

        export_model(out, tmp_path / "theirs", family="qwen3_moe")
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
        with torch.no_grad():
            assert torch.allclose(back(tokens()).logits, want, atol=2e-5)


@pytest.mark.parametrize("kind", ["streams", "ladder"])
def test_a_model_with_streams_or_a_ladder_can_be_upcycled(
    tmp_path: Path, dense: Path, kind: str
) -> None:
    run = tmp_path / "run"
    if kind == "streams":
        upcycle_to_streams(str(dense), run, streams=3)
    else:
        upcycle_to_ladder(str(dense), run, ladder_layers=1)
    upcycle_model(str(run), tmp_path / "moe", experts=4)
    want = logits(run)
    assert torch.allclose(logits(tmp_path / "moe"), want, rtol=0.0, atol=1e-5 * want.abs().max())


def test_without_normalisation_it_would_not(dense: Path, tmp_path: Path) -> None:
    """The comparison can fail: the weights of two of four experts sum to less than 1."""
    upcycle_model(str(dense), tmp_path / "moe", experts=4)
    want = logits(tmp_path / "moe")
    path = tmp_path / "moe" / "config.toml"
    path.write_text(path.read_text().replace("router_norm = true", "router_norm = false"))
    assert float((logits(tmp_path / "moe") - want).abs().max()) > 1e-2


def test_what_cannot_be_upcycled_is_refused() -> None:
    shape = DecoderConfig()
    for config, options, words in (
        (shape, {"experts": 1}, "experts=1"),
        (
            shape,
            {"experts": 4, "experts_per_token": 5},
            "experts_per_token=5 is invalid for experts=4",
        ),
        (
            shape,
            {"experts": 4, "shared_expert_mlp": 160},
            "shared_expert_mlp=160 is out of range for mlp=160",
        ),
        (mixture_config(shape, 4), {"experts": 4}, "already has experts=4"),
        (DecoderConfig(biases=("mlp",)), {"experts": 4}, "biases"),
    ):
        with pytest.raises(PlanError, match=words):
            mixture_config(config, **options)


def test_the_command_makes_a_run(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("upcycle", "--experts", "8") != 0
    assert "needs a dense run" in capsys.readouterr().err
    out = tmp_path / "moe"
    assert (
        call(
            "upcycle",
            str(dense),
            "--experts",
            "8",
            "--experts-per-token",
            "1",
            "--output",
            str(out),
        )
        == 0
    )
    assert (
        load_config_from_dir(out).model.experts,
        load_config_from_dir(out).model.experts_per_token,
    ) == (8, 1)
