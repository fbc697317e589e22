"""`recmill compare`: runs side by side, or what each switch buys, as a page and in the terminal; `recmill clean`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from recmill.cli.output import (
    BYTES,
    emit,
    json_option,
    memory_budget_option,
    progress_for,
    settings_option,
    verify_option,
)
from recmill.sizes import format_bytes
from recmill.training.switches import Switch


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--out", help="File of the page. Default: report.html, or WORK/report.html with --preset.")
@click.option("--title", help="Title of the page. Default: the names of the runs.")
@click.option("--preset", help="Train every variant on this preset and compare them: tiny, small, recd, globo, ...")
@click.option("--data", help="Folder of the preset's files or, without --preset, of your own Parquet.")
@click.option("--work", help="Folder of the variants; the same command resumes. Default: runs/compare-PRESET.")
@click.option("--nproc", type=click.IntRange(min=1), default=2, help="Training processes.")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    help="Trainings per variant, each with another seed. Default: as many as take three minutes, 1 to 9.",
)
@click.option(
    "--switch",
    "switches",
    multiple=True,
    type=click.Choice([switch.value for switch in Switch]),
    help="Compare this switch only; repeatable. Default: all five.",
)
@click.option("--no-leave-one-out", is_flag=True, help="Omit the variants with all switches but one.")
@memory_budget_option
@click.option("--hot-budget", type=BYTES, default="16MiB", help="Memory for hot rows per process.")
@click.option("--compress", default="auto", help="Compression of shared tables: auto, a factor or a size.")
@settings_option
@verify_option
@json_option
def compare(runs: tuple[str, ...], out: str | None, title: str | None, as_json: bool, **options: Any) -> None:
    """Build one self-contained HTML page from RUN folders, or train all variants of a preset first.

    The first RUN is the baseline of every figure; a ratio above 1 always means better. A RUN is a folder written by
    `recmill run --out` or `recmill train --out`.

    With --preset (or --data) the same data is trained with none, one, all but one and all of the optimisations:
    dedup, tiers, hot_batches, sharing, tuning. MLflow gets one run with a nested run per variant
    (RECMILL_TRACKING=off: none).

    \b
    recmill compare runs/baseline runs/dedup runs/all --out ablation.html --json
    recmill compare --preset tiny
    recmill compare --data my_log/ --work runs/mine --repeats 3 --set epochs=2
    """
    from recmill.artifacts import InputError

    is_ablation = bool(options["preset"] or options["data"])
    if bool(runs) == is_ablation:
        raise InputError("give either RUN folders or --preset (or --data), not " + ("both" if runs else "neither"))
    if is_ablation:
        _compare_variants(out, title, as_json, **options)
    else:
        _compare_runs(runs, out or "report.html", title, as_json)


def _compare_runs(runs: tuple[str, ...], out: str, title: str | None, as_json: bool) -> None:
    from recmill.report import build_report
    from recmill.report.comparison import comparison_json, comparison_lines
    from recmill.report.runs import load_runs

    page = build_report(runs, out=out, title=title)
    loaded = load_runs(runs)
    result = {"report": str(page), **comparison_json(loaded)}
    lines = [*comparison_lines(loaded), "", f"Page: {page}"]
    missing = [f"  {run.label}: {sentence}" for run in loaded for sentence in run.missing]
    emit(result, lines + (["", "Missing:", *missing] if missing else []), as_json=as_json)


def _compare_variants(out: str | None, title: str | None, as_json: bool, **options: Any) -> None:
    from recmill import tracking
    from recmill.report import build_report
    from recmill.report.ablation import ablation_json, ablation_lines, load_ablation
    from recmill.report.comparison import comparison_json
    from recmill.report.runs import load_runs
    from recmill.training.ablation import TRAINED, WITHIN, run_ablation
    from recmill.training.trainer import TrainingFailed

    ablation, work = _ablation_of(**options)
    try:
        finished = run_ablation(ablation, out=work, progress=progress_for(as_json, live=WITHIN, lines=(TRAINED,)))
    except TrainingFailed as error:
        click.echo(f"recmill: error: {error}", err=True)
        sys.exit(1)
    folders = [Path(work, entry["name"]) for entry in finished["variants"]]
    page = build_report(folders, out=out or Path(work, "report.html"), title=title, ablation=work)
    variants = load_ablation(work)
    figures = ablation_json(variants)
    if not tracking.is_tracking_off():
        tracking.log_comparison(
            figures,
            name=Path(work).name,
            tracking_uri=tracking.default_tracking_uri(work),
            params=finished["settings"],
            page=page,
        )
    result = {"report": str(page), **comparison_json(load_runs(folders)), "variants": figures}
    emit(result, [*ablation_lines(variants), "", f"Page: {page}"], as_json=as_json)


def _ablation_of(
    *,
    preset: str | None,
    data: str | None,
    work: str | None,
    flags: tuple[str, ...],
    switches: tuple[str, ...],
    no_leave_one_out: bool,
    memory_budget: int,
    hot_budget: int,
    repeats: int | None,
    **others: int | str,
) -> tuple[Any, str]:
    from recmill.training.ablation import Ablation
    from recmill.training.config import TrainConfig, settings_of_run

    preset = preset or "parquet"
    training, data_settings = settings_of_run(preset, flags)
    ablation = Ablation(
        preset=preset,
        data=data,
        data_settings=data_settings,
        config=TrainConfig.from_overrides(training),
        memory_budget_bytes=memory_budget,
        hot_budget_bytes=hot_budget,
        switches=switches or tuple(Switch),
        leave_one_out=not no_leave_one_out,
        repeats=repeats or 0,
        **others,  # type: ignore[arg-type]
    )
    return ablation, work or f"runs/compare-{preset}"


@click.command()
@click.argument("folder")
@click.option("--older-than", "days", type=click.FloatRange(min=0), default=30.0, help="Days without a written file.")
@click.option("--keep", type=click.IntRange(min=0), default=5, help="Newest runs that stay however old they are.")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@json_option
def clean(folder: str, days: float, keep: int, dry_run: bool, as_json: bool) -> None:
    """Remove old runs from FOLDER: folders in it that have a run.json; nothing else is touched.

    \b
    Examples:
      recmill clean runs --older-than 30 --keep 5 --dry-run
      recmill clean /runs --older-than 14
    """
    from recmill.tracking.retention import choose_old_runs, find_runs, remove_run

    found = find_runs(folder)
    old = choose_old_runs(found, older_than_s=days * 86_400, keep=keep)
    if not dry_run:
        for run in old:
            remove_run(run)
    freed = sum(run.num_bytes for run in old)
    done = "would be removed" if dry_run else "removed"
    lines = [
        f"{run.path}: last written to {time.strftime('%Y-%m-%d %H:%M', time.localtime(run.written_at))}" for run in old
    ]
    lines.append(f"{len(old)} of {len(found)} runs {done}, {format_bytes(freed)}")
    names = [run.path.name for run in old]
    emit({"removed": names, "kept": len(found) - len(old), "bytes": freed, "dry_run": dry_run}, lines, as_json=as_json)
