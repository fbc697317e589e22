"""The command line: `recmill COMMAND --help`.

A command lives in the module of what it is about and is imported only when it is called, so `--help` stays quick.
Commands that belong to a layer above this library (running pipelines) are found through the entry points
`recmill.commands`.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points
from typing import Any

import click

import recmill
from recmill.artifacts import InputError, refuse_credentials
from recmill.artifacts.places.failures import describe_failure

COMMANDS = {
    "init": "recmill.cli.init:init",
    "generate": "recmill.cli.generate:generate",
    "prepare": "recmill.cli.data:prepare",
    "cluster": "recmill.cli.data:cluster",
    "profile": "recmill.cli.data:profile",
    "plan": "recmill.cli.planning:plan",
    "layout": "recmill.cli.layout:layout",
    "tune": "recmill.cli.tuning:tune",
    "train": "recmill.cli.training:train",
    "evaluate": "recmill.cli.training:evaluate",
    "predict": "recmill.cli.training:predict",
    "export": "recmill.cli.training:export",
    "convert-checkpoint": "recmill.cli.training:convert_checkpoint",
    "serve": "recmill.cli.serve:serve",
    "compare": "recmill.cli.report:compare",
    "clean": "recmill.cli.report:clean",
    "doctor": "recmill.cli.doctor:doctor",
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        plugins = [entry.name for entry in entry_points(group="recmill.commands")]
        return ["run", *COMMANDS, *(name for name in plugins if name != "run")] if "run" in plugins else list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            module, _, name = COMMANDS[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), name)
            return command
        for entry in entry_points(group="recmill.commands", name=cmd_name):
            loaded: click.Command = entry.load()
            return loaded
        return None


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


@click.group(cls=LazyGroup, context_settings=CONTEXT)
@click.version_option(recmill.__version__, prog_name="recmill")
def cli() -> None:
    """Raw interaction logs in; a trained, compressed, sharded recommendation model out."""


def main(args: list[str] | None = None) -> Any:
    """Run a command; what the user got wrong ends in one line and exit code 2."""
    try:
        for argument in sys.argv[1:] if args is None else args:
            refuse_credentials(argument, "argument")
        return cli.main(args=args, standalone_mode=True)
    except InputError as error:
        click.echo(f"recmill: error: {error}", err=True)
        sys.exit(2)
    except Exception as error:
        if (reason := describe_failure(error)) is None:
            raise  # a mistake of ours: the traceback is what a report needs
        click.echo(f"recmill: error: {reason}", err=True)
        sys.exit(2)
