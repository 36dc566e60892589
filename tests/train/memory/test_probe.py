"""Fit: a run with little memory takes the same steps, and what was predicted is what is needed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import SMALL, call
from pool import Pool
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.errors import INTERNAL_EXIT_CODE, DeviceMemoryError, PlanError
from ranvier.grid import Grid
from ranvier.memory import recompute_budget
from ranvier.memory.recompute_budget import RecomputeMode, StepMemory
from ranvier.models import Decoder
from ranvier.optim.state_store import NUM_SLOTS
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.planner.memory.measured_states import model_state_sizes
from ranvier.train.memory import breakdown, probe, resolve
from ranvier.train.memory.breakdown import tensors_by_category
from ranvier.train.memory.probe import (
    GIB,
    available_bytes,
    blank_batch,
    candidate_micro_batches,
    live_gradients,
    measure_passes,
)
from ranvier.train.resume.checkpointing import state_tensors
from ranvier.train.step import forward_backward
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


def need_of(trainer: Trainer, micro: int, *kinds: RecomputeMode) -> StepMemory:
    run = trainer.run
    count = min(run.plan.global_batch // (run.plan.num_replicas * micro), resolve.MEASURED_PASSES)
    kinds = kinds or tuple(recompute_budget.RECOMPUTE_COST)
    found = measure_passes(
        run, trainer.state.model, trainer.device, micro, passes=count, kinds=kinds
    )
    assert found is not None
    sizes = model_state_sizes(trainer.state.parallel)
    return StepMemory(found, LAYERS, sizes.weight_bytes + sizes.state_bytes, sizes.publish)


def with_gaps(need: StepMemory, kinds: tuple[RecomputeMode, ...]) -> int:
    """What a device must have for it."""
    return (
        round(
            (need.peak_bytes(kinds) - need.fixed_bytes)
            * (1.0 + resolve.offload_search.FRAGMENTATION_SHARE)
        )
        + need.fixed_bytes
    )


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.run_steps()]


def test_blocks_are_recomputed_as_the_memory_asks_and_losses_stay(corpus: str) -> None:
    plain = made(corpus, micro_batch=8)
    need, want = need_of(plain, 8), losses(plain)
    low, high = (with_gaps(need, (kind,) * LAYERS) for kind in ("full", "none"))  # type: ignore[arg-type]
    found = []
    for available in (low, (low + high) // 2):
        limit = (available + 1.0) / GIB
        trainer = made(
            corpus, recompute="memory_budget", memory__device_limit_gib=limit, micro_batch=8
        )
        kinds = tuple(trainer.state.parallel.recompute_modes.values())
        found.append(recompute_budget.recompute_fraction(kinds))  # type: ignore[arg-type]
        assert "micro-batch 8, recomputation of blocks: " in trainer.notes[0]
        if available == (low + high) // 2:
            assert len(set(kinds)) > 1, kinds
            assert losses(trainer) == pytest.approx(want, rel=1e-12)
    assert found[0] > found[1] > 0.0


@pytest.mark.parametrize(
    ("kind", "micro", "more"),
    [
        ("none", 8, {}),
        (
            "selective",
            4,
            {"model__tie_embeddings": True, "model__vocab": 1000, "data__document_mask": True},
        ),
        ("full", 2, {"train__dtype": "fp32"}),
        pytest.param("none", 2, {"model__layers": 1}, marks=pytest.mark.full),
        pytest.param("full", 8, {"lora__rank": 2}, marks=pytest.mark.full),
        pytest.param("selective", 1, {"data__document_mask": True}, marks=pytest.mark.full),
    ],
)
def test_prediction_is_what_a_step_needs(
    corpus: str, kind: RecomputeMode, micro: int, more: dict[str, Any]
) -> None:
    """Two blocks tell what five need, with one micro-batch and with several."""
    found, want = predicted(Grid({}), corpus, kind, micro, more)
    assert found == pytest.approx(want, rel=0.05 if more.get("model__layers") == 1 else 0.01)


def predicted(
    grid: Grid, corpus: str, kind: RecomputeMode, micro: int, more: dict[str, Any]
) -> tuple[int, int]:
    """Most bytes that the passes of a step have made, and what was predicted."""
    trainer = made(corpus, grid, recompute=kind, micro_batch=micro, **more)
    queue, count = (
        trainer.state.parallel.bucket_scheduler,
        len(trainer.state.model.blocks),
    )
    need = replace(need_of(trainer, micro, kind), num_blocks=count, weight_gather_bytes=0)
    passes = trainer.run.plan.num_micro_batches
    batches = [blank_batch(trainer.run, micro, trainer.device) for _ in range(passes)]
    before = [
        [bucket.data for bucket in queue.buckets],
        [batch.model_inputs() for batch in batches],
    ]
    forward_backward(trainer.state.model, batches)
    queue.begin_step("")
    with probe.HostMemoryCounter(before, partial(live_gradients, queue)) as watch:
        forward_backward(trainer.state.model, batches)
    return watch.peak_bytes(), need.peak_bytes((kind,) * count) - need.fixed_bytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sizes_are_those_of_the_tensors(corpus: str, dtype: str) -> None:
    trainer = made(corpus, micro_batch=8, train__dtype=dtype, model__tie_embeddings=dtype == "fp32")
    parallel, known = (
        trainer.state.parallel,
        tensors_by_category(trainer.state.optimizer),
    )
    found = {name: sum(x.nbytes for x in some) for name, some in known.items()}
    sizes = model_state_sizes(parallel, tile=1024)
    assert (sizes.weight_bytes, sizes.moments) == (found["weights"], found["moments"])
    assert sizes.master == (found["master"] if dtype == "bf16" else 0)
    assert sizes.trained_elements == sum(
        weight.num_elements for weight in parallel.weights.values()
    )
    assert sizes.state_ring == NUM_SLOTS * 1024 * (12 if dtype == "bf16" else 8)
    assert sizes.offload_ring == sizes.state_ring + NUM_SLOTS * 1024 * (6 if dtype == "bf16" else 8)
    table = 257 * trainer.run.model.embed * parallel.bucket_scheduler.buckets[0].data.element_size()
    assert (sizes.head_weights, sizes.other_weights) == (
        (0, 0) if dtype == "fp32" else (table, table)
    )
    assert model_state_sizes(parallel, moments="int8").moments < sizes.moments / 3


def test_selective_keeps_less_than_all_and_more_than_nothing(corpus: str) -> None:
    trainer = made(corpus)
    four, double = (need_of(trainer, micro).passes[0] for micro in (4, 8))
    kept = [four.blocks[kind].saved_bytes for kind in ("none", "selective", "full")]
    assert kept[0] > 1.3 * kept[1] and kept[1] > 3 * kept[2]
    embed, seq = trainer.run.model.embed, trainer.run.data.seq_len
    assert kept[2] == 4 * seq * embed * 8, "the output, which is the input of the next block"
    assert [double.blocks[kind].saved_bytes for kind in double.blocks] == [2 * n for n in kept]
    weights = trainer.state.parallel.weights.items()
    inside = [
        w.num_elements for name, w in weights if "blocks.1." in name and w.param_group == "matrix"
    ]
    assert double.block_grad == four.block_grad == 8 * sum(inside)
    middle = recompute_budget.interpolate_pass(four, double, 0.5)
    assert middle.blocks["full"].saved_bytes == kept[2] * 3 // 2


def test_measuring_and_trials_leave_no_trace(corpus: str) -> None:
    trainer = made(corpus, micro_batch=8)
    parallel = trainer.state.parallel
    before = {name: part.clone() for name, (part, _) in state_tensors(trainer.state).items()}
    drawn = torch.random.get_rng_state()
    need_of(trainer, 8, "none", "full")
    resolve.run_trial_steps(
        trainer.run, trainer.state.model, trainer.state.optimizer, trainer.device
    )
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
    assert set(rich.state.parallel.recompute_modes.values()) == {"none"}
    tight = recompute_budget.min_step_bytes(need_of(plain, 2)) - 1
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


def test_what_is_left_open() -> None:
    sizes = {"embed": 8, "heads": 2, "kv_heads": 2, "mlp": 8, "vocab": 8, "seq": 8}
    plan = Plan(recompute="memory_budget", global_batch=12).check_and_resolve(sizes, 2)
    assert (plan.data, plan.micro_batch) == (2, -1) and plan.check_and_resolve(sizes, 2) == plan
    assert (plan.without_measuring.micro_batch, plan.without_measuring.recompute) == (
        6,
        "selective",
    )
    assert Plan().without_measuring == Plan()
    fitted = Plan(global_batch=12).check_and_resolve(sizes, 2, fitted=True)
    assert fitted.micro_batch == -1 and fitted.without_measuring.micro_batch == 6
    with pytest.raises(PlanError, match="col=4 does not divide micro_batch=6"):
        Plan(recompute="memory_budget", global_batch=6, data=1, col=4).check_and_resolve(sizes, 4)
    col = Plan(recompute="memory_budget", global_batch=24, data=1, col=2)
    assert candidate_micro_batches(col, 16) == [24, 12, 8, 6, 4, 2]
    assert candidate_micro_batches(replace(col, micro_batch=3), 16) == [3]
    assert available_bytes(0.5, torch.device("cpu"), 1) == GIB // 2
    machine = available_bytes(0.0, torch.device("cpu"), 1)
    assert available_bytes(1e6, torch.device("cpu"), 1) == machine, "no more than is there"
    assert available_bytes(0.0, torch.device("cpu"), 2) == pytest.approx(machine / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, set()),
        ({"plan__recompute": "memory_budget"}, {"recompute", "micro_batch"}),
        ({"memory__optimizer_states": "host", "memory__optimizer_step_on": "cpu"}, set()),
        (
            {"memory__optimizer_states": "split"},
            {"optimizer_states_on_device_gib", "optimizer_step_on"},
        ),
        ({"memory__activation_offload_fraction": -1.0}, {"activation_offload_fraction"}),
        (
            {"memory__auto": True},
            {"micro_batch", "recompute", *resolve.RATE_DEPENDENT},
        ),
        (
            {"memory__auto": True, "plan__recompute": "full", "memory__optimizer_states": "host"},
            {"micro_batch", *resolve.RATE_DEPENDENT} - {"optimizer_states"},
        ),
    ],
)
def test_what_is_given_is_kept(changes: dict[str, Any], want: set[str]) -> None:
    assert resolve.open_settings(run_of("unused", {}, 1, **changes)) == want


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"plan__pipe": 2, "plan__data": 1},
            r"memory.auto=True with plan.pipe=2\. .* plan.pipe=1",
        ),
        (
            {"plan__cuda_graph": True, "data__document_mask": False},
            "memory.auto=True with plan.cuda_graph=True",
        ),
    ],
)
def test_fits_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    run = RunConfig()
    for name, value in {**changes, "memory__auto": True}.items():
        section, _, key = name.partition("__")
        run = replace(run, **{section: replace(getattr(run, section), **{key: value})})
    with pytest.raises(PlanError, match=words):
        run.check_and_resolve(run.plan.pipe)


def short(asked: str) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has")


def test_a_fit_that_does_not_fit_is_tried_again(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial step fails twice: the limit falls by what was missing, by 5 % at least."""
    want, tries, limits = losses(made(corpus, micro_batch=8)), list[int](), list[int]()
    search = resolve.offload_search.enumerate_fits

    def trial(*_: Any) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise short("1.00 KiB" if len(tries) == 1 else "200.00 KiB")

    def fits(case: Any) -> Any:
        limits.append(case.device_limit)
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


