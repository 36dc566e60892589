"""Pruned runs: masks are made once, survive checkpoints and grids, and leave zeros behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import SMALL_OPTIONS, call
from equivalence import worst
from pool import Pool
from pruned import way_of
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.checkpoint.load import load_full_tensors
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.train.resume import checkpointing
from training import losses_of, run_of, stored, trainer_of

Changes = dict[str, Any]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def newest(out: Path) -> Path:
    return find_checkpoints(out / "checkpoints")[-1]


GROWING: Changes = {"prune__sparsity": 0.8, "prune__update_interval": 2, "prune__final_step": 5}


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [GROWING, pytest.param({"prune__sparsity": 0.7}, marks=pytest.mark.full)],
    ids=["growing", "fixed"],
)
def test_a_run_goes_on_on_another_grid(
    pool: Pool, corpus: str, tmp_path: Path, changes: Changes
) -> None:
    """Six steps on one rank and on a grid, and the last two from there on another grid."""
    changes = {**changes, "checkpoint__interval": 4}
    whole, first, second = (str(tmp_path / name) for name in ("whole", "first", "second"))
    want = losses_of(Grid({}), corpus, whole, 6, changes=changes)
    have = pool.on_grid({"depth": 2, "data": 2}, losses_of, corpus, first, 6, "", changes)[0]
    assert have == pytest.approx(want, rel=1e-9, abs=0.0)
    middle = str(tmp_path / "first" / "checkpoints" / "step-00000004")
    have = pool.on_grid({"row": 2}, losses_of, corpus, second, 6, middle, changes)[0]
    assert have == pytest.approx(want[4:], rel=1e-9, abs=0.0)
    masks = load_full_tensors(newest(tmp_path / "whole"), "mask")
    share = 1.0 - sum(int(x.sum()) for x in masks.values()) / sum(x.numel() for x in masks.values())
    assert len(masks) == 14 and share == pytest.approx(changes["prune__sparsity"], abs=1e-3)
    again = load_full_tensors(newest(tmp_path / "second"), "mask")
    for kind in ("master", "mean", "square"):
        theirs = load_full_tensors(newest(tmp_path / "second"), kind)
        for name, x in load_full_tensors(newest(tmp_path / "whole"), kind).items():
            assert worst(f"{name}.{kind}", theirs[name], x, 1e-8) == []
            if name in masks:
                assert torch.equal(masks[name], again[name])
                assert not x[masks[name] == 0].any() and not theirs[name][masks[name] == 0].any()


def test_a_run_that_goes_on_repeats_the_bits(corpus: str, tmp_path: Path) -> None:
    changes = {**GROWING, "checkpoint__interval": 2, "checkpoint__keep_latest": 0}
    want = losses_of(Grid({}), corpus, str(tmp_path / "whole"), 6, changes=changes)
    middle = str(tmp_path / "whole" / "checkpoints" / "step-00000004")  # they are renewed after it
    assert losses_of(Grid({}), corpus, str(tmp_path / "again"), 6, middle, changes) == want[4:]


MIXTURE: Changes = {"model__experts": 4, "model__experts_per_token": 2, "model__expert_mlp": 8}
GIVEN = [
    (0.5, {"depth": 2, "data": 2}, {}),
    ("2:4", {"expert": 2, "row": 2}, MIXTURE),
    pytest.param(0.8, {"pipe": 2, "depth": 2}, {}, marks=pytest.mark.full),
    pytest.param(0.6, {"expert": 2, "depth": 2}, MIXTURE, marks=pytest.mark.full),
    pytest.param("1:4", {"col": 2, "data": 2}, {}, marks=pytest.mark.full),
]


def begun(grid: Grid, corpus: str, source: str, out: str, way: str, changes: Changes) -> None:
    """Save a pruned run that begins with the weights of another, before its first step."""
    trainer = trainer_of(grid, corpus, run_of(out, dict(grid.degrees), 2, **changes))
    if way == "train.init_from":
        checkpointing.load_initial_weights(trainer.run, trainer.state, Path(source))
    else:  # the weights and all else of a run that is not pruned
        trainer.checkpointer.resume_from(Path(source))
    trainer.save_checkpoint()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("how", "degrees", "model"), GIVEN)
def test_masks_follow_the_weights_that_a_run_begins_with(
    pool: Pool,
    corpus: str,
    tmp_path: Path,
    how: float | str,
    degrees: dict[str, int],
    model: Changes,
) -> None:
    """Not the initial values: of each matrix the largest of what was loaded stay, on any grid."""
    other = {**model, "train__seed": 5, "checkpoint__interval": 1}
    losses_of(Grid({}), corpus, str(tmp_path / "dense"), 2, changes=other)
    source = newest(tmp_path / "dense")
    dense = load_full_tensors(source)
    changes = {**model, "prune__sparsity" if isinstance(how, float) else "prune__n_m_pattern": how}
    changes |= {"checkpoint__allow_config_mismatch": True}
    inside = {n for n, x in dense.items() if x.dim() > 1 and n.startswith("blocks.")}
    for way, at in (("train.init_from", degrees), ("resume", {})):
        out = tmp_path / way
        pool.on_grid(at, begun, corpus, str(source), str(out), way, changes)
        masks, weights = load_full_tensors(newest(out), "mask"), load_full_tensors(newest(out))
        assert {n for n, x in masks.items() if not x.all()} == inside
        for weight in inside:
            want = way_of(how)(dense[weight]).view(dense[weight].shape)
            assert torch.equal(masks[weight].view(want.shape) > 0, want), (way, weight)
            assert torch.equal(weights[weight], dense[weight] * want)


FAST = [*SMALL_OPTIONS, "--nproc", "1", "--train.steps", "3"]
NAMES = ("blocks.1.attention.o.weight", "blocks.1.mlp.down.weight")


@pytest.mark.full
def test_verbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pattern; its export has zeros; from there a user's masks, which need their file once."""
    monkeypatch.chdir(tmp_path)
    assert call("train", *FAST, "--train.output-dir", "run", "--prune.n-m-pattern", "2:4") == 0
    assert "pruned: 50.00% of" in capsys.readouterr().out
    assert call("export", "run", "--output", "out") == 0
    published = load_file(tmp_path / "out" / "model.safetensors")
    for name, x in published.items():
        zeros = (x == 0.0).view(-1, 4).sum(1) if x.dim() == 2 else torch.zeros(1)
        inside = x.dim() == 2 and "layers" in name
        assert (zeros == 2).all() if inside else not zeros.any(), name

    assert call("import", "out", "--output", "again") == 0
    words = ["--prune.sparsity", "0.75", "--optim.lr", "1e-30", "--data.tokenizer", "bytes"]
    few = [
        "--nproc",
        "1",
        "--train.steps",
        "1",
        "--data.seq-len",
        "32",
        "--data.max-bytes",
        "60000",
    ]
    assert call("train", "again", *few, *words, "--train.eval-interval", "0") == 0
    after, before = (load_full_tensors(newest(tmp_path / name)) for name in ("again", "run"))
    for name, x in after.items():
        if x.dim() == 2 and "blocks" in name:  # half of what the pattern left
            mask = way_of(0.75)(before[name])
            assert torch.equal(x != 0.0, mask & (before[name] != 0.0)), name

    masks = {
        name: torch.rand(x.shape) < 0.3
        for name, x in load_full_tensors(newest(tmp_path / "run")).items()
    }
    masks = {name: masks[name] for name in NAMES}
    save_file({n: x.to(torch.float16) for n, x in masks.items()}, tmp_path / "masks.safetensors")
    words = ["train", *FAST, "--train.init-from", "run", "--train.output-dir", "next"]
    assert call(*words, "--prune.mask-file", "masks.safetensors") == 0
    (tmp_path / "masks.safetensors").unlink()
    assert call("train", "next", "--nproc", "1", "--train.steps", "5") == 0
    found = load_full_tensors(newest(tmp_path / "next"), "mask")
    assert all(("blocks.1" in name) and (x.all() or name in NAMES) for name, x in found.items())
    weights = load_full_tensors(newest(tmp_path / "next"))
    for name in NAMES:
        assert torch.equal(found[name] > 0, masks[name])
        assert not weights[name][~masks[name]].any() and weights[name][masks[name]].any()


