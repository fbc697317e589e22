"""The section on data checks."""

from __future__ import annotations

import json
from pathlib import Path

from recmill.artifacts import hash_file
from recmill.artifacts.manifest import sign_manifest
from recmill.data.checks.findings import LogFinding, LogFindings
from recmill.report.page import render_page
from recmill.report.runs import load_run
from tests.unit.report.report_runs import write_run

FOUND = LogFindings(
    checks=("nulls", "days"),
    found=(
        LogFinding(
            check="days",
            level="warning",
            subject="click",
            message="1 day has an unusual rate",
            examples=({"day": "2024-10-07", "events": 1000},),
        ),
        LogFinding(check="nulls", level="info", subject="<brand>", message="'<brand>' is null in 9 of 100 events"),
    ),
    days=(
        {"day": "2024-10-06", "num_events": 900, "click": 0.1},
        {"day": "2024-10-07", "num_events": 1000, "click": 0.0},
    ),
)


def page_with(tmp_path: Path, found: LogFindings | None) -> str:
    run = write_run(tmp_path / "run")
    if found:
        path = run / "dataset" / "schema.json"
        schema = json.loads(path.read_text())
        schema["info"]["checks"] = found.to_json()
        path.write_text(json.dumps(schema))
        manifest = path.with_name("dataset.json")
        body = json.loads(manifest.read_text())
        listed = next(entry for entry in body["files"] if entry["name"] == "schema.json")
        listed |= {"bytes": path.stat().st_size, "sha256": hash_file(path)}
        manifest.write_text(json.dumps(sign_manifest(body)))
    return render_page([load_run(run)])


def test_the_page_shows_warnings_remarks_and_days(tmp_path: Path) -> None:
    page = page_with(tmp_path, FOUND)
    assert 'id="checks"' in page
    assert "1 day has an unusual rate" in page
    assert "day 2024-10-07, events 1000" in page
    assert "Remarks (1)" in page
    assert "&lt;brand&gt;" in page
    assert "<brand>" not in page
    assert "Label rate per day" in page


def test_a_log_that_was_not_prepared_has_no_section(tmp_path: Path) -> None:
    assert 'id="checks"' not in page_with(tmp_path, None)
