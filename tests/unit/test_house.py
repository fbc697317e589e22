"""The rules of the house that a reader relies on: small rooms, short files, one meaning per class name."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("recmill", "kernels", "components", "pipelines")
MOST_LINES = 400
MOST_MODULES = 12


def product_files(*suffixes: str) -> list[Path]:
    return [
        path
        for room in PRODUCT
        for path in sorted((ROOT / room).rglob("*"))
        if path.suffix in suffixes and "third_party" not in path.parts
    ]


PACKAGES = sorted({path.parent for path in product_files(".py")})
# Folders of kernels name their files by backend, and components hold one step each: their rule is their shape.
ROOMS = [package for package in PACKAGES if package.relative_to(ROOT).parts[0] == "recmill"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", product_files(".py", ".cpp", ".h", ".pyi"), ids=name_of)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("package", ROOMS, ids=name_of)
def test_packages_are_small(package: Path) -> None:
    modules = [path.name for path in package.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES, modules


@pytest.mark.parametrize("package", ROOMS, ids=name_of)
def test_packages_say_what_lives_in_them(package: Path) -> None:
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{name_of(package)}/__init__.py has no docstring"


@pytest.mark.parametrize("package", ROOMS, ids=name_of)
def test_file_names_do_not_repeat_their_folder(package: Path) -> None:
    repeated = [path.name for path in package.glob("*.py") if path.stem.startswith(f"{package.name}_")]
    assert not repeated


def test_class_names_have_one_meaning() -> None:
    places = defaultdict(list)
    for path in product_files(".py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name_of(path))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}
