"""MovieLens 1M: ratings as sessions, with what the user rated before."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from recmill.artifacts import InputError
from recmill.data.schema import Feature, Schema
from recmill.data.sources.lists import (
    IntArray,
    Jagged,
    id_column,
    offsets_of,
    plain_column,
    position_in_run,
    space_out,
    starts_of_runs,
    window_column,
)
from recmill.data.sources.log_writer import ROWS_PER_GROUP, write_log
from recmill.progress import Progress, no_progress

DIM = 16
LIKED = 4  # a rating of 4 or 5 is a positive
SESSION_GAP_S = 30 * 60
RATING_FIELDS = ("user", "movie", "rating", "timestamp")


def convert_movielens(
    path: str | Path,
    *,
    out: str | Path,
    history_length: int = 50,
    limit: int | None = None,
    progress: Progress = no_progress,
) -> str | Path:
    """A raw log of ratings (label: 4 stars or more) with the movies that the user rated before.

    A session ends when a user rates nothing for half an hour. `path` is ml-1m.zip as GroupLens publishes it, or the
    folder inside it; `limit` takes the sessions that start first.
    """
    progress("read ratings", 0, 0)
    files = _open_files(Path(path))
    user, movie, rating, seconds = _read_ratings(*files["ratings.dat"])
    profiles = _read_users(*files["users.dat"], num_users=int(user.max()) + 1)
    genres, genre_names = _read_movies(*files["movies.dat"], num_movies=int(movie.max()) + 1)

    by_user = np.lexsort((seconds, user))  # stable: ratings of one second keep the order of the file
    user, movie, rating, seconds = (column[by_user] for column in (user, movie, rating, seconds))
    is_user = starts_of_runs(user)
    is_session = is_user.copy()
    is_session[1:] |= np.diff(seconds) > SESSION_GAP_S
    session = np.cumsum(is_session) - 1
    timestamp = space_out(seconds * 1000, is_session, spacing=1)
    lengths = np.minimum(position_in_run(is_user), history_length)
    starts = np.arange(len(movie)) - lengths

    order = np.lexsort((session, timestamp))
    if limit is not None:
        first = timestamp[is_session]
        chosen = np.argsort(first, kind="stable")[:limit]
        order = order[np.isin(session[order], chosen)]
    schema = _schema(profiles, num_movies=len(genres.offsets) - 1, num_genres=len(genre_names))
    with write_log(out, schema) as writer:
        for begin in range(0, len(order), ROWS_PER_GROUP):
            at = order[begin : begin + ROWS_PER_GROUP]
            columns = [
                plain_column(session[at]),
                plain_column(timestamp[at]),
                plain_column((rating[at] >= LIKED).astype(np.float32)),
                id_column(user[at]),
                *(id_column(profiles[name][user[at]]) for name in profiles),
                window_column(movie, starts[at], lengths[at]),
                id_column(movie[at]),
                window_column(genres.values, genres.offsets[movie[at]], genres.lengths[movie[at]]),
            ]
            writer.write(pa.RecordBatch.from_arrays(columns, schema=schema.arrow_schema()))
            progress("write samples", begin + len(at), len(order))
        writer.info |= {"num_sessions": len(np.unique(session[order])), "genres": genre_names}
    return out


def _schema(profiles: dict[str, IntArray], *, num_movies: int, num_genres: int) -> Schema:
    user_rows = {"user": len(next(iter(profiles.values())))}
    user_rows |= {name: int(column.max()) + 1 for name, column in profiles.items()}
    return Schema(
        features=(
            *(Feature(name=n, kind="sparse", num_rows=rows, dim=DIM, group="user") for n, rows in user_rows.items()),
            Feature(name="history", kind="sequence", table="movie", num_rows=num_movies, dim=DIM, shift=True),
            Feature(name="movie", kind="sparse", num_rows=num_movies, dim=DIM),
            Feature(name="genres", kind="sparse", num_rows=num_genres, dim=DIM, pooling="mean"),
        ),
        user="user",
        item="movie",
        info={"source": "movielens"},
    )


def _open_files(path: Path) -> dict[str, tuple[str, bytes]]:
    """Display name and content of the three files, from the zip or the folder."""
    names = ("ratings.dat", "users.dat", "movies.dat")
    if path.is_dir():
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise InputError(f"{path}: holds no {missing[0]}; expected the folder ml-1m with {', '.join(names)}")
        return {name: (str(path / name), (path / name).read_bytes()) for name in names}
    try:
        with zipfile.ZipFile(path) as archive:
            found = {Path(member).name: member for member in archive.namelist()}
            missing = [name for name in names if name not in found]
            if missing:
                raise InputError(f"{path}: holds no {missing[0]}; expected ml-1m.zip with {', '.join(names)}")
            return {name: (f"{path}:{found[name]}", archive.read(found[name])) for name in names}
    except zipfile.BadZipFile:
        raise InputError(
            f"{path}: is neither a folder nor a zip file; expected ml-1m.zip or the folder ml-1m"
        ) from None


def _split_lines(name: str, content: bytes, fields: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(content.decode("latin-1").splitlines(), start=1):
        parts = line.split("::")
        if len(parts) != len(fields):
            raise InputError(
                f"{name}, line {number}: has {len(parts)} fields, expected {len(fields)} ({'::'.join(fields)})"
            )
        yield number, parts


def _whole_number(text: str, *, name: str, line: int, field: str) -> int:
    if not text.isdigit():
        raise InputError(f"{name}, line {line}: {field} is {text!r}, expected a whole number")
    return int(text)


def _read_ratings(name: str, content: bytes) -> tuple[npt.NDArray[np.int64], ...]:
    """Columns of user::movie::rating::timestamp; with the delimiter ':' every second column is empty."""
    if not content.strip():
        raise InputError(f"{name}: holds no ratings")
    columns = ["user", "_1", "movie", "_2", "rating", "_3", "timestamp"]
    types = {column: pa.null() if column.startswith("_") else pa.uint32() for column in columns}
    try:
        table = pa_csv.read_csv(
            io.BytesIO(content),
            read_options=pa_csv.ReadOptions(column_names=columns),
            parse_options=pa_csv.ParseOptions(delimiter=":", quote_char=False),
            convert_options=pa_csv.ConvertOptions(column_types=types, null_values=[""]),
        )
        if any(table[field].null_count for field in RATING_FIELDS):
            raise pa.ArrowInvalid("an empty field")
    except pa.ArrowInvalid as error:
        # The fast parser does not say where: read again, slowly, up to the wrong line.
        for line, parts in _split_lines(name, content, RATING_FIELDS):
            for field, text in zip(RATING_FIELDS, parts, strict=True):
                _whole_number(text, name=name, line=line, field=field)
        raise InputError(f"{name}: cannot be read ({error})") from None
    return tuple(table[field].to_numpy().astype(np.int64) for field in RATING_FIELDS)


def _read_users(name: str, content: bytes, *, num_users: int) -> dict[str, IntArray]:
    """Gender, age group and occupation by user id; 0 if unknown."""
    profiles: dict[str, IntArray] = {
        field: np.zeros(num_users, dtype=np.int64) for field in ("gender", "age", "occupation")
    }
    ages: dict[str, int] = {}
    fields = ("user", "gender", "age", "occupation", "zip")
    for line, (user, gender, age, occupation, _) in _split_lines(name, content, fields):
        number = _whole_number(user, name=name, line=line, field="user")
        if number >= num_users:
            continue  # rated nothing
        profiles["gender"][number] = 1 + (gender == "F")
        profiles["age"][number] = ages.setdefault(age, len(ages) + 1)
        profiles["occupation"][number] = 1 + _whole_number(occupation, name=name, line=line, field="occupation")
    return profiles


def _read_movies(name: str, content: bytes, *, num_movies: int) -> tuple[Jagged, list[str]]:
    """The genres of every movie id, and their names; a movie that is not listed has none."""
    genre_ids: dict[str, int] = {}
    by_movie: list[list[int]] = [[] for _ in range(num_movies)]
    for line, (movie, _, genres) in _split_lines(name, content, ("movie", "title", "genres")):
        number = _whole_number(movie, name=name, line=line, field="movie")
        if number < num_movies:
            by_movie[number] = [genre_ids.setdefault(genre, len(genre_ids)) for genre in genres.split("|")]
    if not genre_ids:
        raise InputError(f"{name}: names no genre of any rated movie")
    values = np.array([genre for listed in by_movie for genre in listed], dtype=np.int64)
    return Jagged(values=values, offsets=offsets_of(np.array([len(listed) for listed in by_movie]))), list(genre_ids)
