"""Predictions: golden equations, and what is known about layouts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ranvier.config.plan import Plan
from ranvier.cost.layers import ActivationShape
from ranvier.planner.cluster import Cluster, Link, MatmulRate, load_cluster
from ranvier.planner.comm_volume import ShardingKey, step_comm_volume
from ranvier.planner.frameworks import RANVIER
from ranvier.planner.memory.activations import block_activations
from ranvier.planner.model_spec import ModelSpec, dense_decoder, load_shipped_spec
from ranvier.planner.predict import (
    Candidate,
    Prediction,
    Workload,
    model_flops,
    predict_step,
    stage_seconds,
)
from ranvier.planner.time import compute
from ranvier.planner.time.compute import ComputeContext

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import published_formulas
from published_frameworks import MEGATRON21, MEGATRON22, MEGATRON_DEEPSPEED


def gpt(layers: int = 24, embed: int = 4096, heads: int = 32, vocab: int = 51200) -> ModelSpec:
    """A GPT: hidden layers four times as wide, tied head."""
    return dense_decoder(
        layers=layers,
        embed=embed,
        heads=heads,
        kv_heads=heads,
        head_dim=embed // heads,
        mlp=4 * embed,
        gated=False,
        vocab=vocab,
        tied=True,
    )


def plan(**given: Any) -> Plan:
    return Plan(**{"data": 1, "global_batch": 64, "micro_batch": 1, **given})


def guess(model: ModelSpec, made: Cluster, seq: int = 2048, **given: Any) -> Prediction:
    laid = plan(**given)
    return predict_step(Workload(model, seq, laid.global_batch), Candidate(laid), made)


# ---- golden equations -------------------------------------------------------------------


def test_flops_are_those_of_the_papers() -> None:
    layers, width, seq, words = 96, 12288, 2048, 51200
    found = model_flops(gpt(layers, width, 96, words), seq) * seq
    # arXiv 2104.04473 without recomputation counts all of the square; here half of it is
    paper = 72 * seq * layers * width**2 * (1 + seq / (12 * width) + words / (12 * layers * width))
    assert found == pytest.approx(paper, rel=0.02)


def test_the_bubble_is_that_of_the_schedule() -> None:
    machine = replace(load_cluster("dgx-h100").with_size(nodes=8), straggle=0.0)
    model, even = gpt(layers=64, vocab=512), replace(MEGATRON21, pipe_overlap=1.0)
    for chunks in (1, 2, 4):
        laid = plan(pipe=8, global_batch=32, virtual_stages=chunks)
        found = predict_step(Workload(model, 2048, 32), Candidate(laid), machine, even)
        busy = sum(
            x for name, x in found.seconds_by_part.items() if name in ("compute", "attention")
        )
        assert found.seconds_by_part["bubble"] / busy == pytest.approx(7 / (chunks * 32), rel=0.02)


def test_a_block_keeps_what_the_paper_counts() -> None:
    seq, width, heads, samples = 2048, 6144, 64, 4
    block = gpt(48, width, heads).parts[1]
    tokens = seq * samples * width
    scores = 5 * heads * seq / width
    for row, several in ((1, (True, False)), (8, (True, False))):
        for split in several:
            used = replace(MEGATRON22, sequence_parallel=split)
            setup = ComputeContext(samples=samples, seq=seq, row=row)
            none, _ = published_formulas.kept(block, setup, used, "none")
            outer = 10 / (row if split else 1)
            assert none == pytest.approx(tokens * (outer + (24 + scores) / row))
            selective, _ = published_formulas.kept(block, setup, used, "selective")
            assert selective == pytest.approx(tokens * (outer + 24 / row))
            full, _ = published_formulas.kept(block, setup, used, "full")
            assert full == pytest.approx(2 * tokens / (row if split else 1))


def test_first_stages_hold_what_interleaving_asks() -> None:
    assert published_formulas.flights(1, 1, 8) == 1
    assert published_formulas.flights(8, 1, 64) == 8
    assert published_formulas.flights(8, 1, 4) == 4
    assert published_formulas.flights(8, 2, 64) == 8 * (1 + 7 / 16)


@pytest.mark.parametrize(
    ("ways", "alone", "best"),
    [(4, 12, 12), (8, 28, 24), (16, 60, 40), (32, 124, 64), (64, 252, 96), (128, 508, 144)],
)
def test_tensor_layouts_move_the_bytes_of_axonns_table(ways: int, alone: int, best: int) -> None:
    """Units of the table: elements forward over row and col, times T over m·h (specs of AxoNN)."""
    width, samples, seq = 16384, 128, 2048
    model = gpt(layers=1, embed=width, heads=128)
    flow, found = ActivationShape(samples, seq, itemsize=2, statistics_itemsize=4), {}
    for col in (c for c in (1, 2, 4, 8, 16) if c < ways):
        row = ways // col
        laid = plan(row=row, col=col, global_batch=samples, micro_batch=samples)
        sent = 0.0
        for move in step_comm_volume(model, laid, flow).volumes_of_phases("forward"):
            if move.part == "block" and not move.where.startswith("norm"):
                size = {"row": row, "col": col}[move.axis[0]]
                sent += move.count * move.bytes * (size - 1) / size
        found[col] = sent * ways / (2 * samples * seq * width)
    assert found[1] == pytest.approx(alone)
    assert min(found.values()) == pytest.approx(best)


# ---- roofline ---------------------------------------------------------------------------


def test_products_fill_waves_and_matrix_units() -> None:
    device = load_cluster("dgx-a100").device
    time = compute.matmul_seconds
    full = time(device, 8192, 8192, 8192, "bf16")
    rate = 2 * 8192**3 / full
    assert 0.85 * device.best_matmul_rate("bf16") < rate <= 1.1 * device.best_matmul_rate("bf16")
    assert time(device, 128, 128, 8192, "bf16") > 20 * full / 64**2  # most cores idle
    even, odd = (time(device, 8192, 8192, 8192 - less, "bf16") for less in (4, 1))
    assert 2.4 * full < even < 3 * full and 4 * full < odd < 8 * full  # words of 8 and of 2 bytes
    assert time(device, 8192 - 1, 8192, 8192, "bf16") == pytest.approx(full, rel=0.01)  # tokens


def test_measured_products_are_used_instead() -> None:
    rows = (MatmulRate(512, 512, 512, "bf16", 1e12), MatmulRate(4096, 4096, 4096, "bf16", 4e12))
    device = replace(load_cluster("dgx-a100").device, products=rows, name="measured")
    assert 2 * 4096**3 / compute.matmul_seconds(device, 4096, 4096, 4096, "bf16") == pytest.approx(
        4e12, rel=0.02
    )
    between = 2 * 1448**3 / compute.matmul_seconds(device, 1448, 1448, 1448, "bf16")
    assert 1.5e12 < between < 2.7e12


def test_scores_cost_what_their_heads_do() -> None:
    """BLOOM's sweep: heads of 108 elements took 1.4 times as long as heads of 216."""
    machine, times = load_cluster("jean-zay").with_size(nodes=48), {}
    for heads in (64, 128):
        model = gpt(78, 13824, heads, 250880)
        laid = plan(pipe=12, data=8, row=4, global_batch=2048, micro_batch=4, recompute="full")
        used = MEGATRON_DEEPSPEED
        times[heads] = predict_step(
            Workload(model, 2048, 2048), Candidate(laid), machine, used
        ).step_seconds
    assert 1.25 < times[128] / times[64] < 1.75


