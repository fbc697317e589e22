"""MLflow's SQLite database appears whole: its tables come from dozens of migrations, which a kill may cut short."""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

from recmill.artifacts import InputError
from recmill.artifacts.places.scratch import held_folder

SQLITE = "sqlite:///"


def path_of(tracking_uri: str) -> Path | None:
    """The file of a SQLite database; None for servers and other databases."""
    path = tracking_uri.removeprefix(SQLITE)
    return None if path == tracking_uri or path == ":memory:" or "?" in path else Path(path)


def create_database(mlflow: Any, tracking_uri: str) -> None:
    """Create a SQLite database that does not exist yet, under another name first."""
    path = path_of(tracking_uri)
    if path is None or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with held_folder(path) as folder:
        new = folder / path.name
        mlflow.MlflowClient(f"{SQLITE}{new}").search_experiments(max_results=1)
        # A link, unlike a rename, keeps the database of a process that was faster.
        with suppress(FileExistsError):
            try:
                os.link(new, path)
            except PermissionError:  # a file system without links
                os.rename(new, path)


def check_database(path: Path) -> None:
    """Raise at once what MLflow would only say at the end: a file that is no database, a folder nobody can write to."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return
    try:
        with sqlite3.connect(path) as connection:
            connection.execute("SELECT name FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
        raise InputError(
            f"MLflow at {SQLITE}{path}: {error}; remove the file, set MLFLOW_TRACKING_URI, or turn tracking off "
            "(--no-tracking or RECMILL_TRACKING=off)"
        ) from None
    finally:
        connection.close()
