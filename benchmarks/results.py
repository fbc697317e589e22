"""The results tables, made from the JSON files of the benchmarks.

    python benchmarks/results.py                write the tables into README.md (headlines) and docs/results.md (all)
    python benchmarks/results.py --run          run the full form of every benchmark first: hours, on an idle machine
    python benchmarks/results.py --run --stale  run only those that failed or whose code has changed since they ran
    python benchmarks/results.py --run --quick  quick forms into runs/results-quick; prints their table, writes no page
    python benchmarks/results.py --check        report stale rows; fail if the pages do not hold these tables

Each benchmark writes benchmarks/results/NAME.json (--json), and keeps finished parts until then: one that failed or was
killed resumes, and the others run in any case. result_rows.py says when a row is met, open or missed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims import BENCHMARKS
from measured_code import ROOT, changed_code
from result_rows import RESULTS, Row, read_result, read_rows

HERE = Path(__file__).parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
QUICK_RESULTS = ROOT / "runs" / "results-quick"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
COLUMNS = (
    "what",
    "rival",
    "measured",
    "interval",
    "target",
    "verdict",
    "pairs",
    "benchmark",
    "commit",
    "date",
    "machine",
)


def make_table(rows: Sequence[Row]) -> str:
    """All rows, with the commit, date and machine of each."""
    lines = [_line(*COLUMNS), "|" + "---|" * len(COLUMNS)]
    for row in rows:
        found = (row.measured, row.interval, row.target, _strong(row.verdict), row.pairs)
        lines.append(_line(row.claim.text, row.claim.rival, *found, f"`benchmarks/{row.benchmark}.py`", *row.origin))
    return "\n".join(lines)


def make_headlines(rows: Sequence[Row]) -> str:
    """The README's rows and how many targets are met."""
    lines = [_line("what", "measured", "against", "verdict"), "|---|---|---|---|"]
    for row in rows:
        if row.claim.is_headline:
            interval = f" ({row.interval})" if row.interval else ""
            lines.append(_line(row.claim.text, row.measured + interval, row.claim.rival, _strong(row.verdict)))
    counts = Counter(row.verdict for row in rows if row.claim.target is not None)
    wanted = ("met", "open", "missed", "stale", "skipped")
    counted = ", ".join(f"{counts[name]} {name}" for name in wanted if counts[name])
    return "\n".join([*lines, "", f"Of {sum(counts.values())} targets: {counted}."])


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _strong(verdict: str) -> str:
    return f"**{verdict}**" if verdict in ("missed", "stale") else verdict


def describe_stale(rows: Sequence[Row]) -> list[str]:
    """One line for every benchmark whose rows are older than the code they measure."""
    stale: dict[str, list[Row]] = {}
    for row in rows:
        if row.verdict == "stale":
            stale.setdefault(row.benchmark, []).append(row)
    lines = []
    for name, (first, *others) in stale.items():
        why = f"changed since: {', '.join(first.changed)}" if first.result.get("code") else "run before code was hashed"
        lines.append(f"stale: rows of benchmarks/{name}.py: {1 + len(others)}; {why}")
    return lines


def update(page: Path, table: str) -> str:
    """The page's text with the table between its markers."""
    text = page.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{page}: lacks {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def run_benchmarks(names: Sequence[str], folder: Path, *, is_quick: bool, scripts: Path = HERE) -> list[str]:
    """Run one benchmark after the other; one that fails does not stop the others. Returns those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        form = ["--quick"] if is_quick else []
        command = [sys.executable, scripts / f"{name}.py", *form, "--json", folder / f"{name}.json"]
        code = subprocess.run(command, check=False).returncode
        if code:
            print(f"== {name} failed with exit code {code}; the others follow", flush=True)
            failed.append(name)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the benchmarks first")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="run only this one; repeatable")
    parser.add_argument("--stale", action="store_true", help="run only those whose code has changed since they ran")
    parser.add_argument("--quick", action="store_true", help="quick forms, for development: no page is written")
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a page is out of date")
    given = parser.parse_args()
    folder = QUICK_RESULTS if given.quick else RESULTS
    failed: list[str] = []
    if given.run:
        names = [
            name for name in given.only or BENCHMARKS if not given.stale or is_due(name, read_result(folder, name))
        ]
        failed = run_benchmarks(names, folder, is_quick=given.quick)
    rows = list(read_rows(folder))
    print(make_table(rows))
    for line in describe_stale(rows):
        print(line)
    if not given.quick:
        write_pages(rows, is_check=given.check)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; `results.py --run --stale` resumes them")


def is_due(benchmark: str, result: Mapping[str, Any]) -> bool:
    """Never run, run with other code, or failed in part."""
    return bool(changed_code(benchmark, result.get("code")) or result.get("failed"))


def write_pages(rows: Sequence[Row], *, is_check: bool) -> None:
    for page, content in ((README, make_headlines(rows)), (PAGE, make_table(rows))):
        text = update(page, content)
        if text == page.read_text(encoding="utf-8"):
            continue
        if is_check:
            raise SystemExit(
                f"{page.name}: its table differs from benchmarks/results; run python benchmarks/results.py"
            )
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
