"""The map from values to rows over several days: what keeps its row, what is new, what is retired, what is refused."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.artifacts import Checkpoint, Dataset, InputError
from recmill.cli import cli
from recmill.data.cluster import cluster_sessions
from recmill.data.dataset import read_table
from recmill.data.known_rows import find_known_rows
from recmill.data.preparation.prepared_log import prepare_log
from recmill.data.schema import Schema
from recmill.data.vocabulary import Vocabulary, VocabularyMap, check_growth, hash_value, reused_rows
from recmill.training.checkpoint import load_trained_model
from recmill.training.preload import preloaded_ranks

DAY_S = 86_400
LOG = """
format_version: 1
sources:
  events: {{path: events.csv}}
events:
  source: events
  user: user
  item: item
  time: {{column: at, unit: s}}
  session: {{gap: 30min}}
labels: [{{name: bought, where: [{{column: kind, equals: buy}}]}}]
features:
- {{name: user, column: user, kind: sparse, dim: 4}}
- {{name: item, column: item, kind: sparse, dim: 4, rows: {rows}}}
- {{name: kind, column: kind, kind: sparse, dim: 4, rows: {{hash: 11}}}}
- {{name: price, column: price, kind: dense, transform: [log1p, standardise]}}
"""


def prepare(
    folder: Path,
    day: int,
    items: list[str],
    *,
    rows: str = "{min_count: 1}",
    before: int | None = None,
    engine: str = "duckdb",
):
    """A day on which every item of the list is seen once, by users 1 to 3 in turn."""
    source = folder / f"source{day}"
    source.mkdir()
    prices = ["" if n % 4 == 3 else str(n % 7 + day) for n in range(len(items))]  # some are missing
    events = [
        f"{1 + n % 3},{item},{day * DAY_S + 60 * n},{'buy' if n % 2 else 'view'},{price}"
        for n, (item, price) in enumerate(zip(items, prices, strict=True))
    ]
    (source / "events.csv").write_text("\n".join(["user,item,at,kind,price", *events]) + "\n", encoding="utf-8")
    (source / "log.yaml").write_text(LOG.format(rows=rows), encoding="utf-8")
    vocabulary = None if before is None else folder / f"day{before}"
    return prepare_log(source / "log.yaml", out=folder / f"day{day}", vocabulary=vocabulary, engine=engine)


def rows_by_value(folder: Path, day: int) -> dict[str, int]:
    table = pq.read_table(folder / f"day{day}/vocabulary/item.parquet").to_pylist()
    return {row["value"]: row["row"] for row in table}


def test_known_values_keep_their_rows_and_what_is_new_is_counted(tmp_path):
    prepare(tmp_path, 1, ["a", "a", "a", "b", "b", "c"])
    prepare(tmp_path, 2, ["d", "a", "e", "d", "f", "a", "a", "a"], before=1)
    assert rows_by_value(tmp_path, 1) == {"a": 1, "b": 2, "c": 3}
    assert rows_by_value(tmp_path, 2) == {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6}
    first, second = (VocabularyMap.load(tmp_path / f"day{day}") for day in (1, 2))
    assert (first.version, second.version) == (1, 2)
    assert second.ancestors == (first.hash,)
    assert second.extends(first)
    assert not first.extends(second)
    item = second.tables["item"]
    assert (item.num_rows, item.num_new, item.new_share) == (7, 3, 0.5)  # d twice, e and f once, of 8 events
    schema = Schema.load(tmp_path / "day2")
    assert schema.feature("item").num_rows == 7
    assert VocabularyMap.of(schema, where="day2") == second


def test_the_command_says_what_is_new(tmp_path):
    prepare(tmp_path, 1, ["a", "b"])
    prepare(tmp_path, 2, ["a", "x", "y", "z"], before=1)
    arguments = ["prepare", str(tmp_path / "source2/log.yaml"), "--out", str(tmp_path / "again")]
    arguments += ["--vocabulary", str(tmp_path / "day1")]
    shown = CliRunner().invoke(cli, arguments)
    assert "item: 3 new values (75.0% of reads), 6 rows" in shown.output
    found = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert found["info"]["vocabulary"]["tables"]["item"]["num_new"] == 3
    wrong = CliRunner().invoke(cli, [*arguments[:-1], str(tmp_path)])
    assert "holds no vocabulary/vocabulary.json" in str(wrong.exception)


def test_a_map_is_the_same_however_often_it_is_made(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        prepare(tmp_path / name, 1, ["a", "b", "a"])
    assert VocabularyMap.load(tmp_path / "x/day1") == VocabularyMap.load(tmp_path / "y/day1")
    prepare(tmp_path / "x", 2, ["b"], before=1)
    assert VocabularyMap.load(tmp_path / "x/day2").hash == VocabularyMap.load(tmp_path / "x/day1").hash


def test_rare_values_share_hashed_rows(tmp_path):
    prepare(tmp_path, 1, ["a", "a", "b", "c"], rows="{min_count: 2, rare_rows: 5}")
    assert rows_by_value(tmp_path, 1) == {"a": 6, "b": 0, "c": 0}
    by_hash = {v: int(hashlib.md5(v.encode()).hexdigest()[:15], 16) % 5 + 1 for v in ("b", "c", "unheard")}
    log = pq.read_table(next((tmp_path / "day1").glob("log-*.parquet"))).to_pylist()
    assert [row["item"] for row in log] == [[6], [6], [by_hash["b"]], [by_hash["c"]]]
    vocabulary = Vocabulary.load(tmp_path / "day1", "item")
    assert vocabulary.rows(["a", "b", None, "unheard"]).tolist() == [6, by_hash["b"], 0, by_hash["unheard"]]
    assert vocabulary.count_unknown(["a", "b", None, "unheard"]) == 3
    with pytest.raises(InputError, match=r"was made with rare_rows 5, but log.yaml says 0"):
        prepare(tmp_path, 2, ["a"], before=1)


def test_retired_values_lose_their_rows_to_new_ones(tmp_path):
    rows = "{retire_after: 2d}"
    prepare(tmp_path, 1, ["a", "a", "b", "c"], rows=rows)
    prepare(tmp_path, 2, ["c"], rows=rows, before=1)
    prepare(tmp_path, 4, ["c", "d"], rows=rows, before=2)  # a and b were last seen three days ago
    assert rows_by_value(tmp_path, 4) == {"c": 3, "d": 1}
    prepare(tmp_path, 5, ["e", "f", "a"], rows=rows, before=4)
    assert rows_by_value(tmp_path, 5) == {"c": 3, "d": 1, "a": 2, "e": 4, "f": 5}
    third = VocabularyMap.load(tmp_path / "day4").tables["item"]
    assert (third.num_retired, third.num_reused, third.num_rows) == (2, 1, 4)
    old, new = Schema.load(tmp_path / "day1"), Schema.load(tmp_path / "day5")
    assert reused_rows(tmp_path / "day5", old, new)["item"].tolist() == [1, 2]
    check_growth(old, new, checkpoint="model", data="day5")


def test_rows_of_values_are_found_from_the_dataset(tmp_path):
    prepare(tmp_path, 1, ["a", "b", "a"] * 6)
    dataset = cluster_sessions(tmp_path / "day1", out=tmp_path / "data", layout="session")
    assert {"vocabulary/vocabulary.json", "vocabulary/item.parquet"} <= {entry.name for entry in dataset.files}
    assert Vocabulary.load(tmp_path / "data", "item").rows(["b", "a", "q", None]).tolist() == [2, 1, 0, 0]
    assert Vocabulary.load(tmp_path / "data", "user").rows([3, "1", "nobody"]).tolist() == [3, 1, 0]
    with pytest.raises(InputError, match="no vocabulary of table 'kind', only of item, user"):
        Vocabulary.load(tmp_path / "data", "kind")
    (tmp_path / "data/vocabulary/item.parquet").write_bytes(b"")
    with pytest.raises(InputError, match=r"item\.parquet"):
        Dataset.load(tmp_path / "data")


@pytest.mark.parametrize("rows", ["{min_count: 2, rare_rows: 5}", "{min_count: 2}", "{hash: 7}"])
def test_a_served_model_and_preparation_give_a_value_the_same_row(tmp_path, rows):
    """Of text and of numbers, however a caller writes them."""
    from recmill.tracking.pyfunc import ServedValues

    prepare(tmp_path, 1, ["a", "a", "b", "1", "1", "2.5", "True", "é"], rows=rows)
    (tmp_path / "source1/log.yaml").write_text(
        LOG.format(rows=rows).replace("column: user,", f"column: user, rows: {rows},")
    )
    prepare_log(tmp_path / "source1/log.yaml", out=tmp_path / "day2")
    known = VocabularyMap.load(tmp_path / "day2").tables
    asked = {
        "user": [1, 2, "3", "02", 2.0, True, 9, "x", None, float("nan"), 2**70, np.int64(3), "1_0"],
        "item": ["a", "b", 1, "1", 1.0, True, 2.5, "2.5", "True", "é", "nobody", None, ""],
    }
    written = pq.read_table(next((tmp_path / "day2").glob("log-*.parquet"))).to_pylist()
    events = [line.split(",") for line in (tmp_path / "source1/events.csv").read_text().splitlines()[1:]]
    for name, values in asked.items():
        entry = {"num_hashed": known[name].num_rows - 1 if known[name].hashed else known[name].rare_rows}
        if not known[name].hashed:
            content = (tmp_path / f"day2/vocabulary/{name}.parquet").read_bytes()
            entry |= {"file": f"{name}.parquet", "sha256": f"sha256:{hashlib.sha256(content).hexdigest()}"}
        served = ServedValues(entry, str(tmp_path / "day2/vocabulary"))
        if known[name].hashed:
            assert served.rows(values).tolist() == [hash_value(value, known[name].num_rows) for value in values]
        else:
            assert served.rows(values).tolist() == Vocabulary.load(tmp_path / "day2", name).rows(values).tolist()
        given = [event[0 if name == "user" else 1] for event in events]
        by_time = sorted(zip([int(event[2]) for event in events], given, strict=True))
        prepared = sorted((row["timestamp"] // 1_000, row[name][0]) for row in written)
        assert served.rows([value for _, value in by_time]).tolist() == [row for _, row in prepared]


def test_a_served_model_and_preparation_give_a_number_the_same_value(tmp_path):
    """With the mean and scale of the first day, whatever the second one has; other rules are measured anew."""
    from recmill.tracking.pyfunc import dense_column

    prepare(tmp_path, 1, ["a", "b", "c", "a", "b"] * 4)
    prepare(tmp_path, 2, ["a", "b", "d", "d"] * 4, before=1)
    first, second = (VocabularyMap.load(tmp_path / f"day{day}").dense["price"] for day in (1, 2))
    assert first == second
    assert first.scale not in (0.0, 1.0)
    for day in (1, 2):
        lines = [line.split(",") for line in (tmp_path / f"source{day}/events.csv").read_text().splitlines()[1:]]
        given = [float(line[4]) if line[4] else None for line in sorted(lines, key=lambda line: int(line[2]))]
        log = pq.read_table(next((tmp_path / f"day{day}").glob("log-*.parquet"))).sort_by("timestamp")
        served = dense_column(given, "price", json.loads(json.dumps(asdict(first))))
        assert served.astype(np.float32).tolist() == log["price"].to_pylist()
        assert first.apply(np.array(given, dtype=np.float64)).tolist() == log["price"].to_pylist()
    assert dense_column([1, None, True], "x", None).tolist()[::2] == [1.0, 1.0]
    with pytest.raises(ValueError, match="feature 'price': expected numbers"):
        dense_column(["much"], "price", None)
    text = (tmp_path / "source2/log.yaml").read_text().replace("[log1p, standardise]", "[standardise]")
    (tmp_path / "source2/log.yaml").write_text(text)
    prepare_log(tmp_path / "source2/log.yaml", out=tmp_path / "day3", vocabulary=tmp_path / "day1")
    assert VocabularyMap.load(tmp_path / "day3").dense["price"].mean > first.mean


def test_data_with_another_map_is_refused(tmp_path):
    prepare(tmp_path, 1, ["a", "b"])
    prepare(tmp_path, 2, ["c", "a", "b"])
    old, new = (Schema.load(tmp_path / f"day{day}") for day in (1, 2))
    with pytest.raises(InputError, match=r"does not extend that of model \(version 1\)"):
        check_growth(old, new, checkpoint="model", data="day2")
    text = (tmp_path / "source2/log.yaml").read_text(encoding="utf-8").replace("hash: 11", "hash: 12")
    (tmp_path / "source2/log.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"table 'kind' has hash: 11, but log.yaml says hash: 12"):
        prepare_log(tmp_path / "source2/log.yaml", out=tmp_path / "day3", vocabulary=tmp_path / "day1")


def test_a_model_of_another_day_reads_the_rows_that_its_own_vocabulary_gives(tmp_path):
    rows = "{retire_after: 2d, min_count: 2, rare_rows: 3}"
    prepare(tmp_path, 1, ["a", "a", "b", "b", "c", "c", "d"], rows=rows)
    prepare(tmp_path, 2, ["c", "c"], rows=rows, before=1)
    prepare(tmp_path, 4, ["c", "d", "d", "e", "e"], rows=rows, before=2)  # d was rare; a and b retired
    prepare(tmp_path, 5, ["c", "f", "f", "a", "a"], rows=rows, before=4)  # a is back, in another row
    prepare(tmp_path, 6, ["c"])
    schemas = {day: Schema.load(tmp_path / f"day{day}") for day in (1, 2, 4, 5, 6)}

    def translated(model, data, values):
        known = find_known_rows(tmp_path / f"day{model}", schemas[model], tmp_path / f"day{data}", schemas[data])
        given = Vocabulary.load(tmp_path / f"day{data}", "item").rows(values)
        ids = KeyedJaggedTensor(["item"], torch.from_numpy(given), lengths=torch.ones(len(given), dtype=torch.int32))
        found, counts = known.translate(ids)
        return found.values().tolist(), counts.get("item")

    for model, data, values, num_new in ((1, 5, ["a", "c", "d", "e", "f", None, "q"], 3), (5, 1, ["a", "b", "c"], 1)):
        expected = Vocabulary.load(tmp_path / f"day{model}", "item").rows(values).tolist()
        assert translated(model, data, values) == (expected, (len(values), num_new))
    assert translated(1, 1, ["b", "q"])[1] is None  # the same version: nothing to translate
    with pytest.raises(InputError, match=r"day6: its vocabulary \(version 1\) and that of .*day1 .* nothing in common"):
        translated(1, 6, ["c"])
    bare = replace(schemas[1], info={})
    with pytest.raises(InputError, match=r"day1: has a vocabulary and day2 has none"):
        find_known_rows(tmp_path / "day1", schemas[1], "day2", bare)
    grown = replace(bare, features=tuple(replace(f, num_rows=f.num_rows + 1) for f in bare.features))
    with pytest.raises(InputError, match=r"table 'user' has 5 rows, that of model 4, and no vocabulary says"):
        find_known_rows("model", bare, "data", grown)


@pytest.mark.slow  # two trainings, an evaluation and an export
def test_two_days_from_logs_to_a_model_that_callers_ask_with_their_ids(tmp_path, monkeypatch):
    """The commands of docs/data.md, "The next day"; `--from` refuses data that was prepared on its own."""
    prepare(tmp_path, 1, ["a", "b", "c", "a"] * 40)
    prepare(tmp_path, 2, ["a", "b", "d", "d"] * 40, before=1)
    prepare(tmp_path, 3, ["d", "b", "e", "d", "f"] * 40)

    def call(*arguments):
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        if isinstance(result.exception, InputError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result

    monkeypatch.chdir(tmp_path)
    for day in (1, 2, 3):
        call("cluster", f"day{day}", "--out", f"data{day}", "--eval-fraction", "0.2", "--layout", "session")
    small = ["--set", "batch_size=16", "--set", "top_layers=8", "--set", "max_steps=3", "--set", "threads=1"]
    with preloaded_ranks(1):  # loads TorchRec once for both
        call("train", "data1", "--out", "run1", *small)
        call("train", "data2", "--out", "run2", "--from", "run1/checkpoint")
    saved = Checkpoint.load("run2/checkpoint")
    assert (saved.config["batch_size"], saved.config["top_layers"], saved.step) == (16, [8], 3)
    assert VocabularyMap.load("run2/checkpoint").version == 2
    assert Vocabulary.load("run2/checkpoint", "item").rows(["d", "zz"]).tolist() == [4, 0]
    with pytest.raises(InputError, match=r"data3: its vocabulary .* does not extend that of run1/checkpoint"):
        call("train", "data3", "--out", "run3", "--from", "run1/checkpoint")
    found = json.loads(call("evaluate", "run2/checkpoint", "data2", "--where", "item=d", "--json").stdout)
    events = read_table("data2", split="test", columns=["item"]).to_pylist()
    assert found["metrics"]["num_samples"] == sum(event["item"] == [4] for event in events) > 0
    old = json.loads(call("evaluate", "run1/checkpoint", "data2", "--json").stdout)
    num_new = sum(event["item"] == [4] for event in events)
    assert old["new_reads"]["item"] == {"reads": len(events), "new": num_new}
    assert old["metrics"]["num_samples"] == len(events)
    shown = call("evaluate", "run1/checkpoint", "data2").output
    assert f"item: {num_new} of {len(events)} reads" in shown
    assert "new_reads" not in json.loads(call("evaluate", "run2/checkpoint", "data2", "--json").stdout)
    with pytest.raises(InputError, match="nothing in common"):
        call("evaluate", "run1/checkpoint", "data3")
    with pytest.raises(InputError, match="item 'q' has no row of its own"):
        call("evaluate", "run2/checkpoint", "data2", "--where", "item=q")
    call("export", "run2/checkpoint", "--out", "model")
    assert Vocabulary.load("model", "item").rows(["a"]).tolist() == [1]
    _check_served_values(tmp_path)


def _check_served_values(folder):
    """The MLflow model takes events as they are, and gives what the checkpoint gives for the rows of the dataset."""
    import mlflow
    import pandas as pd

    served = mlflow.pyfunc.load_model("model/mlflow")
    assert "pyarrow" in Path("model/mlflow/requirements.txt").read_text()
    assert [column.name for column in served.metadata.signature.inputs] == ["price", "user", "item", "kind"]
    served.predict(served.metadata.load_input_example("model/mlflow"))
    events = pd.read_csv(folder / "source2/events.csv", dtype={"item": str}).sort_values("at")
    frame = events[["user", "item", "kind", "price"]]  # prices as they are: some are missing
    probabilities = served.predict(frame)
    log = pq.read_table(next((folder / "day2").glob("log-*.parquet"))).sort_by("timestamp")
    model, _ = load_trained_model("run2/checkpoint")
    rows = [torch.tensor([own[0] for own in log[name].to_pylist()]) for name in ("user", "item", "kind")]
    ids = KeyedJaggedTensor(
        ["user", "item", "kind"], torch.cat(rows), lengths=torch.ones(3 * len(log), dtype=torch.int32)
    )
    dense = torch.tensor(log["price"].to_numpy()).unsqueeze(1)
    expected = model(dense, ids).sigmoid().detach().numpy()
    np.testing.assert_allclose(probabilities, expected, rtol=1e-5)
    asked = {"user": [99, None], "item": [["zz"], [None]], "kind": ["buy", "buy"], "price": [3, 3]}
    unknown = served.predict(pd.DataFrame(asked))
    assert unknown[0] == unknown[1]  # both have no row of their own
    with pytest.raises(mlflow.MlflowException, match="item"):
        served.predict(frame[["user", "kind", "price"]])
