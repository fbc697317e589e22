"""A log of the user's own: Parquet with a schema.json beside it. Nothing is converted."""

from __future__ import annotations

from pathlib import Path

from recmill.artifacts import InputError, is_remote


def locate_parquet(path: str | Path | None) -> str | Path:
    """The path itself, if it is a Parquet file or a folder of them with `schema.json` beside them."""
    wanted = "expected a Parquet file, or a folder of them, with a schema.json beside it"
    if path is None:
        raise InputError(f"the source 'parquet' needs the path of your data (--data); {wanted}")
    if is_remote(path):
        return path
    folder = Path(path)
    if not folder.exists():
        raise InputError(f"{path}: no such file or folder; {wanted}")
    if folder.is_dir() and not any(folder.rglob("*.parquet")):
        raise InputError(f"{path}: holds no *.parquet file; {wanted}")
    if not ((folder if folder.is_dir() else folder.parent) / "schema.json").is_file():
        raise InputError(f"{path}: has no schema.json beside it; docs/data.md shows what one looks like")
    return path
