"""Data that breaks, ends, changes or comes late (cases E of the reliability list).

Already tested elsewhere: E3 tests/train/test_trainer.py (fingerprint), E4 tests/data/test_corpus.py
(tokens beyond the vocabulary), E5 tests/data/test_indexed_dataset.py and test_cache.py (every
defect), E10 tests/data/test_sources.py (bad files), E11 tests/data/test_data_mixture.py (senseless
weights).
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import SMALL_OPTIONS, call, metrics
from ranvier.data import loader
from ranvier.data.batch import Batch
from ranvier.data.dataset import open_data
from ranvier.data.loader import Loader, load_micro_batches
from ranvier.data.prepare import prepare_corpus
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.errors import DataError, HangError, PlanError
from ranvier.grid import Grid
from ranvier.nn.cross_entropy import IGNORE_INDEX
from ranvier.train.resume.checkpointing import state_tensors
from ranvier.train.step import StepLimits, train_step
from ranvier.train.trainer import Trainer
from training import run_of, stored, trainer_of


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def trainer(tmp_path: Path, corpus: str) -> Trainer:
    return trainer_of(Grid({}), corpus, run_of(str(tmp_path), {}, 100))


def numbers(batches: list[Batch]) -> list[int]:
    """The samples of a step."""
    return [n for batch in batches for n in batch.samples.tolist()]  # type: ignore[union-attr]


def test_a_resumed_run_reads_each_sample_once(trainer: Trainer) -> None:
    """E1, E12: in the middle of an epoch, at its end, at its last batch; then the next begins."""
    whole = trainer._batch_maker()
    (stream,) = trainer.data.train.streams
    end = stream.num_windows // 8
    assert end > 2 and stream.num_windows % 8, "the last batch of an epoch reaches into the next"
    for cut in (1, end - 1, end, end + 1):
        trainer.state.step, trainer.state.samples = cut, cut * 8
        rest = trainer._batch_maker()
        for step in (cut, cut + 1, cut + end):
            assert numbers(rest(step)) == numbers(whole(step)) == [*range(step * 8, step * 8 + 8)]
            for ours, theirs in zip(rest(step), whole(step), strict=True):
                assert torch.equal(ours.tokens, theirs.tokens)
                assert torch.equal(ours.targets, theirs.targets)


@pytest.mark.parametrize(("data", "depth", "micro"), [(1, 1, 2), (2, 1, 4), (2, 2, 1), (8, 1, 1)])
def test_a_step_has_the_same_samples_on_any_grid(
    trainer: Trainer, data: int, depth: int, micro: int
) -> None:
    """E2: other data ranks and other micro-batches read the same samples in a step."""
    found: list[int] = []
    for rank in range(data * depth):
        grid = Grid({"data": data, "depth": depth}, rank=rank)
        found += numbers(load_micro_batches(trainer.data.train, 24, 8, grid, micro))
    assert sorted(found) == list(range(24, 32))


def test_fewer_samples_than_a_batch_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E6, E12: a corpus of a few samples is read in many epochs; no rank is without data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("a few words only, read again and again. " * 3)
    words = ["--data.sources", "short.txt", "--train.steps", "4", "--train.output-dir", "run"]
    words += ["--nproc", "1", "--data.validation-fraction", "0"]
    assert call("train", *SMALL_OPTIONS, *words) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3]


def test_a_batch_without_targets_teaches_nothing(trainer: Trainer) -> None:
    """E7, G11: only padding: the loss is 0, no number is bad, the weights stay finite."""
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    batch = Batch(tokens, torch.full_like(tokens, IGNORE_INDEX), samples=torch.arange(8))
    watch = StepLimits.for_device("cpu")
    taken = train_step(trainer.state.model, trainer.state.optimizer, [batch], 1e-2, watch)
    assert taken.loss == 0.0 and taken.grad_norm == 0.0 and not taken.is_nonfinite
    assert all(part.isfinite().all() for part, _ in state_tensors(trainer.state).values())


def test_an_error_of_the_thread_ends_the_run_with_its_code(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E8: what cannot be read is bad data (65); steps before it are taken."""
    trainer = trainer_of(Grid({}), corpus, run_of(str(tmp_path), {}, 9))
    plain, count = loader.load_micro_batches, [0]

    def breaks(*args: Any, **kwargs: Any) -> list[Batch]:
        count[0] += 1
        if count[0] == 4:
            raise OSError(5, "Input/output error", "corpus.bin")
        return plain(*args, **kwargs)

    monkeypatch.setattr("ranvier.train.trainer.load_micro_batches", breaks)
    rows = []
    with pytest.raises(DataError, match=r"Batch 3 cannot be read.*corpus\.bin") as caught:
        for row in trainer.run_steps():
            rows.append(row)
    assert caught.value.exit_code == 65 and len(rows) == 3


def test_a_thread_that_hangs_is_an_error_and_does_not_hold_the_end() -> None:
    """E8: a batch that never comes is a hang (72); closing does not wait for it."""
    stuck, start = threading.Event(), time.perf_counter()

    def make(number: int) -> int:
        if number == 1:
            stuck.wait()
        return number

    with (
        pytest.raises(
            HangError, match=r"Batch 1 has not arrived for 0 s.*train\.comm_timeout_seconds"
        ) as caught,
        Loader(make, patience=0.1) as found,
    ):
        assert next(found) == 0
        next(found)
    stuck.set()
    assert caught.value.exit_code == 72 and time.perf_counter() - start < 30.0


@pytest.mark.full
def test_slow_data_is_seen_in_the_metrics(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E9: a loader slower than the steps: the run goes on, and says where the time goes."""
    trainer = trainer_of(Grid({}), corpus, run_of(str(tmp_path), {}, 4))
    plain = loader.load_micro_batches

    def slow(*args: Any, **kwargs: Any) -> list[Batch]:
        time.sleep(0.4)
        return plain(*args, **kwargs)

    monkeypatch.setattr("ranvier.train.trainer.load_micro_batches", slow)
    rows = list(trainer.run_steps())
    assert len(rows) == 4 and trainer.meter.phases["waiting for data"] > 0.3


def test_long_lines_and_nul_bytes_are_text(tmp_path: Path) -> None:
    """E10: a line of megabytes and bytes of zero are read as they are."""
    text = "0123456789" * 200_000 + "\0\0"
    (tmp_path / "long.txt").write_text(text)
    prepare_corpus([tmp_path / "long.txt"], tmp_path / "made", ByteTokenizer())
    data = open_data([str(tmp_path / "made")], seq=8, seed=0, held_out=0.0, packed=True)
    assert sum(corpus.manifest.tokens for corpus in data.corpora) == len(text) + 1


@pytest.mark.parametrize(
    ("weights", "good"),
    [((0.0, 1.0), True), ((3.0, 5.0), True), ((-1.0, 2.0), False), ((0.0, 0.0), False)],
    ids=["E11 zero", "E11 any sum", "E11 negative", "E11 all zero"],
)
def test_weights_of_a_mixture(weights: tuple[float, ...], good: bool) -> None:
    """E11: shares need not add up to 1, but are no negative numbers and not all 0."""
    changes = {"data__sources": ("a", "b"), "data__mixture_weights": weights}
    if good:
        assert run_of("", {}, 1, **changes).data.mixture_weights == weights
        return
    with pytest.raises(PlanError, match=r"data\.mixture_weights"):
        run_of("", {}, 1, **changes)
    with pytest.raises(PlanError, match=r"data\.mixture_weights"):
        run_of("", {}, 1, **{**changes, "data__mixture_weights": (float("nan"), 1.0)})
