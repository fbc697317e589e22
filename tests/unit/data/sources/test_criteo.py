import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recmill.artifacts import InputError
from recmill.data.schema import Schema
from recmill.data.sources.criteo import CATEGORIES, COUNTS, convert_criteo, hash_category


def line(label="0", counts=("1",) * 13, categories=("68fd1e64",) * 26):
    return "\t".join([label, *counts, *categories]) + "\n"


def read_log(folder):
    return pq.read_table(folder / "log-00000.parquet")


def test_rows_become_samples_in_order(tmp_path):
    counts = ("0", "-2", "", "7", *("1",) * 9)
    (tmp_path / "train.txt").write_text(line() + line("1", counts, ("", *("0000000A",) * 25)))
    convert_criteo(tmp_path / "train.txt", out=tmp_path / "log")
    table, schema = read_log(tmp_path / "log"), Schema.load(tmp_path / "log")
    assert [feature.name for feature in schema.features] == [*COUNTS, *CATEGORIES]
    assert table["label"].to_pylist() == [0, 1]
    assert table["timestamp"].to_pylist() == table["session_id"].to_pylist() == [0, 1]
    assert [table[name][1].as_py() for name in COUNTS[:4]] == pytest.approx([0, 0, 0, np.log(8)])
    assert table["C1"][1].as_py() == [0]  # missing
    assert table["C2"][1].as_py() != table["C3"][1].as_py()  # columns hash apart


def test_gzip_and_folders_read_in_natural_order(tmp_path):
    folder = tmp_path / "criteo"
    folder.mkdir()
    for day, label in ((10, "1"), (2, "0")):
        with gzip.open(folder / f"day_{day}.gz", "wt") as file:
            file.write(line(label) * 3)
    (folder / "README").write_text("not data")
    convert_criteo(folder, out=tmp_path / "log")
    assert read_log(tmp_path / "log")["label"].to_pylist() == [0, 0, 0, 1, 1, 1]
    convert_criteo(folder, out=tmp_path / "log", limit=4)
    assert read_log(tmp_path / "log")["label"].to_pylist() == [0, 0, 0, 1]


@given(st.lists(st.one_of(st.none(), st.integers(0, 2**32 - 1)), min_size=1, max_size=50), st.integers(2, 10**6))
def test_hashes_depend_on_the_value_only_and_fit_the_table(values, num_rows):
    def ids(values):
        column = pa.array([None if value is None else f"{value:08x}" for value in values], pa.string())
        return hash_category(column, 3, num_rows).tolist()

    hashed = ids(values)
    assert hashed == [ids([value])[0] for value in values]
    assert all((value is None) == (id_ == 0) and 0 <= id_ < num_rows for value, id_ in zip(values, hashed, strict=True))


def test_hashes_fill_the_table_evenly():
    column = pa.array([f"{value:08x}" for value in range(50_000)])
    counts = np.bincount(hash_category(column, 0, 101), minlength=101)
    assert counts[0] == 0
    assert 400 < counts[1:].min() <= counts[1:].max() < 600


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (line().replace("\t", " ", 1), r"train.txt, line 3: has 39 fields, expected 40"),
        (line(counts=("1.5", *("1",) * 12)), r"train.txt, line 3, column I1: is '1.5', expected a whole number"),
        (line(label="2"), r"train.txt, line 3, column label: is 2, expected 0 or 1"),
        (line(label=""), r"train.txt, line 3, column label: is None, expected 0 or 1"),
        (line(categories=("68fd1e6", *("68fd1e64",) * 25)), r"line 3, column C1: is '68fd1e6', expected 8 hexadecimal"),
        (
            line(categories=(*("68fd1e64",) * 25, "xyzxyzxy")),
            r"line 3, column C26: is 'xyzxyzxy', expected 8 hexadecimal",
        ),
    ],
)
def test_a_malformed_line_is_named_with_its_column(bad, sentence, tmp_path):
    (tmp_path / "train.txt").write_text(line() * 2 + bad + line())
    with pytest.raises(InputError, match=sentence):
        convert_criteo(tmp_path / "train.txt", out=tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_a_truncated_gzip_is_one_sentence(tmp_path):
    packed = gzip.compress((line() * 5000).encode())
    (tmp_path / "day_0.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match=r"day_0.gz: cannot be read"):
        convert_criteo(tmp_path / "day_0.gz", out=tmp_path / "log")


def test_an_empty_file_or_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no Criteo files"):
        convert_criteo(tmp_path, out=tmp_path / "log")
    (tmp_path / "train.txt").write_text("")
    with pytest.raises(InputError, match=r"train.txt"):
        convert_criteo(tmp_path / "train.txt", out=tmp_path / "log")
