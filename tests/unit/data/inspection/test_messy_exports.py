"""Exports as they come: init and prepare read them right, or say in one sentence what is wrong and where."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime, timedelta, timezone

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from recmill.artifacts import InputError
from recmill.cli import main
from recmill.data.inspection import reading
from recmill.data.inspection.document import write_document
from recmill.data.inspection.proposal import propose_log
from recmill.data.preparation.prepared_log import check_log, prepare_log
from recmill.data.vocabulary import Vocabulary

START = datetime(2025, 3, 1, 0, 30, tzinfo=timezone(timedelta(hours=2)))
NUM_EVENTS = 300
TIMES = [START + timedelta(minutes=10 * n) for n in range(NUM_EVENTS)]
ACTIONS = ["view", "view", "cart", "view", "purchase"]


def propose(folder) -> dict:
    proposal = propose_log([str(folder / "in")])
    (folder / "log.yaml").write_text(write_document(proposal, out=folder / "log.yaml"), encoding="utf-8")
    return yaml.safe_load((folder / "log.yaml").read_text(encoding="utf-8"))


def samples(folder) -> list[dict]:
    prepare_log(folder / "log.yaml", out=folder / "raw")
    return pq.read_table(folder / "raw/log-00000.parquet").sort_by("timestamp").to_pylist()


def write(folder, name: str, lines: list[str], **how) -> None:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / name).write_text("\n".join(lines) + "\n", **how)


def plain_lines(header="user_id,item_id,event_time,event") -> list[str]:
    rows = [f"u{n % 30},{n % 40},{time:%Y-%m-%d %H:%M:%S},{ACTIONS[n % 5]}" for n, time in enumerate(TIMES)]
    return [header, *rows]


def test_semicolons_quotes_a_byte_order_mark_and_time_zones(tmp_path):
    lines = ['"Event Time";"Customer ID";"Article";"Action"']
    lines += [
        f'"{time.isoformat()}";"Usr-{n % 30:03}";"5"" disk; no {n % 40}";"{ACTIONS[n % 5]}"'
        for n, time in enumerate(TIMES)
    ]
    write(tmp_path, "events.csv", lines, encoding="utf-8-sig", newline="\r\n")
    found = propose(tmp_path)
    assert (found["events"]["user"], found["events"]["item"]) == ("Customer ID", "Article")
    rows = samples(tmp_path)
    assert rows[0]["timestamp"] == int(datetime(2025, 2, 28, 22, 30, tzinfo=UTC).timestamp() * 1_000)
    assert len(rows) == NUM_EVENTS
    asked = Vocabulary.load(tmp_path / "raw", "article").rows(['5" disk; no 7', "5"])
    assert (asked[0] > 0, asked[1]) == (True, 0)


def test_text_times_with_and_without_an_offset(tmp_path):
    (tmp_path / "in").mkdir()
    texts = [START.isoformat(), "2025-02-28 22:45:00", "2025-02-28T22:50:00Z"]
    table = {"user_id": ["a", "b", "c"], "item_id": [1, 2, 3], "event_time": texts, "label": [0, 1, 0]}
    pq.write_table(pa.table(table), tmp_path / "in/events.parquet")
    text = """
