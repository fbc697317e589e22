"""The supply chain: every package is locked with hashes, its licence is accepted, and a bill of materials lists it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
LOCKS = sorted(path.stem for path in FOLDER.glob("*.txt"))
ENTRY = re.compile(r"([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")
REMEDY = "run `make lock`"

sys.path.insert(0, str(FOLDER))
import licences  # noqa: E402
import sbom  # noqa: E402


def read_pins(path: Path) -> dict[str, str]:
    pairs = re.findall(r"^([\w.-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {sbom.canonical(name): version for name, version in pairs}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_versions_and_hashes_and_nothing_else(name: str) -> None:
    head, _, body = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").partition("\n")
    assert head.startswith("# Written by `make lock`")
    assert ENTRY.sub("", body) == ""  # no index, no unpinned line
    assert len(ENTRY.findall(body)) >= 1


@pytest.mark.parametrize("name", [name for name in LOCKS if name not in ("torch-cuda", "lint", "server")])
def test_locks_have_the_versions_of_the_constraints(name: str) -> None:
    pins = read_pins(ROOT / "constraints.txt")
    pins |= {"torch": pins["torch"] + "+cpu"} if name == "torch-cpu" else {}
    wrong = {
        own: version for own, version in read_pins(FOLDER / f"{name}.txt").items() if pins.get(own, version) != version
    }
    assert not wrong, REMEDY
    assert name == "image-cuda" or read_pins(FOLDER / f"{name}.txt").keys() <= pins.keys(), REMEDY


@pytest.mark.parametrize(
    ("name", "path"), [("lint", "lint-requirements.txt"), ("server", "recmill/serving/server/requirements.txt")]
)
def test_environments_of_their_own_have_the_versions_of_their_list(name: str, path: str) -> None:
    pins = read_pins(ROOT / path)
    pins.pop("torch", None)
    assert read_pins(FOLDER / f"{name}.txt") == pins, REMEDY


def test_what_the_project_requires_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(*extras: str) -> set[str]:
        lines = [
            *project["dependencies"],
            *(line for extra in extras for line in project["optional-dependencies"][extra]),
        ]
        return {sbom.canonical(re.match(r"[\w.-]+", line)[0]) for line in lines} - {"torch"}

    assert names("cpu", "spark", "tables", "dev") | {"torchrec"} <= read_pins(FOLDER / "setup.txt").keys(), REMEDY
    assert names("cpu", "tables") | {"torchrec"} <= read_pins(FOLDER / "image-cpu.txt").keys(), REMEDY
    assert names("cuda", "tables") <= read_pins(FOLDER / "image-cuda.txt").keys(), REMEDY
    assert read_pins(FOLDER / "torch-cpu.txt")["torch"] == read_pins(FOLDER / "torch-cuda.txt")["torch"] + "+cpu"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True),
        ("Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("GPL-3.0-only OR BSD-2-Clause", True),
        ("MIT AND GPL-3.0-only", False),
        ("GPL-3.0-only", False),
        ("", False),
    ],
)
def test_expressions_of_licences(expression: str, expected: bool) -> None:
    assert licences.is_allowed(expression, licences.ALLOWED) == expected


def test_licences_of_this_environment_are_accepted_and_others_are_named() -> None:
    ran = subprocess.run([sys.executable, str(FOLDER / "licences.py")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert list(
        licences.problems({"new": "GPL-3.0-only", "none": "", "huey": "GPL-3.0-only", "nvidia-x": "other"})
    ) == [
        "huey: its licence is now 'GPL-3.0-only', the exception is for ''",
        "new: the licence 'GPL-3.0-only' is not on the list",
        "none: names no licence",
    ]
    assert not list(licences.problems({"yamllint": "GPL-3.0-or-later"}, are_tools=True))


def test_the_bill_of_materials_lists_packages_and_vendored_code(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text(
        "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9+deb12u13\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n"
    )
    components = [*sbom.python_components(sys.path), *sbom.debian_components(status)]
    bill = sbom.make_bom("registry/recmill/data:abc", components, digest="sha256:" + "0" * 64)
    named = {entry["name"]: entry for entry in bill["components"]}
    assert named["numpy"]["purl"] == f"pkg:pypi/numpy@{read_pins(ROOT / 'constraints.txt')['numpy']}"
    assert named["libc6"]["purl"].startswith("pkg:deb/")
    assert "gone" not in named
    assert {"recmill", "torch", "torchrec"} <= named.keys()
    subject = bill["metadata"]["component"]
    assert (subject["type"], subject["name"], subject["version"]) == ("container", "registry/recmill/data", "abc")
    assert subject["hashes"] == [{"alg": "SHA-256", "content": "0" * 64}]
    header = (ROOT / "kernels/third_party/zstd/zstd.h").read_text()
    parts = [re.search(rf"define ZSTD_VERSION_{part}\s+(\d+)", header)[1] for part in ("MAJOR", "MINOR", "RELEASE")]
    assert named["zstd"]["version"] == ".".join(parts)
    refs = [entry["bom-ref"] for entry in bill["components"]]
    assert len(refs) == len(set(refs))
    path = tmp_path / "bill.json"
    path.write_text(json.dumps(bill))
    assert licences.read_bill(path)["zstd"] == "BSD-3-Clause"


def test_the_bill_of_materials_has_the_form_of_cyclonedx(tmp_path: Path) -> None:
    validation = pytest.importorskip(
        "cyclonedx.validation.json", reason="needs the schema: pip install 'cyclonedx-python-lib[json-validation]'"
    )
    from cyclonedx.schema import SchemaVersion

    status = tmp_path / "status"
    status.write_text("Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9+deb12u13\n")
    components = [*sbom.python_components(sys.path), *sbom.debian_components(status)]
    for bill in (
        sbom.make_bom("of this Python", components),
        sbom.make_bom("data:a", components, digest="sha256:" + "0" * 64),
    ):
        found = validation.JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill))
        assert found is None, str(found)[:500]
