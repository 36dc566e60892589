"""Checks that a timed step is a right step, before a benchmark times it.

A plain twin (`ranvier.models.Decoder`: eager, in fp32, one sample at a time) and every contestant
get the same seeded weights by their names in the format of Hugging Face. The contestant then takes
its steps as they are timed, all on the first batch, in which samples may repeat, since the twin
computes equal ones once:

    loss       of the first step, relative to the twin's: within 1 %
    gradients  each one's cosine to the twin's at least 0.99, and its norm within 3 %
    updates    loss after each of three updates, relative to the twin's: within 2 %

Only the norm and 64 seeded projections of a gradient are kept, so that a model of 8B fits on one
device. The losses after updates show that a gradient reaches its own weight, at its own rate.
Steps in float8 have limits of their own, from a step known to be right: the twin with the operands
of its matrix products rounded to float8 (`float8_limits`). A ratio is printed only if all
contestants in it have passed; otherwise the reason is printed (`checked_ratio`).
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranvier.data.batch import Batch
from ranvier.models import DecoderConfig
from ranvier.models.config import AdapterConfig
from ranvier.models.hf.family import parameter_shapes
from ranvier.models.hf.registry import FAMILIES
from ranvier.models.lora import adapted_weights, build_decoder
from ranvier.parallel.parallel_model import ParallelModel

# A block that silently fell back to eager would be timed as if it were compiled.
os.environ.setdefault("RANVIER_COMPILE_ERRORS", "raise")

NUM_PROJECTIONS = 64
NUM_UPDATES = 3
SEED = 2026
NamedTensors = Iterable[tuple[str, Tensor]]

# ---- names and weights --------------------------------------------------------------------------

_MIXTURE = FAMILIES["qwen3_moe"]
_SHARED_EXPERTS = {"enter.gate": "gate_proj", "enter.up": "up_proj", "down": "down_proj"}
TWIN_FAMILY = replace(
    _MIXTURE,
    layer_names={
        **_MIXTURE.layer_names,
        **{
            f"blocks.{{i}}.mlp.shared.{ours}": f"model.layers.{{i}}.mlp.shared_experts.{theirs}"
            for ours, theirs in _SHARED_EXPERTS.items()
        },
    },
)
"""Names of all layers that contestants have: those of Qwen3-MoE, which include Llama's and have one
tensor per expert, and shared experts."""


@dataclass(frozen=True)
class Piece:
    """One tensor of the twin as a part of one of our parameters."""

    parameter: str
    expert: int = -1
    """Index along dim 0; -1 for the whole parameter."""

    def select(self, x: Tensor) -> Tensor:
        """Returns the part of our parameter, or of its gradient, as a view."""
        if self.expert < 0:
            return x
        return x[self.expert]


@dataclass(frozen=True)
class TwinWeights(Mapping[str, Tensor]):
    """Seeded weights by Hugging Face name, drawn when they are read.

    dtype: represents all values but those of adapters, so that contestants whose weights have it
        start from the same ones. It must not be narrower than the weights that are updated: if all
        values were multiples of bf16's spacing, and computed with in bf16, rounding would change
        every update in the same way.
    """

    config: DecoderConfig
    device: torch.device
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    seed: int = SEED
    dtype: torch.dtype = torch.bfloat16

    @cached_property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of our parameters by name."""
        shapes = parameter_shapes(self.config)
        if self.lora.rank > 0:
            for own in adapted_weights(self.config, self.lora).values():
                shapes[own.a] = (self.lora.rank, own.shape[1])
                shapes[own.b] = (own.shape[0], self.lora.rank)
        return shapes

    @cached_property
    def pieces(self) -> dict[str, Piece]:
        """The part of our parameters that each tensor is, by Hugging Face name."""
        pieces = {
            entry.name: Piece(entry.our_names[0], entry.expert_index)
            for entry in TWIN_FAMILY.tensor_mappings(self.config)
        }
        if self.lora.rank > 0:
            adapted = adapted_weights(self.config, self.lora)
            for name, piece in list(pieces.items()):
                if piece.parameter in adapted:
                    module = name.removesuffix(".weight")
                    pieces[f"{module}.lora_A.weight"] = Piece(adapted[piece.parameter].a)
                    pieces[f"{module}.lora_B.weight"] = Piece(adapted[piece.parameter].b)
        return pieces

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Position of each tensor, which its seed depends on."""
        return {name: number for number, name in enumerate(self.pieces)}

    @property
    def trained(self) -> list[str]:
        """Names of the tensors with gradients."""
        return [name for name in self.pieces if self.lora.rank == 0 or ".lora_" in name]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        piece = self.pieces[name]
        shape = self.parameter_shapes[piece.parameter]
        return shape if piece.expert < 0 else shape[1:]

    def parameter(self, name: str) -> Tensor:
        """Returns one of our parameters, with all of its experts."""
        names = [one for one, piece in self.pieces.items() if piece.parameter == name]
        if self.pieces[names[0]].expert < 0:
            return self[names[0]]
        return torch.stack([self[one] for one in names])

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape_of(name)
        generator = torch.Generator(self.device).manual_seed(self.seed + self.numbers[name])
        x = torch.randn(shape, device=self.device, generator=generator)
        if len(shape) == 1:
            x = 1.0 + 0.1 * x
        elif "embed_tokens" not in name or self.config.tie_embeddings:
            # The output of a layer is as large as its input, so that every part of a model of any
            # width matters to the loss.
            x = x * shape[-1] ** -0.5
            if ".lora_B" in name:
                # Adapters as large as the weights would make attention so sharp that rounding to
                # bf16 alone breaks the limits in a deep model.
                x = 0.25 * x
        if self.config.experts:
            self._separate_experts(name, x, generator)
        return x if ".lora_" in name else x.to(self.dtype).float()

    def _separate_experts(self, name: str, x: Tensor, generator: torch.Generator) -> None:
        """Gives the E experts of a token E evenly spaced logits, in a random order.

        A rounding error would otherwise send some tokens to another expert, whose gradient then
        differs by more than its limit in a right step too. The first E features of the embedding
        are the levels; no layer writes to them, and router e reads feature e.
        """
        count = self.config.experts
        if "embed_tokens" in name:
            order = torch.rand((len(x), count), device=x.device, generator=generator).argsort(1)
            x[:, :count] = 3.0 * order / (count - 1) - 1.5
        elif "layernorm" in name:
            x[:count] = 1.0
        elif "o_proj" in name or "down_proj" in name:
            x[:count] = 0.0
        elif name.endswith("mlp.gate.weight"):
            x.zero_().fill_diagonal_(1.0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)


class FullState(Mapping[str, Tensor]):
    """The weights of the twin by our names, drawn when they are read."""

    def __init__(self, weights: TwinWeights) -> None:
        self.weights = weights

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.weights.parameter_shapes:
            raise KeyError(name)
        return self.weights.parameter(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights.parameter_shapes)

    def __len__(self) -> int:
        return len(self.weights.parameter_shapes)


class InitialStates(Mapping[str, Tensor]):
    """States of our optimizer before the first update: master weights, and moments of zero."""

    def __init__(self, weights: TwinWeights) -> None:
        self.weights = weights

    def __getitem__(self, name: str) -> Tensor:
        parameter, _, kind = name.rpartition(".")
        if kind == "master":
            return self.weights.parameter(parameter)
        zero = torch.zeros((), device=self.weights.device)
        return zero.expand(self.weights.parameter_shapes[parameter])

    def __iter__(self) -> Iterator[str]:
        kinds = ("master", "mean", "square")
        return (f"{name}.{kind}" for name in self.weights.parameter_shapes for kind in kinds)

    def __len__(self) -> int:
        return 3 * len(self.weights.parameter_shapes)


def load_parallel(parallel: ParallelModel, weights: TwinWeights) -> None:
    """Loads the weights of the twin into one of our models."""
    parallel.load_full_state(FullState(weights))


def parallel_gradients(parallel: ParallelModel, weights: TwinWeights) -> NamedTensors:
    """Yields the gradients of a step of one of our models on one rank, before its update."""
    names: dict[str, list[str]] = {}
    for name, piece in weights.pieces.items():
        names.setdefault(piece.parameter, []).append(name)
    for bucket, pieces in parallel.bucket_scheduler.finish_gradients():
        for weight, part in bucket.split_by_weight(pieces):
            whole = part.new_zeros(weights.parameter_shapes[weight.name])
            bucket.state_shard(weight).write_into(whole, part)
            for name in names[weight.name]:
                yield name, weights.pieces[name].select(whole)


# ---- what is compared ---------------------------------------------------------------------------


@cache
def _random_signs(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Returns 64 pairs of random signs of a matrix, 0 for -1; drawing them takes long."""
    generator = torch.Generator().manual_seed(SEED)
    u, v = (
        torch.randint(2, (NUM_PROJECTIONS, size), generator=generator, dtype=torch.int8)
        for size in (rows, columns)
    )
    return u, v


