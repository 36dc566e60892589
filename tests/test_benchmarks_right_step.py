"""benchmarks/right_step.py: a right step passes, and each kind of wrong step is seen."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranvier.data.batch import Batch
from ranvier.models import Decoder

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LR = 3e-3


@pytest.fixture(scope="module", autouse=True)
def import_path() -> Iterator[None]:
    """Lets tests import modules of the folder."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def build_task(**changes: Any) -> Any:
    from peers import Shape, Task

    sizes = {"kv_heads": 2, "vocab": 64, "max_seq": 16, **changes}
    shape = Shape.of(2, 32, 4, 48, **sizes)
    return Task.of(shape, 2, torch.device("cpu"), clip=False, lr=LR)


@pytest.fixture(scope="module")
def task(import_path: None) -> Any:
    """A dense model of two equal blocks."""
    return build_task()


@pytest.fixture(scope="module")
def reference(task: Any) -> Any:
    """The twin of the task."""
    return task.reference()


def build_peer(task: Any) -> Any:
    """The plain decoder with torch's AdamW."""
    from peers import Peer, decoder_location

    model = Decoder(task.shape)

    def mean_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        return loss / targets.numel()

    return Peer(model, mean_loss, task, partial(decoder_location, task.shape))


def after_backward(peer: Any, change: Callable[[nn.Module], None]) -> None:
    """Changes the gradients of a peer before anything reads them."""
    mean_loss = peer.mean_loss

    def change_gradients(loss: Tensor) -> Tensor:
        class Changed:
            def backward(self) -> None:
                loss.backward()  # type: ignore[no-untyped-call]
                change(peer.model)

            def detach(self) -> Tensor:
                return loss.detach()

        return Changed()  # type: ignore[return-value]

    peer.mean_loss = lambda tokens, targets: change_gradients(mean_loss(tokens, targets))


def swap_blocks(model: nn.Module) -> None:
    first, second = (block.parameters() for block in model.get_submodule("blocks").children())
    for one, other in zip(first, second, strict=True):
        one.grad, other.grad = other.grad, one.grad


def zero_q(model: nn.Module) -> None:
    grad = model.get_parameter("blocks.1.attention.qkv.q.weight").grad
    assert grad is not None
    grad.zero_()


def test_right_steps_pass(task: Any, reference: Any) -> None:
    from peers import Ours
    from right_step import check_step

    for name, contestant in (("plain", build_peer(task)), ("ranvier", Ours(task, {}))):
        check = check_step(name, contestant, reference)
        assert check.passed, check
        # The rule is strict enough only if three updates change the loss.
        assert check.loss is not None and check.loss < 0.9 * reference.record(contestant.rule).loss


@pytest.mark.parametrize(
    ("change", "words"),
    [(swap_blocks, "cosine"), (zero_q, "blocks.1|layers.1.self_attn.q_proj")],
    ids=["gradients of two equal blocks swapped", "the gradient of q is zero"],
)
def test_a_wrong_gradient_is_seen(
    task: Any, reference: Any, change: Callable[[nn.Module], None], words: str
) -> None:
    from right_step import check_step

    peer = build_peer(task)
    after_backward(peer, change)
    check = check_step("wrong", peer, reference)
    assert not check.passed
    assert any(word in str(check) for word in words.split("|")), check


def test_a_gradient_that_reaches_another_weight_is_seen(task: Any, reference: Any) -> None:
    from right_step import check_step

    peer = build_peer(task)
    peer.optimizer.register_step_pre_hook(lambda *_: swap_blocks(peer.model))
    check = check_step("wrong", peer, reference)
    assert check.problems and all("after update" in problem for problem in check.problems)


def test_a_doubled_learning_rate_is_seen(task: Any, reference: Any) -> None:
    from right_step import check_step

    peer = build_peer(task)
    peer.optimizer.param_groups[0]["lr"] *= 2.0
    check = check_step("wrong", peer, reference)
    assert check.problems and all("after update" in problem for problem in check.problems)


