"""Loops of Lightning Fabric and Accelerate on a grid learn what they learn on one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment
from torch import Tensor

from loops import BATCH, accelerate_loop, adamw_of, fabric_loop, loader_of, model_of
from pool import Pool
from ranvier import Accelerator, RanvierStrategy
from ranvier.errors import DataError, NumericError, PlanError
from ranvier.grid import Grid
from ranvier.integrations.training_loop import (
    AdamW,
    GridModel,
    local_rows,
    param_group_indices,
    put_on_grid,
)
from states import assemble
from use_models import tokens

GRIDS = [{"row": 2, "col": 2}, {"data": 2, "depth": 2}]
LIMIT = {"gpt2": 1e-9, "decoder": 1e-9, "llama": 1e-4}


class Joined(LightningEnvironment):
    """Processes that are there already."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.rank, self.world = grid.rank, grid.world_size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def global_rank(self) -> int:
        return self.rank

    def local_rank(self) -> int:
        return self.rank

    def world_size(self) -> int:
        return self.world


def fabric_of(grid: Grid, **options: Any) -> Fabric:
    """Fabric on a grid."""
    fabric = Fabric(
        strategy=RanvierStrategy(grid=grid),
        devices=grid.world_size,
        accelerator="cpu",
        plugins=[Joined(grid)],
        **options,
    )
    fabric.launch()
    return fabric


def on_fabric(grid: Grid, kind: str, folder: str, resume: str) -> dict[str, Any]:
    found = fabric_loop(fabric_of(grid), kind, folder=folder, resume=resume)
    return {**found, "model": found["model"].parallel.sharded_state()}


@functools.cache
def alone(kind: str) -> dict[str, Any]:
    """The loop as it was: Fabric's own strategy of one process, plain PyTorch."""
    fabric = Fabric(devices=1, accelerator="cpu")
    found = fabric_loop(fabric, kind)
    named = found["model"].module.named_parameters()
    return {**found, "model": {name: p.detach() for name, p in named}}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "kind",
    ["decoder", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("gpt2", "llama"))],
)
def test_a_loop_of_fabric_learns_the_same(pool: Pool, kind: str, tmp_path: Path) -> None:
    want, limit = alone(kind), LIMIT[kind]
    assert want["losses"][-1] < 0.9 * want["losses"][0] and max(want["norms"]) > 0.5
    here = tmp_path / "one"
    told = [on_fabric(Grid({}), kind, str(here), "")]
    grids = GRIDS if kind != "llama" else GRIDS[:1]
    for degrees in grids:
        told += pool.on_grid(degrees, on_fabric, kind, "", "")
    for one in told:
        assert one["losses"] == pytest.approx(want["losses"], rel=limit)
        assert one["norms"] == pytest.approx(want["norms"], rel=limit)
    if limit > 1e-9:
        return
    for states in (told[:1], told[1:5], told[5:]):
        for name, x in assemble(one["model"] for one in states).items():
            whole = want["model"][name].reshape(x.shape)  # q, k and v of GPT-2 are apart
            assert float((x - whole).abs().max()) <= limit * float(whole.abs().max()), name


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("decoder", {"context": 2}),
        pytest.param("decoder", {"context": 2, "col": 2}, marks=pytest.mark.full),
        pytest.param("llama", {"context": 2, "row": 2}, marks=pytest.mark.full),
    ],
)
def test_a_loop_over_context_learns_the_same(
    pool: Pool, kind: str, degrees: dict[str, int]
) -> None:
    want = alone(kind)
    for one in pool.on_grid(degrees, on_fabric, kind, "", ""):
        assert one["losses"] == pytest.approx(want["losses"], rel=LIMIT[kind])
        assert one["norms"] == pytest.approx(want["norms"], rel=LIMIT[kind])


def logits_over_context(grid: Grid, masks: Tensor) -> list[Tensor]:
    """Logits of texts with padding at the start or end, and their loss, without gradients."""
    model = put_on_grid(model_of("llama"), grid, device="cpu").eval()
    ids = tokens(len(masks), masks.shape[1], seed=5)
    with torch.no_grad():
        out = model(ids, attention_mask=masks, labels=ids.masked_fill(masks == 0, -100))
    return [out.loss, *(row[mask != 0] for row, mask in zip(out.logits, masks, strict=True))]