@dataclass(frozen=True)
class GradientSummary:
    """The norm of a gradient, and seeded projections that preserve inner products."""

    norm: float
    projections: Tensor

    @classmethod
    def of(cls, grad: Tensor) -> GradientSummary:
        """Projects a gradient G `[m, n]` to uᵀ G v for 64 pairs of random signs u and v.

        E[(uᵀ A v)(uᵀ B v)] = ⟨A, B⟩. Gradients of one shape have the same signs.
        """
        matrix = grad.detach().float().reshape(-1, grad.shape[-1])
        left, right = (
            2.0 * signs.to(matrix.device) - 1.0 for signs in _random_signs(*matrix.shape)
        )
        projections = ((left @ matrix) * right).sum(1)
        return cls(float(matrix.norm()), projections.double().cpu())

    def cosine(self, other: GradientSummary) -> float:
        """Returns the cosine of the angle to another gradient; of two zeros it is 1."""
        if self.norm == other.norm == 0.0:
            return 1.0
        if self.norm == 0.0 or other.norm == 0.0:
            return 0.0
        a, b = self.projections, other.projections
        return float(a @ b / (a.norm() * b.norm()))


def summarize(gradients: NamedTensors) -> dict[str, GradientSummary]:
    """Returns a summary of each gradient."""
    return {name: GradientSummary.of(grad) for name, grad in gradients}


