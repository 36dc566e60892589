"""Numbers that are wrong (cases G of the reliability list): left out, marked, compared, named."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from commands import SMALL_OPTIONS, call, metrics
from pool import Pool
from ranvier.checkpoint import directory as folders
from ranvier.checkpoint.load import load_full_tensors
from ranvier.config.sections import GuardConfig
from ranvier.data.batch import Batch
from ranvier.data.loader import Loader
from ranvier.errors import NumericError
from ranvier.grid import Grid
from ranvier.models import Decoder, DecoderConfig
from ranvier.optim.grad_scaler import MIN_SCALE, GradScaler
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.train import step as steps
from ranvier.train.health.loss_guard import MIN_LOSSES, LossGuard
from ranvier.train.health.replica_check import fingerprint_tensor
from ranvier.train.resume.checkpointing import state_tensors
from ranvier.train.step import StepLimits, train_step
from ranvier.train.trainer import Trainer
from training import run_of, stored, trainer_of

CONFIG = DecoderConfig(layers=1, embed=16, heads=4, kv_heads=2, head_dim=4, mlp=24, vocab=29)
TOKENS = torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


# ---- numbers that are none ------------------------------------------------------------------


def poison(trainer: Trainer, where: str, rank: int, at: range, kind: str) -> None:
    """Have a layer give a bad number, or get a bad gradient, on one rank in some steps."""

    def hook(_: Any, __: Any, output: Tensor) -> Tensor | None:
        if trainer.state.step not in at or not output.requires_grad:
            return None
        bad = torch.tensor([0])
        if kind == "gradient":
            output.register_hook(lambda grad: grad.index_fill(0, bad, torch.nan))
            return output
        return output.index_fill(0, bad, torch.inf if kind == "inf" else torch.nan)

    if trainer.grid.rank == rank:  # another stage may not have it
        trainer.state.model.get_submodule(where).register_forward_hook(hook)


def bits(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and the whole state of the optimizer as they are now."""
    parts = {
        **trainer.state.parallel.sharded_state(),
        **state_tensors(trainer.state),
    }
    return {name: part.clone() for name, (part, _) in parts.items()}


def skipping(
    grid: Grid, corpus: str, out: str, where: str, rank: int, kind: str, changes: dict[str, Any]
) -> tuple[list[tuple[bool, bool, bool]], float, int]:
    """Of 5 steps, the third bad: whether it was skipped, has a loss, changed any bit."""
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # a CPU without products in bf16
    trainer = trainer_of(grid, corpus, run_of(out, dict(grid.degrees), 5, **changes))
    poison(trainer, where, rank, range(2, 3), kind)
    rows = []
    with Loader(trainer._batch_maker()) as loader:
        for _ in range(5):
            before = bits(trainer)
            row = trainer.read_step(trainer.issue_step(loader), None)
            same = all(torch.equal(x, before[name]) for name, x in bits(trainer).items())
            rows.append((row["skipped"], row["loss"] is not None, not same))
    return rows, trainer.state.optimizer.num_updates.item(), trainer.state.guard.nonfinite_steps


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("degrees", "where", "rank", "kind", "changes"),
    [
        ({}, "blocks.1.mlp.down", 0, "inf", {"train__dtype": "bf16", "optim__state_dtype": "bf16"}),
        ({"data": 2, "col": 2}, "blocks.1.norm2", 3, "nan", {}),
        ({"row": 2}, "blocks.0.mlp.down", 1, "gradient", {"train__dtype": "fp32"}),
        ({"pipe": 2}, "blocks.0.norm1", 0, "gradient", {"optim__state_dtype": "bf16"}),
    ],
    ids=["G1 one rank", "G1 data col", "G2 row", "G2 stage without the loss"],
)
def test_all_ranks_leave_out_the_step_of_one_bad_number(
    pool: Pool,
    tmp_path: Path,
    corpus: str,
    degrees: dict[str, int],
    where: str,
    rank: int,
    kind: str,
    changes: dict[str, Any],
) -> None:
    """G1, G2: all ranks skip the same step, without a trace, and go on."""
    arguments = (corpus, str(tmp_path), where, rank, kind, changes)
    for rows, updates, bad in pool.on_grid(degrees, skipping, *arguments):
        loss = kind == "gradient"
        good = (False, True, True)
        assert rows == [good, good, (True, loss, False), good, good]
        assert (updates, bad) == (4, 1)


