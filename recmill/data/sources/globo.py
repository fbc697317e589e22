"""News clicks of Globo.com: real sessions with a history, a context and sampled negatives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recmill.artifacts import InputError
from recmill.data.schema import Feature, Schema
from recmill.data.sources.lists import (
    IntArray,
    first_sessions,
    id_column,
    plain_column,
    position_in_run,
    read_whole_numbers,
    space_out,
    starts_of_runs,
    window_column,
)
from recmill.data.sources.log_writer import in_row_groups, write_log
from recmill.progress import Progress, no_progress

CONTEXT = ("environment", "deviceGroup", "os", "country", "region")  # the same in 99.9% of neighbouring clicks
CHANGING = "referrer_type"  # the same in 90% of them
COLUMNS = (
    "user_id",
    "session_id",
    "click_article_id",
    "click_timestamp",
    *(f"click_{name}" for name in (*CONTEXT, CHANGING)),
)
DIM = 16
HISTORY_LENGTH = 50
NEGATIVE_WINDOW = 10_000  # clicks

Clicks = dict[str, npt.NDArray[np.int64]]


def convert_globo(
    path: str | Path,
    *,
    out: str | Path,
    negatives: int = 1,
    limit: int | None = None,
    one_in: int = 1,
    seed: int = 0,
    progress: Progress = no_progress,
) -> str | Path:
    """A raw log of clicks (label 1) and, after each, `negatives` articles that were not clicked (label 0).

    The data has no impressions. A negative is the article of a click drawn from the last NEGATIVE_WINDOW clicks of all
    users, so popular and fresh articles appear as they would on the page. `limit` takes the sessions that start first,
    when histories are still short; `one_in=n` takes every n-th user with all clicks.
    `path` is clicks.parquet, or a folder with it or with clicks_hour_*.csv.
    """
    progress("read clicks", 0, 0)
    clicks = _in_time_order(_read_clicks(Path(path)), spacing=negatives + 1)
    articles, clicks["article"] = np.unique(clicks["click_article_id"], return_inverse=True)
    stream, starts, lengths = _histories(clicks)
    drawn = _draw_negatives(clicks["article"], count=negatives, seed=seed)
    rows = _of_some_users(clicks, one_in)
    if limit is not None:
        rows = rows[first_sessions(clicks["session_id"][rows], limit)]
    info = {"num_sessions": int((clicks["position"][rows] == 0).sum()), "negatives": negatives, "seed": seed}
    schema = _schema(clicks, num_articles=len(articles), info={"source": "globo", **info})
    # Row r of the log is variant r % (1 + negatives) of a click; variant 0 is the click itself.
    click = np.repeat(rows, 1 + negatives)
    variant = np.tile(np.arange(1 + negatives), len(rows))
    timestamp = clicks["timestamp"][click] + variant
    order = np.lexsort((clicks["session_id"][click], timestamp))
    shown = np.concatenate([clicks["article"][:, None], drawn], axis=1)

    def samples() -> Iterator[pa.RecordBatch]:
        for piece in in_row_groups(order, progress):
            at, which = click[piece], variant[piece]
            columns = {
                "session_id": plain_column(clicks["session_id"][at]),
                "timestamp": plain_column(timestamp[piece]),
                "label": plain_column((which == 0).astype(np.float32)),
                "session_position": plain_column(np.log1p(clicks["position"][at]).astype(np.float32)),
                "user": id_column(clicks["user_id"][at]),
                **{name: id_column(clicks[f"click_{name}"][at]) for name in (*CONTEXT, CHANGING)},
                "history": window_column(stream, starts[at], lengths[at]),
                "article": id_column(shown[at, which]),
            }
            arrays = [columns[name] for name in schema.columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema.arrow_schema())

    return write_log(out, schema, samples())


def _read_clicks(path: Path) -> Clicks:
    if path.is_dir():
        single = path / "clicks.parquet"
        files = [single] if single.exists() else sorted(path.rglob("clicks_hour_*.csv"))
        if not files:
            raise InputError(f"{path}: holds neither clicks.parquet nor clicks_hour_*.csv files of the globo data")
    else:
        files = [path]
    table = pa.concat_tables([read_whole_numbers(file, COLUMNS) for file in files])
    if table.num_rows == 0:
        raise InputError(f"{path}: holds no clicks")
    clicks = {name: table[name].to_numpy() for name in COLUMNS}
    for name in COLUMNS:
        if clicks[name].min() < 0:
            row = int(np.argmax(clicks[name] < 0))
            raise InputError(f"{path}: column {name!r}, row {row}: is {clicks[name][row]}, expected at least 0")
    return clicks


def _in_time_order(clicks: Clicks, *, spacing: int) -> Clicks:
    """Clicks by time, with their `position` in the session and a `timestamp` that leaves room for negatives."""
    by_session = np.lexsort((clicks["click_timestamp"], clicks["session_id"]))
    clicks = {name: column[by_session] for name, column in clicks.items()}
    is_start = starts_of_runs(clicks["session_id"])
    clicks["timestamp"] = space_out(clicks["click_timestamp"], is_start, spacing=spacing)
    clicks["position"] = position_in_run(is_start)
    by_time = np.lexsort((clicks["session_id"], clicks["timestamp"]))
    return {name: column[by_time] for name, column in clicks.items()}


def _histories(clicks: Clicks) -> tuple[IntArray, IntArray, IntArray]:
    """All articles user by user in time order, and for each click the window of its user's earlier clicks."""
    by_user = np.argsort(clicks["user_id"], kind="stable")
    position = position_in_run(starts_of_runs(clicks["user_id"][by_user]))
    lengths, starts = np.empty_like(position), np.empty_like(position)
    lengths[by_user] = np.minimum(position, HISTORY_LENGTH)
    starts[by_user] = np.arange(len(by_user)) - lengths[by_user]
    return clicks["article"][by_user], starts, lengths


