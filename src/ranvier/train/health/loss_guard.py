"""Handling of non-finite losses and gradients, and of loss spikes.

A step with non-finite values is skipped on the device. Such steps are counted here, one step later,
and the run fails after too many of them. A loss far above the median of the previous losses is a
spike. The limit of step k is computed from the losses up to step k - 2, which the host has always
read by then. So it does not depend on when the host reads, and is the same on all ranks and in a
resumed run.
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
"""Number of losses before which nothing is a spike."""
MIN_RELATIVE_DEVIATION = 0.01
MIN_DEVIATION = 1e-3
"""Lower bounds of the deviation, relative to the median and in nats: if losses hardly differ, any
other loss would be a spike."""
MAD_TO_STD = 1.4826
"""Standard deviation of a normal distribution per median absolute deviation (MAD)."""


class LossGuard:
    """The recent losses and the counters that decide whether a step is skipped or rewound."""

    def __init__(self, config: GuardConfig, device: torch.device | str) -> None:
        self.config = config
        self.step_limits = StepLimits.for_device(
            device, budget=config.max_skipped_steps, strict=config.on_spike == "skip"
        )
        self.window: deque[float] = deque(maxlen=config.spike_window)
        """The latest losses that were finite and not spikes."""
        self.recent_losses: list[tuple[int, float]] = []
        """(step, loss) pairs that are too recent for the limit of the next step."""
        self.nonfinite_steps = self.spikes = self.rewinds = 0
        """Numbers of non-finite steps, of spikes, and of rewinds."""
        self.skipped_steps = 0
        """Steps whose update was skipped, for either reason."""
        self.spikes_in_row = 0
        """Consecutive spikes."""
        self.rewind_tokens: int | None = None
        """Position in the data, in tokens, at which to continue after a pending rewind."""

    def update_limit(self, step: int) -> None:
        """Write the spike limit of the next step to the device, without a synchronization."""
        if self.config.on_spike == "off":
            return
        # A loss that the host happens to have read earlier must not enter the limit earlier.
        self.window.extend(loss for known, loss in self.recent_losses if known <= step - 2)
        self.recent_losses = [
            (known, loss) for known, loss in self.recent_losses if known > step - 2
        ]
        self.step_limits.loss_limit.fill_(self.spike_limit())

    def spike_limit(self) -> float:
        """median + height * 1.4826 * MAD of the window; infinity with too few losses."""
        if len(self.window) < min(MIN_LOSSES, self.config.spike_window):
            return math.inf
        middle = statistics.median(self.window)
        spread = MAD_TO_STD * statistics.median(abs(loss - middle) for loss in self.window)
        return middle + self.config.spike_threshold * max(
            spread, MIN_RELATIVE_DEVIATION * abs(middle), MIN_DEVIATION
        )

    def judge_step(self, under: PendingStep) -> str:
        """Update the counters with a completed step; returns a warning, or ""."""
        loss, _, bad, spike, *_ = under.numbers.read()
        self.nonfinite_steps += bool(bad)
        self.spikes += bool(spike)
        if spike:
            # Read by `check_spikes`: skipped spikes in a row mean that the loss level itself has
            # risen.
            self.spikes_in_row = self.spikes_in_row + 1
        else:
            self.spikes_in_row = 0
        # The device has decided the same way, see `train_step`.
        under.is_skipped = bool(bad) or (bool(spike) and self.step_limits.skips_spikes)
        self.skipped_steps += under.is_skipped
        under.skipped_total = self.skipped_steps
        # Spikes stay out of the window: they would raise the limit for the next ones.
        if not bad and not spike:
            self.recent_losses.append((under.step, loss))
            return ""
        what = f"Step {under.step + 1}: the loss ({loss:.4g})"
        if bad:
            return (
                f"{what} or a gradient is not finite. All ranks skip the step "
                f"({self.nonfinite_steps} of "
                f"guard.max_skipped_steps={self.config.max_skipped_steps})."
            )
        if self.step_limits.skips_spikes:
            done = "The step is skipped."
        else:
            done = ""
        return f"{what} is a spike; the median was {statistics.median(self.window):.4g}. {done}"

    def needs_rewind(self) -> bool:
        """Whether the run has to rewind before the next step."""
        return self.rewind_tokens is not None

    def is_exhausted(self) -> bool:
        """Whether more steps were non-finite than the run may skip."""
        return self.nonfinite_steps > self.config.max_skipped_steps

    def check_spikes(self, step: int, kept: str) -> None:
        """Raise after too many skipped spikes in a row, or too many rewinds.

        kept: the checkpoint to resume from, for the message.
        """
        if self.step_limits.skips_spikes and self.spikes_in_row > self.config.max_skipped_steps:
            raise NumericError(
                f"Step {step + 1} is spike number {self.spikes_in_row} in a row. At most "
                f"guard.max_skipped_steps={self.config.max_skipped_steps} are skipped: the losses "
                "stay high. Use a lower optim.lr or a larger guard.spike_threshold, and resume "
                f"from {kept}."
            )
        if self.config.on_spike == "rewind" and self.rewinds >= self.config.max_rewinds:
            raise NumericError(
                f"Step {step + 1} is a spike after {self.rewinds} rewinds. At most "
                f"guard.max_rewinds={self.config.max_rewinds} are allowed. Use a lower optim.lr or "
                f"other data, and resume from {kept}."
            )

    def record_rewind(self, counts: tuple[int, int, int, int]) -> None:
        """Restore the counters from before the checkpoint was reloaded, and count the rewind."""
        self.nonfinite_steps, self.spikes, self.skipped_steps, self.rewinds = counts
        self.rewinds += 1
        self.rewind_tokens = None
        self.step_limits.nonfinite_steps.fill_(self.nonfinite_steps)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Non-finite steps, spikes, skipped steps, rewinds."""
        return self.nonfinite_steps, self.spikes, self.skipped_steps, self.rewinds

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; JSON restores each float bit-exactly."""
        return {
            "counts": list(self.counts),
            "row": self.spikes_in_row,
            "window": list(self.window),
            "fresh": [list(one) for one in self.recent_losses],
        }

    def load_state_dict(self, facts: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        bad, self.spikes, self.skipped_steps, self.rewinds = facts["counts"]
        # If fewer steps may be skipped than before, only the next bad step fails the run.
        self.nonfinite_steps = min(bad, self.config.max_skipped_steps)
        self.spikes_in_row = facts["row"]
        self.window = deque(facts["window"], maxlen=self.config.spike_window)
        self.recent_losses = [(int(step), float(loss)) for step, loss in facts["fresh"]]
        self.step_limits.nonfinite_steps.fill_(self.nonfinite_steps)