def voting(grid: Grid, corpus: str, factor: float) -> list[tuple[bool, bool]]:
    """Of 20 steps, the last with another loss on rank 1 alone: what was skipped, and changed."""
    changes = {"guard__on_spike": "skip", "guard__spike_window": 16, "optim__lr": 1e-4}
    trainer = trainer_of(grid, corpus, run_of("", dict(grid.degrees), 20, **changes))
    plain, rows = steps.forward_backward, []

    def patched(*args: Any, **kwargs: Any) -> Tensor:
        odd = grid.rank == 1 and trainer.state.step == 19
        return plain(*args, **kwargs) * (factor if odd else 1.0)

    steps.forward_backward = patched
    try:
        with Loader(trainer._batch_maker()) as loader:
            for _ in range(20):
                before = bits(trainer)
                row = trainer.read_step(trainer.issue_step(loader), None)
                same = all(torch.equal(x, before[name]) for name, x in bits(trainer).items())
                rows.append((row["skipped"], not same))
    finally:
        steps.forward_backward = plain
    return rows


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "factor",
    [math.nan, pytest.param(math.inf, marks=pytest.mark.full), 100.0],
    ids="G1 G4 {}".format,
)
def test_one_rank_alone_decides_for_all(pool: Pool, corpus: str, factor: float) -> None:
    """G1, G4: the gradients are good and only one rank sees a bad loss; no rank updates."""
    for rows in pool.on_grid({"row": 2}, voting, corpus, factor):
        assert rows == [(False, True)] * 19 + [(True, False)]


def test_after_the_budget_the_run_names_its_cause_and_a_checkpoint(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """G3: more bad steps than guard.max_skipped_steps; each checkpoint is one to go on from."""
    changes = {"guard__max_skipped_steps": 2, "checkpoint__interval": 1}
    trainer = trainer_of(Grid({}), corpus, run_of(str(tmp_path), {}, 9, **changes))
    poison(trainer, "blocks.0.mlp.down", 0, range(2, 99), "nan")
    rows = []
    with pytest.raises(NumericError) as caught:
        rows += trainer.run_steps()
    text = str(caught.value)
    assert caught.value.exit_code == 74 and len(rows) == 4
    assert text.startswith("Step 5 of 9 (loss nan)") and "guard.max_skipped_steps=2" in text
    assert "The first non-finite tensor is the output of blocks.0.mlp.down" in text
    kept = folders.find_checkpoints(tmp_path / "checkpoints")
    assert str(kept[-1]) in text and kept[-1].name == "step-00000004"
    for whole in load_full_tensors(kept[-1]).values():
        assert whole.isfinite().all()
    assert "(2 of guard.max_skipped_steps=2" in capsys.readouterr().err
    assert trainer.state.optimizer.num_updates == 2


def test_skipped_steps_are_in_metrics_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """G1 as a user sees it: a mark in the metrics, the lines, the report, run.json."""
    monkeypatch.chdir(tmp_path)
    assemble = Trainer.from_run.__func__  # type: ignore[attr-defined]

    def poisoned(cls: type[Trainer], *args: Any, **kwargs: Any) -> Trainer:
        trainer: Trainer = assemble(cls, *args, **kwargs)
        poison(trainer, "blocks.1.mlp.down", 0, range(3, 5), "nan")
        return trainer

    monkeypatch.setattr(Trainer, "from_run", classmethod(poisoned))
    words = ["--train.steps", "30", "--train.output-dir", "run", "--nproc", "1"]
    assert call("train", *SMALL_OPTIONS, *words) == 0
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if row["skipped"]] == [3, 4]
    assert rows[3]["loss"] is None and rows[29]["skipped_total"] == 2
    assert "2 skipped" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "run.json").read_text())["skipped_total"] == 2
    page = (tmp_path / "run" / "report.html").read_text()
    assert "2 step(s) were skipped" in page and 'data-name="skipped"' in page


