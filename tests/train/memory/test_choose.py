"""Choices in closed form: what is predicted is what a step needs, and what is given is kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ranvier.config.kinds import named_model
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.config.sections import DataConfig, DecoderModelConfig
from ranvier.cost.optimizer import OptimizerSpec
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.models import Decoder
from ranvier.optim.state_store import NUM_SLOTS
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.planner.memory import model_states
from ranvier.planner.memory.rank_memory import RankMemory
from ranvier.planner.model_spec import load_shipped_spec, resolve_model_spec
from ranvier.tools import dry_run
from ranvier.train.build_model import build_model
from ranvier.train.memory import choose
from ranvier.train.memory.breakdown import tensors_by_category
from ranvier.train.memory.choose import MemoryLimits
from ranvier.train.memory.resolve import build_optimizer
from ranvier.train.memory.usage import (
    GIB,
    HostMemoryCounter,
    available_bytes,
    blank_batch,
    candidate_micro_batches,
    live_gradients,
)
from ranvier.train.step import forward_backward
from training import run_of

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "model__layers": 5,
    "model__embed": 128,
    "model__heads": 8,
    "model__kv_heads": 4,
    "model__head_dim": 16,
    "model__mlp": 352,
    "model__vocab": 1000,
    "data__seq_len": 128,
    "data__document_mask": False,
    "train__dtype": "bf16",
}
"""A model whose tensors are larger than what is constant."""
MOE = {"model__experts": 4, "model__experts_per_token": 2, "model__expert_mlp": 128}
MIXED = ("full", "full", "selective", "none", "none")


class MatmulsInFloat32(TorchDispatchMode):
    """Computes bf16 matrix products in fp32: CPUs without bf16 take 200 times as long otherwise.

    Entered before a counter of tensors, so that the counter does not see the copies.
    """

    ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    OPERATIONS = (
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        ATTENTION,
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in self.OPERATIONS or args[0].dtype != torch.bfloat16:
            return func(*args, **(kwargs or {}))
        outputs = func(*tree_map_only(Tensor, Tensor.float, args), **(kwargs or {}))
        if func is self.ATTENTION:
            # The log-sum-exp is in fp32 in any case.
            return outputs[0].bfloat16(), outputs[1]
        return tree_map_only(Tensor, Tensor.bfloat16, outputs)


def counted_and_predicted(
    modes: tuple[str, ...], micro: int, changes: dict[str, Any]
) -> tuple[int, int]:
    """Peak bytes of the passes of a step on a CPU, besides weights and states."""
    run = run_of("unused", {}, 1, **{**SHAPE, "plan__micro_batch": micro, **changes})
    model = build_model(run, Grid({}), CPU, local_ranks=1)
    assert isinstance(model, Decoder)
    parallel = get_parallel_model(model)
    parallel.recompute_modes.update(zip(parallel.recompute_modes, modes, strict=True))  # type: ignore[arg-type]
    queue = parallel.bucket_scheduler
    batches = [blank_batch(run, micro, Grid({}), CPU) for _ in range(run.plan.num_micro_batches)]
    before = [[bucket.data for bucket in queue.buckets], [b.model_inputs() for b in batches]]
    with MatmulsInFloat32():
        forward_backward(model, batches)
        queue.begin_step("")
        with HostMemoryCounter(before, partial(live_gradients, queue)) as watch:
            forward_backward(model, batches)
    (rank,) = choose.rank_memories(run, resolve_model_spec(run))
    return watch.peak_bytes(), max(one.total_bytes for one in rank.peaks(micro, modes))  # type: ignore[arg-type]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("modes", "micro", "changes", "rel"),
    [
        (("none",) * 5, 8, {}, 0.05),
        (MIXED, 2, {"model__tie_embeddings": True}, 0.05),
        (MIXED, 4, {"lora__rank": 4}, 0.05),
        pytest.param(
            ("none",) * 5, 2, {"model__qk_norm": "per_head"}, 0.05, marks=pytest.mark.full
        ),
        # A CPU has other kernels for these, which copy their inputs.
        (("selective",) * 5, 4, {"data__document_mask": True}, 0.1),
        pytest.param(MIXED, 4, {"model__sliding_window": 32}, 0.1, marks=pytest.mark.full),
        pytest.param(MIXED, 4, MOE, 0.1, marks=pytest.mark.full),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_predicted_peak_is_that_of_a_step(
    modes: tuple[str, ...], micro: int, changes: dict[str, Any], rel: float
) -> None:
    counted, predicted = counted_and_predicted(modes, micro, changes)
    assert predicted == pytest.approx(counted, rel=rel)


@pytest.mark.full
def test_norms_of_a_cpu_save_less_than_those_of_a_gpu() -> None:
    """In fp32 the closed form, which is that of a GPU, is above what a CPU needs."""
    counted, predicted = counted_and_predicted(("none",) * 5, 8, {"train__dtype": "fp32"})
    assert counted < predicted < 1.15 * counted


GRIDS: list[dict[str, Any]] = [
    {"depth": 2, "data": 2, "micro_batch": 2},
    {"pipe": 2, "schedule": "1f1b", "global_batch": 4},
    {"row": 2, "col": 2, "micro_batch": 2},
    {"pipe": 2, "depth": 2, "virtual_stages": 2, "schedule": "interleaved", "global_batch": 8},
    {"pipe": 2, "data": 2, "schedule": "message_driven", "global_batch": 8},
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [{}, MOE], ids=("dense", "moe"))
@pytest.mark.parametrize(
    "layout",
    [*GRIDS[:2], *(pytest.param(one, marks=pytest.mark.full) for one in GRIDS[2:])],
    ids=lambda one: "-".join(one),
)
def test_blocks_of_a_stage_may_have_different_modes(
    layout: dict[str, Any], shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against all tensors of a rank that live at once, on each stage."""
    plan = Plan(**{"data": 1, "micro_batch": 1, "global_batch": 8, **layout})
    sizes = {"layers": 5, "embed": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "mlp": 768}
    sizes |= {key.removeprefix("model__"): 2 * n if n > 99 else n for key, n in shape.items()}
    model = DecoderModelConfig(size="imported", **sizes, vocab=4000, max_seq=512)
    run = RunConfig(model=model, plan=plan, data=DataConfig(seq_len=512))
    prepare = dry_run._prepare_model

    def prepared(run: RunConfig, model: Decoder, load: float) -> None:
        prepare(run, model, load)
        modes = get_parallel_model(model).recompute_modes
        modes.update({name: MIXED[int(name.rpartition(".")[2])] for name in modes})  # type: ignore[misc]

    monkeypatch.setattr(dry_run, "_prepare_model", prepared)
    world = plan.world_size
    for stage in range(plan.pipe):
        rank = stage * (world // plan.pipe)
        found = dry_run.dry_run(run, world=world, rank=rank).memory
        known = dry_run.resolve_dry_run(run, world=world, rank=rank)
        own = choose.rank_memories(known, resolve_model_spec(known))[stage]
        modes = own.own_modes(MIXED)  # type: ignore[arg-type]
        moving = max(one.total_bytes for one in own.peaks(plan.micro_batch, modes))
        predicted = own.sizes.weight_bytes + own.sizes.state_bytes + moving
        assert predicted == pytest.approx(found.allocated_bytes, rel=0.05)


@pytest.mark.sample(1)
@pytest.mark.parametrize("changes", [{"train__dtype": "fp32", "model__tie_embeddings": True}, {}])
def test_sizes_are_those_of_the_tensors(changes: dict[str, Any]) -> None:
    run = run_of("unused", {}, 1, **{**SHAPE, "memory__offload_tile": 4096, **changes})
    model = build_model(run, Grid({}), CPU, local_ranks=1)
    known = tensors_by_category(build_optimizer(run, model, CPU, local_ranks=1))
    held = {name: sum(x.nbytes for x in some) for name, some in known.items()}
    (rank,) = choose.rank_memories(run, resolve_model_spec(run))
    sizes = rank.sizes
    narrow = run.train.dtype == "bf16"
    assert (sizes.weight_bytes, sizes.moments) == (held["weights"], held["moments"])
    assert sizes.master == (held["master"] if narrow else 0)
    weights = get_parallel_model(model).weights.values()
    assert sizes.trained_elements == sum(weight.num_elements for weight in weights)
    assert model_states.TILES_IN_FLIGHT == NUM_SLOTS
    assert sizes.state_ring == NUM_SLOTS * 4096 * (12 if narrow else 8)
    assert sizes.offload_ring == sizes.state_ring + NUM_SLOTS * 4096 * (6 if narrow else 8)
    movable = [w for w in weights if w.param_group != "vector" and not w.bucket.reduce_at_step_end]
    assert sizes.host_weights == sum(w.num_elements for w in movable) * (2 if narrow else 4)
    assert replace(rank, optimizer=OptimizerSpec(moments="int8")).sizes.moments < sizes.moments / 3
    half = replace(rank, density=0.5).sizes
    assert half.host_gradients < sizes.host_gradients and half.moments < sizes.moments


def test_a_choice_needs_no_model() -> None:
    run = RunConfig(
        model=named_model("llama3-8b"), data=DataConfig(seq_len=4096)
    ).check_and_resolve(1)
    run = replace(
        run,
        plan=replace(run.plan, micro_batch=-1, recompute="memory_budget", compile="on"),
        train=replace(run.train, dtype="bf16"),
    )
    spec = load_shipped_spec("llama3-8b")
    rich, poor = (
        choose.choose_memory(run, spec, MemoryLimits(gib * GIB, 0), choose.EQUAL_RATES)
        for gib in (400, 140)
    )
    assert rich.run.plan.micro_batch == 4 and set(rich.placement.recompute_modes) == {"none"}
    assert len(poor.placement.recompute_modes) == 32 and poor.placement != rich.placement
    predicted = poor.tracker.predicted_usage
    assert predicted is not None and predicted.total_bytes <= 140 * GIB
    assert poor.reasons[0].startswith("memory: ")
    with pytest.raises(PlanError, match=r"a rank needs at least [\d.]+ GiB, but may use 40 GiB"):
        choose.choose_memory(run, spec, MemoryLimits(40 * GIB, 0), choose.EQUAL_RATES)


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
    assert available_bytes(0.5, CPU, 1) == GIB // 2
    machine = available_bytes(0.0, CPU, 1)
    assert available_bytes(1e6, CPU, 1) == machine, "no more than is there"
    assert available_bytes(0.0, CPU, 2) == pytest.approx(machine / 2, rel=1e-6)


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
            {"micro_batch", "recompute", *choose.RATE_DEPENDENT},
        ),
        (
            {"memory__auto": True, "plan__recompute": "full", "memory__optimizer_states": "host"},
            {"micro_batch", *choose.RATE_DEPENDENT} - {"optimizer_states"},
        ),
    ],
)
def test_what_is_given_is_kept(changes: dict[str, Any], want: set[str]) -> None:
    assert choose.open_settings(run_of("unused", {}, 1, **changes)) == want


def test_a_recorded_step_is_not_fitted() -> None:
    run = RunConfig()
    for name, value in {
        "plan__cuda_graph": True,
        "data__document_mask": False,
        "memory__auto": True,
    }.items():
        section, _, key = name.partition("__")
        run = replace(run, **{section: replace(getattr(run, section), **{key: value})})
    with pytest.raises(PlanError, match=r"memory\.auto=True with plan\.cuda_graph=True"):
        run.check_and_resolve(1)


def test_measured_times_of_parts_decide_what_a_stage_has(tmp_path: Any) -> None:
    times = tmp_path / "times.toml"
    times.write_text("forward = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0]\n")
    run = run_of("unused", {"pipe": 2}, 1, **SHAPE, plan__stage_profile=str(times))
    first, last = choose.rank_memories(run, resolve_model_spec(run))
    assert isinstance(first, RankMemory)
    assert (first.block_indices, last.block_indices) == ((0, 1, 2, 3, 4), ())
