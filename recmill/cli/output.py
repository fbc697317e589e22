"""What commands share: options, sizes in bytes, and how results are printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from recmill.artifacts import dump_json
from recmill.progress import Progress, no_progress, terminal_progress

F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """`--json`: one JSON object on standard output and nothing else there."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object for machines.")(command)


def progress_for(as_json: bool) -> Progress:
    return no_progress if as_json else terminal_progress()


def emit(result: Mapping[str, Any], lines: list[str], *, as_json: bool) -> None:
    """Print the result: as JSON for machines, otherwise as the given lines for people."""
    click.echo(dump_json(result), nl=False) if as_json else click.echo("\n".join(lines))


def parse_bytes(text: str) -> int:
    """Bytes from '64MiB', '2GB', '512'. Decimal and binary units are kept apart."""
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text.strip()[len(number) :].lower()
    try:
        size = float(number) * units[unit]
    except (ValueError, KeyError):
        raise click.BadParameter(f"{text!r} is not a size; write it like 64MiB or 2GB") from None
    if size <= 0:
        raise click.BadParameter(f"{text!r} must be more than zero")
    return int(size)


class ByteSize(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else parse_bytes(value)


BYTES = ByteSize()


def settings_option(command: F) -> F:
    """`--set NAME=VALUE`, as `flags`."""
    about = "Training setting (epochs=2) or data setting (data.sessions=5000); repeatable."
    return click.option("--set", "flags", multiple=True, metavar="NAME=VALUE", help=about)(command)


def memory_budget_option(command: F) -> F:
    about = "Embedding memory per process."
    return click.option("--memory-budget", type=BYTES, default="1GiB", show_default=True, help=about)(command)