def test_an_overflow_is_bad_only_at_the_smallest_scale() -> None:
    """G5: the scale halves at each overflow, which counts once it cannot."""
    model = parallelize(Decoder(CONFIG), Grid({}), dtype=torch.float16)
    scale = GradScaler("cpu")
    scale.scale.fill_(8.0)
    optimizer, watch = (
        Optimizer(get_parallel_model(model).bucket_scheduler, scale=scale),
        StepLimits.for_device("cpu", budget=9),
    )
    layer = model.get_submodule("blocks.0.norm1")
    layer.register_forward_hook(
        lambda _, __, out: out.register_hook(lambda g: g * torch.inf) and None
    )
    found = []
    for _ in range(5):
        taken = train_step(model, optimizer, [Batch(TOKENS, TOKENS.roll(1, 1))], 1e-2, watch)
        found.append((scale.scale.item(), bool(taken.is_nonfinite)))
    floor = (MIN_SCALE, True)
    assert found == [(4.0, False), (2.0, False), (MIN_SCALE, False), floor, floor]
    assert watch.nonfinite_steps == 2 and optimizer.num_updates == 0


# ---- spikes -----------------------------------------------------------------------------------


class Now:
    """The numbers of a step, as the device would give them."""

    def __init__(self, loss: float, limit: float) -> None:
        self.values = [loss, 1.0, float(not math.isfinite(loss)), float(loss > limit)]

    def read(self) -> list[float]:
        """All of them."""
        return self.values


def watched(guard: LossGuard, losses: list[float], first: int = 0) -> list[bool]:
    """Which losses are spikes."""
    found = []
    for step, loss in enumerate(losses, first):
        guard.update_limit(step)
        under: Any = type(
            "Under", (), {"step": step, "numbers": Now(loss, guard.step_limits.loss_limit)}
        )()
        guard.judge_step(under)
        found.append(bool(under.numbers.values[3]))
    return found


WAVES = [3.0 + 0.1 * math.sin(7 * i) for i in range(200)]


def test_a_spike_is_far_above_the_median_and_stays_outside_the_window() -> None:
    """G4: neither spikes nor what is no number move the limit; few losses have none."""
    guard = LossGuard(GuardConfig(spike_window=64), "cpu")
    assert not any(watched(guard, WAVES[:60]))
    limit = guard.spike_limit()
    assert watched(guard, [30.0, 31.0, math.nan, 32.0, *WAVES[:4]], 60) == [
        *(True, True, False, True),
        *(False,) * 4,
    ]
    assert guard.spike_limit() < limit + 0.1 and max(guard.window) < 3.2
    assert (guard.spikes, guard.nonfinite_steps) == (3, 1)
    young = LossGuard(GuardConfig(), "cpu")
    assert not any(watched(young, [*WAVES[: MIN_LOSSES - 1], 300.0]))
    assert not any(watched(LossGuard(GuardConfig(on_spike="off"), "cpu"), [*WAVES[:50], 300.0]))


def test_losses_that_hardly_differ_make_no_spikes() -> None:
    """G4: a constant loss has no deviation; a floor takes its place."""
    guard = LossGuard(GuardConfig(), "cpu")
    assert watched(guard, [2.0] * 50 + [2.05, 2.0, 2.3]) == [False] * 52 + [True]
    assert not any(watched(LossGuard(GuardConfig(), "cpu"), [0.0] * 50 + [0.005]))
    falling = [10.0 * 0.97**i for i in range(150)]
    assert not any(watched(LossGuard(GuardConfig(), "cpu"), falling))


