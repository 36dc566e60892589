"""A dense model that gets a ladder residual keeps its weights, and can be used like others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from commands import call
from infer.tiny_model import LAYERS, write_tiny_model
from ranvier.config.plan import Plan
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.infer.generate import generate_tokens
from ranvier.infer.load import load_config_from_dir, load_model
from ranvier.infer.model_source import ModelSource
from ranvier.infer.sampling_params import SamplingParams
from ranvier.models import DecoderConfig
from ranvier.tools.upcycle_ladder import ladder_config

PROMPTS = ["def f(x):", "a longer text that begins here"]


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model whose last layer has a ladder residual."""
    folder = tmp_path_factory.mktemp("ladder")
    model = write_tiny_model(folder / "tiny")
    words = ("--ladder-layers", "1", "--output", str(folder / "run"))
    assert call("upcycle", str(model), *words) == 0
    return folder / "run"


def test_only_the_residual_changes(ladder: Path) -> None:
    config = load_config_from_dir(ladder).decoder
    assert (config.residual, config.ladder_layers) == ("ladder", (1,))
    made = load_model(ladder, Grid({}), "cpu")
    dense = ModelSource.find(ladder.parent / "tiny").load(Grid({}), torch.device("cpu"), Plan())
    weights = dict(dense.named_parameters())
    for name, weight in made.named_parameters():
        assert torch.equal(weight, weights[name]), name
    tokens = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        assert not torch.allclose(made(tokens), dense(tokens), atol=1e-3)


def test_it_generates_what_its_forward_pass_says(ladder: Path) -> None:
    """As `ranvier generate`, `serve` and `eval` load it."""
    model = ModelSource.find(ladder).load(Grid({}), torch.device("cpu"), Plan())
    prompts = [list(prompt.encode()) for prompt in PROMPTS]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = generate_tokens(model, prompts, params)
    for prompt, tokens in zip(prompts, found, strict=True):
        text = [*prompt, *tokens]
        with torch.no_grad():
            logits = model(torch.tensor([text[:-1]]))[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == tokens


def test_the_commands_know_it(ladder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ladder.parent / "text.txt"
    text.write_text("A text that has some words, and a few more of them.\n" * 40)
    assert call("eval", str(ladder), "--corpus", str(text), "--train.device", "cpu") == 0
    (file,) = ladder.glob("eval-*.json")
    assert 0.0 < json.loads(file.read_text())["corpora"][str(text)]["loss"] < 20.0
    assert call("serve", str(ladder), "--dry-run", "--engine.kv-cache-gib", "0.001") == 0
    capsys.readouterr()
    assert call("export", str(ladder), "--output", str(ladder.parent / "theirs")) != 0
    assert "residual='ladder'. No architecture of Hugging Face" in capsys.readouterr().err
    words = ("--ladder-layers", "2", "--output", str(ladder.parent / "again"))
    assert call("upcycle", str(ladder.parent / "tiny"), *words) == 0
    assert "The held-out loss is not known, as a published model" in capsys.readouterr().out
    assert call("upcycle", str(ladder), "--experts", "4", "--ladder-layers", "1") != 0
    assert "--experts 4 and --ladder-layers 1" in capsys.readouterr().err


def test_what_cannot_be_upcycled_is_refused() -> None:
    shape = DecoderConfig(layers=LAYERS)
    for layers in (-1, 0, LAYERS + 1):
        with pytest.raises(PlanError, match=rf"ladder_layers={layers} is out of range.*1 to 2"):
            ladder_config(shape, layers)
    every = ladder_config(shape, LAYERS)
    assert every.ladder_layers == () and every.residual == "ladder"
    with pytest.raises(PlanError, match="already has residual='ladder'"):
        ladder_config(every, 1)


def test_the_held_out_loss_of_a_run_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.jsonl"
    rows = [{"text": f"Document {i} of a corpus with a few words in each."} for i in range(200)]
    text.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    small = {"layers": 2, "embed": 32, "heads": 4, "kv-heads": 2, "head-dim": 8, "mlp": 48}
    model = [word for name, size in small.items() for word in (f"--model.{name}", str(size))]
    run = tmp_path / "run"
    words = ("--data.sources", str(text), "--data.seq-len", "32", "--train.steps", "3")
    words += ("--data.validation-fraction", "0.2")
    more = ("--plan.global-batch", "4", "--train.output-dir", str(run), "--train.device", "cpu")
    assert call("train", *model, *words, *more) == 0
    capsys.readouterr()
    out = tmp_path / "out"
    assert call("upcycle", str(run), "--ladder-layers", "2", "--output", str(out)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 of 2 layers have a ladder residual" in lines[0]
    assert "Held-out loss before training:" in lines[-1] and f"of {run}:" in lines[-1]
    assert (
        call(
            "train",
            "--train.init-from",
            str(out),
            *words,
            *more[:2],
            *more[4:],
            "--train.output-dir",
            str(tmp_path / "trained"),
        )
        == 0
    )
    assert load_config_from_dir(tmp_path / "trained").decoder.residual == "ladder"
