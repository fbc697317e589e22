import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import InputError
from recmill.data.schema import Schema
from recmill.data.sources import PRESETS, globo, make_raw_log
from recmill.data.sources.frappe import FIELDS, convert_frappe
from recmill.data.sources.globo import COLUMNS, CONTEXT, convert_globo


def read_log(folder):
    return pa.concat_tables([pq.read_table(file) for file in sorted(Path(folder).glob("*.parquet"))]).combine_chunks()


def real_data(name):
    path = Path(os.environ.get("RECMILL_DATA_DIR", "")) / name
    if not os.environ.get("RECMILL_DATA_DIR") or not path.exists():
        pytest.skip(f"needs RECMILL_DATA_DIR with {name}")
    return path


def write_clicks(path, rows):
    """rows: (user, session, article, time); the context is 1 everywhere."""
    columns = dict(
        zip(("user_id", "session_id", "click_article_id", "click_timestamp"), zip(*rows, strict=True), strict=True)
    )
    columns |= {name: [1] * len(rows) for name in COLUMNS if name not in columns}
    pq.write_table(pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()}), path)
    return path


CLICKS = [
    (1, 10, 500, 1000),
    (2, 20, 600, 1500),
    (1, 10, 700, 2000),
    (1, 10, 600, 2000),  # two clicks of a session in one millisecond
    (1, 11, 800, 9000),
    (2, 20, 500, 1600),
]


def test_globo_history_holds_what_the_user_clicked_before(tmp_path, monkeypatch):
    monkeypatch.setattr(globo, "HISTORY_LENGTH", 2)
    convert_globo(write_clicks(tmp_path / "clicks.parquet", CLICKS), out=tmp_path / "log")
    table = read_log(tmp_path / "log").sort_by([("session_id", "ascending"), ("timestamp", "ascending")])
    clicked = table.filter(pc.equal(table["label"], 1.0))
    ids = {500: 0, 600: 1, 700: 2, 800: 3}
    assert clicked["article"].to_pylist() == [[ids[a]] for a in (500, 700, 600, 800, 600, 500)]
    assert clicked["history"].to_pylist() == [[], [0], [0, 2], [2, 1], [], [1]]


def test_globo_negatives_share_all_but_the_article(tmp_path):
    convert_globo(write_clicks(tmp_path / "clicks.parquet", CLICKS), out=tmp_path / "log", negatives=2)
    table = read_log(tmp_path / "log").sort_by([("session_id", "ascending"), ("timestamp", "ascending")])
    assert table.num_rows == 3 * len(CLICKS)
    assert table["label"].to_pylist() == [1.0, 0.0, 0.0] * len(CLICKS)
    rows = table.to_pylist()
    for click, *negatives in (rows[start : start + 3] for start in range(0, len(rows), 3)):
        for offset, negative in enumerate(negatives, start=1):
            assert negative["article"] != click["article"]
            assert negative["timestamp"] == click["timestamp"] + offset
            changed = {name for name in click if click[name] != negative[name]}
            assert changed == {"label", "article", "timestamp"}
    assert table.group_by(["session_id", "timestamp"]).aggregate([]).num_rows == table.num_rows


def test_globo_negatives_come_from_the_clicks_just_before(tmp_path, monkeypatch):
    monkeypatch.setattr(globo, "NEGATIVE_WINDOW", 3)
    # Article k is clicked only at time k: a negative must be one of the last three.
    rows = [(user, user, user, 1000 * user) for user in range(200)]
    convert_globo(write_clicks(tmp_path / "clicks.parquet", rows), out=tmp_path / "log")
    table = read_log(tmp_path / "log")
    clicked = pc.list_flatten(table["article"]).to_numpy()[table["label"].to_numpy() == 1]
    negative = pc.list_flatten(table["article"]).to_numpy()[table["label"].to_numpy() == 0]
    assert ((clicked - negative)[3:] >= 1).all()
    assert ((clicked - negative)[3:] <= 3).all()


def test_globo_limit_takes_the_sessions_that_start_first(tmp_path):
    convert_globo(write_clicks(tmp_path / "clicks.parquet", CLICKS), out=tmp_path / "log", limit=2)
    assert set(read_log(tmp_path / "log")["session_id"].to_pylist()) == {10, 20}
    assert Schema.load(tmp_path / "log").info["num_sessions"] == 2