def test_a_guard_goes_on_to_the_bit() -> None:
    """G9: limits and counts after a restart, whenever it was, are those of the whole run."""
    losses = [*WAVES[:40], 40.0, math.nan, *WAVES[40:60]]
    whole = LossGuard(GuardConfig(spike_window=32), "cpu")
    found = watched(whole, losses)
    for cut in (1, 17, 41, 42):
        first, second = (LossGuard(GuardConfig(spike_window=32), "cpu") for _ in range(2))
        begun = watched(first, losses[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert begun + watched(second, losses[cut:], cut) == found
        assert second.state_dict() == whole.state_dict() and second.step_limits.nonfinite_steps == (
            cut > 41
        )


def test_fewer_skips_than_were_made_allow_no_more() -> None:
    """G3, F9: a run resumed with a smaller guard.max_skipped_steps is not stopped by its past."""
    old, new = (
        LossGuard(GuardConfig(max_skipped_steps=5), "cpu"),
        LossGuard(GuardConfig(max_skipped_steps=2), "cpu"),
    )
    watched(old, [math.nan] * 4)
    new.load_state_dict(old.state_dict())
    assert not new.is_exhausted() and new.step_limits.nonfinite_steps == 2
    watched(new, [3.0, math.nan], 4)
    assert new.is_exhausted()


@pytest.fixture
def spiky(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Steps, counted as they are taken, whose loss is ten times what it is."""
    plain, spikes, count = steps.forward_backward, list[int](), [0]

    def patched(*args: Any, **kwargs: Any) -> Tensor:
        loss = plain(*args, **kwargs)
        count[0] += 1
        return loss * 10.0 if count[0] - 1 in spikes else loss

    monkeypatch.setattr(steps, "forward_backward", patched)
    yield spikes


SHORT = {"guard__spike_window": 16, "optim__lr": 1e-4}


@pytest.mark.full
def test_a_spike_is_told(
    tmp_path: Path, corpus: str, spiky: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """G4, warn: one line and a mark."""
    spiky.append(20)
    trainer = trainer_of(Grid({}), corpus, run_of(str(tmp_path), {}, 24, **SHORT))
    rows = list(trainer.run_steps())
    assert [row["step"] for row in rows if row["spike"]] == [20]
    assert not any(row["skipped"] for row in rows) and trainer.state.optimizer.num_updates == 24
    assert capsys.readouterr().err.count("is a spike: the median was") == 1


@pytest.mark.full
def test_a_spike_is_left_out(tmp_path: Path, corpus: str, spiky: list[int]) -> None:
    """G4, skip: the update is not made; too many in a row end the run."""
    spiky.append(20)
    changes = {**SHORT, "guard__on_spike": "skip", "guard__max_skipped_steps": 1}
    trainer = trainer_of(Grid({}), corpus, run_of(str(tmp_path), {}, 30, **changes))
    rows, kept = [], {}
    for row in trainer.run_steps():
        rows.append(row)
        if row["step"] == 18:  # step 19 has been taken, 20 has not
            kept = bits(trainer)
        if row["step"] == 19:  # step 20 has been taken
            assert all(torch.equal(x, kept[name]) for name, x in bits(trainer).items())
            spiky += [24, 25]
        if row["step"] == 22:
            break
    assert [row["step"] for row in rows if row["skipped"]] == [20]
    assert trainer.state.optimizer.num_updates == 23
    with pytest.raises(NumericError, match="spike number 2 in a row") as caught:
        list(trainer.run_steps())
    assert caught.value.exit_code == 74


def test_a_run_goes_back_and_on_behind_the_spike(
    tmp_path: Path, corpus: str, spiky: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """G4, rewind: weights of the checkpoint, samples behind the spike, three times at most."""
    spiky += [18, 27]  # as they are taken: before the first checkpoint, and step 27
    changes = {
        **SHORT,
        "guard__on_spike": "rewind",
        "checkpoint__interval": 20,
        "guard__max_rewinds": 1,
    }
    trainer = trainer_of(Grid({}), corpus, run_of(str(tmp_path), {}, 32, **changes))
    rows = list(trainer.run_steps())
    text = capsys.readouterr().err
    assert "The run cannot rewind" in text and "Rewound from step 2" in text
    assert [row["step"] for row in rows] == [*range(28), *range(20, 32)]
    assert rows[27]["spike"] and not any(row["spike"] for row in rows[28:])
    assert rows[28]["tokens"] == 16 * 8 * 29, "the 29th batch follows the 28th, which spiked"
    assert trainer.state.guard.rewinds == 1 and trainer.state.optimizer.num_updates == 32
    spiky += range(40, 99)
    more = trainer_of(Grid({}), corpus, run_of(str(tmp_path), {}, 40, **changes))
    trainer.save_checkpoint()
    more.checkpointer.resume_from(folders.find_checkpoints(tmp_path / "checkpoints")[-1])
    assert more.state.guard.rewinds == 1
    with pytest.raises(NumericError, match=r"a spike after 1 rewinds.*guard.max_rewinds=1"):
        list(more.run_steps())


def spiking(grid: Grid, corpus: str, out: str) -> list[tuple[int, float | None]]:
    """Steps and losses of a run with a spike, from which it goes back."""
    plain, count = steps.forward_backward, [0]

    def patched(*args: Any, **kwargs: Any) -> Tensor:
        count[0] += 1
        return plain(*args, **kwargs) * (10.0 if count[0] == 19 else 1.0)

    steps.forward_backward = patched
    try:
        changes = {**SHORT, "guard__on_spike": "rewind", "checkpoint__interval": 17}
        trainer = trainer_of(grid, corpus, run_of(out, dict(grid.degrees), 20, **changes))
        return [(row["step"], row["loss"]) for row in trainer.run_steps()]
    finally:
        steps.forward_backward = plain


def test_all_ranks_go_back_together(pool: Pool, tmp_path: Path, corpus: str) -> None:
    """G4, rewind on two ranks."""
    one, two = pool.on_grid({"data": 2}, spiking, corpus, str(tmp_path))
    assert one == two and [step for step, _ in one] == [*range(19), 17, 18, 19]


# ---- copies -----------------------------------------------------------------------------------


def test_one_flipped_bit_changes_a_fingerprint() -> None:
    """G6: every bit of a word counts, and the order of words."""
    x = torch.randn(1001)
    marks = {int(fingerprint_tensor(x))}
    for bit in range(32):
        y = x.clone()
        y.view(torch.int32)[999] ^= -(2**31) if bit == 31 else 1 << bit
        marks.add(int(fingerprint_tensor(y)))
    marks |= {int(fingerprint_tensor(x.flip(0))), int(fingerprint_tensor(x[1:]))}
    assert len(marks) == 35
    assert (
        fingerprint_tensor(x[1:]) == fingerprint_tensor(x[1:].clone())
        and fingerprint_tensor(x[:0]) == 0
    )
    assert fingerprint_tensor(x.bfloat16()[3:]) == fingerprint_tensor(x.bfloat16()[3:].clone())


def unharmed(grid: Grid, corpus: str, out: str, changes: dict[str, Any]) -> int:
    """Comparisons in a run that went well; its own trace shows them."""
    run = run_of(out, dict(grid.degrees), 3, guard__replica_check_interval=1, **changes)
    trainer = trainer_of(grid, corpus, run)
    with grid.trace.record_events() as events:
        list(trainer.run_steps())
    trainer.save_checkpoint()
    return sum(event.where == "replicas" for event in events)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("degrees", "changes"),
    [
        ({"data": 2, "row": 2}, {"train__dtype": "bf16", "optim__state_dtype": "bf16"}),
        ({"depth": 2, "col": 2}, {"model__mlp": 25, "plan__col_splits": "samples"}),
        ({"row": 4}, {"model__kv_heads": 2}),
        ({"pipe": 2, "data": 2}, {"model__tie_embeddings": True, "model__layers": 3}),
        (
            {"pipe": 2, "row": 2},
            {"model__tie_embeddings": True, "plan__vocab_over_pipe": True, "model__bias": True},
        ),
        ({"depth": 2, "data": 2}, {"model__position_embedding": "learned", "train__dtype": "fp16"}),
    ],
    ids=["G8 data-row", "G8 depth-col", "G8 F1 kv", "G8 F1 tied-uneven", "G8 spread", "G8 fp16"],
)
def test_copies_of_a_good_run_are_equal(
    pool: Pool, tmp_path: Path, corpus: str, degrees: dict[str, int], changes: dict[str, Any]
) -> None:
    """G8 (and F1: more rows than kv heads, an odd vocabulary, uneven stages work)."""
    found = pool.on_grid(degrees, unharmed, corpus, str(tmp_path), changes)
    assert all(count >= 3 for count in found), found


def harmed(grid: Grid, corpus: str, out: str, rank: int, name: str) -> tuple[str, int]:
    """What a run says after a tensor was changed by one ulp on one rank; its checkpoints."""
    run = run_of(
        out, dict(grid.degrees), 6, guard__replica_check_interval=2, checkpoint__interval=4
    )
    trainer = trainer_of(grid, corpus, run)
    tensors = {
        **trainer.state.parallel.sharded_state(),
        **state_tensors(trainer.state),
    }
    try:
        for row in trainer.run_steps():
            if row["step"] == 2 and grid.rank == rank:  # step 3 is taken, and its copies compared
                part = tensors[name][0].view(-1)
                part[0] = torch.nextafter(part[0], torch.full_like(part[0], 9.0))
    except NumericError as error:
        return f"{error.exit_code} {error}", len(
            folders.find_checkpoints(Path(out) / "checkpoints")
        )
    return "", -1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("degrees", "rank", "name", "said"),
    [
        (
            {"data": 2, "row": 2},
            1,
            "blocks.0.norm1.weight",
            "rank 1 holds different bits of blocks.0.norm1.weight than ranks 0, 2, 3.",
        ),
        (
            {"data": 2},
            1,
            "blocks.1.mlp.down.weight",
            "ranks 0, 1 hold different bits of blocks.1.mlp.down.weight: rank 0 ",
        ),
        ({"row": 2}, 0, "blocks.0.norm2.weight.mean", "bits of blocks.0.norm2.weight.mean: "),
    ],
    ids=["G8 D14 norm", "G6 data", "G8 moment"],
)
def test_copies_that_differ_are_named(
    pool: Pool,
    tmp_path: Path,
    corpus: str,
    degrees: dict[str, int],
    rank: int,
    name: str,
    said: str,
) -> None:
    """G6, G8, D14: one ulp on one rank is found at the next comparison, by all ranks."""
    found = pool.on_grid(degrees, harmed, corpus, str(tmp_path), rank, name)
    assert len(set(found)) == 1, found
    text, kept = found[0]
    assert (
        text.startswith("74 ") and said in text and "no checkpoint was saved" in text and kept == 0
    ), text


def replaying(grid: Grid, corpus: str, out: str, at: int, where: str) -> tuple[str, list[float]]:
    """What a run says that computes each second step twice; at: a pass in which one bit flips."""
    trainer = trainer_of(grid, corpus, run_of(out, dict(grid.degrees), 4, guard__replay_interval=2))
    passes = 0

    def flips(_: Any, __: Any, output: Tensor) -> Tensor | None:
        nonlocal passes
        passes += 1
        if passes != at or grid.rank != grid.world_size - 1:
            return None
        bits = output.detach().clone(memory_format=torch.contiguous_format).view(torch.int64)
        bits.view(-1)[3] ^= 1 << 40
        return output + (bits.view(torch.float64) - output.detach())

    trainer.state.model.get_submodule(where).register_forward_hook(flips)
    losses: list[float] = []
    try:
        for row in trainer.run_steps():
            losses.append(row["loss"])
    except NumericError as error:
        return str(error), losses
    return "", losses


@pytest.mark.full
@pytest.mark.parametrize("degrees", [{}, {"data": 2, "row": 2}], ids=str)
def test_a_bit_that_flips_in_an_activation_is_seen_in_a_replay(
    pool: Pool, tmp_path: Path, corpus: str, degrees: dict[str, int]
) -> None:
    """G7: in the first or the second pass of a step that is computed twice, before its update."""
    where = "blocks.0.mlp.down"
    good = pool.on_grid(degrees, replaying, corpus, str(tmp_path / "0"), 0, where)
    assert {said for said, _ in good} == {""} and len(good[0][1]) == 4
    plain = run_of(str(tmp_path / "1"), {}, 4)
    rows = [row["loss"] for row in trainer_of(Grid({}), corpus, plain).run_steps()]
    assert good[0][1] == pytest.approx(rows, rel=1e-9), "what is computed twice counts once"
    for at in (4, 5):  # step 0 has two passes, step 1 one, step 2 the fourth and the fifth
        found = pool.on_grid(degrees, replaying, corpus, str(tmp_path / str(at + 5)), at, where)
        for said, losses in found:
            assert "Step 3 was computed twice and differs in the loss" in said
            assert losses == good[0][1][: len(losses)] and len(losses) in (1, 2)
    missed = pool.on_grid(degrees, replaying, corpus, str(tmp_path / "9"), 3, where)
    assert {said for said, _ in missed} == {""}, "the control: step 1 is computed once"
