"""A published model on a grid says, learns and is saved as transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pool import Pool
from ranvier import from_pretrained
from ranvier.errors import DataError, PlanError
from ranvier.grid import Grid
from ranvier.infer.logprobs import score_sequences
from ranvier.integrations.hf_forward import documents_from_mask
from ranvier.integrations.pretrained import PretrainedModel, prompts_from_mask
from states import assemble
from use_models import END, VOCAB, gpt2, llama, loss_of, stored, tokens

GRIDS: list[dict[str, int]] = [{"row": 2, "col": 2, "depth": 2}, {"pipe": 2}, {"data": 2, "col": 2}]
LEFT = [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0, 1, 1, 1, 1, 1, 1, 1, 1]]
RIGHT = [row[::-1] for row in LEFT]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    return {"gpt2": stored(gpt2(), home / "gpt2"), "llama": stored(llama(), home / "llama")}


def inputs(mask: list[list[int]] | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, labels (some without) and mask of three samples."""
    ids = tokens(3)
    labels = ids.clone()
    labels[0, 4:6] = -100  # a text that is filled up at the left begins at 3
    if mask is None:
        return ids, labels, None
    kept = torch.tensor(mask)
    return ids, labels.masked_fill(kept == 0, -100), kept


def asked(grid: Grid, folder: str, mask: Any) -> dict[str, Any]:
    """Everything that can be asked without gradients."""
    model = from_pretrained(folder, grid=grid)
    ids, labels, kept = inputs(mask)
    with torch.no_grad():
        both = model(ids, labels=labels, attention_mask=kept)
        alone = model(ids, attention_mask=kept).logits
    assert torch.equal(both.logits, alone) and both["loss"] is both[0]
    found = {"loss": both.loss, "logits": both.logits}
    if mask != RIGHT:
        left = kept if mask is None else torch.tensor(mask)
        found["text"] = model.generate(ids, max_new_tokens=8, attention_mask=left)
    if mask is None:
        found["drawn"] = model.generate(
            ids, max_new_tokens=4, do_sample=True, temperature=0.8, top_k=9, top_p=0.9, seed=2
        )
    return found


def theirs(model: Any, mask: Any) -> dict[str, Any]:
    """The same by transformers."""
    ids, labels, kept = inputs(mask)
    if kept is not None:  # nothing but what fills up comes before these: transformers learns it
        labels[:, 1:][kept[:, :-1] == 0] = -100
    with torch.no_grad():
        out = model(ids, labels=labels, attention_mask=kept)
        more = kept if kept is not None else torch.ones_like(ids)
        text = model.generate(ids, max_new_tokens=8, attention_mask=more, do_sample=False)
    assert float(out.loss) == pytest.approx(float(loss_of(out.logits, labels)), rel=1e-6)
    return {"loss": loss_of(out.logits, labels), "logits": out.logits, "text": text}


def compare(have: dict[str, Any], want: dict[str, Any], mask: Any, limit: float) -> None:
    kept = torch.ones(3, 9) if mask is None else torch.tensor(mask)
    for row in range(3):
        one, other = (x["logits"][row][kept[row] > 0] for x in (have, want))
        assert float((one - other).abs().max()) <= limit * float(other.abs().max())
    assert float(have["loss"]) == pytest.approx(float(want["loss"]), rel=limit)
    if "text" in have:
        assert have["text"].tolist() == want["text"].tolist()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "limit"), [("gpt2", 1e-12), ("llama", 1e-5)])
@pytest.mark.parametrize(
    "mask",
    [*(pytest.param(mask, marks=pytest.mark.full) for mask in (None, LEFT)), RIGHT],
    ids=["whole", "left", "right"],
)
def test_it_says_what_transformers_says(
    pool: Pool, folders: dict[str, Path], kind: str, limit: float, mask: Any
) -> None:
    want = theirs({"gpt2": gpt2, "llama": llama}[kind](), mask)
    if mask is None and kind == "gpt2":
        assert (want["text"][:, 9:] == END).any(), "a text that ends early is part of the test"
    here = asked(Grid({}), str(folders[kind]), mask)
    compare(here, want, mask, limit)
    for degrees in GRIDS if mask is None else GRIDS[:2]:
        for told in pool.on_grid(degrees, asked, str(folders[kind]), mask):
            compare(told, want, mask, limit)
            if "drawn" in here:
                assert torch.equal(told["drawn"], here["drawn"])


