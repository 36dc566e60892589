"""Blocks that cannot be compiled: eager numbers, one warning without private words, or an error."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException

from equivalence import compile_with
from ranvier.config.plan import Plan
from ranvier.data.batch import Batch
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.launch import read_compile_errors
from ranvier.models import Decoder, DecoderConfig
from ranvier.models.feed_forward import GatedMLP
from ranvier.nn.compile_fallback import CompileFallback, describe_error, is_compile_error
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.train.step import forward_backward

CONFIG = DecoderConfig(layers=2, embed=16, heads=2, kv_heads=1, head_dim=8, mlp=24, vocab=29)
TOKENS = torch.arange(16).view(2, 8) % 29


def forward_only(graph: Any, inputs: Any) -> Any:
    """A backend that compiles forward graphs only."""
    from torch._dynamo.backends.common import aot_autograd

    def fail(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no kernel for backward")

    return aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=fail)(
        graph, inputs
    )


def failing(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no kernel")


def train(backend: Any, errors: Any = "raise") -> tuple[list[float], str]:
    """Returns the losses of three steps, and what ran without a graph."""
    torch.manual_seed(0)
    plan = Plan(compile="on" if backend else "off", compile_errors=errors)
    model: Any = compile_with(parallelize(Decoder(CONFIG).double(), Grid({}), plan), backend)
    parallel = get_parallel_model(model)
    optimizer = Optimizer(parallel.bucket_scheduler, lr=1e-2)
    losses = []
    for _ in range(3):
        losses.append(forward_backward(model, [Batch(TOKENS, TOKENS)]).item())
        optimizer.step()
    return losses, parallel.compile_fallback.reason


@pytest.mark.parametrize("planted", ["trace", "backend", "backward"])
def test_training_continues_with_eager_losses(
    planted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    want, _ = train("")
    backend: Any = {"trace": "eager", "backend": failing, "backward": forward_only}[planted]
    if planted == "trace":
        forward = GatedMLP.forward

        def broken(self: GatedMLP, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return forward(self, x)

        monkeypatch.setattr("ranvier.models.decoder.GatedMLP.forward", broken)
    have, reason = train(backend, "fallback")
    assert have == pytest.approx(want, rel=1e-12)
    assert reason.startswith("Blocks run without a graph and are slower: ")
    lines = [line for line in capsys.readouterr().err.splitlines() if "without a graph" in line]
    assert lines == [f"warning: {reason}"]
    with pytest.raises(TorchDynamoException):
        train(backend)


def test_an_error_of_the_model_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised again by the eager block."""
    torch._dynamo.reset()

    def broken(self: GatedMLP, x: torch.Tensor) -> torch.Tensor:
        return x @ x.new_zeros(3, 3)

    monkeypatch.setattr("ranvier.models.decoder.GatedMLP.forward", broken)
    with pytest.raises(RuntimeError) as caught:
        train("eager", "fallback")
    assert not is_compile_error(caught.value)


def test_a_training_step_that_cannot_be_captured_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ranvier.train import cuda_graph

    @contextmanager
    def fail(graph: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        yield

    for name, stand_in in (
        ("synchronize", lambda: None),
        ("empty_cache", lambda: None),
        ("CUDAGraph", SimpleNamespace),
        ("graph", fail),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(cuda_graph, "train_step", lambda *_: "result")
    watch: Any = SimpleNamespace(nonfinite_steps=torch.zeros(()))
    for errors in ("fallback", "raise"):
        plan = Plan(compile_errors=errors)  # type: ignore[arg-type]
        model = parallelize(Decoder(CONFIG), Grid({}), plan)
        step = cuda_graph.CudaGraphStep(model, None)  # type: ignore[arg-type]
        results: list[Any] = [step.step([], 0.1, watch) for _ in range(cuda_graph.WARMUP_STEPS)]
        if errors == "raise":
            with pytest.raises(RuntimeError, match="stream is capturing"):
                step.step([], 0.1, watch)
            continue
        results += [step.step([], 0.1, watch) for _ in range(2)]
        assert results == ["result"] * 5
        assert capsys.readouterr().err == (
            "warning: Training steps run without a graph and are slower: RuntimeError: CUDA error: "
            "operation not permitted when stream is capturing\n"
        )


def test_a_reason_is_one_line_without_private_words() -> None:
    cause = RuntimeError("\n g++ /home/me/.cache/a.cpp at 0x7f00aa in process 4711 failed\nmore")
    error = BackendCompilerFailed(lambda: None, cause, None)
    assert describe_error(error) == "RuntimeError: g++ ... at ... in ... failed"
    assert describe_error(ValueError()) == "ValueError"
    assert len(describe_error(ValueError("x" * 1000))) < 250
    assert is_compile_error(error) and is_compile_error(FailOnRecompileLimitHit("limit"))
    for other in (torch.OutOfMemoryError("memory"), RuntimeError("shape"), AssertionError("tuple")):
        assert not is_compile_error(other)


def test_only_the_first_failure_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    fallback = CompileFallback("fallback")
    for text in ("first", "second"):
        fallback.handle("Blocks", RuntimeError(text))
    assert fallback.reason.endswith("RuntimeError: first")
    assert capsys.readouterr().err.count("\n") == 1
    CompileFallback("fallback", is_reporter=False).handle("Blocks", RuntimeError("x"))
    assert not capsys.readouterr().err


def test_the_environment_decides_for_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    def policy(**options: Any) -> str:
        model = parallelize(Decoder(CONFIG), Grid({}), Plan(**options))
        return get_parallel_model(model).compile_fallback.policy

    for value, want in (("raise", "raise"), ("fallback", "fallback"), ("", "fallback")):
        monkeypatch.setenv("RANVIER_COMPILE_ERRORS", value)
        assert read_compile_errors() == policy() == want
        assert policy(compile_errors="raise") == "raise"
    monkeypatch.setenv("RANVIER_COMPILE_ERRORS", "ignore")
    with pytest.raises(PlanError, match=r"RANVIER_COMPILE_ERRORS='ignore' is unknown.*Use"):
        read_compile_errors()
    problems = Plan(compile_errors="warn").find_problems({}, 1)  # type: ignore[arg-type]
    assert any("compile_errors='warn' is unknown" in problem for problem in problems)
