"""`ranvier scaling-laws`: fits laws to losses of runs, or designs runs; needs no torch for fits."""

from __future__ import annotations

import json
import math
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


def run_scaling_laws(paths: Sequence[str], wanted: ScalingLawsOptions) -> int:
    """Fits laws and prints them, or writes the files of a design."""
    if wanted.design:
        return write_designed_runs(wanted, paths)
    _check_options(wanted, paths)
    check_outputs(wanted.json, wanted.html, wanted.rows)
    found = collect_losses(
        [Path(path) for path in paths], allow_data_mismatch=wanted.allow_data_mismatch
    )
    tables = [
        (name, fit_laws(table, resamples=wanted.resamples, seed=wanted.seed))
        for name, table in found.tables
    ]
    cost = FlopCost(vocab=found.vocab, seq=found.seq)
    asked = prescribe_budgets(wanted, tables, cost)
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
    """Raises if options are out of range."""
    wrong = []
    if not paths:
        wrong.append(
            "No run is given. Laws are fitted to the losses of runs. Use: ranvier scaling-laws RUN "
            "..., or `ranvier scaling-laws --design 6` to write runs to train."
        )
    for name in ("flops", "hours"):
        value = getattr(wanted, name)
        if value is not None and not (math.isfinite(value) and value > 0.0):
            wrong.append(
                f"--{name} {value:g} is out of range. A budget must be above 0. Use e.g. 1e3."
            )
    if wanted.cluster and wanted.hours is None:
        wrong.append(
            f"--cluster {wanted.cluster} without --hours or --design. A cluster is only used to "
            "predict times. Add --hours, or remove --cluster."
        )
    if not 10 <= wanted.resamples <= 100_000:
        wrong.append(
            f"--resamples {wanted.resamples} is out of range. Intervals need 10 to 100,000 "
            "resamples. Use e.g. 200."
        )
    if wrong:
        raise PlanError(wrong)


def prescribe_budgets(
    wanted: ScalingLawsOptions, tables: Sequence[tuple[str, ScalingLaws]], cost: FlopCost
) -> list[tuple[str, list[Prescription]]]:
    """Returns the prescriptions for each budget that was asked for, with a title."""
    found = []
    for name, laws in tables:
        costs: list[tuple[str, TokenCost, float]] = []
        if wanted.flops is not None:
            costs.append((f"{wanted.flops:g} FLOPs", cost, wanted.flops))
        if wanted.hours is not None:
            title = f"{wanted.hours:g} device hours"
            spent: TokenCost
            if wanted.cluster:
                machine = clusters.load_cluster(wanted.cluster)
                title += f" of {machine.name}"
                spent = ClusterTimeCost(machine, vocab=cost.vocab, seq=cost.seq)
            elif laws.table.has_seconds:
                title += " on the machine of the runs"
                spent = MeasuredTimeCost.fit(laws.table)
            else:
                raise PlanError(
                    f"--hours {wanted.hours:g} without --cluster, but the times of some losses are "
                    "not known. Hours need the time of a token. Use --cluster with one of "
                    f"{', '.join(clusters.cluster_names())}, or rows with device_seconds_per_token."
                )
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


def write_designed_runs(wanted: ScalingLawsOptions, paths: Sequence[str]) -> int:
    """Writes the files of a design, and prints their FLOPs and hours."""
    if paths:
        raise PlanError(
            f"--design {wanted.design} with {paths[0]!r}. A design writes new runs and reads none. "
            "Remove one of them."
        )
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