def learned(grid: Grid, folder: str, out: str) -> dict[str, Any]:
    """Losses, gradients of the first step and weights of the last; each coordinate has its rows."""
    model = from_pretrained(folder, grid=grid).train()
    optimizer = model.optimizer(lr=1e-2, decay=0.0, clip=0.0)
    queue, losses, grads = model.parallel.bucket_scheduler, [], {}
    replicas = grid.axis("data", "depth")
    ids = tokens(4)
    labels = ids.clone()
    labels[0, 2:] = -100  # the coordinates have different numbers of targets
    ids, labels = (x.chunk(replicas.size)[replicas.index] for x in (ids, labels))
    for step in range(3):
        out_ = model(ids, labels=labels)
        assert out_.logits is None
        out_.loss.backward()
        if step == 0:
            grads = {
                weight.name: (part.clone(), bucket.state_shard(weight))
                for bucket, pieces in queue.finish_gradients()
                for weight, part in bucket.split_by_weight(pieces)
            }
        optimizer.step()
        losses.append(out_.loss.item())
    if out:
        model.save_pretrained(out)
    return {"losses": losses, "grads": grads, "weights": model.parallel.sharded_state()}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "degrees", [{}, {"row": 2, "col": 2, "depth": 2}, {"data": 2, "row": 2}], ids=str
)
def test_it_learns_as_transformers_does(
    pool: Pool, folders: dict[str, Path], degrees: dict[str, int], tmp_path: Path
) -> None:
    model, out = gpt2().train(), tmp_path / "out"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    ids = tokens(4)
    labels = ids.clone()
    labels[0, 2:] = -100
    losses, grads = [], {}
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(ids).logits, labels)
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()} if step == 0 else grads
        optimizer.step()
        losses.append(loss.item())
    path = str(folders["gpt2"])
    if degrees:
        told = pool.on_grid(degrees, learned, path, str(out))
    else:
        told = [learned(Grid({}), path, str(out))]
    for one in told:
        assert one["losses"] == pytest.approx(losses, rel=1e-9)
    have = assemble(one["grads"] for one in told)
    assert have["blocks.0.mlp.down.weight"].shape == (16, 24)
    for ours, name in (
        ("embed.weight", "transformer.wte.weight"),
        ("norm.bias", "transformer.ln_f.bias"),
    ):
        torch.testing.assert_close(have[ours], grads[name], rtol=1e-9, atol=1e-11)
    down = grads["transformer.h.0.mlp.c_proj.weight"].T
    torch.testing.assert_close(have["blocks.0.mlp.down.weight"], down, rtol=1e-9, atol=1e-11)
    saved = type(model).from_pretrained(out, dtype=torch.float64)
    for (name, x), y in zip(saved.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9, msg=name)


def resaved(grid: Grid, folder: str, out: str) -> None:
    from_pretrained(folder, grid=grid).save_pretrained(out)


def test_what_is_saved_is_bit_for_bit_what_was_loaded(
    pool: Pool, folders: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    before = load_file(folders["llama"] / "model.safetensors")
    for degrees in ({"pipe": 2, "row": 2}, {"data": 2, "col": 2, "depth": 2}):
        out = tmp_path / "".join(degrees)
        pool.on_grid(degrees, resaved, str(folders["llama"]), str(out))
        after = load_file(out / "model.safetensors")
        assert {n: x.dtype for n, x in after.items()} == {n: x.dtype for n, x in before.items()}
        assert all(torch.equal(x, before[name]) for name, x in after.items())
        assert (out / "generation_config.json").exists()


def staged_loss(grid: Grid, folder: str) -> str:
    ids = tokens(2)
    try:
        from_pretrained(folder, grid=grid)(ids, labels=ids)
    except PlanError as error:
        return str(error)
    return ""


def beyond(grid: Grid, folder: str) -> list[str]:
    """What is said of texts beyond the positions that were learned."""
    model, said = from_pretrained(folder, grid=grid), []
    most = model.config.max_seq
    ids = torch.zeros(1, most + 1, dtype=torch.int64)
    places = torch.arange(2)[None] + most - 1
    tries: list[Any] = [
        lambda: model(ids),
        lambda: model.generate(ids[:, 3:], max_new_tokens=4),
        lambda: score_sequences(model.model, [[0] * (most + 2)]),
        lambda: model(ids[:, :2], position_ids=places),
    ]
    for work in tries:
        with torch.no_grad(), pytest.raises(DataError) as error:
            work()
        said.append(str(error.value))
    with torch.no_grad():
        assert model(ids[:, :-1]).logits.shape[1] == most
        assert model.generate(ids[:, 3:], max_new_tokens=2).shape[1] <= most
    return said


def test_texts_beyond_learned_positions_are_named(pool: Pool, folders: dict[str, Path]) -> None:
    for degrees in ({}, {"row": 2}):
        for said in pool.on_grid(degrees, beyond, str(folders["gpt2"])):
            assert all("positions" in one and "vocabulary" not in one for one in said)
            assert all("tokens" in one and "Use " in one for one in said)


def test_gradients_through_stages_are_refused(pool: Pool, folders: dict[str, Path]) -> None:
    for said in pool.on_grid({"pipe": 2}, staged_loss, str(folders["gpt2"])):
        assert "pipe=2" in said and "torch.no_grad" in said


def test_what_cannot_be_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    path = folders["gpt2"]
    for plan, words in (({"row": 2}, "multiple of 2 ranks"), ({"rows": 2}, "rows is not an axis")):
        with pytest.raises(PlanError, match=words):
            from_pretrained(path, plan=plan)
    with pytest.raises(PlanError, match="does not exist"):
        from_pretrained(tmp_path / "nowhere")
    with pytest.raises(DataError, match="padding_side='left'"):
        prompts_from_mask(tokens(3), torch.tensor(RIGHT))
    with pytest.raises(DataError, match="without gaps"):
        documents_from_mask(torch.tensor([[1, 0, 1]]))
    with pytest.raises(DataError, match="-100"):
        documents_from_mask(torch.tensor([[0, 1, 1]]), torch.tensor([[5, 5, 5]]))
    model = from_pretrained(path)
    with pytest.raises(PlanError, match="max_new_tokens=0"):
        model.generate(tokens(1), max_new_tokens=0)
    with pytest.raises(PlanError, match="exists"):
        model.save_pretrained(path)
    assert (
        isinstance(model, PretrainedModel)
        and model.tokenizer is None
        and model.eos_token_ids == [END]
    )
    assert model.config.vocab == VOCAB and model.device.type == "cpu"
