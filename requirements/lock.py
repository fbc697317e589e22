"""Writes requirements/*.txt: every package of every environment at one version, with the hashes of its files.

    make lock                                        after a change of dependencies or of their versions
    make lock TORCH_WHEEL=torch-2.13.0+cpu-....whl   after a change of torch: the CPU build is not on PyPI

Versions come from constraints.txt, hashes from the index (uv asks it). A package with a wheel for Linux on x86-64 and
Python 3.11 is locked to its wheels: nothing of a source archive runs. The files name no index: any mirror serves.

torch has two builds: torch-cpu.txt, which some index must offer, and torch-cuda.txt, PyPI's, with all that it needs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent
SERVER = "recmill/serving/server/requirements.txt"
HEAD = "# Written by `make lock`; change constraints.txt or pyproject.toml instead.\n"
PLATFORM = "x86_64-manylinux_2_28"
OF_CUDA = re.compile(r"nvidia-|cuda-|triton$|torch$")
HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True)
class Lock:
    """One file: packages by name, or extras of pyproject.toml, with all that they require; `alone` without that."""

    packages: Sequence[str] = ()
    extras: Sequence[str] | None = None
    alone: Sequence[str] = ()
    constraints: str = "constraints.txt"
    python: str = "3.11"


LOCKS = {
    "build": Lock(packages=["setuptools", "wheel"]),  # for the few packages without a wheel
    "kernels": Lock(packages=["scikit-build-core", "nanobind", "cmake", "ninja"]),
    # torchrec alone: it requires fbgemm-gpu, whose files overwrite those of fbgemm-gpu-cpu.
    "setup": Lock(extras=["cpu", "spark", "tables", "dev"], alone=["torchrec"]),
    "image-cpu": Lock(extras=["cpu", "tables"], alone=["torchrec"]),
    "image-cuda": Lock(extras=["cuda", "tables"]),
    "mlflow": Lock(packages=["mlflow", "psycopg2-binary", "Flask-WTF"]),
    "spark": Lock(packages=["pyspark", "py4j"]),
    "server": Lock(packages=[f"-r {SERVER}"], constraints=SERVER),
    "lint": Lock(packages=["-r lint-requirements.txt"], constraints="lint-requirements.txt", python="3.11.5"),
}
Packages = dict[str, dict[str, Any]]  # name -> its entry of a pylock.toml


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-wheel", type=Path, help="a CPU build of torch, whose hash is added")
    arguments = parser.parse_args()
    found = {name: resolve(lock) for name, lock in LOCKS.items()}
    version = found["setup"]["torch"]["version"] + "+cpu"
    write("torch-cpu", {"torch": {"version": version, "hashes": cpu_hashes(version, arguments.torch_wheel)}})
    every = {name: entry for packages in found.values() for name, entry in packages.items()}
    write("torch-cuda", {name: entry for name, entry in every.items() if OF_CUDA.match(name)})
    for name, packages in found.items():
        write(name, {own: entry for own, entry in packages.items() if not OF_CUDA.match(own)})


def resolve(lock: Lock) -> Packages:
    """What uv finds for a lock, with everything that is required."""
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        if lock.extras is not None:
            sources = ["pyproject.toml", *(f"--extra={extra}" for extra in lock.extras)]
        if lock.packages:
            Path(folder, "in.txt").write_text("\n".join(lock.packages).replace("-r ", f"-r {ROOT}/") + "\n")
            sources = [f"{folder}/in.txt"]
        found = compile_lock(lock, sources)
        if lock.alone:
            Path(folder, "alone.txt").write_text("\n".join(lock.alone) + "\n")
            found |= compile_lock(lock, [f"{folder}/alone.txt", "--no-deps"])
    return found


def compile_lock(lock: Lock, sources: Sequence[str]) -> Packages:
    uv = Path(sys.executable).with_name("uv")
    target = [f"--python-version={lock.python}", f"--python-platform={PLATFORM}", "--format=pylock.toml"]
    command = [uv, "pip", "compile", "--quiet", *sources, f"--constraint={lock.constraints}", *target]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {entry["name"]: entry for entry in tomllib.loads(printed)["packages"]}


def cpu_hashes(version: str, wheel: Path | None) -> list[str]:
    """The CPU build's hash: of `wheel`, or the one in the file while torch's version stays the same."""
    if wheel is not None:
        if not wheel.name.startswith(f"torch-{version}-cp311-"):
            sys.exit(f"{wheel}: expected a file torch-{version}-cp311-...whl")
        with open(wheel, "rb") as file:
            return ["sha256:" + file_digest(file, "sha256").hexdigest()]
    path = FOLDER / "torch-cpu.txt"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if f"torch=={version} " not in before:
        sys.exit(f"torch is now {version}: download this build and name the file: make lock TORCH_WHEEL=FILE")
    return HASH.findall(before)


def hashes(entry: dict[str, Any]) -> list[str]:
    if "hashes" in entry:
        return list(entry["hashes"])
    files = entry.get("wheels") or [entry["sdist"]]
    return ["sha256:" + file["hashes"]["sha256"] for file in files]


def write(name: str, packages: Packages) -> None:
    lines = []
    for own, entry in sorted(packages.items()):
        allowed = sorted(set(hashes(entry)))
        lines.append(" \\\n".join([f"{own}=={entry['version']}", *(f"    --hash={one}" for one in allowed)]))
    (FOLDER / f"{name}.txt").write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