def test_half_the_share_of_an_expert_is_seen() -> None:
    from right_step import check_step

    sizes = {"experts": 4, "experts_per_token": 2, "expert_mlp": 16, "shared_expert_mlp": 16}
    task = build_task(**sizes)
    reference = task.reference()
    peer = build_peer(task)
    assert check_step("right", peer, reference).passed

    peer = build_peer(task)
    layer: Any = peer.model.blocks[0].mlp
    apply_expert = layer._apply_expert
    layer._apply_expert = lambda e, x: apply_expert(e, x) * (0.5 if e == 1 else 1.0)
    check = check_step("wrong", peer, reference)
    assert any("layers.0.mlp.experts.1." in problem for problem in check.problems), check


def test_a_lost_gradient_and_nan_are_seen(task: Any, reference: Any) -> None:
    from right_step import Limits, UpdateRule, compare_records

    twin = reference.record(UpdateRule(LR))
    assert compare_records("same", twin, twin, Limits()).passed
    fewer = {name: one for name, one in twin.gradients.items() if "o_proj" not in name}
    assert not compare_records("lost", replace(twin, gradients=fewer), twin, Limits()).passed
    assert not compare_records("nan", replace(twin, loss=float("nan")), twin, Limits()).passed


def test_projections_preserve_cosines() -> None:
    from right_step import GradientSummary

    torch.manual_seed(0)
    a = torch.randn(40, 30)
    for share in (0.0, 0.1):
        b = a + share * torch.randn_like(a)
        exact = float(torch.cosine_similarity(a.flatten(), b.flatten(), 0))
        assert GradientSummary.of(a).cosine(GradientSummary.of(b)) == pytest.approx(exact, abs=2e-3)
    assert abs(GradientSummary.of(a).cosine(GradientSummary.of(torch.randn(40, 30)))) < 0.5


def test_limits_of_float8_are_below_the_nearest_control(task: Any, reference: Any) -> None:
    from right_step import Limits, StepErrors, UpdateRule, compare_records, float8_limits

    rule = UpdateRule(LR)
    limits, words = float8_limits(reference, rule)
    assert "cannot" not in words, words
    twin, rounded = reference.record(rule), reference.record(rule, float8=True)
    assert StepErrors.between(rounded, twin).cosines != StepErrors.between(twin, twin).cosines
    assert compare_records("float8", rounded, twin, limits).passed
    doubled = reference.record(replace(rule, lr=2.0 * LR))
    assert not compare_records("doubled", doubled, twin, limits).passed
    assert limits.cosine > 0.5 and limits.updates >= Limits().updates


def test_equal_samples_count_as_often_as_they_are_there() -> None:
    from right_step import Reference, UpdateRule, distinct_samples

    task = build_task()
    tokens, targets = task.pairs[0]
    repeated = Batch(*(x[[0, 1, 1, 0, 1]] for x in (tokens, targets)))
    assert [count for _, count in distinct_samples(repeated)] == [2, 3]
    assert len(distinct_samples(Batch(*task.pairs[1]))) == 2
    weights = task.reference().weights
    once, thrice = (Batch(*(x[[i] * 3] for x in (tokens, targets))) for i in (0, 1))
    record, first, second = (
        Reference(weights, batch).record(UpdateRule(LR)) for batch in (repeated, once, thrice)
    )
    assert record.loss == pytest.approx(0.4 * first.loss + 0.6 * second.loss, rel=1e-6)


def test_contestants_start_from_the_values_of_the_twin(task: Any, reference: Any) -> None:
    from peers import Ours

    name = "blocks.1.attention.qkv.q.weight"
    twin = reference.weights.parameter(name)
    assert not torch.equal(twin, twin.bfloat16().float())
    ours = Ours(task, {"train.dtype": "bf16"})
    ours.load_weights(reference.weights)
    master = ours.trainer.state.optimizer.sharded_state()[f"{name}.master"][0]
    assert torch.equal(master.view(twin.shape), twin)
    assert torch.equal(ours.trainer.state.parallel.weights[name].storage.float(), twin.bfloat16())


