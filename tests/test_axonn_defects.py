"""The defects found in AxoNN, each as a test that it is not here.

Numbers are rows of the table in its critique.
Not applicable: 4 (Conv2d) and 7 (CPUAdam) concern layers that do not exist here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from equivalence import Case, Serial, batch_of, compare, copied, gradients, micros_of, run_case
from pool import Pool
from ranvier.comm import collectives
from ranvier.cost.layers import ActivationShape
from ranvier.grid import Grid
from ranvier.models import EXAMPLES
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import parallelize
from ranvier.train.step import evaluate, forward_backward

CUBE = {"depth": 2, "row": 2, "col": 2}


def biased(pool: Pool, degrees: dict[str, int], **options: Any) -> list[str]:
    """What differs from one process for a model with biases everywhere."""
    case = Case("biased", **options)
    serial = Serial("biased", batch_of("biased", samples=8, packed=False), 1e-2, 0.5)
    return compare(serial, pool.on_grid(degrees, run_case, case, serial.batch, 1e-2, 0.5))


def test_1_bias_gradients_are_whole_on_row_and_col(pool: Pool) -> None:
    assert biased(pool, {"row": 2, "col": 2}) == []


def test_2_bias_gradients_are_summed_over_depth(pool: Pool) -> None:
    assert biased(pool, {"depth": 2}) == []


def weight_gradients(grid: Grid, recompute: str) -> list[str]:
    """Weights without gradient when everything overlaps and blocks are recomputed."""
    model = Case("llama", recompute=recompute).on(grid)
    forward_backward(model, micros_of(batch_of("llama", samples=8, packed=False), grid, 1))
    return [
        name
        for name, (grad, _) in gradients(model.parallel).items()
        if grad.numel() and not grad.abs().sum() > 0
    ]


def test_3_overlap_with_recomputation_loses_no_gradient(pool: Pool) -> None:
    assert pool.on_grid(CUBE, weight_gradients, "full") == [[]] * 8


def two_grids(grid: Grid) -> tuple[float, float]:
    """Losses of one model on two grids of one process, forward passes interleaved."""
    other = Grid({"depth": 4, "row": 2}, rank=grid.rank, connected=True, groups=grid.groups)
    batch = batch_of("llama", samples=8, packed=False)
    models = [(g, Case("llama").on(g)) for g in (grid, other)]
    losses = [forward_backward(model, micros_of(batch, g, 1)).item() for g, model in models]
    return losses[0], losses[1]


def test_5_two_grids_with_another_depth_live_in_one_process(pool: Pool) -> None:
    pool.on_grid({"depth": 4, "row": 2}, weight_gradients, "none")  # makes its groups
    for first, second in pool.on_grid(CUBE, two_grids):
        assert first == pytest.approx(second, rel=1e-13)


def loaded(grid: Grid, values: dict[str, torch.Tensor]) -> bool:
    """Whether a load puts other values into every weight."""
    model = Case("llama").on(grid)
    before = copied(model.parallel.sharded_state())
    model.parallel.load_full_state(values)
    return all(
        not torch.equal(p, before[n][0]) for n, (p, _) in model.parallel.sharded_state().items()
    )


def test_6_what_is_loaded_is_used(pool: Pool) -> None:
    values = {n: torch.randn(p.shape).double() for n, p in EXAMPLES["llama"]().named_parameters()}
    assert pool.on_grid({"row": 2, "depth": 2}, loaded, values) == [True] * 4


def evaluated(grid: Grid) -> list[str]:
    """What an evaluation between two steps changes."""
    batch, found = batch_of("llama", samples=8, packed=False), []
    results = []
    for look in (False, True):
        model = Case("llama").on(grid)
        optimizer = Optimizer(model.parallel.bucket_scheduler, lr=1e-2)
        micros = micros_of(batch, grid, 1)
        for _ in range(2):
            forward_backward(model, micros)
            optimizer.step()
            before = copied(model.parallel.sharded_state())
            if look:
                evaluate(model, micros)
                after = model.parallel.sharded_state()
                found += [n for n, (p, _) in before.items() if not torch.equal(p, after[n][0])]
        results.append(copied(model.parallel.sharded_state()))
    return found + [n for n, (p, _) in results[0].items() if not torch.equal(p, results[1][n][0])]


@pytest.mark.full
def test_8_evaluation_changes_nothing_and_one_micro_batch_works(pool: Pool) -> None:
    assert pool.on_grid(CUBE, evaluated) == [[]] * 8


class Padded(nn.Module):
    """An embedding with a padding index."""

    dims = {"embed": ("vocab", "embed")}

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"vocab": 29, "embed": 16}
        self.embed = nn.Embedding(29, 16, padding_idx=17)


def padded_gradient(grid: Grid) -> list[int]:
    """Rows of my part of the table, as rows of the whole, that get no gradient."""
    model = parallelize(Padded().double(), grid)
    ids = torch.arange(32).remainder(29).view(4, 8)
    model.embed(ids).sum().backward()
    grad, place = gradients(model.parallel)["embed.weight"]
    rows = grad.view(place.local_shape).abs().sum(1)[: place.valid_shape[0]]
    return [place.global_offset[0] + i for i, row in enumerate(rows.tolist()) if row == 0.0]


def test_9_padding_index_is_a_row_of_the_whole_table(pool: Pool) -> None:
    found = pool.on_grid({"depth": 2, "row": 2}, padded_gradient)
    assert sorted(row for rows in found for row in rows) == [17]


def test_10_hugging_face_heads_are_divided_once(pool: Pool) -> None:
    case = Case("hf-llama", inner="features")
    serial = Serial("hf-llama", batch_of("hf-llama", samples=8, packed=False), 1e-2, 0.5)
    assert compare(serial, pool.on_grid({"row": 2}, run_case, case, serial.batch, 1e-2, 0.5)) == []


def test_11_norms_take_statistics_of_all_features(pool: Pool) -> None:
    assert biased(pool, {"col": 4}, inner="features") == []


def decayed(grid: Grid) -> list[str]:
    """Matrices that do not decay, or vectors that do."""
    weights = Case("gpt2").on(grid).parallel.weights
    embeddings = ("embed.weight", "position.weight")
    return [
        n
        for n, w in weights.items()
        if (w.param_group == "matrix") != (len(w.dims) == 2 and n not in embeddings)
    ]


@pytest.mark.full
def test_12_decay_follows_names_copies_stay_equal_and_ties_hold(pool: Pool) -> None:
    assert pool.on_grid(CUBE, decayed) == [[]] * 8
    serial = Serial("gpt2", batch_of("gpt2", samples=8, packed=False), 1e-2, 0.5)
    results = pool.on_grid(CUBE, run_case, Case("gpt2"), serial.batch, 1e-2, 0.5)
    assert compare(serial, results) == []  # compares copies to the bit as well
    assert "head.weight" not in results[0]["after"]


def bytes_of_leaving(grid: Grid) -> dict[str, int]:
    """Predicted forward bytes of a layer that leaves, by axis."""
    leaf = Case("llama").on(grid).parallel.layers["blocks.0.mlp.down"]
    events = leaf.forward_events(
        ActivationShape(samples=4, seq=8, itemsize=8, statistics_itemsize=8)
    )
    return {event.axis[0]: event.bytes for event in events}


def test_13_a_leaving_layer_moves_its_wide_input_over_col_and_its_narrow_output_over_row(
    pool: Pool,
) -> None:
    tokens, mlp, embed = 4 * 8, 24, 16
    want = {"col": tokens * mlp // 2 * 8, "row": tokens * embed // 2 * 8}
    assert pool.on_grid(CUBE, bytes_of_leaving) == [want] * 8


def unfinished(grid: Grid) -> bool:
    """Whether the result of an asynchronous reduction is right once it is awaited.

    Many times over.
    """
    axis, good = grid.axis("depth"), True
    for i in range(20):
        pending = [
            collectives.reduce_scatter(torch.full((4096,), float(i + j)), axis) for j in range(4)
        ]
        good &= all((p.wait() == 2.0 * (i + j)).all().item() for j, p in enumerate(pending))
    return good


def test_14_results_are_read_after_their_own_handle(pool: Pool) -> None:
    assert pool.on_grid({"depth": 2}, unfinished) == [True, True]