ODD: list[tuple[str, tuple[int, ...], str]] = [
    (
        "blocks.9.attention.o.weight",
        (16, 16),
        "blocks.9.attention.o.weight, which the model does not have",
    ),
    ("embed.weight", (257, 16), "embed.weight, which is not pruned"),
    ("head.weight", (257, 16), "head.weight, which is not pruned"),
    ("blocks.0.mlp.down.weight", (24, 16), r"of shape \[24, 16\], not \[16, 24\]"),
]


def test_odd_masks_are_refused(corpus: str, tmp_path: Path) -> None:
    file = tmp_path / "masks.safetensors"
    run = run_of("", {}, 3, prune__mask_file=str(file))
    with pytest.raises(PlanError, match=r"cannot be read: .* Check the path"):
        trainer_of(Grid({}), corpus, run)
    for name, shape, says in ODD:
        save_file({name: torch.ones(shape)}, file)
        with pytest.raises(PlanError, match=says):
            trainer_of(Grid({}), corpus, run)


REFUSED: list[tuple[Changes, str]] = [
    ({"prune__sparsity": 1.0}, "prune.sparsity=1.0 is not a fraction"),
    ({"prune__n_m_pattern": "4:2"}, "prune.n_m_pattern='4:2' is not a valid pattern"),
    (
        {"prune__n_m_pattern": "2:4", "prune__sparsity": 0.7},
        "The pattern already implies the sparsity 0.5",
    ),
    ({"prune__mask_file": "x", "prune__sparsity": 0.7}, "The mask file alone determines"),
    ({"prune__sparsity": 0.5, "lora__rank": 4}, "Both prune and lora are enabled"),
    ({"prune__sparsity": 0.5, "prune__update_interval": 2}, "Set both, or none"),
    (
        {"prune__sparsity": 0.5, "prune__update_interval": 5, "prune__final_step": 4},
        "update_interval <= final_step <= train.steps",
    ),
    ({"prune__update_interval": 2, "prune__final_step": 4}, "without prune.sparsity, or with"),
    ({**GROWING, "plan__cuda_graph": True}, "A CUDA graph cannot change its masks"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_settings_that_do_not_fit_are_refused(changes: Changes, says: str) -> None:
    with pytest.raises(PlanError) as error:
        run_of("", {}, 6, **changes)
    assert says in str(error.value)