@pytest.mark.parametrize(
    ("tokens", "width", "words", "milliseconds"),
    [
        (4096, 768, 50257, (3.354, 2.384, 2.171)),
        (4096, 768, 50260, (1.298, 1.319, 1.190)),
        (4096, 768, 50264, (0.448, 0.411, 0.410)),
        (4096, 1600, 32003, (4.037, 3.090, 2.933)),
        (16384, 4096, 128257, (171.026, 117.354, 112.112)),
        (16384, 4096, 128256, (25.380, 25.195, 26.273)),
        (16384, 4095, 11008, (10.799, 10.326, 9.236)),
        (16384, 4092, 11008, (5.445, 5.382, 5.342)),
        (16383, 4096, 11008, (1.828, 1.949, 2.197)),
    ],
)
def test_products_of_odd_dims_take_as_long_as_measured(
    tokens: int, width: int, words: int, milliseconds: tuple[float, ...]
) -> None:
    """A head or a layer on an H200, forward and both gradients; torch.matmul in bf16."""
    device = load_cluster("dgx-h200").device
    shapes = (
        (tokens, words, width, "y"),
        (tokens, width, words, "dx"),
        (words, width, tokens, "dw"),
    )
    for (m, n, k, kind), measured in zip(shapes, milliseconds, strict=True):
        found = 1e3 * compute.matmul_seconds(device, m, n, k, "bf16", kind)
        assert found == pytest.approx(measured, rel=0.4), kind
    fast = (MatmulRate(4096, 4096, 4096, "bf16", 6e14),)
    there = replace(device, products=fast, name="measured")
    for m, n, k, kind in shapes:
        odd = compute.matmul_seconds(there, m, n, k, "bf16", kind) * 6e14 / (2.0 * m * n * k)
        assert 1 / odd == pytest.approx(compute.alignment_factor(m, n, k, kind)), (
            "measured elsewhere, too"
        )