def test_globo_one_in_takes_some_users_whole_and_draws_their_negatives_from_everybody(tmp_path):
    clicks = [*CLICKS, (1, 12, 900, 9500), (2, 21, 700, 9600)]
    path = write_clicks(tmp_path / "clicks.parquet", clicks)
    everybody = read_log(convert_globo(path, out=tmp_path / "all")).to_pylist()
    some = read_log(convert_globo(path, out=tmp_path / "some", one_in=2)).to_pylist()
    assert some == [row for row in everybody if row["user"] == [2]]
    first = read_log(convert_globo(path, out=tmp_path / "first", one_in=2, limit=1))
    assert set(first["session_id"].to_pylist()) == {20}
    with pytest.raises(InputError, match="one_in is 5, and no user's id is a multiple of it"):
        convert_globo(path, out=tmp_path / "none", one_in=5)


def test_globo_reads_the_hourly_files_of_kaggle(tmp_path):
    clicks = pq.read_table(write_clicks(tmp_path / "all.parquet", CLICKS))
    folder = tmp_path / "kaggle" / "clicks"
    folder.mkdir(parents=True)
    for number, part in enumerate((clicks.slice(0, 3), clicks.slice(3))):
        pa.csv.write_csv(part, folder / f"clicks_hour_{number:03d}.csv")
    from_csv = convert_globo(tmp_path / "kaggle", out=tmp_path / "a")
    from_parquet = convert_globo(tmp_path / "all.parquet", out=tmp_path / "b")
    assert read_log(from_csv).equals(read_log(from_parquet))


