"""What the documentation names exists: files, commands with their options, make targets."""

import re
import shlex
from pathlib import Path

import click
import pytest

from recmill.cli import cli
from recmill.training.switches import Switch

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TOP = ("pipelines/", "components/", "recmill/", "kernels/", "tests/", "benchmarks/", "docs/", "images/", "manifests/")
CODE = re.compile(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)


def snippets(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [
        line.split("  #")[0].strip() for found in CODE.finditer(text) for line in (found[1] or found[2]).split("\n")
    ]


def commands(page: Path) -> list[list[str]]:
    return [
        shlex.split(line)
        for line in snippets(page)
        if line.startswith("recmill ") and not line.startswith("recmill COMMAND")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_in_the_docs_exist(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    paths = [word for line in snippets(page) for word in line.split() if word.startswith(TOP) and "<" not in word]
    missing += [path for path in paths if not list(ROOT.glob(path.rstrip("/,.;:")))]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_named_in_the_docs_exist_with_their_options(page):
    context = click.Context(cli)
    for words in commands(page):
        if words[1].startswith("-"):
            continue
        command = cli.get_command(context, words[1])
        assert command is not None, " ".join(words)
        known = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
        used = {word.split("=")[0] for word in words[2:] if word.startswith("--")}
        assert used <= known, f"{' '.join(words)}: unknown {used - known}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_named_in_the_docs_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {line.split()[1] for line in snippets(page) if re.match(r"make [a-z-]+", line)}
    assert named <= targets


RATES = re.compile(
    r"\b(?:rows|samples|bytes|bits|ids|seconds|ms|us|ns|s|MB|kB|once|one|workers?|folder|image|messages?|cop(?:y|ies)|reads)"
    r" an? (?:row|rank|step|batch|session|sample|second|epoch|id|weight|feature|table|node|stage|million|core)\b"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_write_rates_with_per(page):
    # "rows per second", not "rows a second"
    assert not RATES.findall(page.read_text(encoding="utf-8"))


def test_the_readme_fits_two_screens():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def test_the_readme_names_the_five_switches_as_settings_do():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"\| `([a-z_]+)` \| \[docs/", text)
    assert named == [switch.value for switch in Switch]


def test_python_names_in_the_readme_can_be_imported():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for module, name in re.findall(r"`(recmill(?:\.[a-z_]+)+)\.([A-Za-z_]+)`", text):
        imported = __import__(module, fromlist=[name])
        assert hasattr(imported, name), f"{module}.{name}"


def test_top_level_packages_are_ours():
    # A package called `kernels` exists elsewhere too; an import must never find that one.
    for name in ("pipelines", "components", "recmill", "kernels"):
        assert Path(__import__(name).__file__).parent == ROOT / name


def test_every_command_has_help_and_json():
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        assert command.help, name
        assert "--json" in {flag for parameter in command.params for flag in parameter.opts}, name
