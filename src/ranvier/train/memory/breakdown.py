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

from ranvier.buckets.scheduler import Deferred
from ranvier.errors import DeviceMemoryError
from ranvier.html import page
from ranvier.html.plot import escaped
from ranvier.models import Decoder
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import parallel_of
from ranvier.planner import device_rates, offload_search
from ranvier.planner.communicators import communicator_bytes
from ranvier.planner.device_rates import Rates
from ranvier.planner.memory import breakdown
from ranvier.planner.memory.breakdown import GIB, Table
from ranvier.planner.offload_search import Case, Choice
from ranvier.train.memory.probe import gradients, marking

MEMORY = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
"""How torch says that memory is too small."""


def is_short(error: BaseException) -> bool:
    """Whether an error says that memory is too small."""
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in MEMORY)


USUAL = Rates(flops=4e14, memory=2e12, to_device=2e10, to_host=2e10, adam=1e9)
"""Of a device of today, for proposals where nothing can be measured any more."""
RULE = "Weights, gradients, moments and activations of a rank must fit on its device."
REMEDY = "Use --memory.fit auto, a smaller plan.micro_batch, or more ranks."
LESS = 0.95
"""What of a prediction that was too small is held to be there."""


@dataclass
class Account:
    """What is known of the memory of a run."""

    case: Case | None = None
    """What its choices depend on; None: nothing was measured."""
    choice: Choice | None = None
    """How its steps are placed."""
    gradients: int = 0
    """Bytes of gradients when most was there, as seen in the passes of a step."""
    peers: int = 0
    """Ranks that this one sends to point to point, over all communicators."""

    @property
    def predicted(self) -> Table | None:
        """What a step needs, by category."""
        if self.case is None or self.choice is None:
            return None
        return offload_search.table(self.case, self.choice)

    def watch(self, model: Decoder, work: Callable[[], Tensor]) -> Tensor:
        """Do the passes of a step, and look at the gradients there are when most is there.

        On a host, where nobody counts, these are the gradients at the end.
        """
        queue, most = parallel_of(model).queue, 0

        def note(_: str) -> None:
            nonlocal most
            cuda = queue.device.type == "cuda"
            now = torch.cuda.max_memory_allocated(queue.device) if cuda else 0
            if now >= most + cuda:  # it has grown since the last block began
                most, self.gradients = now, _held(queue)

        whole = parallel_of(model).grid.degrees["pipe"] == 1  # else other stages have blocks, too
        with marking(model, note) if whole else nullcontext():
            loss = work()
        note("end")
        return loss

    def measured(self, optimizer: Optimizer, device: torch.device) -> Table:
        """What a run has held: weights, states and gradients; of the rest only the sum is known.

        On a host nobody counts the rest. No driver tells what the communicators of a process take:
        those that were made count as much as they took where that was measured.
        """
        here: dict[str, int] = {"gradients": self.gradients}
        homes = optimizer.queue.homes
        there: dict[str, int] = {"gradients": homes.gradients} if homes is not None else {}
        seen = set[int]()
        for name, tensors in tensors_of(optimizer).items():
            for x in tensors:
                if x.data_ptr() not in seen:  # many may share a piece of memory, none a part of it
                    seen.add(x.data_ptr())
                    column = here if x.device.type == device.type else there
                    column[name] = column.get(name, 0) + x.nbytes
        ways = optimizer.store.bytes()["staging"]
        for column, size in zip((here, there), ways, strict=True):
            column["staging"] = size
        if device.type == "cuda":
            most = torch.cuda.max_memory_allocated(device)
            here["libraries"] = self.case.libraries if self.case is not None else 0
            here["activations"] = max(most - sum(here.values()), 0)
            here["fragmentation"] = max(torch.cuda.max_memory_reserved(device) - most, 0)
        made = [one for one in optimizer.queue.grid.communicators if one.backend == "nccl"]
        here["communicators"] = communicator_bytes(len(made), self.peers)
        return Table(here, there)

    def facts(self, optimizer: Optimizer, device: torch.device) -> dict[str, Any]:
        """Both tables, as run.json holds them."""
        predicted = self.predicted
        return {
            "predicted": None if predicted is None else predicted.facts(),
            "measured": self.measured(optimizer, device).facts(),
        }

    @contextmanager
    def explained(self, device: torch.device) -> Iterator[None]:
        """Inside, an error that says that memory is too small says what would help, too."""
        words = ""
        try:
            yield
        except RuntimeError as error:
            if not is_short(error):
                raise
            words = str(error).splitlines()[0][:200]
        if words:
            raise self.short(words, device)

    def short(self, words: str, device: torch.device | None = None) -> DeviceMemoryError:
        """The error of a run that had too little memory: the table, and what would fit."""
        if self.case is None or self.choice is None:
            return DeviceMemoryError(f"{words}. {RULE} {REMEDY}")
        predicted = offload_search.table(self.case, self.choice)
        lines = [
            f"{words}. {RULE}",
            *breakdown.lines(predicted),
            *self._proposals(predicted, device),
        ]
        return DeviceMemoryError("\n".join(lines))

    def _proposals(self, predicted: Table, device: torch.device | None) -> list[str]:
        """The cheapest changes that would fit, as lines."""
        assert self.case is not None and self.choice is not None
        held = predicted.total - self.case.communicators
        limit = min(self.case.limit, int(LESS * held))
        case = replace(self.case, limit=limit, rates=self._rates(device))
        now = offload_search.seconds(case, self.choice).total
        lines = []
        for found in offload_search.cheapest(case, self.choice):
            slower = found.seconds.total / max(now, 1e-12)
            words = " ".join(offload_search.options(self.choice, found.choice))
            lines.append(f"  {words}: {found.device / GIB:.3g} GiB, {slower:.2f} x the time")
        if not lines:
            return [f"No such change fits into {limit / GIB:.3g} GiB. {REMEDY}"]
        return ["The cheapest changes that would fit, as predicted:", *lines]

    def _rates(self, device: torch.device | None) -> Rates:
        assert self.case is not None
        if device is not None and device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.empty_cache()
                return device_rates.measured(device, torch.bfloat16)
        return self.case.rates if self.case.open else USUAL