def test_rows_are_appended_under_one_header(tmp_path: Path) -> None:
    from right_step import Check
    from rows import append_rows, checked_cell, data_columns, package_hash

    columns = data_columns("lora.csv")
    row = {"size": "8b", "checked": checked_cell(Check("a", "")), "source": package_hash()}
    for _ in range(2):
        append_rows(tmp_path / "lora.csv", columns, [row])
    header, *rows = (tmp_path / "lora.csv").read_text().splitlines()
    assert header == ",".join(columns) and len(rows) == 2
    assert rows[0].startswith("8b,,") and rows[0].endswith(f",yes,{package_hash()}")
    assert checked_cell(Check("a", ""), Check("b", "", ("loss",))) == checked_cell(None) == ""


def test_a_ratio_needs_checks() -> None:
    from right_step import Check, checked_ratio

    right, wrong = Check("ours", ""), Check("peer", "", ("loss 1 instead of 2",))
    assert checked_ratio(1.25, [right, right]) == "1.250x"
    assert checked_ratio(1.25, [right, wrong]) == "peer is wrong"
    assert checked_ratio(1.25, [right, None]) == "not checked"


def test_a_wrong_token_is_seen(task: Any) -> None:
    from right_tokens import check_tokens

    torch.manual_seed(0)
    model = Decoder(task.shape).eval()

    @torch.no_grad()
    def logits_of(tokens: Sequence[int]) -> Tensor:
        logits: Tensor = model(torch.tensor([tokens]))[0]
        return logits

    prompts = [[1 + i, 7, 9 + i] for i in range(8)]
    answers: list[list[int]] = [[] for _ in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        for _ in range(4):
            answer.append(int(logits_of([*prompt, *answer])[-1].argmax()))
    check = partial(check_tokens, "engine", prompts, logits_of=logits_of)
    assert check(answers, dtype=torch.float32).passed

    right = answers[3][2]
    second = int(logits_of([*prompts[3], *answers[3][:2]])[-1].topk(2).indices[1])
    answers[3][2] = second
    wrong = check(answers, dtype=torch.float32)
    assert f"token 2 of prompt 3 is {second} instead of {right}" in wrong.problems[0]
    assert not check(answers[:-1], dtype=torch.float32).passed

    # Two logits closer than the rounding of the dtype are alike.
    def close_logits(tokens: Sequence[int]) -> Tensor:
        logits = torch.zeros(len(tokens), 8)
        logits[:, 2], logits[:, 5] = 4.0, 3.99
        return logits

    for token, dtype, passes in (
        (5, torch.bfloat16, True),
        (5, torch.float32, False),
        (4, torch.bfloat16, False),
    ):
        close = check_tokens("engine", [[1]], [[token]], close_logits, dtype)
        assert close.passed is passes, (token, dtype, close)


def test_a_kernel_that_is_off_by_one_is_seen() -> None:
    from right_tokens import check_outputs

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 24, 8, dtype=torch.float64) for _ in range(3))
    twin = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    right = nn.functional.scaled_dot_product_attention(
        *(x.float() for x in (q, k, v)), is_causal=True
    )
    assert check_outputs("kernel", right, twin, 1e-5).passed
    # Each query also sees the key after its own.
    mask = torch.ones(24, 24, dtype=torch.bool).tril(1)
    wrong = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not check_outputs("kernel", wrong, twin, 1e-2).passed
    assert not check_outputs("kernel", right[:, :, 1:], twin, 1e-2).passed
    assert not check_outputs("kernel", right * torch.nan, twin, 1e-2).passed


def test_stand_ins_of_context_kernels_have_the_methods_of_the_package() -> None:
    from context_kernels import KeysInPlace, Ready, ThreadExchange

    from ranvier.nn.context_attention import Exchange, Pending

    for protocol, stand_ins in ((Exchange, (KeysInPlace, ThreadExchange)), (Pending, (Ready,))):
        methods = [name for name in vars(protocol) if not name.startswith("_")]
        assert methods
        for stand_in in stand_ins:
            for name in methods:
                expected = inspect.signature(getattr(protocol, name)).parameters
                assert list(inspect.signature(getattr(stand_in, name)).parameters) == list(expected)
