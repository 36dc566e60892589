"""The command line as a user types it: results, errors without traceback, ends of broken runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ranvier
from commands import SMALL_OPTIONS, call, ended, losses, metrics, started
from ranvier.cli.completion import OPTION_CLASSES, SUBCOMMAND_OPTION_CLASSES
from ranvier.cli.help import COMMON_SETTINGS, SYNONYMS, option_names
from ranvier.cli.main import COMMANDS, main, parse_train_options
from ranvier.config import arguments
from ranvier.config.arguments import TrainOptions
from ranvier.config.kinds import named_model
from ranvier.config.run import RunConfig, load_run_config
from ranvier.config.sections import TrainConfig
from ranvier.errors import PlanError
from ranvier.launch import find_free_port, read_process_info
from ranvier.train.resume.run_directory import acquire_dir

FAULT = """
import os
take = Trainer.issue_step
def issue(self, *arguments, **options):
    if self.grid.rank == 1 and self.state.step == 1:
        {action}
    return take(self, *arguments, **options)
Trainer.issue_step = issue
"""
BROKEN = """
def reduce_scatter(x, axis, dim=0):
    return PendingTensor(x.chunk(axis.size, dim)[axis.index].clone())
"""
TRAINER = "ranvier.train.trainer"
CRASHES = """
def save(self):
    import os
    os.kill(os.getpid(), 11 if self.grid.rank == 1 else 0)

