"""`recmill generate`: a raw log from a preset."""

from __future__ import annotations

from typing import Any

import click

from recmill.artifacts import InputError
from recmill.cli.output import emit, json_option, progress_for
from recmill.data.sources.presets import PRESETS
from recmill.sizes import format_bytes

SHOP = "shop"


@click.command()
@click.option(
    "--preset",
    type=click.Choice([*PRESETS, SHOP]),
    required=True,
    help="Data to write; the first four are synthetic. shop: three CSV files for recmill init.",
)
@click.option("--out", required=True, help="Folder for log-*.parquet and schema.json; shop: for its CSV files.")
@click.option("--sessions", type=int, help="Number of sessions (synthetic). Default: the preset's.")
@click.option("--samples-per-session", type=float, help="Mean session size; sizes are heavy-tailed (synthetic).")
@click.option("--zipf", type=float, help="Exponent of the popularity of ids; 0 is uniform (synthetic).")
@click.option(
    "--stay-prob", type=float, help="Probability that a user feature stays from sample to sample (synthetic)."
)
@click.option(
    "--labels",
    metavar="NAMES",
    help="Label columns, e.g. click,purchase: each can be 1 only where the one before is (synthetic). Default: label.",
)
@click.option("--seed", type=int, help="Same seed, same log (synthetic; globo: its negatives).")
@click.option(
    "--limit", type=int, help="Take only this many sessions, the earliest (real data; frappe: rows per split)."
)
@click.option("--data", help="Folder of the real data. Default: RECMILL_DATA_DIR.")
@json_option
def generate(preset: str, out: str, data: str | None, as_json: bool, **overrides: Any) -> None:
    """Write a raw log in time order: synthetic traffic, or a real data set in recmill's format.

    \b
    Examples:
      recmill generate --preset small --sessions 20000 --out logs/small
      recmill generate --preset recd --samples-per-session 4 --stay-prob 0.95 --out logs/short
      RECMILL_DATA_DIR=/data recmill generate --preset globo --limit 100000 --out logs/globo

    shop writes no log but events.csv, products.csv and customers.csv, as a shop would export them (--sessions, --seed).
    Labels of synthetic logs come from a hidden model, so the best reachable AUC is known and printed.
    Nothing is downloaded; docs/data.md says where to get each data set and where to put it.
    """
    import time

    if preset == SHOP:
        _write_shop(out, data, overrides, as_json=as_json)
        return
    from recmill.data.sources.log_writer import summarise_log
    from recmill.data.sources.raw_log import make_raw_log

    started_s = time.perf_counter()
    path = make_raw_log(preset, out=out, data=data, overrides=overrides, progress=progress_for(as_json))
    summary = {"preset": preset, **summarise_log(path, seconds=time.perf_counter() - started_s)}
    emit(summary, describe(summary), as_json=as_json)


def _write_shop(out: str, data: str | None, overrides: dict[str, Any], *, as_json: bool) -> None:
    from recmill.data.sources.shop import ShopConfig, write_shop

    names = {"sessions": "num_visits", "seed": "seed"}
    given = {name: value for name, value in ({"data": data} | overrides).items() if value is not None}
    if unknown := [name for name in given if name not in names]:
        raise InputError(
            f"preset {SHOP!r} has no option --{unknown[0].replace('_', '-')}; it has --sessions and --seed"
        )
    rows = write_shop(out, ShopConfig(**{names[name]: value for name, value in given.items()}))
    files = ", ".join(f"{name} ({count:,} rows)" for name, count in rows.items())
    emit({"preset": SHOP, "path": out, "num_rows": rows}, [f"{out}: {files}"], as_json=as_json)


def describe(summary: dict[str, Any]) -> list[str]:
    info = summary["info"]
    lines = [
        f"{summary['path']}: {summary['num_rows']:,} samples of {summary['num_sessions']:,} sessions",
        f"  size        {format_bytes(summary['bytes'])} in {summary['num_files']} file(s)",
        f"  speed       {summary['samples_per_s']:,.0f} samples/s ({summary['seconds']:.1f} s)",
        f"  positives   {info['base_rate']:.1%}",
    ]
    if info.get("best_auc") is not None:
        lines.append(f"  best AUC    {info['best_auc']:.4f} (log loss {info['best_log_loss']:.4f})")
    for name, own in info.get("labels", {}).items():
        best = "undefined" if own["best_auc"] is None else f"{own['best_auc']:.4f}"
        lines.append(f"  {name:<12}{own['base_rate']:.1%} positives, best AUC {best}")
    return lines
