import zipfile

import pyarrow.parquet as pq
import pytest

from recmill.artifacts import InputError
from recmill.data.schema import Schema
from recmill.data.sources.movielens import convert_movielens

FILES = {
    "ratings.dat": "2::10::5::1000\n1::10::4::500\n1::20::3::500\n1::30::5::9000\n2::30::1::1005\n",
    "users.dat": "1::F::25::7::12345\n2::M::18::0::99999\n",
    "movies.dat": "10::Alien: Resurrection (1997)::Action|Sci-Fi\n20::Délicatessen (1991)::Comedy\n30::Heat::Action\n",
}


def write_files(folder, **changed):
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(changed.get(name.split(".")[0], content), encoding="latin-1")
    return folder


def read_log(folder):
    return pq.read_table(folder / "log-00000.parquet")


def test_ratings_become_sessions_with_a_history(tmp_path):
    convert_movielens(write_files(tmp_path / "ml-1m"), out=tmp_path / "log")
    table, schema = read_log(tmp_path / "log"), Schema.load(tmp_path / "log")
    # user 1 rates 10 and 20 in one second, comes back after more than half an hour for 30; user 2 rates 10, then 30
    assert table["timestamp"].to_pylist() == [500_000, 500_001, 1_000_000, 1_005_000, 9_000_000]
    assert table["session_id"].to_pylist() == [0, 0, 2, 2, 1]
    assert table["movie"].to_pylist() == [[10], [20], [10], [30], [30]]
    assert table["history"].to_pylist() == [[], [10], [], [10], [10, 20]]
    assert table["label"].to_pylist() == [1, 0, 1, 0, 1]
    assert table["genres"].to_pylist() == [[0, 1], [2], [0, 1], [0], [0]]
    assert table["gender"].to_pylist() == [[2], [2], [1], [1], [2]]
    assert schema.info["genres"] == ["Action", "Sci-Fi", "Comedy"]
    assert schema.feature("history").table == "movie"
    assert schema.info["num_sessions"] == 3


def test_the_zip_of_grouplens_reads_like_the_folder(tmp_path):
    folder = write_files(tmp_path / "ml-1m")
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as archive:
        for name in FILES:
            archive.write(folder / name, f"ml-1m/{name}")
    convert_movielens(folder, out=tmp_path / "a")
    convert_movielens(tmp_path / "ml-1m.zip", out=tmp_path / "b")
    assert read_log(tmp_path / "a").equals(read_log(tmp_path / "b"))


def test_limit_takes_the_sessions_that_start_first(tmp_path):
    convert_movielens(write_files(tmp_path / "ml-1m"), out=tmp_path / "log", limit=2)
    assert read_log(tmp_path / "log")["session_id"].to_pylist() == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"ratings": "1::10::4::500\n1::x::4::500\n"},
            r"ratings.dat, line 2, column movie: is 'x'",
        ),
        ({"ratings": "1::10::4::500\n1::10::4\n"}, r"ratings.dat, line 2: has 3 fields, expected 4"),
        ({"ratings": "1::10::::500\n"}, r"ratings.dat, line 1, column rating: is '', expected a whole number"),
        ({"ratings": ""}, r"ratings.dat: cannot be read .Empty"),
        ({"users": "1::F::25\n"}, r"users.dat, line 1: has 3 fields, expected 5"),
        ({"users": "1::F::25::none::1\n"}, r"users.dat, line 1, column occupation: is 'none', expected a whole number"),
        ({"movies": "10::Alien::Action\nthree::Heat::Action\n"}, r"movies.dat, line 2, column movie: is 'three'"),
    ],
)
def test_a_malformed_line_is_named(changed, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        convert_movielens(write_files(tmp_path / "ml-1m", **changed), out=tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_what_is_not_movielens_is_refused(tmp_path):
    folder = write_files(tmp_path / "ml-1m")
    (folder / "users.dat").unlink()
    with pytest.raises(InputError, match=r"holds no users.dat"):
        convert_movielens(folder, out=tmp_path / "log")
    with pytest.raises(InputError, match="neither a folder nor a zip file"):
        convert_movielens(folder / "ratings.dat", out=tmp_path / "log")
