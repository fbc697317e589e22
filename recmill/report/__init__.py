"""One self-contained HTML page about one run, or about several runs compared with the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recmill.artifacts import is_remote, write_text_atomically
from recmill.report.ablation import load_ablation
from recmill.report.page import render_page
from recmill.report.runs import load_runs

__all__ = ["build_report"]


def build_report(
    runs: Sequence[str | Path], *, out: str | Path, title: str | None = None, ablation: str | Path | None = None
) -> Path | str:
    """Write the page about the run folders (the first is the baseline) and return its path: a Path, or the URL.

    `ablation` is the folder of a comparison: the page then begins with the gain of each switch.

    The page names missing parts of a run; a folder that is not a run, or a broken file in it, raises InputError.
    """
    variants = load_ablation(ablation) if ablation else ()
    write_text_atomically(out, render_page(load_runs(runs), title=title, variants=variants))
    return out if is_remote(out) else Path(out)
