"""Guard: what a run does about losses and gradients that are wrong.

A step whose numbers are not finite is left out on the device; here such steps are counted, one step
later, and the run ends after too many. A loss that lies far above the median of those before it is
a spike. The bound a step is compared with is made of the losses up to two steps before, which the
host has always read by then: so it is the same however late the host reads, on all ranks, and in a
run that was stopped and goes on.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from ranvier.config.sections import GuardConfig
from ranvier.errors import NumericError
from ranvier.train.metrics import PendingStep
from ranvier.train.step import StepLimits

MIN_LOSSES = 16
"""Losses before which nothing is a spike."""
MIN_RELATIVE_DEVIATION = 0.01
MIN_DEVIATION = 1e-3
"""The deviation counts as this share of the median at least, and as so many nats: losses that
hardly differ would make a spike of any other."""
MAD_TO_STD = 1.4826
"""Deviations of a normal distribution in its median distance from the median."""


class LossGuard:
    """The losses and the counts of a run that decide what becomes of its steps."""

    def __init__(self, config: GuardConfig, device: torch.device | str) -> None:
        self.config = config
        self.step_limits = StepLimits.for_device(
            device, budget=config.skips, strict=config.spike == "skip"
        )
        self.window: deque[float] = deque(maxlen=config.window)
        """The newest losses that were numbers and no spikes."""
        self.recent_losses: list[tuple[int, float]] = []
        """Steps and losses that are too new for the limit of the next step."""
        self.nonfinite_steps = self.spikes = self.rewinds = 0
        """Steps that were no numbers, spikes, and how often the run went back."""
        self.skipped_steps = 0
        """Steps whose update was left out, for either reason."""
        self.spikes_in_row = 0
        """Spikes since the last loss that was none."""
        self.rewind_tokens: int | None = None
        """Tokens of the run behind which it goes on once it has gone back."""

    def update_limit(self, step: int) -> None:
        """Tell the device above which loss the next step is a spike; nobody waits."""
        if self.config.spike == "off":
            return
        self.window.extend(loss for known, loss in self.recent_losses if known <= step - 2)
        self.recent_losses = [
            (known, loss) for known, loss in self.recent_losses if known > step - 2
        ]
        self.step_limits.loss_limit.fill_(self.spike_limit())

    def spike_limit(self) -> float:
        """The median of the window and `height` robust deviations; of too few losses infinity."""
        if len(self.window) < min(MIN_LOSSES, self.config.window):
            return math.inf
        middle = statistics.median(self.window)
        spread = MAD_TO_STD * statistics.median(abs(loss - middle) for loss in self.window)
        return middle + self.config.height * max(
            spread, MIN_RELATIVE_DEVIATION * abs(middle), MIN_DEVIATION
        )

    def judge_step(self, under: PendingStep) -> str:
        """Take note of a step that the device has taken; what is to be said about it, or ""."""
        loss, _, bad, spike, *_ = under.numbers.read()
        self.nonfinite_steps += bool(bad)
        self.spikes += bool(spike)
        if spike:
            self.spikes_in_row = self.spikes_in_row + 1
        else:
            self.spikes_in_row = 0
        under.is_skipped = bool(bad) or (bool(spike) and self.step_limits.skips_spikes)
        self.skipped_steps += under.is_skipped
        under.skipped_total = self.skipped_steps
        if not bad and not spike:
            self.recent_losses.append((under.step, loss))
            return ""
        what = f"Step {under.step + 1}: the loss {loss:.4g}"
        if bad:
            return (
                f"{what} or a gradient is not finite. The step is left out on all ranks; that "
                f"makes {self.nonfinite_steps} of guard.skips={self.config.skips}."
            )
        if self.step_limits.skips_spikes:
            done = "The step is left out."
        else:
            done = ""
        return f"{what} is a spike: the median was {statistics.median(self.window):.4g}. {done}"

    def needs_rewind(self) -> bool:
        """Whether the run has to go back before it takes another step."""
        return self.rewind_tokens is not None

    def is_exhausted(self) -> bool:
        """Whether a step too many was no number."""
        return self.nonfinite_steps > self.config.skips

    def check_spikes(self, step: int, kept: str) -> None:
        """Refuse to leave out spikes for ever, or to go back once more. kept: a checkpoint."""
        if self.step_limits.skips_spikes and self.spikes_in_row > self.config.skips:
            raise NumericError(
                f"Step {step + 1} is spike number {self.spikes_in_row} in a row. At most "
                "guard.skips="
                f"{self.config.skips} are left out: the losses stay high. Use a lower optim.lr or "
                f"a larger guard.height, and go on from {kept}."
            )
        if self.config.spike == "rewind" and self.rewinds >= self.config.rewinds:
            raise NumericError(
                f"Step {step + 1} is a spike, and the run has gone back {self.rewinds} times. "
                f"guard.rewinds={self.config.rewinds} allows no more. Use a lower optim.lr or "
                f"other data, and go on from {kept}."
            )

    def record_rewind(self, counts: tuple[int, int, int, int]) -> None:
        """Keep the counts that a checkpoint does not know, and one more time that it went back."""
        self.nonfinite_steps, self.spikes, self.skipped_steps, self.rewinds = counts
        self.rewinds += 1
        self.rewind_tokens = None
        self.step_limits.nonfinite_steps.fill_(self.nonfinite_steps)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Bad steps, spikes, steps left out, times gone back."""
        return self.nonfinite_steps, self.spikes, self.skipped_steps, self.rewinds

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON gives each float back to the bit."""
        return {
            "counts": list(self.counts),
            "row": self.spikes_in_row,
            "window": list(self.window),
            "fresh": [list(one) for one in self.recent_losses],
        }

    def load_state_dict(self, facts: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        bad, self.spikes, self.skipped_steps, self.rewinds = facts["counts"]
        self.nonfinite_steps = min(
            bad, self.config.skips
        )  # fewer may be allowed now: the next one is too many
        self.spikes_in_row = facts["row"]
        self.window = deque(facts["window"], maxlen=self.config.window)
        self.recent_losses = [(int(step), float(loss)) for step, loss in facts["fresh"]]
        self.step_limits.nonfinite_steps.fill_(self.nonfinite_steps)