def test_globo_names_a_missing_column_and_a_negative_id(tmp_path):
    good = pq.read_table(write_clicks(tmp_path / "clicks.parquet", CLICKS))
    pq.write_table(good.drop_columns(["click_os"]), tmp_path / "short.parquet")
    with pytest.raises(InputError, match=r"short.parquet: column 'click_os' is missing"):
        convert_globo(tmp_path / "short.parquet", out=tmp_path / "log")
    write_clicks(tmp_path / "bad.parquet", [*CLICKS, (1, 12, -5, 9999)])
    with pytest.raises(InputError, match=r"column 'click_article_id', row 6: is -5"):
        convert_globo(tmp_path / "bad.parquet", out=tmp_path / "log")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "clicks.parquet").read_bytes()[:500])
    with pytest.raises(InputError, match=r"cut.parquet: cannot be read"):
        convert_globo(tmp_path / "cut.parquet", out=tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_the_real_globo_log_keeps_its_promises(tmp_path):
    convert_globo(real_data("globo/clicks.parquet"), out=tmp_path / "log", limit=5000)
    schema, table = Schema.load(tmp_path / "log"), read_log(tmp_path / "log")
    assert schema.feature("article").num_rows == 46_033
    assert schema.info["num_sessions"] == 5000
    assert table["label"].to_numpy().mean() == 0.5
    assert (np.diff(table["timestamp"].to_numpy()) >= 0).all()
    assert table.group_by(["session_id", "timestamp"]).aggregate([]).num_rows == table.num_rows
    ordered = table.sort_by([("session_id", "ascending"), ("timestamp", "ascending")])
    sessions = ordered["session_id"].to_numpy()
    inside = sessions[1:] == sessions[:-1]
    for name in ("user", *CONTEXT):
        values = pc.list_flatten(ordered[name]).to_numpy()
        assert (values[1:] == values[:-1])[inside].mean() >= (1 if name == "user" else 0.99)
    assert pc.max(pc.list_value_length(table["history"])).as_py() <= 50


def write_frappe(folder, split, rows):
    folder.mkdir(exist_ok=True)
    names = ("label", *FIELDS)
    table = pa.table({name: [row[column] for row in rows] for column, name in enumerate(names)})
    pq.write_table(table, folder / f"{split}.parquet")


def frappe_row(label, user):
    return (label, user, 100 + user, *range(200, 208))


def test_frappe_keeps_the_published_split(tmp_path):
    for split, users in (("train", (3, 1, 2)), ("valid", (1,)), ("test", (2, 5))):
        write_frappe(tmp_path / "frappe", split, [frappe_row(user % 2, user) for user in users])
    convert_frappe(tmp_path / "frappe", out=tmp_path / "log")
    schema, table = Schema.load(tmp_path / "log"), read_log(tmp_path / "log")
    assert schema.splits == {"valid": 3, "test": 4}
    assert table["timestamp"].to_pylist() == table["session_id"].to_pylist() == [0, 1, 2, 3, 4, 5]
    assert table["user"].to_pylist() == [[2], [0], [1], [0], [1], [4]]  # ids of a field start at 0
    assert schema.feature("user").num_rows == schema.feature("item").num_rows == 5
    assert table["label"].to_pylist() == [1, 1, 0, 1, 0, 1]


def test_frappe_names_the_split_and_the_label_that_is_wrong(tmp_path):
    write_frappe(tmp_path / "frappe", "train", [frappe_row(1, 1)])
    with pytest.raises(InputError, match=r"holds no valid.parquet or valid.csv"):
        convert_frappe(tmp_path / "frappe", out=tmp_path / "log")
    write_frappe(tmp_path / "frappe", "valid", [frappe_row(2, 1)])
    with pytest.raises(InputError, match=r"valid.parquet: column 'label' holds values from 2 to 2, expected 0 or 1"):
        convert_frappe(tmp_path / "frappe", out=tmp_path / "log")


def test_the_real_frappe_has_its_published_sizes(tmp_path):
    convert_frappe(real_data("frappe"), out=tmp_path / "log")
    schema = Schema.load(tmp_path / "log")
    assert schema.splits == {"valid": 202_027, "test": 259_749}
    assert schema.info["num_samples"] == 288_609
    assert sum(table.num_rows for table in schema.tables) == 5_382


@pytest.mark.parametrize("source", ["globo", "frappe", "movielens", "criteo"])
def test_missing_data_says_where_to_get_it_and_where_to_put_it(source, tmp_path, monkeypatch):
    monkeypatch.setenv("RECMILL_DATA_DIR", str(tmp_path))
    for data in (None, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"get it from https://\S+ and put it at \$RECMILL_DATA_DIR/.*--data"):
            make_raw_log(source, out=tmp_path / "log", data=data)
    monkeypatch.delenv("RECMILL_DATA_DIR")
    with pytest.raises(InputError, match="RECMILL_DATA_DIR is not set"):
        make_raw_log(source, out=tmp_path / "log")
    assert list(tmp_path.iterdir()) == []


def test_parquet_of_the_user_is_only_located(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        make_raw_log("parquet", out=tmp_path / "log", data=tmp_path / "mine")
    mine = make_raw_log("tiny", out=tmp_path / "mine", overrides={"sessions": 20})
    assert make_raw_log("parquet", out=tmp_path / "log", data=mine) == mine
    (mine / "schema.json").unlink()
    with pytest.raises(InputError, match=r"schema\.json"):
        make_raw_log("parquet", out=tmp_path / "log", data=mine)
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("source", "overrides", "sentence"),
    [
        ("huge", {}, "unknown preset 'huge'; expected one of tiny, demo, small, recd, globo"),
        ("tiny", {"colour": 1}, "unknown setting 'colour'"),
        ("tiny", {"limit": 5}, "'tiny' has no setting 'limit'; it has sessions"),
        ("frappe", {"zipf": 1.0}, "'frappe' has no setting 'zipf'; it has limit"),
        ("tiny", {"sessions": "many"}, "setting 'sessions' of 'tiny' is 'many', expected a whole number"),
        ("globo", {"limit": 0}, "setting 'limit' of 'globo' is 0, expected at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(source, overrides, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        make_raw_log(source, out=tmp_path / "log", overrides=overrides)


def test_settings_may_come_as_text(tmp_path):
    log = make_raw_log("tiny", out=tmp_path / "log", overrides={"sessions": "20", "stay-prob": "0.5", "seed": None})
    assert Schema.load(log).info["stay_prob"] == 0.5
    assert set(PRESETS) >= {"tiny", "small", "recd", "globo", "frappe", "movielens", "criteo"}
