"""`recmill cluster` and `recmill profile` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import click
import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from recmill.cli import cli, main
from recmill.data.schema import Schema
from tests.raw_logs import random_log, write_log


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_generate_cluster_profile_count_what_the_raw_files_hold(tmp_path: Path, capsys) -> None:
    raw, data, profile = tmp_path / "D", tmp_path / "E", tmp_path / "P"
    assert run(capsys, "generate", "--preset", "small", "--sessions", "300", "--out", raw)[0] == 0
    code, out, _ = run(capsys, "cluster", raw, "--layout", "session", "--out", data, "--json")
    assert code == 0
    clustered = json.loads(out)
    code, out, _ = run(capsys, "profile", data, "--out", profile, "--json")
    assert code == 0
    profiled = json.loads(out)
    num_rows, num_sessions = duckdb.sql(
        f"SELECT count(*), count(DISTINCT session_id) FROM '{raw}/*.parquet'"
    ).fetchall()[0]
    assert (clustered["num_rows"], clustered["num_sessions"]) == (num_rows, num_sessions)
    assert (profiled["num_samples"], profiled["num_sessions"]) == (num_rows, num_sessions)
    for table in Schema.load(raw).tables:
        selects = " UNION ALL ".join(f"SELECT unnest(\"{f}\") AS id FROM '{raw}/*.parquet'" for f in table.features)
        query = f"SELECT id, count(*) AS n FROM ({selects}) GROUP BY id ORDER BY n DESC, id"
        expected = duckdb.sql(query).fetchnumpy()
        counts = pq.read_table(profile / "counts" / f"{table.name}.parquet")
        assert np.array_equal(counts["row"].to_numpy(), expected["id"])
        assert np.array_equal(counts["count"].to_numpy(), expected["n"])
        assert profiled["tables"][table.name]["num_accesses"] == expected["n"].sum()


def test_people_get_a_table(tmp_path: Path, capsys) -> None:
    raw = write_log(tmp_path / "raw", random_log(200))
    code, out, err = run(capsys, "cluster", raw, "--out", tmp_path / "data", "--eval-fraction", "0.2")
    assert code == 0
    assert "200 rows of" in out
    assert "check the log: 200 of 200" in err
    code, out, _ = run(capsys, "profile", tmp_path / "data", "--out", tmp_path / "profile", "--split", "test")
    assert code == 0
    assert "items" in out
    assert "history" in out


@pytest.mark.parametrize("command", ["cluster", "profile"])
def test_help_says_what_it_does(capsys, command: str) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert "--json" in out
    assert "--out" in out


def test_what_is_wrong_ends_in_one_line_and_exit_code_2(tmp_path: Path, capsys) -> None:
    raw = write_log(tmp_path / "raw", random_log(20).drop_columns(["tags"]))
    for args in (
        ["cluster", raw, "--out", tmp_path / "out"],
        ["cluster", tmp_path / "nowhere", "--out", tmp_path / "out"],
        ["profile", raw, "--out", tmp_path / "out"],
        ["profile", tmp_path / "nowhere", "--out", tmp_path / "out", "--json"],
    ):
        code, out, err = run(capsys, *args)
        assert (code, out) == (2, "")
        assert err.startswith("recmill: error: ")
        assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]


def test_layouts_that_do_not_exist_are_not_offered(tmp_path: Path, capsys) -> None:
    code, _, err = run(capsys, "cluster", tmp_path, "--out", tmp_path / "out", "--layout", "columnar")
    assert code == 2
    assert "'auto', 'deduplicated', 'session', 'time'" in err


def test_the_help_of_every_command_shows_defaults_and_no_empty_ones(capsys) -> None:
    with click.Context(cli) as context:
        names = cli.list_commands(context)
    texts = {name: " ".join(run(capsys, name, "--help")[1].split()) for name in names}
    assert [name for name, text in texts.items() if '[default: ""]' in text] == []
    assert "[default: 2048]" in texts["plan"]
