"""Budgets as pipelines pass them: text, because a parameter of a pipeline has one type."""

from __future__ import annotations

from typing import Literal

from recmill.artifacts import InputError
from recmill.sizes import parse_bytes


def read_hot_budget(text: str) -> int | Literal["auto"] | None:
    """Memory for hot rows: "auto", None for "none", or bytes ("16MiB")."""
    if text == "auto":
        return "auto"
    try:
        return None if text == "none" else parse_bytes(text)
    except ValueError as error:
        raise InputError(f"hot_budget: {error}, or auto, or none") from None
