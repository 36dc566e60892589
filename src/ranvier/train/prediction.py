"""Predicted vs. measured step time and memory of a run, as a printed line and a report section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from ranvier.config.resolved_run import StepPrediction
from ranvier.html import page
from ranvier.html.plot import escape_html
from ranvier.planner.memory.breakdown import GIB
from ranvier.system.terminal import print

CHECK_AFTER_STEPS = 8
"""Steps after which a run is compared with its prediction; the first two are warm-up."""
WARMUP_STEPS = 2


@dataclass
class PredictionCheck:
    """A prediction and the measured steps of the run."""

    prediction: StepPrediction
    step_seconds: list[float] = field(default_factory=list)
    memory: int = 0
    """Peak bytes of tensors on the device; 0 if they are not counted."""

    def report_step(self, row: Mapping[str, Any], *, counted: bool) -> None:
        """Add a step; print the comparison once, after the first few steps."""
        line = self.add_step(row, counted=counted)
        if line:
            print(f"  {line}", flush=True)

    def add_step(self, row: Mapping[str, Any], *, counted: bool) -> str:
        """Add a step; returns the comparison as a line after `CHECK_AFTER_STEPS`, else "".

        counted: whether the device counts the bytes of its tensors.
        """
        self.step_seconds.append(float(row["step_seconds"]))
        # On a CPU the row has the memory of the whole process, which was not predicted.
        if counted:
            self.memory = int(row["peak_memory_bytes"])
        else:
            self.memory = 0
        if len(self.step_seconds) == CHECK_AFTER_STEPS:
            return self.summary_line()
        return ""

    @property
    def median_seconds(self) -> float:
        """The median step time without warm-up; 0 before the first step that counts."""
        if len(self.step_seconds) > WARMUP_STEPS:
            return median(self.step_seconds[WARMUP_STEPS:])
        return 0.0

    def summary_line(self) -> str:
        """Predicted vs. measured, as a sentence."""
        predicted = self.prediction
        words = (
            f"step time: predicted {_format_time(predicted.seconds)}, measured "
            f"{_format_time(self.median_seconds)}"
        )
        words += f" ({self.median_seconds / predicted.seconds - 1.0:+.0%})"
        if self.memory:
            words += f"; memory: predicted {predicted.memory / GIB:.2f} GiB, "
            words += f"measured {self.memory / GIB:.2f} GiB"
        if not predicted.low <= self.median_seconds <= predicted.high:
            words += "; run `ranvier plan --calibrate RUN` to correct the planner"
        return words

    def to_dict(self) -> dict[str, Any]:
        """The comparison as stored in run.json."""
        return {
            "predicted": asdict(self.prediction),
            "measured": {"seconds": self.median_seconds, "memory": self.memory},
        }


def _format_time(seconds: float) -> str:
    if seconds < 1.0:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def prediction_section(facts: Any) -> str:
    """The report section on predicted vs. measured; empty without a prediction."""
    try:
        predicted = StepPrediction(**facts["predicted"])
        measured = facts["measured"]
        taken = float(measured["seconds"])
        held = float(measured["memory"])
    # run.json may come from another version, or have no prediction.
    except (TypeError, KeyError, ValueError):
        return ""
    rows = [_table_row("seconds per step", predicted.seconds, taken, 1.0)]
    rows += [_table_row("GiB of tensors per device", predicted.memory, held, GIB)]
    rows += [(f"of which {name}", f"{x:.4g}", "", "") for name, x in predicted.parts.items()]
    notes = [
        f"{predicted.why} ({predicted.machine})",
        f"80% interval: {predicted.low:.4g} to {predicted.high:.4g} s.",
    ]
    return page.render_section(
        "Prediction",
        page.render_table(["", "predicted", "measured", "measured vs. predicted"], rows),
        "".join(f'<p class="muted">{escape_html(note)}</p>' for note in notes),
    )


def _table_row(
    name: str, predicted: float, measured: float, unit: float
) -> tuple[str, str, str, str]:
    if not measured:
        return name, f"{predicted / unit:.4g}", "·", "·"
    return (
        name,
        f"{predicted / unit:.4g}",
        f"{measured / unit:.4g}",
        f"{measured / predicted - 1.0:+.1%}",
    )