@pytest.mark.full
@pytest.mark.parametrize("degrees", [{"context": 2}, {"context": 2, "row": 2}, {"context": 4}])
def test_logits_over_context_return_in_order(pool: Pool, degrees: dict[str, int]) -> None:
    masks = torch.ones(3, 9, dtype=torch.int64)
    masks[1, 6:] = 0
    masks[2, :4] = 0
    want = logits_over_context(Grid({}), masks)
    for found in pool.on_grid(degrees, logits_over_context, masks):
        for have, one in zip(found, want, strict=True):
            assert torch.allclose(have, one, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_what_one_grid_has_saved_another_goes_on_from(pool: Pool, tmp_path: Path) -> None:
    want, kept = alone("decoder"), tmp_path / "kept"
    pool.on_grid(GRIDS[1], on_fabric, "decoder", str(kept), "")
    told = [on_fabric(Grid({}), "decoder", "", str(kept))]
    told += pool.on_grid({"col": 2, "data": 2}, on_fabric, "decoder", "", str(kept))
    for one in told:  # two rounds over the data were over
        assert one["losses"] == pytest.approx(want["losses"][6:], rel=1e-9)
        assert one["norms"] == pytest.approx(want["norms"][6:], rel=1e-9)


def on_accelerator(grid: Grid, folder: str) -> dict[str, Any]:
    accelerator = Accelerator(grid=grid, gradient_accumulation_steps=2)
    return accelerate_loop(accelerator, "gpt2", folder=folder)


@pytest.mark.full
def test_a_loop_of_accelerate_learns_the_same(pool: Pool, tmp_path: Path) -> None:
    from accelerate import Accelerator as Theirs

    want = accelerate_loop(Theirs(cpu=True, gradient_accumulation_steps=2), "gpt2")
    told = [on_accelerator(Grid({}), str(tmp_path / "one"))]
    for degrees in GRIDS:
        told += pool.on_grid(degrees, on_accelerator, str(tmp_path / "".join(degrees)))
    for one in told:
        assert one["losses"] == pytest.approx(want["losses"], rel=1e-9)
        assert one["rate"] == pytest.approx(want["rate"], rel=1e-12)
        scale = float(want["logits"].abs().max())
        assert float((one["logits"] - want["logits"]).abs().max()) <= 1e-9 * scale


def other_uses(grid: Grid) -> list[str]:
    """What ranks say of mistakes, and what the rest of Fabric's methods give."""
    fabric, said = fabric_of(grid), list[str]()
    assert fabric.broadcast({"rank": fabric.global_rank}) == {"rank": 0}
    assert fabric.all_gather(torch.tensor(fabric.global_rank)).tolist() == list(
        range(grid.world_size)
    )
    assert float(fabric.all_reduce(torch.tensor(2.0), reduce_op="sum")) == 2.0 * grid.world_size
    fabric.barrier()
    model = model_of("gpt2")
    model, optimizer = fabric.setup(model, adamw_of(model))
    with fabric.no_backward_sync(model):
        pass
    loader = loader_of("in order")
    loader.batch_sampler.batch_size = 7  # of 24 samples: the last batch has 3
    try:
        for _ in fabric.setup_dataloaders(loader):
            pass
    except DataError as error:
        said.append(str(error))
    generator = torch.Generator().manual_seed(grid.rank)
    sampler = torch.utils.data.RandomSampler(loader.dataset, generator=generator)
    odd = torch.utils.data.DataLoader(loader.dataset, batch_size=BATCH, sampler=sampler)
    try:
        next(iter(fabric.setup_dataloaders(odd)))
    except DataError as error:
        said.append(str(error))
    loss = model(**next(iter(loader_of("in order")))).loss
    fabric.backward(loss * float("nan"))
    try:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    except NumericError as error:
        said.append(str(error))
    return said


def test_mistakes_are_told_on_a_grid(pool: Pool) -> None:
    for said in pool.on_grid({"data": 2}, other_uses):
        assert len(said) == 3
        assert "7 samples" in said[0] and "different samples" in said[1] and "nan" in said[2]


def test_a_call_that_a_grid_has_no_words_for_is_refused() -> None:
    model = put_on_grid(model_of("gpt2"), Grid({}), device="cpu")
    ids = next(iter(loader_of("in order")))["input_ids"]
    assert isinstance(model, GridModel) and model(ids, use_cache=False).logits.shape == (
        *ids.shape,
        29,
    )
    for inputs in ({"inputs_embeds": torch.zeros(1, 2, 16)}, {"output_attentions": True}):
        with pytest.raises(PlanError, match="by name"):
            model(ids, **inputs)
    with pytest.raises(PlanError, match="pipe=2"):
        put_on_grid(model_of("decoder"), Grid({"pipe": 2}), device="cpu")
    with pytest.raises(PlanError, match="Linear"):
        put_on_grid(torch.nn.Linear(2, 2), Grid({}), device="cpu")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "SGD"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad"),
        (
            lambda p: torch.optim.AdamW(
                [{"params": p[:1]}, {"params": p[1:], "betas": (0.5, 0.6)}], lr=1e-3
            ),
            "betas",
        ),
    ],
)
def test_other_optimizers_are_refused(make: Any, words: str) -> None:
    model = model_of("decoder")
    with pytest.raises(PlanError, match=words):
        param_group_indices(model, make(list(model.parameters())))


def test_groups_that_cut_a_kind_of_weights_are_refused() -> None:
    for cut, rest in ((4, None), (0, -1)):
        model = model_of("decoder")
        weights = list(model.parameters())
        groups = [{"params": some} for some in (weights[:cut], weights[cut:rest]) if some]
        named = torch.optim.AdamW(groups)
        members = param_group_indices(model, named)
        with pytest.raises(PlanError, match="groups of AdamW"):
            AdamW.from_optimizer(named, members, put_on_grid(model, Grid({}), device="cpu"))


def test_precision_and_clipping_by_value_are_refused() -> None:
    fabric = Fabric(
        strategy=RanvierStrategy(), devices=1, accelerator="cpu", precision="bf16-mixed"
    )
    with pytest.raises(PlanError, match="bf16-mixed"):
        fabric.launch()
    fabric = fabric_of(Grid({}))
    model = model_of("decoder")
    model, optimizer = fabric.setup(model, adamw_of(model))
    with pytest.raises(PlanError, match="max_norm"):
        fabric.clip_gradients(model, optimizer, clip_val=1.0)
    with pytest.raises(PlanError, match="Save model"):
        optimizer.state_dict()
    with pytest.raises(PlanError, match="not valid JSON"):
        fabric.save("nowhere", {"model": model, "odd": object()})
    assert local_rows(8, Grid({"data": 2, "row": 2}, rank=3)) == range(4, 8)
