"""Resolving memory: a run with little memory takes the same steps, with and without a pipeline."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import SMALL_OPTIONS, call
from pool import Pool
from ranvier.config.sections import MemoryConfig
from ranvier.errors import INTERNAL_EXIT_CODE, DeviceMemoryError, PlanError
from ranvier.grid import Grid
from ranvier.memory import recompute_budget
from ranvier.models import Decoder
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.planner import offload_search
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.planner.offload_search import Placement
from ranvier.train.memory import breakdown, choose, resolve
from ranvier.train.memory.choose import MemoryLimits
from ranvier.train.memory.usage import GIB
from ranvier.train.resume.checkpointing import state_tensors
from ranvier.train.trainer import Trainer
from training import run_of, stored, trainer_of

LAYERS = 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def made(corpus: str, grid: Grid | None = None, **changes: Any) -> Trainer:
    """A trainer; changes of the plan without a section."""
    grid = grid or Grid({})
    named = {name if "__" in name else f"plan__{name}": x for name, x in changes.items()}
    named = {"data__document_mask": False, "model__layers": LAYERS, **named}
    run = run_of("unused", dict(grid.degrees), 3, **named)
    return trainer_of(grid, corpus, run)


def need_of(trainer: Trainer, micro: int, *modes: str) -> int:
    """Bytes that a rank needs, with gaps."""
    run = trainer.run
    case = choose.build_fit_problem(
        run, resolve_model_spec(run), MemoryLimits(0, 0), choose.EQUAL_RATES, frozenset()
    )
    choice = Placement(micro, modes * (LAYERS // len(modes)))  # type: ignore[arg-type]
    return offload_search.stage_device_bytes(case, case.stages[0], choice)


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.run_steps()]


@pytest.mark.full
def test_blocks_are_recomputed_as_the_memory_asks_and_losses_stay(corpus: str) -> None:
    plain = made(corpus, micro_batch=8)
    want = losses(plain)
    low, high = (need_of(plain, 8, kind) for kind in ("full", "none"))
    found = []
    for available in (low, (low + high) // 2):
        limit = (available + 1.0) / GIB
        trainer = made(
            corpus, recompute="memory_budget", memory__device_limit_gib=limit, micro_batch=8
        )
        kinds = resolve.current_modes(get_parallel_model(trainer.state.model))
        found.append(recompute_budget.recompute_fraction(kinds))
        assert "micro-batch 8, recomputation per block: " in trainer.notes[0]
        if available == (low + high) // 2:
            assert len(set(kinds)) > 1, kinds
            assert losses(trainer) == pytest.approx(want, rel=1e-12)
    assert found[0] > found[1] > 0.0


def test_trials_leave_no_trace(corpus: str) -> None:
    trainer = made(corpus, micro_batch=8)
    parallel = get_parallel_model(trainer.state.model)
    before = {name: part.clone() for name, (part, _) in state_tensors(trainer.state).items()}
    drawn = torch.random.get_rng_state()
    resolve.run_trial_steps(
        trainer.run, trainer.state.model, trainer.state.optimizer, trainer.device
    )
    resolve.drop_gradients(parallel, trainer.device)
    assert isinstance(trainer.state.model, Decoder) and len(trainer.state.model.blocks) == LAYERS
    assert set(parallel.recompute_modes.values()) == {"none"}
    assert all(bucket.grad is None for bucket in parallel.bucket_scheduler.buckets)
    assert all(
        torch.equal(part, before[name]) for name, (part, _) in state_tensors(trainer.state).items()
    )
    assert float(trainer.state.optimizer.num_updates) == 0.0
    assert torch.equal(torch.random.get_rng_state(), drawn)


@pytest.mark.full
def test_the_micro_batch_is_found(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_budget, "USEFUL_TOKENS", 32)
    monkeypatch.setattr(recompute_budget, "OVERHEAD_TOKENS", 2)
    plain = made(corpus, global_batch=4, micro_batch=2)
    rich = made(corpus, global_batch=4, recompute="memory_budget")
    assert rich.run.plan.micro_batch == 2, "32 tokens are enough"
    assert set(get_parallel_model(rich.state.model).recompute_modes.values()) == {"none"}
    tight = min(need_of(plain, 2, kind) for kind in ("none", "selective", "full")) - 1
    poor = made(
        corpus, global_batch=4, recompute="memory_budget", memory__device_limit_gib=tight / GIB
    )
    assert poor.run.plan.micro_batch == 1
    assert losses(poor) == pytest.approx(losses(plain), rel=1e-12)
    assert poor.run.check_and_resolve(1) == poor.run, (
        "a run that is continued keeps its micro-batch"
    )


@pytest.mark.full
def test_too_small_a_budget_is_refused(corpus: str) -> None:
    with pytest.raises(PlanError) as caught:
        made(corpus, recompute="memory_budget", memory__device_limit_gib=1e-4)
    text = str(caught.value)
    assert re.search(r"a rank needs at least [\d.]+ GiB, but may use 0.0001 GiB \(", text)
    assert (
        "must fit. Use a larger memory.device_limit_gib, memory.auto=True, a smaller data.seq_len"
        in text
    )


def short(asked: str) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has")


def test_a_fit_that_does_not_fit_is_tried_again(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial step fails twice: the limit falls by what was missing, by 5 % at least."""
    want, tries, limits = losses(made(corpus, micro_batch=8)), list[int](), list[int]()
    search = resolve.offload_search.enumerate_fits

    def trial(*_: Any) -> int:
        """It fails, then reports a peak above the limit, then fits."""
        tries.append(1)
        if len(tries) == 1:
            raise short("1.00 KiB")
        return limits[-1] + 200 * 1024 if len(tries) == 2 else limits[-1]

    def fits(case: Any) -> Any:
        # Explanations also search without a limit.
        limits.extend([case.device_limit] if case.device_limit < GIB else [])
        return search(case)

    monkeypatch.setattr(resolve, "run_trial_steps", trial)
    monkeypatch.setattr(resolve.offload_search, "enumerate_fits", fits)
    limit = 2_500_000
    trainer = made(corpus, memory__auto=True, memory__device_limit_gib=limit / GIB, micro_batch=8)
    assert limits[:3] == [limit, limit - limit // 20, limit - limit // 20 - 200 * 1024]
    assert len(tries) == 3 and sum("chosen again" in note for note in trainer.notes) == 2
    assert losses(trainer) == pytest.approx(want, rel=1e-12)
    predicted = trainer.memory_tracker.predicted_usage
    assert predicted is not None and predicted.total_bytes <= limits[2]
    monkeypatch.setattr(
        resolve, "run_trial_steps", lambda *_: (_ for _ in ()).throw(short("1.00 GiB"))
    )
    with pytest.raises((DeviceMemoryError, PlanError)):
        made(corpus, memory__auto=True, memory__device_limit_gib=limit / GIB, micro_batch=8)


def test_what_torch_says_is_missing() -> None:
    words = "Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 4 GiB of which 1.00 GiB is"
    assert resolve.missing_bytes(f"{words} free.") == 2 * GIB
    assert resolve.missing_bytes("Tried to allocate 20.00 MiB") == 20 * 2**20
    assert resolve.missing_bytes("no words") == 0


def on_grid(
    grid: Grid, corpus: str, limit: float, how: dict[str, Any]
) -> tuple[list[float], list[str], int, list[str]]:
    trainer = made(corpus, grid, memory__device_limit_gib=limit, **how)
    kinds = list(get_parallel_model(trainer.state.model).recompute_modes.values())
    return losses(trainer), kinds, trainer.run.plan.micro_batch, trainer.notes


@pytest.mark.parametrize(
    "degrees",
    [{"depth": 2, "data": 2}, pytest.param({"row": 2, "col": 2}, marks=pytest.mark.full)],
    ids=str,
)
@pytest.mark.full
def test_ranks_agree(pool: Pool, corpus: str, degrees: dict[str, int]) -> None:
    rich = pool.on_grid(degrees, on_grid, corpus, 1.0, {"recompute": "memory_budget"})
    want = losses(made(corpus))
    cases: list[tuple[float, dict[str, Any]]] = [
        (0.0017, {"recompute": "memory_budget"}),
        (
            0.0015,
            {
                "memory__auto": True,
                "memory__optimizer_states": "device",
                "memory__offload_tile": 4096,
            },
        ),
    ]
    for limit, how in cases:
        found = pool.on_grid(degrees, on_grid, corpus, limit, how)
        assert all(one[1:] == found[0][1:] for one in found[1:])
        assert found[0][0] == pytest.approx(want, rel=1e-9)
    assert set(rich[0][1]) == {"none"}


def fitted(
    grid: Grid, corpus: str, changes: dict[str, Any], modes: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A run and what was chosen for it. modes: of all blocks, given by hand."""
    trainer = made(corpus, grid, **changes)
    kinds = get_parallel_model(trainer.state.model).recompute_modes
    if modes:
        kinds.update({name: modes[int(name.rpartition(".")[2])] for name in kinds})  # type: ignore[misc]
    predicted = trainer.memory_tracker.predicted_usage
    return {
        "losses": losses(trainer),
        "modes": dict(kinds),
        "micro": trainer.run.plan.micro_batch,
        "memory": trainer.run.memory,
        "notes": trainer.notes,
        "bytes": 0 if predicted is None else predicted.total_bytes,
    }


ORDER = {"schedule": "1f1b"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("degrees", "limit", "changes"),
    [
        ({"pipe": 2}, 0.0007, {"recompute": "memory_budget", **ORDER}),
        ({"pipe": 2}, 0.0006, {"memory__auto": True, "memory__offload_tile": 4096}),
        pytest.param(
            {"pipe": 2, "depth": 2},
            0.0007,
            {"memory__auto": True, "memory__offload_tile": 4096, **ORDER},
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"pipe": 2},
            0.0007,
            {"memory__optimizer_states": "split", "memory__offload_tile": 4096, "micro_batch": 1},
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"pipe": 2},
            0.00045,
            {"memory__activation_offload_fraction": -1.0, "micro_batch": 1, **ORDER},
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
def test_a_pipeline_is_fitted(
    pool: Pool, corpus: str, degrees: dict[str, int], limit: float, changes: dict[str, Any]
) -> None:
    """It takes the steps of a run with the chosen settings given by hand, to the bit."""
    how = {**changes, "memory__device_limit_gib": limit}
    found = pool.on_grid(degrees, fitted, corpus, how)
    first = found[0]
    stages = {str(one["modes"]): one for one in found}
    modes = {name: kind for one in stages.values() for name, kind in one["modes"].items()}
    chosen = tuple(modes[f"blocks.{i}"] for i in range(LAYERS))
    for one in found:
        assert (one["micro"], one["memory"]) == (first["micro"], first["memory"])
        assert 0 < one["bytes"] <= limit * GIB
    assert set(chosen) != {"none"} or first["memory"] != MemoryConfig(device_limit_gib=limit), (
        "something had to be saved"
    )
    memory = {
        f"memory__{name}": getattr(first["memory"], name)
        for name in ("optimizer_states", "optimizer_states_on_device_gib", "optimizer_step_on")
    }
    memory |= {
        f"memory__{name}": getattr(first["memory"], name)
        for name in ("parameters", "activation_offload_fraction", "offload_tile")
    }
    given = {**memory, "micro_batch": first["micro"], "recompute": "none"}
    given |= {key: changes[key] for key in ORDER if key in changes}
    same = pool.on_grid(degrees, fitted, corpus, given, chosen)
    assert same[0]["losses"] == first["losses"]


# ---- what is told -----------------------------------------------------------------------


def test_a_run_that_is_short_says_what_would_fit(corpus: str) -> None:
    """Also if it left nothing open."""
    trainer = made(corpus, micro_batch=8)
    run, model, device = trainer.run, trainer.state.model, trainer.device
    assert trainer.memory_tracker.predicted_usage is None
    plain = pytest.raises(DeviceMemoryError, match=r"Weights, .* Use --memory.auto")
    with plain, trainer.memory_tracker.explain_out_of_memory(device):
        raise short("20 MiB")
    known = resolve.predict_memory(run, model, trainer.state.optimizer, device, 1)
    predicted = known.predicted_usage
    assert predicted is not None and predicted.total_bytes == need_of(trainer, 8, "none")
    assert known.fit_problem is not None
    assert known.fit_problem.micro_batches == (8, 4, 2, 1)
    with pytest.raises(DeviceMemoryError) as caught, known.explain_out_of_memory(device):
        raise short("20 MiB")
    assert caught.value.exit_code == INTERNAL_EXIT_CODE
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("CUDA out of memory. Tried to allocate 20 MiB")
    assert any(re.fullmatch(r"activations +[\d.]+ +-", line) for line in lines)
    at = lines.index("The cheapest changes that are predicted to fit:")
    assert len(lines) == at + 4
    words = r"  --(plan|memory)\.[\w-]+ [\w.]+( --(plan|memory)\.[\w-]+ [\w.]+)?"
    for line in lines[at + 1 :]:
        assert re.fullmatch(words + r": [\d.]+ GiB, \d+\.\d\dx the time", line), line
    with pytest.raises(RuntimeError, match=r"^other$"), known.explain_out_of_memory(device):
        raise RuntimeError("other")


def test_the_command_tells_it_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fit, its table in the report, and the error of a step that is short all the same."""
    out, issue = tmp_path / "run", Trainer.issue_step

    def failing(trainer: Trainer, *arguments: Any, **options: Any) -> Any:
        if trainer.state.step == 3:
            raise short("20.00 MiB")
        return issue(trainer, *arguments, **options)

    monkeypatch.setattr(Trainer, "issue_step", failing)
    fitted = ("--memory.auto", "True", "--plan.global-batch", "2", "--plan.data", "1")
    steps = ("--train.steps", "5", "--train.output-dir", str(out))
    assert call("train", *SMALL_OPTIONS, *fitted, *steps) == INTERNAL_EXIT_CODE
    said = capsys.readouterr()
    assert "recomputation per block: 2 none" in said.out and "sum of tensors" in said.out
    assert said.err.startswith("DeviceMemoryError: CUDA out of memory.")
    assert (
        "The cheapest changes that are predicted to fit" in said.err and "Traceback" not in said.err
    )
    facts = json.loads((out / "run.json").read_text())
    assert facts["status"].startswith("failed: CUDA out of memory.")
    measured = facts["memory"]["measured"]["device"]
    assert measured["weights"] == measured["gradients"] == measured["moments"] / 2
    page = (out / "report.html").read_text()
    assert "<h2>Memory</h2>" in page and "device, predicted" in page
    assert not breakdown.memory_section(None) and not breakdown.memory_lines({"predicted": 3})
