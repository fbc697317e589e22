"""Checks of the events of a shop in which things are wrong, and `recmill init --check` on it."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from recmill.artifacts import InputError
from recmill.cli import main
from recmill.data.checks.findings import LogFinding
from recmill.data.inspection.document import write_document
from recmill.data.inspection.proposal import propose_log
from recmill.data.preparation.prepared_log import check_log, prepare_log
from recmill.data.schema import Schema
from recmill.data.sources.shop import ShopConfig, write_shop

Rows = list[dict[str, str]]


def make_shop(folder: Path, **changes: Callable[[Rows], Rows]) -> Path:
    """A log.yaml proposed for a small shop, whose files are changed afterwards."""
    write_shop(folder, ShopConfig(num_visits=300, num_customers=60, num_products=30))
    log_yaml = folder / "log.yaml"
    log_yaml.write_text(write_document(propose_log([str(folder)]), out=log_yaml))
    for name, change in changes.items():
        with (folder / f"{name}.csv").open() as file:
            rows = change(list(csv.DictReader(file)))
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return log_yaml


def sign_up_late(rows: Rows) -> Rows:
    return [rows[0] | {"signed_up": "2025-03-15 00:00:00"}, *rows[1:]]


def repeat_and_sell_out(rows: Rows) -> Rows:
    """Three repeated events, and a day on which every look is a purchase."""
    sold = [row | {"event": "purchase"} if row["event_time"].startswith("2025-03-11") else row for row in rows]
    return [*sold, sold[5], sold[5], sold[9]]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, LogFinding], Rows]:
    """The findings about a shop with several faults, by check, and its events."""
    folder = tmp_path_factory.mktemp("faulty")
    log_yaml = make_shop(folder, events=repeat_and_sell_out, customers=sign_up_late, products=lambda rows: rows[1:])
    found = {finding.check: finding for finding in check_log(log_yaml).warnings}
    return found, list(csv.DictReader((folder / "events.csv").open()))


def test_repeated_events_are_counted_with_a_row(faulty: tuple[dict[str, LogFinding], Rows]) -> None:
    finding, rows = faulty[0]["duplicates"], faulty[1]
    assert finding.numbers == {"num_duplicates": 3, "num_events": len(rows)}
    ids = {(row["customer_id"], row["times"]) for row in finding.examples}
    assert ids == {(rows[5]["customer_id"], 3), (rows[9]["customer_id"], 2)}


def test_events_before_the_customer_signed_up_are_counted(faulty: tuple[dict[str, LogFinding], Rows]) -> None:
    finding, rows = faulty[0]["existence"], faulty[1]
    early = [row for row in rows if row["customer_id"] == "C000000" and row["event_time"] < "2025-03-15"]
    assert finding.numbers["num_early"] == len(early) > 0
    assert finding.subject == "customers.signed_up"
    assert finding.examples[0]["signed_up"] == "2025-03-15 00:00:00"


def test_events_without_a_row_in_a_side_table_are_counted(faulty: tuple[dict[str, LogFinding], Rows]) -> None:
    finding, rows = faulty[0]["joins"], faulty[1]
    lost = sum(row["product_id"] == "P-00000" for row in rows)
    assert finding.numbers["num_unjoined"] == lost
    assert finding.examples == ({"product_id": "P-00000", "events": lost},)


def test_nulls_of_a_side_table_are_counted_by_events(tmp_path: Path) -> None:
    """A column that is empty for the products that are seen is not saved by those that nobody sees."""

    def forget(rows: Rows) -> Rows:
        return [row | {"brand": "" if n % 4 else row["brand"]} for n, row in enumerate(rows)]

    log_yaml = make_shop(tmp_path, products=forget)
    (finding,) = [own for own in check_log(log_yaml).warnings if own.subject == "products.brand"]
    known = {row["product_id"] for row in csv.DictReader((tmp_path / "products.csv").open()) if row["brand"]}
    events = [row["product_id"] for row in csv.DictReader((tmp_path / "events.csv").open())]
    lost = Counter(product for product in events if product not in known)
    assert finding.numbers == {"num_nulls": lost.total(), "num_events": len(events)}
    worst = min(lost, key=lambda product: (-lost[product], product))
    assert finding.examples[0] == {"product_id": worst, "events": lost[worst]}


def test_a_day_of_successes_stands_out(faulty: tuple[dict[str, LogFinding], Rows]) -> None:
    finding = faulty[0]["days"]
    assert finding.subject == "label"
    assert "100.00% on 2025-03-11" in finding.message


def test_the_shop_has_no_warning(tmp_path: Path) -> None:
    found = check_log(make_shop(tmp_path))
    assert found.warnings == []
    assert sum(day["num_events"] for day in found.days) == len((tmp_path / "events.csv").read_text().splitlines()) - 1


def test_strict_refuses_and_writes_nothing(tmp_path: Path) -> None:
    log_yaml = make_shop(tmp_path / "shop", events=lambda rows: [*rows, rows[5]])
    with pytest.raises(InputError, match=r"duplicates: 1 of .* without --strict this is a warning"):
        prepare_log(log_yaml, out=tmp_path / "raw", is_strict=True)
    assert not (tmp_path / "raw").exists()
    prepare_log(log_yaml, out=tmp_path / "raw")
    written = json.loads((tmp_path / "raw" / "checks.json").read_text())
    assert written["num_warnings"] == 1
    assert Schema.load(tmp_path / "raw").info["checks"] == written


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_check_prints_findings_and_a_mistake_is_one_sentence(tmp_path: Path, capsys) -> None:
    log_yaml = make_shop(tmp_path)
    code, out, _ = run(capsys, "init", "--check", log_yaml)
    assert code == 0
    assert "'device' is null in" in out
    assert "0 warnings from 5 checks" in out
    text = log_yaml.read_text()
    for before, after, expected in (
        ("products.price", "products.prize", "has no column 'prize'"),
        ("one_of: [cart, purchase]", "one_off: [cart]", "labels[0].where[0].one_off is not a key here"),
        ("{source: customers, column: customer_id}", "{source: customers, column: device}", "no value of 'device'"),
        ("gap: 30min", "gap: 0min", "expected more than zero"),
    ):
        assert before in text
        log_yaml.write_text(text.replace(before, after))
        code, _, error = run(capsys, "init", "--check", log_yaml)
        assert code == 2
        assert expected in error
        assert error.strip().splitlines()[-1].startswith("recmill: error:")


def test_nulls_in_ids_and_repeated_keys_are_one_sentence(tmp_path: Path, capsys) -> None:
    def without_a_user(rows: Rows) -> Rows:
        return [rows[0] | {"customer_id": ""}, *rows[1:]]

    for name, changes, expected in (
        ("nulls", {"events": without_a_user}, "column 'customer_id'"),
        ("keys", {"customers": lambda rows: [*rows, rows[3]]}, "1 values of 'customer_id' occur more than once"),
    ):
        code, _, error = run(capsys, "init", "--check", make_shop(tmp_path / name, **changes))
        assert code == 2
        assert expected in error
