"""Repository metadata is complete and consistent: version, licence, citation, continuous integration, typing marker."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import yaml

import recmill

ROOT = Path(__file__).parents[2]
PAPERS = ("2211.05239", "2301.02959", "2103.00686", "2308.08500", "2207.10731")


def read_yaml(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_version_and_licence_agree_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = read_yaml("CITATION.cff")
    assert project["version"] == citation["version"] == recmill.__version__
    assert project["license"] == citation["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_citation_lists_the_five_papers() -> None:
    urls = [reference["url"] for reference in read_yaml("CITATION.cff")["references"]]
    assert urls == [f"https://arxiv.org/abs/{paper}" for paper in PAPERS]


def test_continuous_integration_runs_the_tests_and_checks_with_pinned_actions() -> None:
    steps = [step for job in read_yaml(".github/workflows/ci.yml")["jobs"].values() for step in job["steps"]]
    assert {step["run"] for step in steps if "run" in step} == {"make test", "make check"}
    actions = [step["uses"] for step in steps if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", action) for action in actions), actions


def test_pre_commit_runs_linters_that_make_check_runs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for hook in read_yaml(".pre-commit-config.yaml")["repos"][0]["hooks"]:
        program = hook["entry"].split()[0].replace(".venv-lint/", "$(LINT)/").replace(".venv/bin", "$(BIN)")
        assert program in makefile


def test_typed_packages_say_so() -> None:
    for package in ("recmill", "kernels"):
        assert (ROOT / package / "py.typed").is_file()


def test_tests_import_one_another_by_their_full_names() -> None:
    """A bare name is found only after pytest has collected a test beside it: the result would depend on the order."""
    tests = ROOT / "tests"
    bare = {path.stem for path in tests.rglob("*.py") if path.parent != tests}
    found = []
    for path in tests.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            found += [f"{path.relative_to(ROOT)}: {name}" for name in names if name.partition(".")[0] in bare]
    assert found == []
