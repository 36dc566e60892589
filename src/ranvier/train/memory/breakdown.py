"""Account: the memory of a run by category, as predicted and as measured, in words and pages.

The same table stands in the report and in the error of a run that had too little memory, there
with the cheapest changes that would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ranvier.buckets.scheduler import BucketScheduler
from ranvier.errors import DeviceMemoryError
from ranvier.html import page
from ranvier.html.plot import escape_html
from ranvier.models import Decoder
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import get_parallel_model
from ranvier.planner import device_rates, offload_search
from ranvier.planner.communicators import communicator_bytes
from ranvier.planner.device_rates import DeviceRates
from ranvier.planner.memory import breakdown
from ranvier.planner.memory.breakdown import GIB, MemoryBreakdown
from ranvier.planner.offload_search import FitProblem, Placement
from ranvier.train.memory.probe import live_gradients, mark_blocks

OUT_OF_MEMORY_TEXTS = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
"""How torch says that memory is too small."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is too small."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        word in str(error) for word in OUT_OF_MEMORY_TEXTS
    )


TYPICAL_RATES = DeviceRates(flops=4e14, memory=2e12, to_device=2e10, to_host=2e10, adam=1e9)
"""Of a device of today, for proposals where nothing can be measured any more."""
MEMORY_RULE = "Weights, gradients, moments and activations of a rank must fit on its device."
MEMORY_REMEDY = "Use --memory.fit auto, a smaller plan.micro_batch, or more ranks."
OOM_LIMIT_FRACTION = 0.95
"""What of a prediction that was too small is held to be there."""


@dataclass
class MemoryTracker:
    """What is known of the memory of a run."""

    fit_problem: FitProblem | None = None
    """What its choices depend on; None: nothing was measured."""
    placement: Placement | None = None
    """How its steps are placed."""
    gradient_bytes: int = 0
    """Bytes of gradients when most was there, as seen in the passes of a step."""
    peers: int = 0
    """Ranks that this one sends to point to point, over all communicators."""

    @property
    def predicted_usage(self) -> MemoryBreakdown | None:
        """What a step needs, by category."""
        if self.fit_problem is None or self.placement is None:
            return None
        return offload_search.predict_breakdown(self.fit_problem, self.placement)

    def track_gradients(self, model: Decoder, work: Callable[[], Tensor]) -> Tensor:
        """Do the passes of a step, and look at the gradients there are when most is there.

        On a host, where nobody counts, these are the gradients at the end.
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
            if now >= most + cuda:  # it has grown since the last block began
                most = now
                self.gradient_bytes = _live_gradient_bytes(queue)

        whole = (
            get_parallel_model(model).grid.degrees["pipe"] == 1
        )  # else other stages have blocks, too
        with mark_blocks(model, note) if whole else nullcontext():
            loss = work()
        note("end")
        return loss

    def measure_usage(self, optimizer: Optimizer, device: torch.device) -> MemoryBreakdown:
        """What a run has held: weights, states and gradients; of the rest only the sum is known.

        On a host nobody counts the rest. No driver tells what the communicators of a process take:
        those that were made count as much as they took where that was measured.
        """
        here: dict[str, int] = {"gradients": self.gradient_bytes}
        homes = optimizer.bucket_scheduler.host_offload
        if homes is not None:
            there: dict[str, int] = {"gradients": homes.grad_bytes}
        else:
            there = {}
        seen = set[int]()
        for name, tensors in tensors_by_category(optimizer).items():
            for x in tensors:
                if x.data_ptr() not in seen:  # many may share a piece of memory, none a part of it
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
            here["activations"] = max(most - sum(here.values()), 0)
            here["fragmentation"] = max(torch.cuda.max_memory_reserved(device) - most, 0)
        made = [
            one for one in optimizer.bucket_scheduler.grid.communicators if one.backend == "nccl"
        ]
        here["communicators"] = communicator_bytes(len(made), self.peers)
        return MemoryBreakdown(here, there)

    def to_dict(self, optimizer: Optimizer, device: torch.device) -> dict[str, Any]:
        """Both tables, as run.json holds them."""
        predicted = self.predicted_usage
        return {
            "predicted": None if predicted is None else predicted.to_dict(),
            "measured": self.measure_usage(optimizer, device).to_dict(),
        }

    @contextmanager
    def explain_out_of_memory(self, device: torch.device) -> Iterator[None]:
        """Inside, an error that says that memory is too small says what would help, too."""
        words = ""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            words = str(error).splitlines()[0][:200]
        if words:
            raise self.out_of_memory_error(words, device)

    def out_of_memory_error(
        self, words: str, device: torch.device | None = None
    ) -> DeviceMemoryError:
        """The error of a run that had too little memory: the table, and what would fit."""
        if self.fit_problem is None or self.placement is None:
            return DeviceMemoryError(f"{words}. {MEMORY_RULE} {MEMORY_REMEDY}")
        predicted = offload_search.predict_breakdown(self.fit_problem, self.placement)
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
        held = predicted.total_bytes - self.fit_problem.communicator_bytes
        limit = min(self.fit_problem.device_limit, int(OOM_LIMIT_FRACTION * held))
        case = replace(self.fit_problem, device_limit=limit, rates=self._measure_rates(device))
        now = offload_search.predict_fit_seconds(case, self.placement).total
        lines = []
        for found in offload_search.cheapest_changes(case, self.placement):
            slower = found.seconds.total / max(now, 1e-12)
            words = " ".join(offload_search.diff_options(self.placement, found.placement))
            lines.append(f"  {words}: {found.device_bytes / GIB:.3g} GiB, {slower:.2f} x the time")
        if not lines:
            return [f"No such change fits into {limit / GIB:.3g} GiB. {MEMORY_REMEDY}"]
        return ["The cheapest changes that would fit, as predicted:", *lines]

    def _measure_rates(self, device: torch.device | None) -> DeviceRates:
        assert self.fit_problem is not None
        if device is not None and device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.empty_cache()
                return device_rates.measure_rates(device, torch.bfloat16)
        if self.fit_problem.open_settings:
            return self.fit_problem.rates
        return TYPICAL_RATES


def _live_gradient_bytes(queue: BucketScheduler) -> int:
    """Bytes of the gradients on the device now."""
    made = (
        x.untyped_storage() for x in live_gradients(queue) if x.device.type == queue.device.type
    )
    return sum({x.data_ptr(): x.nbytes() for x in made}.values())


def tensors_by_category(optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """Weights and states, where they lie."""
    held = optimizer.state_store.states.values()
    scales = [*optimizer.state_store.scales.values()]
    return {
        "weights": [bucket.storage for bucket in optimizer.bucket_scheduler.buckets],
        "master": [held["master"] for held in held if "master" in held],
        "moments": [held[kind] for held in held for kind in ("mean", "square")] + scales,
    }


def memory_lines(facts: Any) -> list[str]:
    """The tables of a run as text; nothing if there are none."""
    predicted, measured = _read_breakdowns(facts)
    if predicted or measured:
        return breakdown.format_breakdown(predicted, measured)
    return []


def memory_section(facts: Any) -> str:
    """The section of a report on the memory of a run; nothing if nothing is known."""
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