def _held(queue: Deferred) -> int:
    """Bytes of the gradients on the device now."""
    made = (x.untyped_storage() for x in gradients(queue) if x.device.type == queue.device.type)
    return sum({x.data_ptr(): x.nbytes() for x in made}.values())


def tensors_of(optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """Weights and states, where they lie."""
    held, scales = optimizer.store.held.values(), [*optimizer.store.scales.values()]
    return {
        "weights": [bucket.rest for bucket in optimizer.queue.buckets],
        "master": [held["master"] for held in held if "master" in held],
        "moments": [held[kind] for held in held for kind in ("mean", "square")] + scales,
    }


def lines(facts: Any) -> list[str]:
    """The tables of a run as text; nothing if there are none."""
    predicted, measured = _read(facts)
    return breakdown.lines(predicted, measured) if predicted or measured else []


def section(facts: Any) -> str:
    """The section of a report on the memory of a run; nothing if nothing is known."""
    predicted, measured = _read(facts)
    if predicted is None and measured is None:
        return ""
    unit, cells = breakdown.rows(predicted, measured)
    notes = (
        f'<p class="muted">{escaped(line)}</p>' for line in breakdown.words(predicted, measured)
    )
    head = [unit, "device, predicted", "measured", "host, predicted", "measured"]
    return page.section("Memory", page.table(head, cells), "".join(notes))


def _read(facts: Any) -> tuple[Table | None, Table | None]:
    known = facts if isinstance(facts, Mapping) else {}
    return Table.read(known.get("predicted")), Table.read(known.get("measured"))