format_version: 1
sources: {events: {path: in/events.parquet}}
events: {source: events, user: user_id, item: item_id, time: {column: event_time}, session: {gap: 30min}}
labels: [{name: label, where: [{column: label, equals: 1}]}]
features: [{name: item, column: item_id, kind: sparse}]
"""
    (tmp_path / "log.yaml").write_text(text)
    times = [row["timestamp"] for row in samples(tmp_path)]
    assert [datetime.fromtimestamp(time / 1_000, UTC).strftime("%H:%M") for time in times] == [
        "22:30",
        "22:45",
        "22:50",
    ]


def test_nested_json_lines(tmp_path):
    (tmp_path / "in").mkdir()
    with gzip.open(tmp_path / "in/events.jsonl.gz", "wt") as file:
        for n, time in enumerate(TIMES):
            user = {"id": f"u{n % 30}", "address": {"country": ["DE", "FR"][n % 2]}}
            event = {"ts": time.isoformat(), "user": user, "item": {"sku": n % 40, "tags": ["x", "y"][: n % 3]}}
            file.write(json.dumps({**event, "event": ACTIONS[n % 5]}) + "\n")
    found = propose(tmp_path)
    assert (found["events"]["user"], found["events"]["item"]) == ("user.id", "item.sku")
    columns = {feature.get("column") for feature in found["features"]}
    assert {"user.address.country", "item.tags"} <= columns
    assert samples(tmp_path)[0]["timestamp"] == START.timestamp() * 1_000


def test_ids_of_19_and_20_digits(tmp_path):
    """The first look like nanoseconds since 1970, the second exceed 64 bits; some are missing."""
    users = ["" if n % 100 == 3 else str(2**63 + n % 30) for n in range(NUM_EVENTS)]
    rows = [
        f"{user},{10**18 + n % 40},{int(TIMES[n].timestamp() * 1_000)},{ACTIONS[n % 5]}" for n, user in enumerate(users)
    ]
    write(tmp_path, "events.csv", ["user_id,item_id,timestamp,event", *rows])
    found = propose(tmp_path)
    assert (found["events"]["user"], found["events"]["item"]) == ("user_id", "item_id")
    assert found["events"]["where"] == [{"column": "user_id", "is_null": False}]
    assert len(samples(tmp_path)) == NUM_EVENTS - 3
    assert Vocabulary.load(tmp_path / "raw", "user_id").rows([2**63 + 1, str(2**63 + 1), 2**63]).all()


def test_ids_that_are_numbers_until_late(tmp_path):
    rows = plain_lines()[1:]
    rows[-2] = rows[-2].replace(f",{(NUM_EVENTS - 2) % 40},", ",A7,")
    write(tmp_path, "events.csv", ["user_id,item_id,event_time,event", *rows])
    propose(tmp_path)
    samples(tmp_path)
    assert Vocabulary.load(tmp_path / "raw", "item_id").rows(["A7", 7, "7"]).all()


def cut(lines: list[str]) -> bytes:
    whole = gzip.compress("\n".join(lines).encode(), mtime=0)
    return whole[: len(whole) // 2]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("events.csv", [*plain_lines(), *plain_lines()], "events.csv, line 302: repeats the header line"),
        (
            "events.csv",
            [*plain_lines()[:200], "u1,2,2025-03-01 00:30:00,view,more,fields", *plain_lines()[200:]],
            "events.csv: cannot be read as csv (line 201 has 6 fields, the first line has 4)",
        ),
        ("events.csv.gz", cut(plain_lines()), "events.csv.gz: cannot be read as csv (Compressed file ended"),
        ("events.parquet", b"not parquet at all", "events.parquet: cannot be read as parquet"),
        ("events.csv", ["user_id,item_id,event_time,event"], "events.csv: the table is empty"),
        ("events.csv", b"", "events.csv: the file is empty"),
        ("events.jsonl", b"", "events.jsonl: the file is empty"),
        ("events.csv", gzip.compress(b"a,b"), "events.csv: is compressed with gzip; its name should end in .gz"),
        (
            "events.csv",
            b"PK\x03\x04 and so on",
            "events.csv: is a zip archive or a workbook of Excel; export it as CSV",
        ),
        (
            "events.csv",
            "\n".join([*plain_lines(), "u1,5 \u20ac,2025-03-01 00:30:00,view"]).encode("cp1252"),
            "events.csv, line 302 is neither UTF-8 nor Latin-1 (Windows-1252?); save the file as UTF-8)",
        ),
        (
            "events.csv",
            [line.replace("2025-03-02 ", "02.03.2025 ") for line in plain_lines()],
            "event_time: 52.0% of its values are times as ISO 8601, others are not, such as '02.03.2025 00:00:00';",
        ),
        (
            "events.jsonl",
            ['{"user_id": 1, "item_id": 2}', '{"user_id": 1, "item'],
            "events.jsonl, line 2: Invalid",
        ),
    ],
    ids=[
        *("header in the middle", "too many fields", "cut file", "another format", "header only", "empty"),
        *("empty lines", "gzip by another name", "a workbook", "Windows-1252", "two forms of times", "cut JSON"),
    ],
)
def test_files_that_cannot_be_read_are_named_with_the_line(tmp_path, capsys, name, content, sentence):
    if isinstance(content, bytes):
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / name).write_bytes(content)
    else:
        write(tmp_path, name, content)
    with pytest.raises(SystemExit) as stop:
        main(["init", str(tmp_path / "in"), "--out", str(tmp_path / "log.yaml")])
    assert stop.value.code == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("  ")]
    assert sentence in said
    assert not (tmp_path / "log.yaml").exists()


def test_a_time_that_is_none_is_named_with_its_line(tmp_path):
    write(tmp_path, "events.csv", plain_lines())
    propose(tmp_path)
    lines = plain_lines()
    lines[250] = "u1,2,yesterday,view"
    write(tmp_path, "events.csv", lines)
    with pytest.raises(InputError, match=r'"yesterday".*; see .*events.csv, line 251$'):
        check_log(tmp_path / "log.yaml")


def test_init_says_which_days_are_empty(tmp_path):
    """One of 21 days may be a missing file, which prepare refuses; most of them are how the log is."""
    days = [time for n in range(21) if n != 7 for time in [START + timedelta(days=n, minutes=m) for m in range(15)]]
    rows = [f"u{n % 30},{n % 40},{time:%Y-%m-%d %H:%M:%S},{ACTIONS[n % 5]}" for n, time in enumerate(days)]
    write(tmp_path, "events.csv", ["user_id,item_id,event_time,event", *rows])
    assert "checks" not in propose(tmp_path)
    assert "1 of 21 days have no events: is a file missing?" in " ".join(
        (tmp_path / "log.yaml").read_text(encoding="utf-8").replace("#", "").split()
    )
    with pytest.raises(InputError, match=r"events\.time: day 2025-03-08 has no events"):
        check_log(tmp_path / "log.yaml")
    sparse = [row for n, row in enumerate(rows) if (n // 15) % 3 == 0]
    write(tmp_path, "events.csv", ["user_id,item_id,event_time,event", *sparse])
    (tmp_path / "log.yaml").unlink()
    assert propose(tmp_path)["checks"] == {"empty_days": "allow"}
    check_log(tmp_path / "log.yaml")


def test_days_and_months_that_duckdb_would_guess_are_said(tmp_path):
    """DuckDB alone reads 03/04/2025 as the 3rd of April, without a word."""
    times = [START + timedelta(hours=n) for n in range(240)]  # ten days: none is later than the 12th of a month
    rows = [f"u{n % 30},{n % 40},{time:%m/%d/%Y %H:%M:%S},{ACTIONS[n % 5]}" for n, time in enumerate(times)]
    write(tmp_path, "events.csv", ["user_id,item_id,event_time,event", *rows])
    found = propose(tmp_path)
    assert found["events"]["time"] == {"column": "event_time", "format": "%d/%m/%Y %H:%M:%S"}
    assert "checks" not in found  # that most days are empty is no fact as long as the days are not certain
    said = " ".join((tmp_path / "log.yaml").read_text(encoding="utf-8").replace("#", "").split())
    assert "its times fit %d/%m/%Y %H:%M:%S and %m/%d/%Y %H:%M:%S; took %d/%m/%Y %H:%M:%S." in said
    text = (tmp_path / "log.yaml").read_text(encoding="utf-8")
    (tmp_path / "log.yaml").write_text(text.replace("%d/%m/%Y", "%m/%d/%Y"), encoding="utf-8")
    assert samples(tmp_path)[1]["timestamp"] == times[1].replace(tzinfo=UTC).timestamp() * 1_000
    (tmp_path / "log.yaml").write_text(text.replace(", format: '%d/%m/%Y %H:%M:%S'", ""), encoding="utf-8")
    with pytest.raises(InputError, match=r"03/01/2025.*; see .*events.csv, line 2"):
        check_log(tmp_path / "log.yaml")


def test_decimal_commas_and_nulls_in_words(tmp_path):
    lines = plain_lines("user_id;item_id;event_time;event;price;note")
    prices = ["1,5", "N/A", "-2,25", "7"]
    lines[1:] = [f"{line.replace(',', ';')};{prices[n % 4]};{prices[n % 2]} kg" for n, line in enumerate(lines[1:])]
    lines[4] = lines[4].replace("u3;", "NULL;")
    write(tmp_path, "events.csv", lines)
    found = propose(tmp_path)
    assert found["sources"]["events"] == {
        "path": "in/events.csv",
        "delimiter": ";",
        "decimal": ",",
        "nulls": ["N/A", "NULL"],
    }
    assert found["events"]["where"] == [{"column": "user_id", "is_null": False}]
    said = (tmp_path / "log.yaml").read_text(encoding="utf-8")
    assert "events: numbers are read with a decimal comma: -2,25 is -2.25." in said
    assert "events: the texts N/A, NULL are read as missing values (nulls)." in said
    text = said.split("features:")[0] + "features: [{name: price, column: price, kind: dense, null_value: 0}]\n"
    (tmp_path / "log.yaml").write_text(text, encoding="utf-8")
    rows = samples(tmp_path)
    assert len(rows) == NUM_EVENTS - 1
    assert [row["price"] for row in rows[:4]] == [1.5, 0.0, -2.25, 1.5]


def test_amounts_with_separated_thousands_are_said(tmp_path):
    lines = [line.replace(",", ";") for line in plain_lines("user_id,item_id,event_time,event,price")]
    lines[1:] = [f"{line};{1 + n % 3}.{100 + n % 9},50" for n, line in enumerate(lines[1:])]
    write(tmp_path, "events.csv", lines)
    propose(tmp_path)
    said = " ".join((tmp_path / "log.yaml").read_text(encoding="utf-8").replace("#", "").split())
    assert "events.price: looks like amounts (1.100,50), but is read as text; write them without separators" in said


def test_utf_16_empty_parts_and_a_name_twice(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/events-1.csv").write_bytes(b"")
    lines = plain_lines("user_id,item_id,event_time,event,item_id")
    lines[1:] = [f"{line},K\u00e4se {n % 3}" for n, line in enumerate(lines[1:])]
    (tmp_path / "in/events-2.csv").write_text("\n".join(lines).replace(",", "\t") + "\n", encoding="utf-16")
    found = propose(tmp_path)
    assert found["sources"]["events"]["encoding"] == "utf-16"
    said = " ".join((tmp_path / "log.yaml").read_text(encoding="utf-8").replace("#", "").split())
    assert "events: empty files are left out:" in said
    assert "its header has item_id more than once; the later ones are read as item_id_1." in said
    assert len(samples(tmp_path)) == NUM_EVENTS
    assert Vocabulary.load(tmp_path / "raw", "item_id_1").are_known(["K\u00e4se 2"]).all()


def test_ids_that_are_numbers_until_after_the_rows_that_types_are_guessed_from(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "SNIFFED_ROWS", 2_048)
    rows = [
        f"u{n % 30},{n % 40},{START + timedelta(minutes=n):%Y-%m-%d %H:%M:%S},{ACTIONS[n % 5]}" for n in range(9_000)
    ]
    rows[-1] = rows[-1].replace(f",{8_999 % 40},", ",A7,")
    write(tmp_path, "events.csv", ["user_id,item_id,event_time,event", *rows])
    propose(tmp_path)
    prepare_log(tmp_path / "log.yaml", out=tmp_path / "raw")
    assert Vocabulary.load(tmp_path / "raw", "item_id").are_known(["A7", "7"]).all()


def test_days_that_a_sample_lacks_are_counted_in_all_rows(tmp_path):
    """Of 40 daily files 14 are looked at: their days are no evidence of missing ones."""
    (tmp_path / "in").mkdir()
    for day in range(40):
        times = [datetime(2025, 3, 1, 10, tzinfo=UTC) + timedelta(days=day, minutes=n) for n in range(30)]
        columns = {"user_id": [f"u{n % 7}" for n in range(30)], "item_id": list(range(30)), "event_time": times}
        pq.write_table(pa.table(columns), tmp_path / f"in/events-{day:02}.parquet")
    proposal = propose_log([str(tmp_path / "in")], sample_rows=200)
    assert proposal.roles.table.is_sample
    assert (proposal.times.num_days, proposal.times.num_empty_days) == (40, 0)
    (tmp_path / "in/events-07.parquet").unlink()
    proposal = propose_log([str(tmp_path / "in")], sample_rows=200)
    assert [note for note in proposal.notes if "1 of 40 days have no events: is a file missing?" in note]


def test_nan_is_a_missing_value_in_conditions_and_checks(tmp_path):
    """pandas writes missing numbers so; DuckDB ranks them above all others."""
    (tmp_path / "in").mkdir()
    prices = pa.array([float("nan"), 1.0, None, 7.0] * 5)
    columns = {"user": ["a", "b"] * 10, "item": list(range(20)), "ts": list(range(20)), "price": prices}
    pq.write_table(pa.table(columns), tmp_path / "in/events.parquet")
    text = """
format_version: 1
sources: {events: {path: in/events.parquet}}
events: {source: events, user: user, item: item, time: {column: ts, unit: s}, session: {gap: 30min}}
labels: [{name: label, where: [{column: price, at_least: 5}]}]
features: [{name: price, column: price, kind: dense}]
"""
    (tmp_path / "log.yaml").write_text(text)
    assert sum(row["label"] for row in samples(tmp_path)) == 5
    (finding,) = [own for own in check_log(tmp_path / "log.yaml").found if own.check == "nulls"]
    assert finding.numbers == {"num_nulls": 10, "num_events": 20}
    assert finding.examples[0]["price"] is None
    (tmp_path / "log.yaml").write_text(text.replace("session:", "where: [{column: price, is_null: false}], session:"))
    assert len(samples(tmp_path)) == 10