@pytest.mark.parametrize(("col", "least", "most"), [(1, 0.99, 1.01), (2, 1.01, 1.6)])
def test_gpt2_with_its_own_vocabulary(col: int, least: float, most: float) -> None:
    """The head pads its columns; where col divides them only its own products are slower."""
    machine, times = load_cluster("dgx-h100").with_size(devices=8), dict[int, float]()
    for words in (50257, 50304):
        model = gpt(48, 1600, 25, words)
        times[words] = guess(model, machine, seq=1024, data=8 // col, col=col).step_seconds
    assert least < times[50257] / times[50304] < most
    padded = compute.ComputeContext(samples=1, seq=1024, row=2, col=4)
    assert compute.local_size("vocab", 50257, padded) == 25132  # 50264 words on two ranks


# ---- stages -----------------------------------------------------------------------------


def staged(model: ModelSpec, **given: Any) -> tuple[Prediction, list[float]]:
    """A layout of an eager pipeline, and seconds of a micro-batch on each of its stages."""
    laid = plan(**{"schedule": "1f1b", "compile": "off", **given})
    job, layout = (
        Workload(model, 2048, laid.global_batch),
        Candidate(laid, axis_order=laid.axis_order),
    )
    machine = replace(load_cluster("dgx-h100"), straggle=0.0)
    machine = (
        machine.with_size(devices=laid.world_size)
        if laid.world_size < 8
        else machine.with_size(nodes=laid.world_size // 8)
    )
    return predict_step(job, layout, machine), stage_seconds(job, layout, machine)


@pytest.mark.parametrize("more", [{"row": 8}, {"row": 4, "col": 2}, {"depth": 8}], ids=str)
@pytest.mark.parametrize("extra", [0, 1, 2])
def test_a_stage_without_a_block_hides_nothing(extra: int, more: dict[str, Any]) -> None:
    """The first stage of layers + 2 has the embedding only; others communicate all the same."""
    model, micros = gpt(14, 4096), 32
    batch = micros * more.get("depth", 1) * more.get("col", 1)
    given = {"global_batch": batch, "micro_batch": more.get("col", 1), **more}
    half = staged(model, pipe=7, **given)[0]
    found, stages = staged(model, pipe=14 + extra, **given)
    assert len(stages) == 14 + extra and min(stages) > 0.0
    for axis in more:
        spent = found.seconds_by_part[axis] * (14 + extra) / (7 * half.seconds_by_part[axis])
        assert spent == pytest.approx(1.0, rel=0.02), (axis, "blocks communicate wherever they are")
    waits = sum(found.seconds_by_part[name] for name in ("pipe", "data", "update", "other"))
    assert found.step_seconds == pytest.approx(
        micros * max(stages) + sum(stages) * (1 - 1 / len(stages)) + waits, rel=0.05
    )


def test_the_slowest_stage_decides_whichever_it_is() -> None:
    model, times = gpt(12, 4096), dict[tuple[int, ...], float]()
    for cut in ((), (7,), (3,), (11,)):
        found, stages = staged(model, pipe=2, row=4, global_batch=32, stage_starts=cut)
        times[cut] = found.step_seconds
        mean = sum(stages) / 2
        uneven = 32 * (max(stages) - mean)
        assert found.seconds_by_part["bubble"] == pytest.approx(uneven + mean, rel=0.05), cut
        assert found.step_seconds >= 32 * max(stages)
    assert times[()] <= times[7,] < times[3,] and times[7,] < times[11,]


def test_mixtures_behind_the_first_stage_communicate() -> None:
    """Every second block is a mixture; the first stage has none."""
    model = load_shipped_spec("ted-6.7b-16e")
    given = {"expert": 8, "global_batch": 8192, "micro_batch": 1}
    few = staged(model, pipe=model.num_layers // 2, **given)[0].seconds_by_part["expert"]
    many = staged(model, pipe=model.num_layers, **given)[0].seconds_by_part["expert"]
    assert few > 0.0 and 2 * many == pytest.approx(few, rel=0.1)


def test_a_head_on_the_last_stage_communicates() -> None:
    words = [gpt(8, 1024, 16, vocab=size) for size in (512, 512 * 512)]
    small, large = (
        staged(one, pipe=4, row=2, col=4, micro_batch=4)[0].seconds_by_part for one in words
    )
    assert large["col"] > 1.5 * small["col"], "logits are summed over col"
    alike = staged(words[1], pipe=1, row=2, col=4, micro_batch=4)[0].seconds_by_part
    assert 4 * large["col"] == pytest.approx(alike["col"], rel=0.1)


# ---- what is known about layouts --------------------------------------------------------


@pytest.mark.full
def test_pure_depth_is_best_at_a_large_batch_on_a_fast_network() -> None:
    model, machine = load_shipped_spec("llama3-8b"), load_cluster("dgx-h100").with_size(nodes=16)
    given = {"global_batch": 1024, "seq": 4096, "recompute": "selective"}
    depth = guess(model, machine, depth=128, micro_batch=2, **given).step_seconds
    tensor, pipeline = {"row": 8, "depth": 16}, {"row": 8, "pipe": 4, "data": 4}
    for other in (tensor, pipeline, {"row": 4, "col": 2, "depth": 16}):
        assert depth < guess(model, machine, micro_batch=2, **given, **other).step_seconds, other


def test_a_pipeline_is_best_across_slow_links() -> None:
    model = load_shipped_spec("llama3-8b")
    slow = replace(
        load_cluster("dgx-h100").with_size(nodes=4), network=Link(5e9, 2e-5), name="slow"
    )
    given = {"global_batch": 128, "seq": 4096, "micro_batch": 1, "recompute": "selective"}
    pipe = guess(model, slow, pipe=4, row=8, **given).step_seconds
    for other in ({"depth": 32}, {"row": 32}, {"row": 8, "depth": 4}, {"row": 8, "data": 4}):
        assert pipe < guess(model, slow, **given, **other).step_seconds, other


def test_parts_are_the_whole_and_states_on_the_host_cost_time() -> None:
    model, machine = load_shipped_spec("llama3-8b"), load_cluster("dgx-h100")
    here = guess(model, machine, depth=8, global_batch=16)
    assert here.step_seconds == pytest.approx(sum(here.seconds_by_part.values()))
    assert here.interval[0] < here.step_seconds < here.interval[1]
    assert 0.2 < here.mfu < 0.7
    laid = Candidate(plan(depth=8, global_batch=16), states="host")
    away = predict_step(Workload(model, 2048, 16), laid, machine)
    assert away.seconds_by_part["host"] > 0 and away.seconds_by_part["update"] == 0
    assert away.memory.total_bytes < here.memory.total_bytes
    assert away.step_seconds > here.step_seconds


def test_more_computed_again_takes_longer_and_keeps_less() -> None:
    model, machine, found = load_shipped_spec("llama3-8b"), load_cluster("dgx-h100"), []
    for word in ("none", "selective", "full"):
        found.append(guess(model, machine, depth=8, global_batch=16, seq=8192, recompute=word))
    assert found[0].step_seconds < found[1].step_seconds < found[2].step_seconds
    assert found[0].memory.total_bytes > found[1].memory.total_bytes > found[2].memory.total_bytes


def test_a_graph_leaves_out_what_nobody_reads() -> None:
    """The last product of a block: it is not computed again, and its result is not kept."""
    model, flow, tokens = (
        load_shipped_spec("llama3-8b"),
        ActivationShape(2, 512, itemsize=2, statistics_itemsize=4),
        2 * 512,
    )
    part, device = model.parts[1], load_cluster("dgx-h100").device
    setup = ComputeContext(samples=2, seq=512, is_compiled=True)
    times = compute.block_times(part, device, setup, RANVIER)
    down = compute.matmul_seconds(device, tokens, 4096, 14336, "bf16", "y")
    assert times.recompute_savings == pytest.approx(down)
    assert (
        compute.block_times(
            part, device, replace(setup, is_compiled=False), RANVIER
        ).recompute_savings
        == 0
    )
    one, plan = Workload(model, 512, 2), Plan(data=1, global_batch=2, micro_batch=2, compile="on")
    full = Candidate(replace(plan, recompute="full"))
    again = predict_step(one, full, load_cluster("dgx-h100").with_size(devices=1)).seconds_by_part[
        "recompute"
    ]
    assert again == pytest.approx(model.num_layers * (times.forward - down))
    spot = ShardingKey.from_plan(plan)
    eager, graph = (
        block_activations(model, part, spot, flow, compiled) for compiled in (False, True)
    )
    assert eager.selective - graph.selective == tokens * 4096 * 2


def test_a_graph_keeps_what_products_in_8_bits_read() -> None:
    """One scale: down's input in 8 bits, attention's result once more in 8 bits. Scales by rows:
    inputs of qkv, gate and down are made again; values keep the buffer of queries and keys.
    """
    model, flow, tokens = (
        load_shipped_spec("llama3-8b"),
        ActivationShape(2, 512, itemsize=2, statistics_itemsize=4),
        2 * 512,
    )
    spot = ShardingKey.from_plan(Plan(data=1, global_batch=2, micro_batch=2))
    plain, tensor, row = (
        block_activations(model, model.parts[1], spot, flow, True, fp8).none
        for fp8 in ("", "tensor", "row")
    )
    assert tensor - plain == tokens * (4096 - 14336)
    assert row - plain == 2 * tokens * (4096 + 1024 - 4096 - 4096 - 14336)
    eager = {
        block_activations(model, model.parts[1], spot, flow, False, x).none
        for x in ("", "tensor", "row")
    }
    assert len(eager) == 1


def test_no_torch() -> None:
    code = "import sys, ranvier.planner.predict as p; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
