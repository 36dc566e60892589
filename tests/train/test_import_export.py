"""From a published model to a run and back by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from commands import call
from published_models import BASE, CASES, GPT2, save, theirs
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.errors import DataError
from ranvier.grid import Grid
from ranvier.infer.generate import generate_tokens
from ranvier.infer.load import find_checkpoint, load_config_from_dir, load_model, saved_dtype
from ranvier.infer.sampling_params import SamplingParams

FEW = ["--data.seq-len", "16", "--plan.global-batch", "4", "--train.steps", "2", "--nproc", "1"]
FEW += ["--train.eval-interval", "0", "--train.sample-prompt", "", "--data.max-bytes", "20000"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Llama with a tokenizer of bytes."""
    folder = save(theirs("llama", {**BASE, "vocab_size": 257}), tmp_path / "model")
    ByteTokenizer().save(folder / "tokenizer.json")
    table = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    return folder


def test_a_model_is_imported_trained_and_exported(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tmp_path / "run"
    assert call("import", str(model), "--output", str(run)) == 0
    assert load_config_from_dir(run).data.tokenizer == str(run / "tokenizer.json")
    assert call("checkpoint", "verify", str(run)) == 0
    assert call("generate", str(run), "--prompt", "a", "--max-new-tokens", "3") == 0
    run = run.rename(tmp_path / "moved")
    assert call("train", str(run), *FEW) == 0
    assert "Starting at step 0 of 2" in capsys.readouterr().out
    assert load_config_from_dir(run).peak_lr == 2e-5
    assert call("export", str(run), "--output", str(tmp_path / "out")) == 0
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    moved = [n for n, x in back.state_dict().items() if not torch.equal(x, before[n])]
    assert "lm_head.weight" in moved and len(moved) > 15
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("hi").input_ids == [104, 105]
    assert (tmp_path / "out/config.json").read_text() == (model / "config.json").read_text()


LONG = {"llama": {**BASE, "max_position_embeddings": 600}, "gpt2": {**GPT2, "n_positions": 600}}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_whole_prompt_is_read(
    tmp_path: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Up to the positions of the model, whatever data.seq_len is; not the end of a longer one."""
    there = theirs(kind, {**LONG[kind], "vocab_size": 257})
    folder, run = save(there, tmp_path / "model"), tmp_path / "run"
    ByteTokenizer().save(folder / "tokenizer.json")
    assert call("import", str(folder), "--output", str(run)) == 0
    assert load_config_from_dir(run).data.seq_len == 512
    text = "".join(chr(97 + n * n % 26) for n in range(601))
    model = load_model(run, Grid({}), "cpu")
    for size in (597, 514):
        ids = ByteTokenizer().encode([text[:size]])[0].tolist()
        (said,) = generate_tokens(model, [ids], SamplingParams(max_tokens=3, temperature=0.0))
        assert len(said) == 3
        with torch.no_grad():
            want = there(torch.tensor([[*ids, *said[:-1]]])).logits[0, size - 1 :].argmax(-1)
        assert said == want.tolist()
    with pytest.raises(DataError, match=r"together 601\. A sequence may have 600"):
        generate_tokens(model, [[1] * 598], SamplingParams(max_tokens=3))
    ask = ["generate", str(run), "--temperature", "0", "--max-new-tokens", "3", "--prompt"]
    capsys.readouterr()
    assert call(*ask, text[:597]) == 0
    assert not capsys.readouterr().err
    assert call(*ask, text[:598]) == 64
    words = "The prompt has 598 tokens and 3 are to be generated, together 601."
    remedy = "Use at most 2 new tokens, or --max-new-tokens 0."
    errors = capsys.readouterr().err
    assert words in errors and remedy in errors, errors
    assert call(*ask[:-2], "0", "--prompt", text[:598]) == 0
    assert "the text has 600 tokens, as many as the model" in capsys.readouterr().err
    assert call(*ask, text[:600]) == 64
    assert "Use a prompt of at most 599 tokens." in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_longer_samples_than_the_positions_are_refused(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In training and evaluation; rotary positions can be extended, and those of a run as well."""
    small = {"llama": BASE, "gpt2": GPT2}[kind]
    folder = save(theirs(kind, {**small, "vocab_size": 257}), tmp_path / "model")
    ByteTokenizer().save(folder / "tokenizer.json")
    run = str(tmp_path / "run")
    assert call("import", str(folder), "--output", run) == 0
    (tmp_path / "text.txt").write_text("some words, " * 40)
    for words in (
        ["train", run, *FEW, "--data.seq-len", "65"],
        ["eval", run, "--corpus", str(tmp_path / "text.txt"), "--data.seq-len", "65"],
        ["dry-run", run, "--data.seq-len", "65"],
    ):
        assert call(*words) == 64
        said = capsys.readouterr().err
        assert "data.seq_len=65 is longer than model.max_seq=64" in said
        assert "Use data.seq_len=64 or less" in said
        assert ("extend its rotary positions with model.max_seq=65" in said) == (kind == "llama")
    if kind == "llama":
        more = ["--data.seq-len", "80", "--model.max-seq", "80"]
        assert call("train", run, *FEW, *more) == 0
        assert call("train", run, *FEW, *more, "--train.steps", "3") == 0
        assert load_config_from_dir(Path(run)).model.max_seq == 80
        file = Path(run) / "config.toml"  # of a run from before that was refused
        file.write_text(file.read_text().replace("max_seq = 80", "max_seq = 64"))
        assert load_config_from_dir(Path(run)).model.max_seq == 80


def test_a_new_run_begins_with_the_weights_of_another(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a published model, of the run that came of it, and of a checkpoint of that."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for source, out in ((model, first), (first, second), (second / "checkpoints/latest", third)):
        if source.name == "latest":
            source = source.parent / source.read_text().strip()
        start = ["--train.init-from", str(source), "--train.output-dir", str(out)]
        assert call("train", *start, *FEW, "--data.tokenizer", "bytes") == 0
        assert f"the weights of {source}" in capsys.readouterr().out
    losses = [
        [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (first, second, third)
    ]
    assert losses[0][0] > losses[1][0] > losses[2][0]  # the same samples, known better each time
    assert call("export", str(third), "--output", str(tmp_path / "out"), "--dtype", "bf16") == 0
    table = json.loads((tmp_path / "out/config.json").read_text())
    assert table["dtype"] == "bfloat16" and table["model_type"] == "llama"


KINDS = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "phi3", "gpt2")
PAIRS = [("llama", "phi3"), ("phi3", "mistral"), ("llama", "llama")]
PAIRS += [  # those that have a model in common
    pytest.param(*pair, marks=pytest.mark.full)  # type: ignore[misc]
    for pair in [
        ("llama", "mistral"),
        *(("mistral", one) for one in ("llama", "phi3")),
        *(("phi3", one) for one in ("llama", "phi3")),
        *((one, one) for one in (*KINDS, "mixtral", "qwen3_moe", "olmoe")),
    ]
]


@pytest.mark.parametrize("given", [True, False], ids=["named", "by default"])
@pytest.mark.parametrize(("kind", "other"), PAIRS)
def test_ids_of_tokens_go_to_another_family(
    tmp_path: Path, kind: str, other: str, given: bool
) -> None:
    """What begins, ends and fills a text stays, also where config.json relied on its family."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = {**CASES[kind][1], **({"sliding_window": None} if kind == "phi3" else {})}
    config |= {"bos_token_id": 5, "eos_token_id": [7, 8], "pad_token_id": 9} if given else {}
    there = theirs(kind, config)
    source, run, out = save(there, tmp_path / "model"), tmp_path / "run", tmp_path / "out"
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    if not given:  # what is not written is that of the family, if the model knows such a token
        table = json.loads((source / "config.json").read_text())
        left = {key: value for key, value in table.items() if key not in names}
        (source / "config.json").write_text(json.dumps(left))
        plain = type(there.config)()
        ids = [getattr(plain, name) for name in names]
        ids = [one if one is not None and one < there.config.vocab_size else None for one in ids]
    else:
        ids = [5, [7, 8], 9]
    assert call("import", str(source), "--output", str(run)) == 0
    if kind == other:  # another model, which the file that came does not fit
        text = (run / "config.toml").read_text()
        key = "norm_eps = " if kind == "gpt2" else "max_seq = "
        (run / "config.toml").write_text(text.replace(key, f"{key}1", 1))
    assert call("export", str(run), "--output", str(out), "--family", other) == 0
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert model.config.model_type == other and not any(info.values())
    assert [getattr(model.config, name) for name in names] == ids
    if given:
        made = GenerationConfig.from_pretrained(out)
        assert [getattr(made, name) for name in names] == ids
    if kind != other:
        x = torch.randint(0, there.config.vocab_size, (2, 9))
        with torch.no_grad():
            torch.testing.assert_close(model(x).logits, there(x).logits, rtol=1e-4, atol=1e-4)


def test_a_run_with_adapters_is_no_start_without_them(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says how to go on, and so it goes on."""
    run, merged, alone = (str(tmp_path / name) for name in ("run", "merged", "alone"))
    assert call("import", str(model), "--output", run) == 0
    assert call("train", run, *FEW, "--lora.rank", "3", "--lora.alpha", "5") == 0
    step = f"{run}/checkpoints/step-00000002"
    start = ["train", *FEW, "--train.init-from"]
    for source, words, said in (
        (run, [], "but this run has lora.rank=0"),
        (step, [], f"`ranvier export {run} --step 2 --output DIR` and use train.init_from=DIR"),
        (run, ["--lora.rank", "4", "--lora.alpha", "5"], "this run has lora.rank=4"),
        (run, ["--lora.rank", "3"], "train with the same adapters: lora.alpha=5.0"),
    ):
        assert call(*start, source, *words, "--train.output-dir", str(tmp_path / "none")) == 66
        have = capsys.readouterr().err
        assert said in have and "is a run with adapters of rank 3" in have
        assert "`ranvier export " in have and "Traceback" not in have
    assert call("export", run, "--output", merged) == 0
    assert call("export", run, "--output", alone, "--adapter") == 0
    assert call(*start, merged, "--train.output-dir", str(tmp_path / "whole")) == 0
    same = ["--lora.rank", "3", "--lora.alpha", "5"]
    assert call(*start, run, *same, "--train.output-dir", str(tmp_path / "beside")) == 0
    for words in (["import", alone], [*start, alone]):
        assert call(*words) == 64
        assert "and the adapter as lora.init_from" in capsys.readouterr().err


def test_adapters_are_merged_or_go_out_alone(tmp_path: Path, model: Path) -> None:
    """Both give the logits of the run; the base alone does not."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, lora = tmp_path / "run", ["--lora.rank", "3", "--optim.lr", "0.05"]
    assert call("import", str(model), "--output", str(run)) == 0
    assert call("train", str(run), *FEW, *lora) == 0
    assert call("generate", str(run), "--prompt", "a", "--max-new-tokens", "2") == 0
    assert call("export", str(run), "--output", str(tmp_path / "merged"), "--adapter", "false") == 0
    assert call("export", str(run), "--adapter", "true", "--output", str(tmp_path / "adapter")) == 0
    for number, words in enumerate((["--adapter"], ["--adapter=True"])):  # said in other words
        out = tmp_path / f"adapter {number}"
        assert call("export", str(run), "--output", str(out), *words) == 0
        assert sorted(p.name for p in out.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
    table = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert table["base_model_name_or_path"] == str(model)
    plain, other, merged = (
        AutoModelForCausalLM.from_pretrained(x) for x in (model, model, tmp_path / "merged")
    )
    with_adapter = PeftModel.from_pretrained(other, tmp_path / "adapter")
    x = torch.arange(20).view(2, 10)
    served = load_model(run, Grid({}), "cpu")
    with torch.no_grad():
        a, b, c = (one.eval()(x).logits for one in (with_adapter, merged, plain))
        ours = served(x)
    assert (a - b).abs().max() < 1e-5 and (a - ours).abs().max() < 1e-5
    assert (a - c).abs().max() > 1e-2
    assert call("export", str(run), "--output", str(tmp_path / "base"), "--step", "0") == 0
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    assert all(torch.equal(value, first[name]) for name, value in plain.state_dict().items())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_a_run_in_16_bits_is_asked_in_one_type(tmp_path: Path, model: Path) -> None:
    """Its adapters are saved wider than the weights beside them."""
    run, lora = tmp_path / "run", ["--lora.rank", "2", "--train.dtype", "bf16"]
    assert call("import", str(model), "--output", str(run)) == 0
    assert call("train", str(run), *FEW, *lora) == 0
    assert call("generate", str(run), "--prompt", "a", "--max-new-tokens", "2") == 0
    assert saved_dtype(find_checkpoint(run)) == torch.bfloat16
    assert {p.dtype for p in load_model(run, Grid({}), "cpu").parameters()} == {torch.bfloat16}


def test_what_is_wrong_is_said(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert call(*words) > 1
        return capsys.readouterr().err

    assert "does not exist" in said(
        "import", str(tmp_path / "none"), "--output", str(tmp_path / "x")
    )
    assert "config.json cannot be read" in said("import", str(tmp_path), "--output", "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    assert "exists" in said("import", str(model), "--output", str(tmp_path / "full"))
    assert "is not a run" in said("export", str(model), "--output", str(tmp_path / "x"))
    odd = save(theirs("gpt2", GPT2), tmp_path / "odd")
    assert call("import", str(odd), "--output", str(tmp_path / "run")) == 0
    assert "attn_pdrop=0.1" in capsys.readouterr().out
    words = ["export", str(tmp_path / "run"), "--output", str(tmp_path / "x")]
    assert "llama does not support" in said(*words, "--family", "llama")
    assert "is not supported" in said(*words, "--dtype", "int4")
    settings = tmp_path / "run" / "config.toml"
    settings.write_text(settings.read_text().replace("layers = 2", "layers = 3"))
    assert "has no blocks.2." in said(*words)
    assert not (tmp_path / "x").exists()