@dataclass(frozen=True)
class StepRecord:
    """What is compared of the steps of one model."""

    loss: float
    gradients: Mapping[str, GradientSummary]
    updated_losses: Sequence[float]
    """Loss of the same batch after each update."""


@dataclass(frozen=True)
class UpdateRule:
    """The optimizer of a contestant: AdamW, and Muon of the hidden matrices if `muon` is set."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 0.0
    """0 does not clip."""
    dtype: torch.dtype = torch.float32
    """Dtype of the weights that are updated."""

    def optimizer_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """Returns the optimizer of one parameter."""
        decay = self.weight_decay if parameter.dim() > 1 else 0.0
        return torch.optim.AdamW(
            [parameter], lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=decay
        )


class Twin:
    """The plain model with the seeded weights, in fp32 without TF32.

    Samples go through it one by one, equal ones once, and blocks are recomputed, so that weights,
    gradients, two moments and one sample of a model of 8B fit on one device.
    """

    def __init__(
        self,
        weights: TwinWeights,
        batch: Batch,
        convert: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.weights = weights
        self.samples = distinct_samples(batch)
        self.num_targets = batch.count_targets()
        with torch.device(weights.device):
            self.model: nn.Module = build_decoder(weights.config, weights.lora)
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights.parameter(name))
        self.trained = {
            name: parameter for name, parameter in parameters.items() if parameter.requires_grad
        }
        if convert is not None:
            convert(self.model)
        for block in self.model.get_submodule("blocks").children():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]

    def loss(self) -> float:
        """Returns the mean loss of the batch."""
        with torch.no_grad(), full_precision():
            return sum(loss.item() for loss in self._sample_losses())

    def backward(self) -> float:
        """Returns the mean loss of the batch, and leaves gradients in the parameters."""
        total = 0.0
        with full_precision():
            for loss in self._sample_losses():
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
        return total

    def _sample_losses(self) -> Iterator[Tensor]:
        """Yields the share of each distinct sample in the loss."""
        for sample, count in self.samples:
            yield self.model(**sample.model_inputs()) * (count / self.num_targets)

    def record(self, rule: UpdateRule) -> StepRecord:
        """Takes some updates on the batch."""
        optimizers = {
            name: rule.optimizer_of(parameter) for name, parameter in self.trained.items()
        }
        gradients: dict[str, GradientSummary] = {}
        losses = []
        for step in range(NUM_UPDATES):
            losses.append(self.backward())
            if step == 0:
                gradients = self._summarize_gradients()
            if rule.max_grad_norm > 0.0:
                nn.utils.clip_grad_norm_(self.trained.values(), rule.max_grad_norm)
            for name, parameter in self.trained.items():
                optimizers[name].step()
                parameter.grad = None
                with torch.no_grad():
                    parameter.copy_(parameter.to(rule.dtype))
        losses.append(self.loss())
        return StepRecord(losses[0], gradients, losses[1:])

    def _summarize_gradients(self) -> dict[str, GradientSummary]:
        summaries = {}
        for name, piece in self.weights.pieces.items():
            if piece.parameter in self.trained:
                grad = self.trained[piece.parameter].grad
                assert grad is not None, name
                summaries[name] = GradientSummary.of(piece.select(grad))
        return summaries


def distinct_samples(batch: Batch) -> list[tuple[Batch, int]]:
    """Returns the samples of a batch, and how often each is there."""
    samples: list[tuple[Batch, int]] = []
    for i in range(len(batch.tokens)):
        sample = batch.select(slice(i, i + 1))
        for j, (earlier, count) in enumerate(samples):
            if _have_equal_inputs(sample, earlier):
                samples[j] = earlier, count + 1
                break
        else:
            samples.append((sample, 1))
    return samples


def _have_equal_inputs(first: Batch, second: Batch) -> bool:
    inputs, other_inputs = first.model_inputs(), second.model_inputs()
    return inputs.keys() == other_inputs.keys() and all(
        torch.equal(x, other_inputs[name]) if isinstance(x, Tensor) else x == other_inputs[name]
        for name, x in inputs.items()
    )


@contextmanager
def full_precision() -> Iterator[None]:
    """Context in which matrix products in fp32 do not use TF32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@dataclass
