"""ResolvedRun: the settings with which a run trains, and why each has its value.

Users leave most settings unset. `ranvier.train.resolve` fills them in with an ordered list of
resolvers, and every value that a resolver chooses is recorded here as a `Decision`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import groupby
from typing import Any

from ranvier.config.run import RunConfig


@dataclass(frozen=True)
class StepPrediction:
    """The planner's prediction for a run, as stored in run.json."""

    why: str
    machine: str
    seconds: float
    low: float
    """Lower end of the 80% interval of the step time; `high` is its upper end."""
    high: float
    memory: int
    """Peak bytes of tensors on a device."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds per step by activity."""


@dataclass(frozen=True)
class Decision:
    """A value that a resolver chose for a setting."""

    resolver: str
    setting: str
    """Dotted name, such as plan.micro_batch."""
    before: Any
    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class ResolvedRun(RunConfig):
    """A run config with all settings resolved, as the trainer and the tools require."""

    decisions: tuple[Decision, ...] = field(default=(), compare=False)
    """All decisions, in order."""
    prediction: StepPrediction | None = field(default=None, compare=False)
    """The prediction for the layout that the planner chose, if it chose one."""

    @classmethod
    def from_config(cls, run: RunConfig) -> ResolvedRun:
        """Returns the same settings without decisions; a run that is already resolved is returned
        unchanged."""
        if isinstance(run, ResolvedRun):
            return run
        return cls(**{one.name: getattr(run, one.name) for one in fields(RunConfig)})

    def decide(self, resolver: str, values: Mapping[str, Any], reason: str) -> ResolvedRun:
        """Returns the run with these settings; changes are recorded with the reason.

        values: by the dotted names of the settings.
        """
        run = self
        made = list[Decision]()
        for setting, value in values.items():
            section, _, name = setting.partition(".")
            config = getattr(run, section)
            before = getattr(config, name)
            if value != before:
                run = replace(run, **{section: replace(config, **{name: value})})
                made.append(Decision(resolver, setting, before, value, reason))
        return replace(run, decisions=(*self.decisions, *made))

    def adopt(self, resolver: str, run: RunConfig, reasons: Mapping[str, str]) -> ResolvedRun:
        """Returns the run with all settings of another run; every difference is recorded.

        reasons: by the dotted name of a setting; the reason under "" is for all others.
        """
        found = self
        for setting, value in _setting_differences(self, run):
            found = found.decide(resolver, {setting: value}, reasons.get(setting, reasons[""]))
        return found

    def reopen(self, setting: str) -> ResolvedRun:
        """Returns the run with a setting reset to its value before it was decided."""
        made = [one for one in self.decisions if one.setting == setting]
        if not made:
            return self
        section, _, name = setting.partition(".")
        config = replace(getattr(self, section), **{name: made[0].before})
        others = tuple(one for one in self.decisions if one.setting != setting)
        return replace(self, **{section: config}, decisions=others)

    def decisions_by(self, resolver: str) -> tuple[Decision, ...]:
        """Returns the decisions of one resolver."""
        return tuple(one for one in self.decisions if one.resolver == resolver)


def _setting_differences(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the new value of every setting in which two runs differ."""
    for section in fields(RunConfig):
        before, after = getattr(old, section.name), getattr(new, section.name)
        for one in fields(before):
            value = getattr(after, one.name)
            if value != getattr(before, one.name):
                yield f"{section.name}.{one.name}", value


def decision_lines(run: ResolvedRun) -> list[str]:
    """Returns the decisions as lines of text, grouped by resolver."""
    lines = []
    for resolver, made in groupby(run.decisions, lambda one: one.resolver):
        lines.append(resolver)
        for reason, same in groupby(made, lambda one: one.reason):
            changes = [
                f"{one.setting} = {_format_value(one.value)} (was {_format_value(one.before)})"
                for one in same
            ]
            if len(changes) == 1:
                lines.append(f"  {changes[0]}: {reason}")
            else:
                lines += [f"  {reason}", *(f"    {change}" for change in changes)]
    return lines or ["nothing to resolve: all settings are given"]


def decisions_to_json(run: ResolvedRun) -> list[dict[str, Any]]:
    """Returns the decisions as JSON types, for run.json."""
    return [asdict(one) for one in run.decisions]


def _format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return "unset" if value is None or value == "" else str(value)
