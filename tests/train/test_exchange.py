"""From a published model to a run and back by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from commands import call
from published_models import BASE, GPT2, save, theirs
from ranvier.data.tokenizer import Bytes
from ranvier.grid import Grid
from ranvier.infer.loaded import load, saved_dtype
from ranvier.infer.sample import checkpoint_of, run_of

FEW = ["--data.seq", "16", "--plan.batch", "4", "--train.steps", "2", "--nproc", "1"]
FEW += ["--train.evaluate", "0", "--train.prompt", "", "--data.max-bytes", "20000"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Llama with a tokenizer of bytes."""
    folder = save(theirs("llama", {**BASE, "vocab_size": 257}), tmp_path / "model")
    Bytes().save(folder / "tokenizer.json")
    table = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    return folder


def test_a_model_is_imported_trained_and_exported(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tmp_path / "run"
    assert call("import", str(model), "--to", str(run)) == 0
    assert run_of(run).data.tokenizer == str(run / "tokenizer.json")
    assert call("checkpoint", "verify", str(run)) == 0
    assert call("generate", str(run), "--prompt", "a", "--tokens", "3") == 0
    run = run.rename(tmp_path / "moved")
    assert call("train", str(run), *FEW) == 0
    assert "Beginning of 2" in capsys.readouterr().out
    assert run_of(run).lr == 2e-5
    assert call("export", str(run), "--to", str(tmp_path / "out")) == 0
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    moved = [n for n, x in back.state_dict().items() if not torch.equal(x, before[n])]
    assert "lm_head.weight" in moved and len(moved) > 15
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("hi").input_ids == [104, 105]
    assert (tmp_path / "out/config.json").read_text() == (model / "config.json").read_text()


def test_a_new_run_begins_with_the_weights_of_another(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a published model, of the run that came of it, and of a checkpoint of that."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for source, out in ((model, first), (first, second), (second / "checkpoints/latest", third)):
        if source.name == "latest":
            source = source.parent / source.read_text().strip()
        start = ["--train.start", str(source), "--train.out", str(out)]
        assert call("train", *start, *FEW, "--data.tokenizer", "bytes") == 0
        assert f"the weights of {source}" in capsys.readouterr().out
    losses = [
        [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (first, second, third)
    ]
    assert losses[0][0] > losses[1][0] > losses[2][0]  # the same samples, known better each time
    assert call("export", str(third), "--to", str(tmp_path / "out"), "--dtype", "bf16") == 0
    table = json.loads((tmp_path / "out/config.json").read_text())
    assert table["dtype"] == "bfloat16" and table["model_type"] == "llama"


def test_adapters_are_merged_or_go_out_alone(tmp_path: Path, model: Path) -> None:
    """Both give the logits of the run; the base alone does not."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, lora = tmp_path / "run", ["--lora.rank", "3", "--optim.lr", "0.05"]
    assert call("import", str(model), "--to", str(run)) == 0
    assert call("train", str(run), *FEW, *lora) == 0
    assert call("generate", str(run), "--prompt", "a", "--tokens", "2") == 0
    assert call("export", str(run), "--to", str(tmp_path / "merged")) == 0
    assert call("export", str(run), "--to", str(tmp_path / "adapter"), "--adapter") == 0
    table = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert table["base_model_name_or_path"] == str(model)
    plain, other, merged = (
        AutoModelForCausalLM.from_pretrained(x) for x in (model, model, tmp_path / "merged")
    )
    with_adapter = PeftModel.from_pretrained(other, tmp_path / "adapter")
    x = torch.arange(20).view(2, 10)
    served = load(run, Grid({}), "cpu")
    with torch.no_grad():
        a, b, c = (one.eval()(x).logits for one in (with_adapter, merged, plain))
        ours = served(x)
    assert (a - b).abs().max() < 1e-5 and (a - ours).abs().max() < 1e-5
    assert (a - c).abs().max() > 1e-2
    assert call("export", str(run), "--to", str(tmp_path / "base"), "--step", "0") == 0
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    assert all(torch.equal(value, first[name]) for name, value in plain.state_dict().items())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_a_run_in_16_bits_is_asked_in_one_type(tmp_path: Path, model: Path) -> None:
    """Its adapters are saved wider than the weights beside them."""
    run, lora = tmp_path / "run", ["--lora.rank", "2", "--train.dtype", "bf16"]
    assert call("import", str(model), "--to", str(run)) == 0
    assert call("train", str(run), *FEW, *lora) == 0
    assert call("generate", str(run), "--prompt", "a", "--tokens", "2") == 0
    assert saved_dtype(checkpoint_of(run)) == torch.bfloat16
    assert {p.dtype for p in load(run, Grid({}), "cpu").parameters()} == {torch.bfloat16}


def test_what_is_wrong_is_said(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert call(*words) > 1
        return capsys.readouterr().err

    assert "is not there" in said("import", str(tmp_path / "none"), "--to", str(tmp_path / "x"))
    assert "config.json cannot be read" in said("import", str(tmp_path), "--to", "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    assert "exists" in said("import", str(model), "--to", str(tmp_path / "full"))
    assert "is no run" in said("export", str(model), "--to", str(tmp_path / "x"))
    odd = save(theirs("gpt2", GPT2), tmp_path / "odd")
    assert call("import", str(odd), "--to", str(tmp_path / "run")) == 0
    assert "attn_pdrop=0.1" in capsys.readouterr().out
    words = ["export", str(tmp_path / "run"), "--to", str(tmp_path / "x")]
    assert "llama has no" in said(*words, "--family", "llama")
    assert "Types are" in said(*words, "--dtype", "int4")
    settings = tmp_path / "run" / "config.toml"
    settings.write_text(settings.read_text().replace("layers = 2", "layers = 3"))
    assert "has no blocks.2." in said(*words)
    assert not (tmp_path / "x").exists()
