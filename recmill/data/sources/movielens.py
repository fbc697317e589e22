"""MovieLens 1M: ratings as sessions, with what the user rated before."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from recmill.artifacts import InputError
from recmill.data.schema import Feature, Schema
from recmill.data.sources.lists import (
    IntArray,
    csv_error,
    first_sessions,
    id_column,
    plain_column,
    position_in_run,
    space_out,
    starts_of_runs,
    window_column,
)
from recmill.data.sources.log_writer import in_row_groups, write_log
from recmill.progress import Progress, no_progress

DIM = 16
LIKED = 4  # a rating of 4 or 5 is a positive
SESSION_GAP_S = 30 * 60
HISTORY_LENGTH = 50
FILES = {
    "ratings.dat": dict.fromkeys(("user", "movie", "rating", "timestamp"), pa.uint32()),
    "users.dat": {
        "user": pa.uint32(),
        "gender": pa.string(),
        "age": pa.string(),
        "occupation": pa.uint32(),
        "zip": pa.string(),
    },
    "movies.dat": {"movie": pa.uint32(), "title": pa.string(), "genres": pa.string()},
}


def convert_movielens(
    path: str | Path, *, out: str | Path, limit: int | None = None, progress: Progress = no_progress
) -> str | Path:
    """A raw log of ratings (label: 4 stars or more) with the movies that the user rated before.

    A session ends when a user rates nothing for half an hour. `path` is ml-1m.zip as GroupLens publishes it, or the
    folder inside it; `limit` takes the sessions that start first.
    """
    progress("read ratings", 0, 0)
    ratings, users, movies = _read_files(Path(path))
    user, movie, rating, seconds = (column.to_numpy().astype(np.int64) for column in ratings.columns)
    profiles = _profiles(users, num_users=int(user.max()) + 1)
    genres, genre_starts, genre_counts, genre_names = _genres(movies, num_movies=int(movie.max()) + 1)

    by_user = np.lexsort((seconds, user))  # stable: ratings of one second keep the order of the file
    user, movie, rating, seconds = (column[by_user] for column in (user, movie, rating, seconds))
    is_user = starts_of_runs(user)
    is_session = is_user.copy()
    is_session[1:] |= np.diff(seconds) > SESSION_GAP_S
    session = np.cumsum(is_session) - 1
    timestamp = space_out(seconds * 1000, is_session, spacing=1)
    lengths = np.minimum(position_in_run(is_user), HISTORY_LENGTH)
    starts = np.arange(len(movie)) - lengths

    order = np.lexsort((session, timestamp))
    if limit is not None:
        order = order[first_sessions(session[order], limit)]
    user_rows = {"user": int(user.max()) + 1} | {name: int(own.max()) + 1 for name, own in profiles.items()}
    history = Feature(name="history", kind="sequence", table="movie", num_rows=len(genre_starts), dim=DIM, shift=True)
    schema = Schema(
        features=(
            *(Feature(name=n, kind="sparse", num_rows=rows, dim=DIM, group="user") for n, rows in user_rows.items()),
            history,
            Feature(name="movie", kind="sparse", num_rows=history.num_rows, dim=DIM),
            Feature(name="genres", kind="sparse", num_rows=len(genre_names), dim=DIM, pooling="mean"),
        ),
        user="user",
        item="movie",
        info={"source": "movielens", "num_sessions": len(np.unique(session[order])), "genres": genre_names},
    )

    def samples() -> Iterator[pa.RecordBatch]:
        for at in in_row_groups(order, progress):
            columns = [
                plain_column(session[at]),
                plain_column(timestamp[at]),
                plain_column((rating[at] >= LIKED).astype(np.float32)),
                id_column(user[at]),
                *(id_column(profiles[name][user[at]]) for name in profiles),
                window_column(movie, starts[at], lengths[at]),
                id_column(movie[at]),
                window_column(genres, genre_starts[movie[at]], genre_counts[movie[at]]),
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=schema.arrow_schema())

    return write_log(out, schema, samples())


def _read_files(path: Path) -> list[pa.Table]:
    """The three files, from the zip or the folder."""
    if path.is_dir():
        found = {file.name: file.read_bytes() for file in path.iterdir() if file.name in FILES}
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            members = {Path(member).name: member for member in archive.namelist()}
            found = {name: archive.read(members[name]) for name in FILES if name in members}
    else:
        raise InputError(f"{path}: is neither a folder nor a zip file; expected ml-1m.zip or the folder ml-1m")
    if missing := [name for name in FILES if name not in found]:
        raise InputError(f"{path}: holds no {missing[0]}; expected ml-1m with {', '.join(FILES)}")
    return [_parse(found[name], types, where=f"{path}/{name}") for name, types in FILES.items()]


def _parse(content: bytes, types: Mapping[str, pa.DataType], *, where: str) -> pa.Table:
    """The columns of lines such as user::movie::rating::timestamp. Nothing in them holds a tab."""
    try:
        return pa_csv.read_csv(
            io.BytesIO(content.replace(b"::", b"\t")),
            read_options=pa_csv.ReadOptions(column_names=list(types), encoding="latin-1", use_threads=False),
            parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=pa_csv.ConvertOptions(column_types=types, null_values=[]),
        )
    except pa.ArrowInvalid as error:
        raise csv_error(where, error, list(types)) from None


def _profiles(users: pa.Table, *, num_users: int) -> dict[str, IntArray]:
    """Gender, age group and occupation by user id; 0 if unknown."""
    users = users.filter(pc.less(users["user"], num_users)).combine_chunks()  # the others rated nothing
    columns = {
        "gender": pc.equal(users["gender"], "F").cast(pa.int64()),
        "age": users["age"].chunk(0).dictionary_encode().indices if users.num_rows else pa.array([], pa.int64()),
        "occupation": users["occupation"],
    }
    profiles: dict[str, IntArray] = {}
    for name, column in columns.items():
        profiles[name] = np.zeros(num_users, np.int64)
        profiles[name][users["user"].to_numpy()] = 1 + column.to_numpy().astype(np.int64)
    return profiles


def _genres(movies: pa.Table, *, num_movies: int) -> tuple[IntArray, IntArray, IntArray, list[str]]:
    """All genres, where those of every movie id begin, how many it has (none if it is not listed), and their names."""
    movies = movies.filter(pc.less(movies["movie"], num_movies))
    if not movies.num_rows:
        raise InputError("movies.dat: names no genre of any rated movie")
    lists = pc.split_pattern(movies["genres"].combine_chunks(), "|")
    genres = lists.flatten().dictionary_encode()
    starts, counts = np.zeros(num_movies, np.int64), np.zeros(num_movies, np.int64)
    starts[movies["movie"].to_numpy()] = lists.offsets.to_numpy()[:-1]
    counts[movies["movie"].to_numpy()] = np.diff(lists.offsets.to_numpy())
    return genres.indices.to_numpy(), starts, counts, genres.dictionary.to_pylist()
