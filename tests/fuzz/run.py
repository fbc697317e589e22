"""Fuzzes the C++ kernels with hostile pages, offsets and windows: `python tests/fuzz/run.py [--runs N] [TARGET...]`.

Built with AddressSanitizer and UndefinedBehaviorSanitizer in build/fuzz: with clang and libFuzzer if they are there,
else with any C++ compiler and the random driver beside this file. A finding ends in exit code 1; its input is kept.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
BUILD = ROOT / "build" / "fuzz"
TARGETS = sorted(path.stem for path in FOLDER.glob("*.cpp") if path.stem != "driver")
ZSTD = ROOT / "kernels" / "third_party" / "zstd"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-g", "-O1", "-fno-omit-frame-pointer", "-Wno-unknown-pragmas", "-Wno-psabi", *SANITIZERS]
INCLUDES = [f"-I{FOLDER}", f"-I{ROOT / 'kernels'}", "-isystem", str(ZSTD)]
NO_ASSEMBLY = ["-DZSTD_DISABLE_ASM", "-DZSTD_LEGACY_SUPPORT=0"]


def find_clang() -> str | None:
    """A clang++ that has libFuzzer."""
    names = ["clang++", *(f"clang++-{version}" for version in range(30, 12, -1))]
    for name in filter(shutil.which, names):
        probe = 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
        command = [name, "-fsanitize=fuzzer,address", "-xc++", "-", "-o", "/dev/null"]
        if subprocess.run(command, input=probe, text=True, capture_output=True, check=False).returncode == 0:
            return name
    return None


def build(target: str, compiler: str, *, has_fuzzer: bool) -> Path:
    """The program of a target; built anew if a source is newer."""
    program = BUILD / f"{target}{'' if has_fuzzer else '-driver'}"
    sources = [
        path for folder in (FOLDER, ROOT / "kernels") for path in folder.rglob("*") if path.suffix in (".cpp", ".h")
    ]
    if program.exists() and program.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return program
    BUILD.mkdir(parents=True, exist_ok=True)
    objects: list[str] = []
    if target == "decode_pages":
        objects = build_zstd(compiler, has_fuzzer=has_fuzzer)
    driver = ["-fsanitize=fuzzer"] if has_fuzzer else [str(FOLDER / "driver.cpp")]
    command = [compiler, "-std=c++17", *FLAGS, *INCLUDES, str(FOLDER / f"{target}.cpp"), *driver, *objects]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def build_zstd(compiler: str, *, has_fuzzer: bool) -> list[str]:
    folder = BUILD / ("zstd" if has_fuzzer else "zstd-driver")
    folder.mkdir(exist_ok=True)
    coverage = ["-fsanitize=fuzzer-no-link"] if has_fuzzer else []
    c_compiler = compiler.replace("clang++", "clang").replace("g++", "gcc").replace("c++", "cc")
    objects = []
    for source in sorted([*ZSTD.glob("common/*.c"), *ZSTD.glob("decompress/*.c")]):
        target = folder / f"{source.stem}.o"
        if not target.exists():
            flags = [*FLAGS, *coverage, *NO_ASSEMBLY, "-w"]
            subprocess.run([c_compiler, *flags, f"-I{ZSTD}", "-c", str(source), "-o", str(target)], check=True)
        objects.append(str(target))
    return objects


def fuzz(target: str, program: Path, *, runs: int, seed: int) -> tuple[int, str]:
    """(executions, finding or "")"""
    grown = BUILD / "corpus" / target
    grown.mkdir(parents=True, exist_ok=True)
    seeds = FOLDER / "corpus" / target
    limits = [f"-runs={runs}", f"-seed={seed}", "-max_len=2048", "-timeout=20", "-rss_limit_mb=2048"]
    command = [str(program), *limits, f"-artifact_prefix={BUILD}/{target}-", str(grown)]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}
    ran = subprocess.run(
        [*command, *([str(seeds)] if seeds.is_dir() else [])],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    done = re.search(r"Done (\d+) runs", ran.stderr)
    if ran.returncode == 0 and done:
        return int(done[1]), ""
    found = [line for line in ran.stderr.splitlines() if re.search("ERROR|runtime error|wrong result|Test unit", line)]
    return 0, "; ".join(found[:4]) or ran.stderr[-300:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--runs", type=int, default=10_000, help="executions per target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--driver", action="store_true", help="the random driver, even if libFuzzer is there")
    arguments = parser.parse_args()
    clang = None if arguments.driver else find_clang()
    compiler = clang or os.environ.get("CXX", "g++")
    print(f"{'libFuzzer' if clang else 'random driver'}, {compiler}", flush=True)
    total, is_clean = 0, True
    for target in arguments.targets:
        program, began = build(target, compiler, has_fuzzer=clang is not None), time.monotonic()
        executions, finding = fuzz(target, program, runs=arguments.runs, seed=arguments.seed)
        total, is_clean = total + executions, is_clean and not finding
        print(f"{target:<16}{executions:>12,} executions in {time.monotonic() - began:.0f} s  {finding}", flush=True)
    print(f"{'all':<16}{total:>12,} executions, {'no finding' if is_clean else 'FINDINGS'}")
    sys.exit(0 if is_clean else 1)


if __name__ == "__main__":
    main()