def _draw_negatives(articles: IntArray, *, count: int, seed: int) -> IntArray:
    """`count` other articles for every click, each the article of a random earlier click."""
    rng = np.random.default_rng(seed)
    position = np.arange(len(articles))[:, None]
    size = min(NEGATIVE_WINDOW, len(articles))
    # The first clicks have too short a past: they draw from the first window, whose articles are as fresh.
    low = np.maximum(position - size, 0)
    drawn = articles[low + rng.integers(0, size, (len(articles), count))]
    for _ in range(8):
        clash = np.nonzero(drawn == articles[:, None])
        if len(clash[0]) == 0:
            break
        drawn[clash] = articles[low[clash[0], 0] + rng.integers(0, size, len(clash[0]))]
    # In a window in which one article has nearly all clicks, any other article is a negative.
    num_articles = int(articles.max()) + 1
    if num_articles > 1:
        clash = np.nonzero(drawn == articles[:, None])
        drawn[clash] = (drawn[clash] + rng.integers(1, num_articles, len(clash[0]))) % num_articles
    return drawn


def _of_some_users(clicks: Clicks, one_in: int) -> IntArray:
    """The rows of every `one_in`th user."""
    if one_in < 1:
        raise InputError(f"one_in is {one_in}, expected at least 1")
    rows = np.nonzero(clicks["user_id"] % one_in == 0)[0]
    if not len(rows):
        raise InputError(f"one_in is {one_in}, and no user's id is a multiple of it")
    return rows


def _schema(clicks: Clicks, *, num_articles: int, info: dict[str, object]) -> Schema:
    def context(name: str, column: str, group: str) -> Feature:
        return Feature(name=name, kind="sparse", num_rows=int(clicks[column].max()) + 1, dim=DIM, group=group)

    return Schema(
        features=(
            Feature(name="session_position", kind="dense"),
            context("user", "user_id", "context"),
            *(context(name, f"click_{name}", "context") for name in CONTEXT),
            context(CHANGING, f"click_{CHANGING}", CHANGING),
            Feature(name="history", kind="sequence", table="article", num_rows=num_articles, dim=DIM, shift=True),
            Feature(name="article", kind="sparse", num_rows=num_articles, dim=DIM),
        ),
        user="user",
        item="article",
        info=info,
    )