class Reference:
    """The twin of a shape and a batch; its records by what was asked for."""

    weights: TwinWeights
    batch: Batch
    records: dict[tuple[UpdateRule, bool], StepRecord] = field(default_factory=dict)

    def record(self, rule: UpdateRule, *, float8: bool = False) -> StepRecord:
        """Returns the record of a rule. float8: with operands rounded to float8."""
        key = (rule, float8)
        if key not in self.records:
            convert = round_to_float8 if float8 else None
            twin = Twin(self.weights, self.batch, convert)
            self.records[key] = twin.record(rule)
            del twin
            # Its blocks and layers refer to themselves.
            gc.collect()
            if self.weights.device.type == "cuda":
                torch.cuda.empty_cache()
        return self.records[key]


# ---- limits -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Limits of the difference to the twin."""

    loss: float = 0.01
    cosine: float = 0.99
    norm: float = 0.03
    updates: float = 0.02


@dataclass(frozen=True)
class StepErrors:
    """Differences of a record to that of the twin."""

    loss: float
    cosines: Mapping[str, float]
    norms: Mapping[str, float]
    """Relative difference of the norm of each gradient."""
    updates: Sequence[float]

    @classmethod
    def between(cls, record: StepRecord, twin: StepRecord) -> StepErrors:
        """Compares the gradients that both have."""
        common = [name for name in twin.gradients if name in record.gradients]
        pairs = [(name, record.gradients[name], twin.gradients[name]) for name in common]
        return cls(
            _relative(record.loss, twin.loss),
            {name: ours.cosine(theirs) for name, ours, theirs in pairs},
            {name: _relative(ours.norm, theirs.norm) for name, ours, theirs in pairs},
            [
                _relative(ours, theirs)
                for ours, theirs in zip(record.updated_losses, twin.updated_losses, strict=True)
            ],
        )


