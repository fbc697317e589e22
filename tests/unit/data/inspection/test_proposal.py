"""`recmill init` on tables whose meaning is known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import duckdb
import pytest

from recmill.cli import main
from recmill.data.inspection.document import write_document
from recmill.data.inspection.proposal import LogProposal, propose_log
from recmill.data.preparation.reading import parse_spec
from recmill.data.preparation.spec import LogSpec
from recmill.data.sources.shop import ShopConfig, write_shop


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    write_shop(folder, ShopConfig(num_visits=400, num_customers=80, num_products=40))
    return folder


def spec_of(proposal: LogProposal, folder: Path) -> LogSpec:
    return parse_spec(write_document(proposal, out=folder / "log.yaml"), where="log.yaml")


def roles_of(proposal: LogProposal) -> dict[str, str]:
    return {role: choice.column for role, choice in proposal.roles.chosen.items()}


def write_table(path: Path, query: str) -> Path:
    duckdb.sql(f"COPY ({query}) TO '{path}'")
    return path


def test_a_shop_export_needs_no_edit(shop: Path) -> None:
    proposal = propose_log([str(shop)])
    spec = spec_of(proposal, shop)
    assert roles_of(proposal) == {"user": "customer_id", "item": "product_id", "time": "event_time"}
    assert (spec.events.source, spec.events.session.gap) == ("events", "30min")
    assert {(join.source, join.column) for join in spec.joins} == {
        ("customers", "customer_id"),
        ("products", "product_id"),
    }
    assert {name: source.key for name, source in spec.sources.items()} == {
        "events": "",
        "customers": "customer_id",
        "products": "product_id",
    }
    assert set(spec.labels[0].where[0].one_of or ()) == {"cart", "purchase"}
    kinds = {feature.column: feature.kind for feature in spec.features if feature.column}
    assert kinds == {
        "customer_id": "sparse",
        "customers.country": "sparse",
        "customers.birth_year": "dense",
        "device": "sparse",
        "product_id": "sparse",
        "products.category": "sparse",
        "products.brand": "sparse",
        "products.price": "dense",
    }
    assert spec.sources["events"].path == "events.csv"


def test_comments_carry_the_evidence(shop: Path) -> None:
    text = write_document(propose_log([str(shop)]), out=shop / "log.yaml")
    num_events = len((shop / "events.csv").read_text().splitlines()) - 1
    assert f"# {num_events:,} rows: event_time, customer_id" in text
    assert "keys are unique" in text
    assert "left out: products.name: nearly every key has a text of its own" in text
    assert "left out: customers.signed_up: a time other than the event's" in text


def test_the_same_files_give_the_same_text(shop: Path) -> None:
    texts = {write_document(propose_log([str(shop)]), out=shop / "log.yaml") for _ in range(2)}
    assert len(texts) == 1


def test_two_times_are_said_and_the_one_of_the_event_is_taken(tmp_path: Path) -> None:
    write_table(
        tmp_path / "log.parquet",
        """SELECT 'u' || i % 50 AS visitor, i % 70 AS sku, TIMESTAMP '2024-01-01' + to_minutes(i * 7) AS ts,
                  TIMESTAMP '2024-01-01' + to_minutes(i * 7 + 1) AS click_time FROM range(2000) t(i)""",
    )
    proposal = propose_log([str(tmp_path / "log.parquet")])
    assert roles_of(proposal) == {"user": "visitor", "item": "sku", "time": "ts"}
    assert any("2 columns look like the time: ts, click_time; took ts" in note for note in proposal.notes)
    assert any("took ts" in line for line in write_document(proposal, out="log.yaml").splitlines() if line[0:1] == "#")


def test_a_time_of_storage_is_not_the_time_of_the_event(tmp_path: Path) -> None:
    write_table(
        tmp_path / "log.parquet",
        """SELECT TIMESTAMP '2024-02-01' + to_minutes(i) AS updated_at, 'u' || i % 50 AS user_id, i % 70 AS item_id,
                  1704067200000 + i * 60000 AS ts FROM range(2000) t(i)""",
    )
    proposal = propose_log([str(tmp_path)])
    assert roles_of(proposal)["time"] == "ts"
    assert spec_of(proposal, tmp_path).events.time.unit == "ms"


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("1704067200 + i * 60", {"unit": "s"}),
        ("(1704067200 + i * 60) * 1000000", {"unit": "us"}),
        ("strftime(TIMESTAMP '2024-01-15' + to_minutes(i * 7), '%d/%m/%Y %H:%M')", {"format": "%d/%m/%Y %H:%M"}),
        ("strftime(TIMESTAMP '2024-01-15' + to_minutes(i * 7), '%Y-%m-%dT%H:%M:%S')", {}),
        ("DATE '2024-01-15' + (i // 100)::INT", {}),
    ],
)
def test_the_form_of_a_time_is_found(tmp_path: Path, written: str, form: dict[str, str]) -> None:
    write_table(
        tmp_path / "log.parquet",
        f"SELECT i % 50 AS user_id, i % 70 AS item_id, {written} AS happened_at FROM range(2000) t(i)",
    )
    time = spec_of(propose_log([str(tmp_path)]), tmp_path).events.time
    assert {"unit": time.unit, "format": time.format} == {"unit": None, "format": ""} | form


def test_days_and_months_that_cannot_be_told_apart_are_said(tmp_path: Path) -> None:
    lines = [f"{i % 9},{i % 11},0{1 + i % 9}/0{1 + i % 7}/2024 10:{i % 60:02d}" for i in range(500)]
    (tmp_path / "log.csv").write_text("user,item,when\n" + "\n".join(lines) + "\n")
    proposal = propose_log([str(tmp_path)])
    assert any("fit %d/%m/%Y %H:%M and %m/%d/%Y %H:%M" in note for note in proposal.notes)


def test_sessions_and_requests_are_found_and_those_of_many_users_refused(tmp_path: Path) -> None:
    rows = """SELECT i // 20 AS user_id, i % 70 AS item_id, 1704067200 + i * 60 AS ts, {session} AS session_id,
                     i // 4 AS request_id FROM range(2000) t(i)"""
    write_table(tmp_path / "good.parquet", rows.format(session="i // 10"))
    write_table(tmp_path / "bad.parquet", rows.format(session="i % 40"))
    good, bad = propose_log([str(tmp_path / "good.parquet")]), propose_log([str(tmp_path / "bad.parquet")])
    assert (roles_of(good)["session"], roles_of(good)["request"]) == ("session_id", "request_id")
    assert "session" not in roles_of(bad)
    assert any(
        "session_id is named like a session, but only 0% of its values belong to one user" in n for n in bad.notes
    )
    assert spec_of(bad, tmp_path).events.session.gap == "30min"