Trainer.save_checkpoint = save
"""
"""A rank that crashes at the end of a run, when it saves."""
FIELDS = {
    *("step", "tokens", "loss", "lr", "grad_norm", "step_seconds", "tokens_per_second", "mfu"),
    *("mfu_noncausal", "peak_memory_bytes", "exposed_communication_seconds"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.full
def test_every_start_and_every_grid_gives_the_same_losses(folder: Path) -> None:
    """One process, `--nproc`, `torchrun`'s and `srun`'s variables."""
    words = ["train", *SMALL_OPTIONS, "--train.steps", "4", "--checkpoint.interval", "-1"]
    many = ["--nproc", "4", "--plan.col", "2", "--plan.depth", "2", "--train.trace-comm", "True"]
    four = started(folder, *words, *many, "--train.output-dir", "many")
    assert call(*words, "--train.output-dir", "one", "--nproc", "1") == 0
    # One rank is told by srun's variables and the other by torchrun's: both mean the same.
    slurm = {
        "SLURM_JOB_ID": str(find_free_port()),
        "SLURM_JOB_NODELIST": "here",
        "SLURM_NTASKS": "2",
    }
    slurm |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    meant = read_process_info(slurm)
    assert meant is not None
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": meant.address}
    torchrun |= {"MASTER_PORT": str(meant.port)}
    launched = [*words, "--train.output-dir", "launched", "--plan.row", "2"]
    both = [started(folder, *launched, environment=env) for env in (torchrun, slurm)]
    code, out, errors = ended(four)
    assert code == 0, errors
    assert "hidden" in out and "reduce_scatter" in out
    ends = [ended(one) for one in both]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "row 2" in ends[0][1] and ends[1][1] == ""
    one = losses(folder / "one")
    for name in ("many", "launched"):
        assert losses(folder / name) == pytest.approx(one, abs=1e-4)
        assert [row["tokens"] for row in metrics(folder / name)] == [256, 512, 768, 1024]
    assert one[0] > one[-1] and set(metrics(folder / "one")[0]) >= FIELDS
    trace = json.loads((folder / "many" / "trace-rank3.json").read_text())
    assert len(trace["traceEvents"]) > 50
    assert load_run_config(folder / "many" / "config.toml").plan.col == 2


@pytest.mark.full
def test_a_rank_that_raises_ends_all_with_its_message(folder: Path) -> None:
    start = time.monotonic()
    patch = TRAINER, FAULT.format(action="raise RuntimeError('disk on fire')")
    words = ["train", *SMALL_OPTIONS, "--nproc", "2", "--plan.row", "2"]
    words += ["--train.output-dir", "run"]
    code, _, errors = ended(started(folder, *words, patch=patch))
    assert code == 70
    assert "rank 1: " in errors and "disk on fire" in errors
    assert "CommunicationError" not in errors, "the broken connection of rank 0 is not the cause"
    assert time.monotonic() - start < 30
    report = (folder / "run" / "report.html").read_text()
    assert len(metrics(folder / "run")) == 1 and "failed" in report


@pytest.mark.full
def test_a_rank_that_is_killed_ends_all(folder: Path) -> None:
    patch = TRAINER, FAULT.format(action="os.kill(os.getpid(), 9)")
    words = ["train", *SMALL_OPTIONS, "--nproc", "2", "--plan.depth", "2"]
    words += ["--train.output-dir", "run"]
    words += ["--launch.max-restarts", "0"]
    code, _, errors = ended(started(folder, *words, patch=patch))
    assert code == 71 and "Traceback" not in errors
    assert "Rank 1 was killed by signal 9 (SIGKILL) at step 0. The host may be out of" in errors


@pytest.mark.full
def test_verify_passes_on_grids_and_fails_on_a_broken_collective(folder: Path) -> None:
    text = '[model]\nsize = "llama3-8b"\nkv_heads = 1\nvocab = 128259\nbias = true\n'
    begun = []
    patches = {
        "good": ("", ""),
        "bad": ("ranvier.comm.collectives", BROKEN),
        "crash": (TRAINER, CRASHES),
    }
    for name, patch in patches.items():
        (folder / name).mkdir()
        (folder / name / "run.toml").write_text(text + "[plan]\nrow = 2\nbatch = 8\n")
        begun.append(started(folder / name, "verify", "run.toml", patch=patch))
    good, bad, crash = begun
    code, out, errors = ended(good)
    assert code == 0, out + errors
    assert "verified: the grid equals one process" in out and "step 3 (reloaded)" in out
    assert "32 heads, 1 kv heads" in out and "all as predicted" in out
    assert "vocab 25," in out  # 128259 and 25 are odd
    code, out, _ = ended(bad)
    assert code == 1
    assert "DIFFERS" in out and "FAILED" in out
    code, out, errors = ended(crash)
    assert code == 1 and "FAILED: a rank crashed, hung or was lost (exit code 71)" in out
    assert "DIFFERS" not in out and "Rank 1 was killed by signal 11 (SIGSEGV)" in errors


BAD_FILES = {
    "bad.toml": b"[plan]\nrwo = 2\n",
    "type.toml": b'[train]\nsteps = "ten"\n',
    "broken.toml": b"[plan\n",
    "empty.txt": b"",
    "latin.txt": b"caf\xe9 au lait",
    "text.jsonl": b'{"text": "one"}\n{"txet": "two"}\n',
    "broken.jsonl": b'{"text": "one"\n',
    "list.jsonl": b'{"text": ["one"]}\n',
    "cut.jsonl.gz": b"\x1f\x8b\x08\x00\x00\x00",
    "bad.parquet": b"PAR1",
    "pair.bin": b"\0\0",
    "pair.idx": b"MMIDIDX\0\0\1",
    "text.docx": b"what",
    "words.json": b"{}",
    "good.txt": b"some text " * 50,
    "date.toml": b"[data]\nsources = 2020-01-01\n",
    "huge.toml": b"[optim]\nlr = 1" + b"0" * 400,
    "deep.toml": b"x = " + b"[" * 3000,
    "long.toml": b"[train]\nsteps = 1" + b"0" * 5000,
    "null.toml": b'[data]\nsources = ["a\\u0000b.txt"]\n',
    "out.toml": b'[train]\noutput_dir = "a\\u0000b"\n',
}
MISTAKES: list[tuple[list[str], str]] = [
    (["fly"], "'fly' is not a command. Use one of train, "),
    (["trian"], "Did you mean 'train'?"),
    (["train", "--nproc", "3", "--plan.row", "2"], "needs a multiple of 2 ranks, but there are 3"),
    (
        ["train", "--plan.context", "7", "--nproc", "7"],
        "context·row=7 does not divide seq=",
    ),
    (
        ["train", "--plan.pipe", "8", "--nproc", "8"],
        "pipe=8 with virtual_stages=1 gives 8 virtual stages",
    ),
    (["train", "--model.size", "llama9"], "model.size='llama9' is unknown"),
    (["train", "--model.vocab", "100"], "model.vocab=100 is smaller than"),
    (["train", "missing.toml"], "missing.toml cannot be read"),
    (["train", "bad.toml"], "plan.rwo is not a setting. Did you mean 'row'?"),
    (["train", "type.toml"], "train.steps='ten' is invalid. It must be an integer"),
    (["train", "broken.toml"], "is not valid TOML"),
    (["train", "nowhere", "more"], "Only one file or run is read"),
    (["train", "--plan.rwo", "2"], "plan.row"),
    (["train", "--train.steps", "ten"], "ten"),
    (["train", "--train.dtype", "fp8"], "bf16"),
    (["train", "--data.seq-len", "0"], "data.seq_len=0 is too small"),
    (
        ["train", "--data.validation-fraction", "1.5"],
        "data.validation_fraction=1.5 is not a fraction",
    ),
    (["train", "--nproc", "-1"], "--nproc -1 is out of range"),
    (["verify", "--nproc", "-1"], "--nproc -1 is out of range"),
    (["train", "--model.kv-heads", "0"], "model.kv_heads=0 is too small"),
    (["train", "--model.kv-heads", "3"], "kv_heads=3 does not divide heads=8"),
    (["train", "--optim.beta1", "1.0"], "optim.beta1=1.0 is not a fraction"),
    (["train", "--optim.lr", "nan"], "optim.lr=nan is not finite"),
    (["train", "--optim.lr", "-1"], "optim.lr=-1.0 is too small"),
    (["train", "--optim.lr", "0"], "optim.lr=0.0 trains nothing"),
    (["train", "--optim.warmup-steps", "500"], "optim.warmup_steps=500 is longer than train.steps"),
    (["train", "--plan.global-batch", "7", "--plan.data", "2"], "global_batch=7"),
    (["train", "--train.backend", "nccl"], "nccl needs CUDA devices"),
    (["train", "--train.device", "cuda"], "torch sees no CUDA device"),
    (["train", "--checkpoint.interval", "-2"], "checkpoint.interval=-2 is too small"),
    (["train", "--data.sources", "missing.txt"], "missing.txt"),
    (["train", "--data.sources", "empty.txt"], "empty.txt"),
    (["train", "--data.sources", "latin.txt"], "latin.txt"),
    (["train", "--data.sources", "text.jsonl"], "text.jsonl"),
    (["train", "--data.sources", "broken.jsonl"], "broken.jsonl"),
    (["train", "--data.sources", "list.jsonl"], "list.jsonl"),
    (["train", "--data.sources", "cut.jsonl.gz"], "cut.jsonl.gz"),
    (["train", "--data.sources", "bad.parquet"], "bad.parquet"),
    (["train", "--data.sources", "pair.bin"], "pair.idx"),
    (["train", "--data.sources", "text.docx"], "text.docx"),
    (["train", "--data.sources", "nothing-here"], "nothing-here"),
    (["train", "--data.tokenizer", "words.json"], "words.json"),
    (["train", "--data.tokenizer", "bpe"], "bpe"),
    (
        ["train", "--data.sources", "good.txt", "--data.mixture-weights", "1", "2"],
        "data.mixture_weights has length 2",
    ),
    (
        ["train", "--data.sources", "good.txt", "--data.mixture-weights", "-1"],
        "data.mixture_weights",
    ),
    (
        ["train", "--data.sources", "good.txt", "--data.mixture-weights", "0"],
        "data.mixture_weights are all 0",
    ),
    (["train", "date.toml"], "data.sources=datetime.date(2020, 1, 1) is not a list"),
    (["train", "huge.toml"], "optim.lr=inf is not finite"),
    (["train", "deep.toml"], "is not valid TOML"),
    (["train", "long.toml"], "is not valid TOML"),
    (["train", "null.toml"], "contains unprintable characters"),
    (["train", "out.toml"], "contains unprintable characters"),
    (["train", "--train.output-dir", "good.txt"], "good.txt is not a directory"),
    (["train", "--train.output-dir", "good.txt/deeper"], "is not a directory"),
    (["train", "--train.output-dir", "a" * 300], "cannot be a directory"),
    (["train", "--train.output-dir", "/proc/nope/x"], "/proc is not writable"),
    (["train", "--data.sources", "a" * 300 + ".txt"], "aaa"),
    (["train", "a" * 300 + ".toml"], "cannot be read"),
    (["train", "--plan.row", "1000000007"], "The plan needs 1000000007 ranks"),
    (["train", "--data.seq-len", "1000000000001"], "data.seq_len=1000000000001 is too large"),
    (["train", "--plan.global-batch", "9" * 400], "is too large"),
    (["train", "--model.layers", "1000000000"], "model.layers=1000000000 is too large"),
    (
        ["train", "--model.size", "llama3-405b", "--nproc", "2"],
        "does not fit on 2 x cpu in any layout",
    ),
    (["train", "--model.size", "llama3-405b"], "A rank needs at least"),
    (["train", "--model.dropout", "nan"], "Use 0.1"),
    (["train", "--nproc", "100000"], "--nproc 100000 is out of range"),
    (["train", "--plan.row", "512"], "At most 256 can be started"),
    (
        ["train", "--train.comm-timeout-seconds", "1e300"],
        "train.comm_timeout_seconds=1e+300 is too large",
    ),
    (
        ["train", "--data.sources", "good.txt", "stdlib", "--data.mixture-weights", "1e308", "inf"],
        "weights",
    ),
    (["data", "prepare"], "needs at least one file"),
    (["data", "prepare", "missing.txt"], "missing.txt"),
    (["data", "polish"], "'data polish' is not a command"),
    (["data", "show", "."], "corpus.json"),
    (["generate", "nowhere"], "is not a run"),
    (["report", "nowhere"], "is not a run"),
    (["report"], "was given 0 arguments"),
]


@pytest.mark.sample(40)
@pytest.mark.parametrize(
    ("words", "says"), MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, list) else ""
)
def test_mistakes_end_with_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    for name, content in BAD_FILES.items():
        (folder / name).write_bytes(content)
    if words[0] == "train" and "--data.sources" not in words and "--data.tokenizer" not in words:
        words = [*words, "--data.tokenizer", "bytes", "--data.max-bytes", "50000"]
    assert call(*words) in (64, 65, 73)
    text = "".join(capsys.readouterr())
    assert says in text and "Traceback" not in text, text
    assert {path.name for path in folder.iterdir()} == set(BAD_FILES), "nothing was begun"


def test_all_problems_come_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--plan.row", "3", "--plan.col", "5", "--plan.context", "2", "--data.seq-len", "32"]
    assert call("train", "--nproc", "30", *words) == 64
    text = capsys.readouterr().err
    for part in ("context·row=6", "heads=8", "embed=192", "seq=32", "micro_batch=8"):
        assert part in text, text


def test_help_explains(capsys: pytest.CaptureFixture[str]) -> None:
    verbs = ("train", "generate", "data prepare", "verify", "doctor", "report", "profile", "")
    for words in map(str.split, verbs):
        with pytest.raises(SystemExit) as end:
            main([*words, "--help-all" if words == ["train"] else "--help"])
        assert end.value.code == 0
    text = capsys.readouterr().out
    assert "usage: ranvier COMMAND" in text and "--plan.row" in text and "Megatron" in text
    assert "--prompt" in text and "--tokenizer" in text


def test_help_of_a_section_tells_choices_bounds_and_units(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for section, parts in {
        "data": (
            "(integer, 1 to 2,147,483,648, tokens)",
            "(assistant, all)",
        ),
        "memory": ("(number, at least 0, GiB)", "--memory.auto False   (true, false)"),
        "optim": ("--optim.lr -   (number, at least 0)", "(number, in [0, 1))"),
        "train": ("(list of tensorboard, wandb)", "(string)"),
    }.items():
        with pytest.raises(SystemExit) as end:
            main(["train", "--help", section])
        text = capsys.readouterr().out
        assert end.value.code == 0 and all(part in text for part in parts), text
        assert max(map(len, text.splitlines())) <= 100


def test_the_first_page_of_help_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and len(text.splitlines()) <= 48
    assert max(map(len, text.splitlines())) <= 100
    assert {"--model.size", "--plan.row", "--train.steps", "--nproc"} <= {*text.split()}
    with pytest.raises(SystemExit) as end:
        main(["train", "--help", "guard"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and "--guard.on-spike" in text and "--plan.row" not in text
    assert call("train", "--help", "guards") == PlanError.exit_code
    assert "'guards' is not a section. Sections are model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("--plan.tp", "--plan.row"),
        ("--plan.pp=2", "--plan.pipe"),
        ("--dp", "--plan.data"),
        ("--plan.fsdp", "--plan.depth"),
        ("--ep", "--plan.expert"),
        ("--plan.cp", "--plan.context"),
        ("--lr", "--optim.lr"),
        ("--train.lr", "--optim.lr"),
        ("--steps", "--train.steps"),
        ("--batch-size", "--plan.global-batch"),
        ("--batch_size", "--plan.global-batch"),
    ],
)
def test_options_of_other_frameworks_are_answered_by_meaning(
    option: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", option, "2") == PlanError.exit_code
    text = capsys.readouterr().err
    assert " is not an option. " in text and text.endswith(f" Use {ours}.\n")


def test_every_synonym_leads_to_a_setting() -> None:
    known = option_names(TrainOptions())
    assert {ours for ours, _ in SYNONYMS.values()} <= {*known}
    assert not {*SYNONYMS} & {*known}
    assert {*COMMON_SETTINGS} <= {*known}


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"ranvier {ranvier.__version__}\n"


MISSING = [
    "train nope.toml",
    "generate nope",
    "eval nope",
    "export nope",
    "report nope",
    "plan nope.toml",
    "verify nope.toml",
    "dry-run nope.toml",
    "simulate pipeline nope.toml",
    "profile nope.toml",
    "import ./nope",
    "upcycle ./nope --experts 8",
    "extend-context ./nope --max-position 8192",
    "scaling-laws nope",
    "train --data.sources nope.jsonl",
    "train --train.init-from ./nope",
    "data prepare nope.jsonl",
    "checkpoint verify nope",
    "checkpoint diff nope nope",
    "checkpoint ls nope",
    "data show nope",
]


def test_a_missing_file_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    """One process for all of them: none imports it."""
    code = (
        "import sys\nfrom ranvier.cli.main import main\n"
        "for line in sys.argv[1:]:\n"
        "    try:\n        main(line.split())\n"
        "    except SystemExit as end:\n        assert end.code, line\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    words = [sys.executable, "-c", code, *MISSING]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nope") >= len(MISSING)


def test_a_shell_completes_verbs_and_options(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ranvier", "completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
    )
    ask = (
        "COMP_WORDS=(ranvier $2 $3); COMP_CWORD=$1; _ranvier; echo ${COMPREPLY[@]}"  # as bash does
    )
    for words, found in ((["1", "tra"], "train"), (["2", "train", "--plan.r"], "--plan.row")):
        line = ["bash", "-c", f"{done.stdout}\n{ask}", "bash", *words]
        text = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert found in text.split(), text
    assert call("completion", "fish") == PlanError.exit_code


def test_the_options_of_every_command_are_completed() -> None:
    kinds = {
        kind
        for kind in vars(arguments).values()
        if isinstance(kind, type) and kind.__name__.endswith("Options")
    }
    more = [kind for classes in SUBCOMMAND_OPTION_CLASSES.values() for kind in classes.values()]
    known = {*OPTION_CLASSES.values(), *more}
    # A class that others extend need not have a command of its own.
    assert kinds and {kind for kind in kinds if not kind.__subclasses__()} <= known <= kinds
    assert set(OPTION_CLASSES) | {"plan"} < set(COMMANDS)


def test_the_last_size_counts_and_a_file_keeps_its_other_settings(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\nsize = "gpt2"\nlayers = 3\n')
    run = parse_train_options(["--model.size", "gpt2", "--model.size", "tiny"])
    assert run.model == named_model("tiny")
    run = parse_train_options([str(tmp_path / "run.toml"), "--model.size", "tiny"])
    assert (run.model.embed, run.model.layers) == (named_model("tiny").embed, 3)


def test_runs_claim_directories_of_their_own(folder: Path) -> None:
    assert [str(acquire_dir(RunConfig())[0]) for _ in range(3)] == [
        "runs/tiny",
        "runs/tiny-2",
        "runs/tiny-3",
    ]
    (folder / "runs/tiny/metrics.jsonl").touch()
    with pytest.raises(PlanError, match="has metrics but no config"):
        acquire_dir(RunConfig(train=TrainConfig(output_dir="runs/tiny")))


@pytest.mark.parametrize("word", ["true", "True"])
def test_booleans_are_written_as_in_toml_or_as_in_python(word: str) -> None:
    words = [
        "--train.trace-comm",
        word,
        f"--checkpoint.allow-data-mismatch={word}",
        "--train.sample-prompt",
        "true",
    ]
    run = parse_train_options(words)
    assert (
        run.train.trace_comm
        and run.checkpoint.allow_data_mismatch
        and run.train.sample_prompt == "true"
    )