def _relative(value: float, reference: float) -> float:
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def round_to_float8(model: nn.Module) -> None:
    """Rounds the operands of the linear layers in blocks as tensorwise float8 does."""
    for name, layer in model.get_submodule("blocks").named_modules():
        if isinstance(layer, nn.Linear) and "router" not in name and "adapters" not in name:
            layer.forward = partial(_rounded_product, layer)  # type: ignore[method-assign]


def _rounded_product(layer: nn.Linear, x: Tensor) -> Tensor:
    # torch 2.11 takes no keyword arguments here.
    y: Tensor = _RoundedProduct.apply(x, layer.weight)  # type: ignore[no-untyped-call]
    return y


class _RoundedProduct(torch.autograd.Function):
    """y = q(x) q(W)ᵀ, dx = q(dy) q(W), dW = q(dy)ᵀ q(x), with one scale per tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, w8 = (_round_tensorwise(t, torch.float8_e4m3fn) for t in (x, weight))
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x8, w8 = ctx.saved_tensors
        dy8 = _round_tensorwise(grads[0], torch.float8_e5m2)
        return dy8 @ w8, dy8.flatten(0, -2).T @ x8.flatten(0, -2)


def _round_tensorwise(x: Tensor, dtype: torch.dtype) -> Tensor:
    scale = torch.finfo(dtype).max / x.abs().max().clamp(min=1e-12)
    return (x * scale).to(dtype).to(x.dtype) / scale


def float8_limits(reference: Reference, rule: UpdateRule) -> tuple[Limits, str]:
    """Returns limits for steps in float8, and the numbers that they come from.

    Each is twice the error of the twin with rounded operands, and at most half of that of the
    nearest negative control: gradients of two equal layers swapped, half a gradient, twice the
    learning rate.
    """
    twin = reference.record(rule)
    right = StepErrors.between(reference.record(rule, float8=True), twin)
    doubled = reference.record(replace(rule, lr=2.0 * rule.lr))
    swapped = max(_swapped_cosines(twin.gradients), default=0.0)
    errors = {
        "loss": (right.loss, math.inf),
        "cosine": (1.0 - min(right.cosines.values()), 1.0 - swapped),
        "norm": (max(right.norms.values()), 0.5),
        "updates": (max(right.updates), max(StepErrors.between(doubled, twin).updates)),
    }
    limits = {}
    words = []
    for name, (error, control) in errors.items():
        limit = max(getattr(Limits(), name) if name != "cosine" else 0.01, 2.0 * error)
        limits[name] = min(limit, control / 2.0)
        words.append(
            f"{name} {limits[name]:.4f} (right step {error:.4f}, nearest control {control:.4f})"
        )
        if error > limits[name]:
            words[-1] += ", which cannot tell them apart"
    limits["cosine"] = 1.0 - limits["cosine"]
    return Limits(**limits), "float8 limits of errors: " + ", ".join(words)


def _swapped_cosines(gradients: Mapping[str, GradientSummary]) -> Iterator[float]:
    """Yields the cosine of each block's gradient to the same one of the next block."""
    for name, summary in gradients.items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            following = ".".join([*parts[:2], str(int(parts[2]) + 1), *parts[3:]])
            if following in gradients and len(summary.projections) and "norm" not in name:
                yield summary.cosine(gradients[following])


# ---- checks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """Whether the results of a contestant are right."""

    name: str
    """The contestant."""
    values: str
    """What was compared, with numbers."""
    problems: tuple[str, ...] = ()
    """Values that break a rule; empty if it has passed."""
    loss: float | None = None
    """Loss of the first batch after the last update, which contestants share with the twin."""

    @property
    def passed(self) -> bool:
        """Whether it may be compared by its time."""
        return not self.problems

    def __str__(self) -> str:
        if self.passed:
            return f"{self.name}: right ({self.values})"
        return f"{self.name}: WRONG, {'; '.join(self.problems[:4])} ({self.values})"