def movielens(folder: Path) -> None:
    """Files in the shape of MovieLens 1M: two colons, no header, Latin-1."""
    ratings = [f"{1 + i % 60}::{1 + (i * 7) % 45}::{1 + i % 5}::{978300760 + i * 600}" for i in range(1500)]
    (folder / "ratings.dat").write_text("\n".join(ratings) + "\n")
    users = [f"{n}::{'FM'[n % 2]}::{(1, 18, 25, 35)[n % 4]}::{n % 20}::{10000 + n * 37}" for n in range(1, 61)]
    (folder / "users.dat").write_text("\n".join(users) + "\n")
    genres = ("Drama", "Drama|Comédie", "Action|Drama", "Comédie|Action")
    movies = [f"{n}::Title, The {n} (1999)::{genres[n % 4]}" for n in range(1, 46)]
    (folder / "movies.dat").write_bytes(("\n".join(movies) + "\n").encode("latin-1"))


def test_movielens_as_published_is_read_without_a_header(tmp_path: Path) -> None:
    movielens(tmp_path)
    proposal = propose_log([str(tmp_path)])
    spec = spec_of(proposal, tmp_path)
    assert roles_of(proposal) == {"user": "column0", "item": "column1", "time": "column3"}
    assert {(join.source, join.column) for join in spec.joins} == {("users", "column0"), ("movies", "column1")}
    assert (spec.labels[0].where[0].column, spec.labels[0].where[0].at_least) == ("column2", 4)
    assert {source.delimiter for source in spec.sources.values()} == {"::"}
    assert spec.sources["movies"].encoding == "latin-1"
    assert spec.sources["ratings"].names == ("column0", "column1", "column2", "column3")
    assert {own.column: own.separator for own in spec.features if own.separator} == {"movies.column2": "|"}