def test_weights_go_before_two_blocks_are_measured_if_they_must(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that holds no two blocks beside all weights; steps stay as they are."""
    probed = resolve.MemoryProbes.step_passes

    def passes(self: resolve.MemoryProbes, micro: int, count: int) -> Any:
        home = get_parallel_model(self.model).bucket_scheduler.host_offload is not None
        return probed(self, micro, count) if home else None

    whole = [row["loss"] for row in made(corpus, global_batch=4).run_steps()]
    monkeypatch.setattr(resolve.MemoryProbes, "step_passes", passes)
    trainer = made(corpus, global_batch=4, memory__auto=True, memory__device_limit_gib=0.01)
    assert trainer.run.memory.parameters == "host"
    assert [row["loss"] for row in trainer.run_steps()] == pytest.approx(whole, rel=1e-9)


def test_what_torch_says_is_missing() -> None:
    words = "Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 4 GiB of which 1.00 GiB is"
    assert resolve.missing_bytes(f"{words} free.") == 2 * GIB
    assert resolve.missing_bytes("Tried to allocate 20.00 MiB") == 20 * 2**20
    assert resolve.missing_bytes("no words") == 0


def on_grid(
    grid: Grid, corpus: str, limit: float, how: dict[str, Any]
) -> tuple[list[float], list[str], int, list[str]]:
    trainer = made(corpus, grid, memory__device_limit_gib=limit, **how)
    kinds = list(trainer.state.parallel.recompute_modes.values())
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


# ---- what is told -----------------------------------------------------------------------


def test_a_run_that_is_short_says_what_would_fit(corpus: str) -> None:
    """Also if it left nothing open: its own blocks are measured, the rest is estimated."""
    trainer = made(corpus, micro_batch=8)
    run, model, device = trainer.run, trainer.state.model, trainer.device
    assert trainer.memory_tracker.predicted_usage is None
    plain = pytest.raises(DeviceMemoryError, match=r"Weights, .* Use --memory.auto")
    with plain, trainer.memory_tracker.explain_out_of_memory(device):
        raise short("20 MiB")
    known = resolve.predict_memory(run, model, trainer.state.optimizer, device, 1)
    need, predicted = need_of(trainer, 8), known.predicted_usage
    assert predicted is not None and known.fit_problem is not None
    assert predicted.allocated_bytes == need.peak_bytes(("none",) * LAYERS)
    for kind, micro, rel in (("none", 4, 0.1), ("full", 8, 0.2), ("full", 1, 0.2)):
        choice = replace(
            known.fit_problem.given_placement, recompute_modes=(kind,) * LAYERS, micro_batch=micro
        )  # type: ignore[arg-type]
        found = (
            resolve.offload_search.predict_breakdown(known.fit_problem, choice).allocated_bytes
            - need.fixed_bytes
        )
        want = need_of(trainer, micro, kind).peak_bytes(choice.recompute_modes) - need.fixed_bytes  # type: ignore[arg-type]
        assert found == pytest.approx(want, rel=rel)
    with pytest.raises(DeviceMemoryError) as caught, known.explain_out_of_memory(device):
        raise short("20 MiB")
    assert caught.value.exit_code == INTERNAL_EXIT_CODE
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("CUDA out of memory. Tried to allocate 20 MiB")
    assert any(re.fullmatch(r"activations +[\d.]+ +-", line) for line in lines)
    at = lines.index("The cheapest changes that would fit, as predicted:")
    assert len(lines) == at + 4
    words = r"  --(plan|memory)\.[\w-]+ [\w.]+( --(plan|memory)\.[\w-]+ [\w.]+)?"
    for line in lines[at + 1 :]:
        assert re.fullmatch(words + r": [\d.]+ GiB, \d+\.\d\d x the time", line), line
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
    assert call("train", *SMALL, *fitted, *steps) == INTERNAL_EXIT_CODE
    said = capsys.readouterr()
    assert "recomputation of blocks: 2 keep all" in said.out and "sum of tensors" in said.out
    assert said.err.startswith("DeviceMemoryError: CUDA out of memory.")
    assert "The cheapest changes that would fit" in said.err and "Traceback" not in said.err
    facts = json.loads((out / "run.json").read_text())
    assert facts["status"].startswith("failed: CUDA out of memory.")
    measured = facts["memory"]["measured"]["device"]
    assert measured["weights"] == measured["gradients"] == measured["moments"] / 2
    page = (out / "report.html").read_text()
    assert "<h2>Memory</h2>" in page and "device, predicted" in page
    assert not breakdown.memory_section(None) and not breakdown.memory_lines({"predicted": 3})