class CheckedContestant(Protocol):
    """What a contestant needs to be checked."""

    loss: Tensor | None
    """Of the last step."""
    rule: UpdateRule
    """Its optimizer."""
    on_gradients: Callable[[NamedTensors], None] | None
    """Called in each step with the gradients by Hugging Face name, before the update."""

    def load_weights(self, weights: TwinWeights) -> None:
        """Loads the weights of the twin."""

    def step(self, i: int) -> None:
        """Takes one optimizer step on batch number i, as it is timed."""


def record_steps(contestant: CheckedContestant, weights: TwinWeights) -> StepRecord:
    """Loads the weights and takes steps on the first batch as they are timed."""
    gradients: dict[str, GradientSummary] = {}
    contestant.load_weights(weights)
    contestant.on_gradients = lambda named: gradients.update(summarize(named))
    losses = []
    for _ in range(NUM_UPDATES + 1):
        contestant.step(0)
        contestant.on_gradients = None
        assert contestant.loss is not None
        losses.append(float(contestant.loss))
    return StepRecord(losses[0], gradients, losses[1:])


def check_step(
    name: str,
    contestant: CheckedContestant,
    reference: Reference,
    limits: Limits | None = None,
) -> Check:
    """Compares the steps of a contestant with those of the twin."""
    twin = reference.record(contestant.rule)
    record = record_steps(contestant, reference.weights)
    return compare_records(name, record, twin, limits or Limits())


def compare_records(name: str, record: StepRecord, twin: StepRecord, limits: Limits) -> Check:
    """Compares two records."""
    errors = StepErrors.between(record, twin)
    problems = []
    # `not (a <= b)` also finds NaN.
    if not errors.loss <= limits.loss:
        problems.append(
            f"loss {record.loss:.4f} instead of {twin.loss:.4f} (within {limits.loss:.1%})"
        )
    missing = [one for one in twin.gradients if one not in record.gradients]
    unknown = [one for one in record.gradients if one not in twin.gradients]
    problems += [f"no gradient of {one}" for one in missing]
    problems += [f"a gradient of {one}, which the twin does not have" for one in unknown]
    for one, cosine in sorted(errors.cosines.items(), key=lambda pair: pair[1]):
        if not cosine >= limits.cosine:
            problems.append(
                f"cosine {cosine:.4f} of the gradient of {one} (>= {limits.cosine:.4f})"
            )
    for one, error in sorted(errors.norms.items(), key=lambda pair: -pair[1]):
        if not error <= limits.norm:
            problems.append(
                f"norm of the gradient of {one} differs by {error:.1%} (within {limits.norm:.1%})"
            )
    for number, error in enumerate(errors.updates):
        if not error <= limits.updates:
            problems.append(
                f"loss after update {number + 1} is {record.updated_losses[number]:.4f} instead of "
                f"{twin.updated_losses[number]:.4f} (within {limits.updates:.1%})"
            )
    values = (
        f"loss {record.loss:.4f}, twin {twin.loss:.4f}; least cosine "
        f"{_worst(errors.cosines, least=True)}; norms within {_worst(errors.norms)}; after updates "
        + ", ".join(
            f"{ours:.4f} / {theirs:.4f}"
            for ours, theirs in zip(record.updated_losses, twin.updated_losses, strict=True)
        )
    )
    return Check(name, values, tuple(problems), record.updated_losses[-1])


def _worst(values: Mapping[str, float], *, least: bool = False) -> str:
    if not values:
        return "-"
    name = min(values, key=values.__getitem__) if least else max(values, key=values.__getitem__)
    return f"{values[name]:.4f} ({name})"


def checked_ratio(ratio: float, checks: Sequence[Check | None]) -> str:
    """Formats a ratio, or says which contestant of it has not passed."""
    for check in checks:
        if check is None:
            return "not checked"
        if not check.passed:
            return f"{check.name} is wrong"
    return f"{ratio:.3f}x"