def test_columns_of_lists_become_features(tmp_path: Path) -> None:
    write_table(
        tmp_path / "events.parquet",
        """SELECT i % 50 AS user_id, i % 70 AS item_id, 1704067200 + i * 60 AS ts, [i % 5, i % 7] AS seen,
                  [0.5 * i] AS weights, 'click' AS action FROM range(2000) t(i)""",
    )
    proposal = propose_log([str(tmp_path)])
    (seen,) = (own for own in spec_of(proposal, tmp_path).features if own.name == "seen")
    assert (seen.kind, seen.separator) == ("sparse", "")
    left_out = {feature.name: feature.left_out for feature in proposal.features if feature.left_out}
    assert "only lists of whole numbers or text are read" in left_out["weights"]


def test_another_delimiter_is_written_down(tmp_path: Path) -> None:
    lines = [f"{i % 50};{i % 70};{1704067200 + i * 60};{i % 10},5" for i in range(500)]
    (tmp_path / "events.csv").write_text("user;item;ts;price\n" + "\n".join(lines) + "\n")
    spec = spec_of(propose_log([str(tmp_path)]), tmp_path)
    assert spec.sources["events"].delimiter == ";"


def test_a_column_that_is_filled_after_a_purchase_is_left_out(tmp_path: Path) -> None:
    write_table(
        tmp_path / "events.parquet",
        """SELECT i % 50 AS user_id, i % 70 AS item_id, 1704067200 + i * 60 AS ts, i % 3 AS device,
                  CASE WHEN hash(i) % 10 = 0 THEN 'purchase' ELSE 'view' END AS action,
                  CASE WHEN hash(i) % 10 = 0 THEN 100 + i % 9 END AS order_code FROM range(2000) t(i)""",
    )
    proposal = propose_log([str(tmp_path)])
    left_out = {feature.name: feature.left_out for feature in proposal.features if feature.left_out}
    assert left_out["order_code"].startswith("predicts the label alone (AUC 1.000)")
    assert "device" not in left_out


def test_events_without_an_id_are_left_out_and_counted(tmp_path: Path) -> None:
    write_table(
        tmp_path / "events.parquet",
        """SELECT CASE WHEN i % 100 = 0 THEN NULL ELSE i % 50 END AS user_id, i % 70 AS item_id,
                  1704067200 + i * 60 AS ts FROM range(2000) t(i)""",
    )
    proposal = propose_log([str(tmp_path)])
    (condition,) = spec_of(proposal, tmp_path).events.where
    assert (condition.column, condition.is_null) == ("user_id", False)
    assert any("20 events (1.0%) have no user" in note for note in proposal.notes)


def test_only_events_means_drawn_negatives(tmp_path: Path) -> None:
    write_table(
        tmp_path / "plays.parquet",
        "SELECT i % 50 AS listener_id, i % 70 AS track_id, 1704067200 + i * 60 AS ts FROM range(2000) t(i)",
    )
    spec = spec_of(propose_log([str(tmp_path)]), tmp_path)
    assert (spec.labels[0].every, spec.negatives.kind) == (True, "popular")


def test_purchases_in_another_table_are_the_outcome_of_views(tmp_path: Path) -> None:
    base = "SELECT i % 50 AS user_id, i % 70 AS item_id, 1704067200 + i * 60 AS ts FROM range({n}) t(i)"
    write_table(tmp_path / "views.parquet", base.format(n=3000))
    write_table(tmp_path / "purchases.parquet", base.format(n=300))
    proposal = propose_log([str(tmp_path)])
    spec = spec_of(proposal, tmp_path)
    assert spec.events.source == "views"
    assert dict(spec.outcomes[0].match) == {"user_id": "user_id", "item_id": "item_id"}
    assert spec.labels[0].outcome == "purchases"
    assert not spec.joins


def test_a_table_whose_rows_change_joins_as_of_a_time(tmp_path: Path) -> None:
    write_table(
        tmp_path / "events.parquet",
        "SELECT i % 50 AS user_id, i % 70 AS item_id, 1704067200 + i * 60 AS ts FROM range(3000) t(i)",
    )
    write_table(
        tmp_path / "users.parquet",
        """SELECT i % 50 AS user_id, DATE '2023-01-01' + (i // 50)::INT AS valid_since,
                  ['gold', 'blue'][1 + i % 2] AS tier FROM range(100) t(i)""",
    )
    spec = spec_of(propose_log([str(tmp_path)]), tmp_path)
    source = spec.sources["users"]
    assert source.valid_from is not None
    assert (source.key, source.valid_from.column) == ("user_id", "valid_since")


