"""What commands share: options, sizes in bytes, and how results are printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from recmill.artifacts import dump_json
from recmill.progress import Progress, no_progress, terminal_progress
from recmill.sizes import parse_bytes

F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """`--json`: one JSON object on standard output and nothing else there."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object for machines.")(command)


def progress_for(as_json: bool) -> Progress:
    return no_progress if as_json else terminal_progress()


def emit(result: Mapping[str, Any], lines: list[str], *, as_json: bool) -> None:
    """Print the result: as JSON for machines, otherwise as the given lines for people."""
    click.echo(dump_json(result), nl=False) if as_json else click.echo("\n".join(lines))


class ByteSize(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None


class HotBudget(click.ParamType[Any]):
    """Memory for hot rows: a size, "auto" or "none"."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value in ("auto", "none") else BYTES.convert(value, param, ctx)


BYTES = ByteSize()
HOT_BUDGET = HotBudget()


def settings_option(command: F) -> F:
    """`--set NAME=VALUE`, as `flags`."""
    about = "Training setting (epochs=2) or data setting (data.sessions=5000); repeatable."
    return click.option("--set", "flags", multiple=True, metavar="NAME=VALUE", help=about)(command)


def memory_budget_option(command: F) -> F:
    about = "Embedding memory per process."
    return click.option("--memory-budget", type=BYTES, default="1GiB", help=about)(command)
