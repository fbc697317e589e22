"""What commands share: options, sizes in bytes, and how results are printed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from recmill.artifacts import dump_json
from recmill.artifacts.manifest import VERIFY_CHOICES, VERIFY_VARIABLE
from recmill.progress import Progress, no_progress, terminal_progress
from recmill.sizes import parse_bytes

F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """`--json`: one JSON object on standard output and nothing else there."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object for machines.")(command)


def verify_option(command: F) -> F:
    """`--verify`: how much of the artifacts a command reads is compared with their hashes."""

    def choose(ctx: click.Context, _: click.Parameter, choice: str) -> None:
        if choice == "full":
            os.environ[VERIFY_VARIABLE] = choice  # training processes inherit it
            ctx.call_on_close(lambda: os.environ.pop(VERIFY_VARIABLE, None))

    about = "Compare hashes of what is read (used), or of every file of every artifact before it is used (full)."
    option = click.option(
        "--verify",
        type=click.Choice(VERIFY_CHOICES),
        default="used",
        show_default=True,
        expose_value=False,
        callback=choose,
        help=about,
    )
    return option(command)


def progress_for(as_json: bool, **shown: tuple[str, ...]) -> Progress:
    return no_progress if as_json else terminal_progress(**shown)


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