def test_repeated_keys_without_a_time_are_said_and_not_joined(tmp_path: Path) -> None:
    write_table(
        tmp_path / "events.parquet",
        "SELECT i % 200 AS user_id, i % 70 AS item_id, 1704067200 + i * 60 AS ts FROM range(3000) t(i)",
    )
    write_table(
        tmp_path / "users.parquet",
        "SELECT least(i, 198) AS user_id, ['DE', 'FR'][1 + i % 2] AS country FROM range(200) t(i)",
    )
    proposal = propose_log([str(tmp_path)])
    assert not proposal.matches
    assert any("users is not joined: 1 values of user_id occur more than once" in note for note in proposal.notes)


def test_formats_and_parts_of_a_table_are_one_source(tmp_path: Path) -> None:
    rows = [{"user_id": f"u{i % 40}", "item_id": f"p{i % 30}", "ts": 1704067200 + i * 60} for i in range(900)]
    (tmp_path / "log").mkdir()
    for part in range(3):
        lines = "\n".join(json.dumps(row) for row in rows[part * 300 : part * 300 + 300])
        (tmp_path / "log" / f"events-{part}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    proposal = propose_log([str(tmp_path)])
    assert [(table.name, len(table.found.files), table.num_rows) for table in proposal.tables] == [("events", 3, 900)]
    assert spec_of(proposal, tmp_path).sources["events"].path == "log/events*.jsonl.gz"


def test_a_sample_is_named_as_such(shop: Path) -> None:
    proposal = propose_log([str(shop)], sample_rows=100)
    assert "looked at the first 100 rows: event_time" in write_document(proposal, out=shop / "log.yaml")
    assert proposal.roles.table.num_rows == 100


def test_remote_tables_are_read_through_fsspec(shop: Path) -> None:
    import fsspec

    remote = fsspec.filesystem("memory")
    for name in ("events.csv", "products.csv"):
        remote.pipe(f"/shop/{name}", (shop / name).read_bytes())
    proposal = propose_log(["memory://shop/events.csv", "memory://shop/products.csv"])
    assert [match.table for match in proposal.matches] == ["products"]
    assert "memory://shop/events.csv" in write_document(proposal, out="log.yaml")


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_init_writes_once_and_replaces_with_force(shop: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "log.yaml"
    assert run(capsys, "init", shop, "--out", out)[0] == 0
    code, _, error = run(capsys, "init", shop, "--out", out)
    assert code == 2
    assert "exists; give another --out, or --force" in error
    code, printed, _ = run(capsys, "init", shop, "--out", out, "--force", "--json")
    assert code == 0
    assert json.loads(printed)["roles"]["user"]["column"] == "customer_id"


def mistakes(folder: Path) -> dict[str, list[object]]:
    (folder / "notes.docx").write_text("x")
    (folder / "empty.csv").write_text("")
    (folder / "broken.parquet").write_text("not parquet")
    (folder / "names.csv").write_text("first,last\nAda,Lovelace\nAlan,Turing\n")
    return {
        "no such file or folder": [folder / "nothing.csv"],
        "cannot tell its format": [folder / "notes.docx"],
        "the file is empty": [folder / "empty.csv"],
        "cannot be read as parquet": [folder / "broken.parquet"],
        "has a column of times": [folder / "names.csv"],
        "no file matches": [folder / "*.jsonl"],
    }


def test_mistakes_are_one_sentence_with_exit_code_2(tmp_path: Path, capsys) -> None:
    for expected, paths in mistakes(tmp_path).items():
        code, _, error = run(capsys, "init", *paths, "--out", tmp_path / "log.yaml")
        assert code == 2
        assert expected in error
        assert error.count("recmill: error:") == 1
        assert error.strip().splitlines()[-1].startswith("recmill: error:")
    assert not (tmp_path / "log.yaml").exists()


def test_a_named_column_that_is_not_there_is_refused(shop: Path, tmp_path: Path, capsys) -> None:
    code, _, error = run(capsys, "init", shop, "--user", "client", "--out", tmp_path / "log.yaml")
    assert code == 2
    assert "--user client" in error
    assert "it has event_time, customer_id" in error
