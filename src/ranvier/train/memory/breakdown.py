"""Memory of a run by category, predicted vs. measured, as text and as a report section.

The same table is part of the report and of an out-of-memory error, which also lists the cheapest
changes that would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.buckets.scheduler import BucketScheduler
from ranvier.errors import DeviceMemoryError
from ranvier.html import page
from ranvier.html.plot import escape_html
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.planner import device_rates, offload_search
from ranvier.planner.communicators import communicator_bytes
from ranvier.planner.device_rates import DeviceRates
from ranvier.planner.memory import breakdown
from ranvier.planner.memory.breakdown import GIB, MemoryBreakdown
from ranvier.planner.memory.rank_memory import RankMemory
from ranvier.planner.offload_search import FitProblem, Placement
from ranvier.train.memory.usage import live_gradients, mark_blocks

OUT_OF_MEMORY_TEXTS = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of torch's out-of-memory messages."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an out-of-memory error."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        word in str(error) for word in OUT_OF_MEMORY_TEXTS
    )


TYPICAL_RATES = DeviceRates(flops=4e14, memory=2e12, to_device=2e10, to_host=2e10, adam=1e9)
"""Rates of a current device, for suggestions when nothing can be measured any more."""
MEMORY_RULE = "Weights, gradients, optimizer states and activations must fit on the device."
MEMORY_REMEDY = "Use --memory.auto, a smaller plan.micro_batch, or more ranks."
OOM_LIMIT_FRACTION = 0.95
"""Fraction of the predicted bytes assumed to be available after the prediction was too low."""


@dataclass
class MemoryTracker:
    """Predicted and measured memory of a run."""

    fit_problem: FitProblem | None = None
    """Inputs of the placement search; None if nothing was predicted."""
    placement: Placement | None = None
    """The placement that the run uses."""
    gradient_bytes: int = 0
    """Bytes of gradients at the memory peak of a step."""
    stage: int = 0
    """The stage of this rank."""
    peers: int = 0
    """Number of point-to-point peers of this rank, over all communicators."""

    @property
    def predicted_usage(self) -> MemoryBreakdown | None:
        """Predicted bytes of a step by category; None if nothing was predicted."""
        if self.fit_problem is None or self.placement is None:
            return None
        return offload_search.predict_breakdown(self.fit_problem, self.placement, self.stage)

    @property
    def rank_memory(self) -> RankMemory:
        """The closed form of the memory of this rank."""
        assert self.fit_problem is not None
        return self.fit_problem.stages[self.stage]

    def track_gradients(self, model: nn.Module, work: Callable[[], Tensor]) -> Tensor:
        """Run the passes of a step and record the gradient bytes at the memory peak.

        On a CPU, which has no peak count, these are the gradients at the end.
        """
        queue = get_parallel_model(model).bucket_scheduler
        most = 0

        def note(_: str) -> None:
            nonlocal most
            cuda = queue.device.type == "cuda"
            if cuda:
                now = torch.cuda.max_memory_allocated(queue.device)
            else:
                now = 0
            # On CUDA (cuda == 1) only if the peak has grown since the last mark; on a CPU always.
            if now >= most + cuda:
                most = now
                self.gradient_bytes = _live_gradient_bytes(queue)

        # With a pipeline this rank does not run all blocks, so calls cannot be numbered.
        whole = get_parallel_model(model).grid.degrees["pipe"] == 1
        with mark_blocks(model, note) if whole else nullcontext():
            loss = work()
        note("end")
        return loss

    def measure_usage(self, optimizer: Optimizer, device: torch.device) -> MemoryBreakdown:
        """Measured bytes of weights, states and gradients; only the sum of the rest is known.

        On a CPU the rest is not counted. Drivers do not report the memory of communicators, so each
        of them counts with the size it had when that was measured.
        """
        here: dict[str, int] = {"gradients": self.gradient_bytes}
        homes = optimizer.bucket_scheduler.host_offload
        if homes is not None:
            # `here` is the device of the run, `there` the host.
            there: dict[str, int] = {"gradients": homes.grad_bytes}
        else:
            there = {}
        seen = set[int]()
        for name, tensors in tensors_by_category(optimizer).items():
            for x in tensors:
                # Tensors may share a whole storage, but never a part of one.
                if x.data_ptr() not in seen:
                    seen.add(x.data_ptr())
                    if x.device.type == device.type:
                        column = here
                    else:
                        column = there
                    column[name] = column.get(name, 0) + x.nbytes
        ways = optimizer.state_store.bytes_by_kind()["staging"]
        for column, size in zip((here, there), ways, strict=True):
            column["staging"] = size
        if device.type == "cuda":
            most = torch.cuda.max_memory_allocated(device)
            if self.fit_problem is not None:
                here["libraries"] = self.fit_problem.library_bytes
            else:
                here["libraries"] = 0
            # What remains of torch's peak is activations; reserved memory above the peak is
            # fragmentation.
            here["activations"] = max(most - sum(here.values()), 0)
            here["fragmentation"] = max(torch.cuda.max_memory_reserved(device) - most, 0)
        made = [
            one for one in optimizer.bucket_scheduler.grid.communicators if one.backend == "nccl"
        ]
        here["communicators"] = communicator_bytes(len(made), self.peers)
        return MemoryBreakdown(here, there)

    def to_dict(self, optimizer: Optimizer, device: torch.device) -> dict[str, Any]:
        """Both tables, as stored in run.json."""
        predicted = self.predicted_usage
        return {
            "predicted": None if predicted is None else predicted.to_dict(),
            "measured": self.measure_usage(optimizer, device).to_dict(),
        }

    @contextmanager
    def explain_out_of_memory(self, device: torch.device) -> Iterator[None]:
        """Convert an out-of-memory error inside into one that lists what would help."""
        words = ""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            words = str(error).splitlines()[0][:200]
        # Raised outside of `except`: the first error would keep the tensors of its frames alive.
        if words:
            raise self.out_of_memory_error(words, device)

    def out_of_memory_error(
        self, words: str, device: torch.device | None = None
    ) -> DeviceMemoryError:
        """The out-of-memory error of a run, with the table and the changes that would fit."""
        predicted = self.predicted_usage
        if predicted is None:
            return DeviceMemoryError(f"{words}. {MEMORY_RULE} {MEMORY_REMEDY}")
        lines = [
            f"{words}. {MEMORY_RULE}",
            *breakdown.format_breakdown(predicted),
            *self._cheapest_changes(predicted, device),
        ]
        return DeviceMemoryError("\n".join(lines))

    def _cheapest_changes(
        self, predicted: MemoryBreakdown, device: torch.device | None
    ) -> list[str]:
        """The cheapest changes that would fit, as lines."""
        assert self.fit_problem is not None and self.placement is not None
        # The run failed although the prediction fitted: assume that less is available than it
        # predicted.
        held = predicted.total_bytes - self.fit_problem.communicator_bytes
        limit = min(self.fit_problem.device_limit, int(OOM_LIMIT_FRACTION * held))
        case = replace(self.fit_problem, device_limit=limit, rates=self._measure_rates(device))
        now = offload_search.predict_fit_seconds(case, self.placement).total
        lines = []
        for found in offload_search.cheapest_changes(case, self.placement):
            slower = found.seconds.total / max(now, 1e-12)
            words = " ".join(offload_search.diff_options(self.placement, found.placement))
            lines.append(f"  {words}: {found.device_bytes / GIB:.3g} GiB, {slower:.2f}x the time")
        if not lines:
            return [
                "No change of the placement (recomputation, offloading, micro-batch) is predicted "
                f"to fit into {limit / GIB:.3g} GiB. Use a smaller model.size or data.seq_len, or "
                "more ranks on depth, row or col."
            ]
        return ["The cheapest changes that are predicted to fit:", *lines]

    def _measure_rates(self, device: torch.device | None) -> DeviceRates:
        assert self.fit_problem is not None
        if device is not None and device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.empty_cache()
                return device_rates.measure_rates(device, torch.bfloat16)
        # With open settings the rates were measured before.
        if self.fit_problem.open_settings:
            return self.fit_problem.rates
        return TYPICAL_RATES


def _live_gradient_bytes(queue: BucketScheduler) -> int:
    """Bytes of the gradients that are currently on the device."""
    made = (
        x.untyped_storage() for x in live_gradients(queue) if x.device.type == queue.device.type
    )
    return sum({x.data_ptr(): x.nbytes() for x in made}.values())


def tensors_by_category(optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """Weights and optimizer states by category, on the device where they are stored."""
    held = optimizer.state_store.states.values()
    scales = [*optimizer.state_store.scales.values()]
    return {
        "weights": [bucket.storage for bucket in optimizer.bucket_scheduler.buckets],
        "master": [held["master"] for held in held if "master" in held],
        "moments": [x for states in held for kind, x in states.items() if kind != "master"]
        + scales
        + [x for x, _ in optimizer.owner_states().values()],
    }


def memory_lines(facts: Any) -> list[str]:
    """The memory tables of a run as lines of text; empty if there are none."""
    predicted, measured = _read_breakdowns(facts)
    if predicted or measured:
        return breakdown.format_breakdown(predicted, measured)
    return []


def memory_section(facts: Any) -> str:
    """The report section on the memory of a run; empty if nothing is known."""
    predicted, measured = _read_breakdowns(facts)
    if predicted is None and measured is None:
        return ""
    unit, cells = breakdown.breakdown_rows(predicted, measured)
    notes = (
        f'<p class="muted">{escape_html(line)}</p>'
        for line in breakdown.breakdown_notes(predicted, measured)
    )
    head = [unit, "device, predicted", "measured", "host, predicted", "measured"]
    return page.render_section("Memory", page.render_table(head, cells), "".join(notes))


def _read_breakdowns(facts: Any) -> tuple[MemoryBreakdown | None, MemoryBreakdown | None]:
    if isinstance(facts, Mapping):
        known = facts
    else:
        known = {}
    return MemoryBreakdown.from_dict(known.get("predicted")), MemoryBreakdown.from_dict(
        known.get("measured")
    )
