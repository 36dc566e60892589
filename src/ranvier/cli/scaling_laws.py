"""`ranvier scaling-laws`: fits laws to losses of runs, or designs runs; needs no torch for fits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ranvier.config.arguments import ScalingLawsOptions
from ranvier.errors import PlanError, WriteError
from ranvier.planner import cluster as clusters
from ranvier.planner.cluster import Cluster
from ranvier.planner.output_files import check_outputs, write_output
from ranvier.scaling import design_files, page, summary
from ranvier.scaling.cluster_time import ClusterTimeCost
from ranvier.scaling.laws import ScalingLaws, fit_laws
from ranvier.scaling.prescription import (
    FlopCost,
    MeasuredTimeCost,
    Prescription,
    ShapeGrid,
    TokenCost,
    prescribe,
)
from ranvier.scaling.rows import Collection, collect_losses
from ranvier.system.terminal import command_line, print

FIT_OPTIONS = (
    "flops",
    "hours",
    "resamples",
    "seed",
    "json",
    "html",
    "rows",
    "allow_data_mismatch",
)
"""Options that a design does not use."""
DESIGN_OPTIONS = ("budget", "base", "output")
"""Options of a design alone."""
MAX_BUDGET = 1e100


def run_scaling_laws(paths: Sequence[str], wanted: ScalingLawsOptions) -> int:
    """Fits laws and prints them, or writes the files of a design."""
    _check_options(wanted, paths)
    if wanted.design != 0:
        return write_designed_runs(wanted)
    check_outputs(wanted.json, wanted.html, wanted.rows)
    machine = clusters.load_cluster(wanted.cluster) if wanted.cluster else None
    found = collect_losses(
        [Path(path) for path in paths], allow_data_mismatch=wanted.allow_data_mismatch
    )
    if wanted.hours is not None and machine is None:
        _check_times(found, wanted.hours)
    tables = [
        (name, fit_laws(table, resamples=wanted.resamples, seed=wanted.seed))
        for name, table in found.tables
    ]
    cost = FlopCost(vocab=found.vocab, seq=found.seq)
    asked = prescribe_budgets(wanted, tables, cost, machine)
    if wanted.rows:
        write_output(wanted.rows, "".join(json.dumps(row) + "\n" for row in found.to_records()))
    if wanted.json:
        write_output(wanted.json, json.dumps(_to_dict(found, tables, asked), indent=1) + "\n")
    if wanted.html:
        write_output(wanted.html, page.render_page(tables, asked, cost=cost, notes=found.notes))
    if wanted.json != "-":
        _print_text(found, tables, asked)
        for name in filter(None, (wanted.json, wanted.html, wanted.rows)):
            print(name)
    return 0


def _check_options(wanted: ScalingLawsOptions, paths: Sequence[str]) -> None:
    """Raises if options are out of range, or if they would be ignored."""
    wrong = []
    if not paths and wanted.design == 0:
        wrong.append(
            "No run is given. Laws are fitted to the losses of runs. Use: ranvier scaling-laws RUN "
            "..., or `ranvier scaling-laws --design 6` to write runs to train."
        )
    if paths and wanted.design != 0:
        wrong.append(
            f"--design {wanted.design} with {paths[0]!r}. A design writes new runs and reads none. "
            "Remove one of them."
        )
    ignored = _changed_options(wanted, FIT_OPTIONS if wanted.design != 0 else DESIGN_OPTIONS)
    if ignored and wanted.design != 0:
        wrong.append(
            f"{ignored} with --design {wanted.design}. A design writes new runs and fits nothing. "
            f"Remove {ignored}, or --design."
        )
    elif ignored:
        wrong.append(
            f"{ignored} without --design. Only a design has a budget, settings of its runs and a "
            f"directory for them. Add --design, or remove {ignored}."
        )
    for name in ("flops", "hours"):
        value = getattr(wanted, name)
        if value is not None and not 0.0 < value <= MAX_BUDGET:
            wrong.append(
                f"--{name} {value:g} is out of range. A budget must be above 0 and at most "
                f"{MAX_BUDGET:g}. Use e.g. 1e3."
            )
    if wanted.cluster and wanted.hours is None and wanted.design == 0:
        wrong.append(
            f"--cluster {wanted.cluster} without --hours or --design. A cluster is only used to "
            "predict times. Add --hours, or remove --cluster."
        )
    if not 10 <= wanted.resamples <= 100_000:
        wrong.append(
            f"--resamples {wanted.resamples} is out of range. Intervals need 10 to 100,000 "
            "resamples. Use e.g. 200."
        )
    if wanted.seed < 0:
        wrong.append(f"--seed {wanted.seed} is out of range. A seed is at least 0. Use e.g. 0.")
    if wrong:
        raise PlanError(wrong)


def _changed_options(wanted: ScalingLawsOptions, names: Sequence[str]) -> str:
    """Returns the options among `names` that do not have their default."""
    default = ScalingLawsOptions()
    changed = [name for name in names if getattr(wanted, name) != getattr(default, name)]
    return ", ".join("--" + name.replace("_", "-") for name in changed)


def _check_times(found: Collection, hours: float) -> None:
    """Raises if hours are asked for, but some losses have no time."""
    if all(table.has_seconds for _, table in found.tables):
        return
    raise PlanError(
        f"--hours {hours:g} without --cluster, but the times of some losses are not known. Hours "
        "need the time of a token. Use --cluster with one of "
        f"{', '.join(clusters.cluster_names())}, or rows with device_seconds_per_token."
    )


def prescribe_budgets(
    wanted: ScalingLawsOptions,
    tables: Sequence[tuple[str, ScalingLaws]],
    cost: FlopCost,
    machine: Cluster | None,
) -> list[tuple[str, list[Prescription]]]:
    """Returns the prescriptions for each budget that was asked for, with a title.

    machine: where hours are spent; None for the machine of the runs.
    """
    found = []
    for name, laws in tables:
        costs: list[tuple[str, TokenCost, float]] = []
        if wanted.flops is not None:
            costs.append((f"{wanted.flops:g} FLOPs", cost, wanted.flops))
        if wanted.hours is not None:
            title = f"{wanted.hours:g} device hours"
            spent: TokenCost
            if machine is not None:
                title += f" of {machine.name}"
                spent = ClusterTimeCost(machine, vocab=cost.vocab, seq=cost.seq)
            else:
                title += " on the machine of the runs"
                spent = MeasuredTimeCost.fit(laws.table)
            costs.append((title, spent, 3600.0 * wanted.hours))
        for title, one, budget in costs:
            grid = ShapeGrid(one, cost.vocab)
            found.append((f"{title}, by {name} losses", prescribe(laws, grid, budget)))
    return found


def _print_text(
    found: Collection,
    tables: Sequence[tuple[str, ScalingLaws]],
    asked: Sequence[tuple[str, Sequence[Prescription]]],
) -> None:
    for note in found.notes:
        print(note)
    for name, laws in tables:
        print("\n".join(summary.text_lines(name, laws)))
    for title, several in asked:
        print(f"{title}:")
        print("\n".join(summary.prescription_lines(several)))


def _to_dict(
    found: Collection,
    tables: Sequence[tuple[str, ScalingLaws]],
    asked: Sequence[tuple[str, Sequence[Prescription]]],
) -> dict[str, Any]:
    return {
        "notes": list(found.notes),
        "laws": {name: summary.laws_to_dict(laws) for name, laws in tables},
        "prescriptions": {
            title: [summary.prescription_to_dict(one) for one in several]
            for title, several in asked
        },
    }


# ---- design -------------------------------------------------------------------------------


def write_designed_runs(wanted: ScalingLawsOptions) -> int:
    """Writes the files of a design, and prints their FLOPs and hours."""
    base, vocab, seq = design_files.read_base(wanted.base)
    machine = find_machine(wanted.cluster)
    planned = design_files.plan_design(wanted.design, wanted.budget, machine, vocab=vocab, seq=seq)
    folder = Path(wanted.output)
    try:
        files = design_files.write_design(planned, base, folder)
    except OSError as error:
        raise WriteError(
            f"{folder} cannot be written: {error.strerror}. Pass another --output."
        ) from None
    head = ("file", "parameters", "tokens", "FLOPs", "hours")
    rows = [head]
    for path, one in zip(files, planned, strict=True):
        cells = (
            summary.format_count(one.run.parameters),
            summary.format_count(one.tokens),
            f"{one.flops:.3g}",
            f"{one.seconds / 3600.0:.3g}",
        )
        rows.append((str(path), *cells))
    total = (
        "",
        summary.format_count(sum(one.tokens for one in planned)),
        f"{sum(one.flops for one in planned):.3g}",
        f"{sum(one.seconds for one in planned) / 3600.0:.3g}",
    )
    rows.append(("total", *total))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        cells_of = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells_of).rstrip())
    print(f"Hours are predicted for one device of {machine.name} ({machine.source or 'given'}).")
    print("Train each, then fit them:")
    print(f"  {command_line('ranvier', 'train', files[0])}")
    runs = [folder / "runs" / one.name for one in planned]
    print(f"  {command_line('ranvier', 'scaling-laws', *runs, '--html', 'laws.html')}")
    return 0


def find_machine(name: str) -> Cluster:
    """Returns a cluster by name, or this machine."""
    if name:
        return clusters.load_cluster(name)
    known = clusters.load_measured_cluster()
    if known is not None:
        return known
    # A machine that was not measured is examined with torch.
    import torch

    from ranvier.tools.local_cluster import detect_cluster

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return detect_cluster(device, 1)
