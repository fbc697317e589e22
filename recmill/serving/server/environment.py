"""The server's own Python environment: where it is, and how to make it where it is missing."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import recmill
from recmill.artifacts import InputError

VARIABLE = "RECMILL_SERVER_PYTHON"  # an interpreter that has what `requirements.txt` lists
CHECKOUT = Path(recmill.__file__).parents[1]
FOLDER = ".venv-server"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def server_python() -> str:
    """The interpreter that runs the server: this one if it has KServe, else the one of the server's environment."""
    if find_spec("kserve") is not None:
        return sys.executable
    named = os.environ.get(VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise InputError(f"{VARIABLE}: {named} is not a program")
        return named
    found = CHECKOUT / FOLDER / "bin/python"
    if not (CHECKOUT / FOLDER / ".ready").exists():
        raise InputError(f"the server's environment is missing; this makes it: {setup_command()}")
    return str(found)


def setup_command() -> str:
    """The command that makes the environment: in a checkout `make setup-server`, elsewhere pip with our pins."""
    if (CHECKOUT / "Makefile").is_file():
        return "make setup-server"
    home = Path("~/.recmill-server").expanduser()
    pip = f"{home}/bin/python -m pip install"
    return (
        f"python3.11 -m venv {shlex.quote(str(home))} && {pip} --requirement {shlex.quote(str(REQUIREMENTS))} "
        f"&& {pip} --no-deps recmill=={recmill.__version__} && export {VARIABLE}={home}/bin/python"
    )
