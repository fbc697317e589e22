"""Which code each benchmark measures, and a hash of it, so that a result tells whether it is older than that code.

A hash covers Python without comments, docstrings and layout, and C++ without comments: text may change, code may not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parent.parent


def _ops(*names: str) -> tuple[str, ...]:
    """These ops, and what all ops share."""
    return (*(f"kernels/{name}" for name in names), "kernels/*.h", "kernels/autograd.py", "kernels/buffers.py")


ROWS = _ops("expand_rows", "move_rows", "split_tiers", "update_rows")
READING = (
    *(f"recmill/data/{name}" for name in ("cluster", "hot", "ikjt", "ingest", "storage", "*.py")),
    *_ops("check_pages", "decode_pages", "decode_streams", "dedup_rows", "join_lists"),
    *(f"kernels/{name}" for name in ("merge_windows", "take_rows", "window_rows", "windows.py")),
)
ENCODERS = tuple(f"kernels/{name}_attention" for name in ("pointwise", "target", "window"))
TRAINING = (
    *("recmill/model", "recmill/training/rank"),
    *(*ROWS, *ENCODERS, "kernels/dot_interaction", "kernels/pool_windows"),
)
HARNESS = ("benchmarks/harness.py", "benchmarks/session_logs.py", "benchmarks/training_rate.py")
NETWORK = ("benchmarks/shaped_network.py", "benchmarks/forked_ranks.py")

# Packages, kernels and scripts by benchmark; a pattern may match several files.
CODE: dict[str, tuple[str, ...]] = {
    "recd": (*READING, *TRAINING, *HARNESS, "benchmarks/recd*.py", "benchmarks/dedup*.py", "benchmarks/wire_bytes.py"),
    # The exchange of rows, not their update.
    "flexshard": (
        *("recmill/planning/planner.py", "recmill/planning/tiers"),
        *("recmill/model/stores/*.py", "recmill/model/stores/tiered", "recmill/model/tiered_embedding.py"),
        *_ops("expand_rows", "split_tiers"),
        *(*NETWORK, "benchmarks/harness.py", "benchmarks/flexshard*.py"),
    ),
    "fae": (*READING, *TRAINING, "recmill/planning/hot", *HARNESS, *NETWORK, "benchmarks/fae*.py"),
    "fae_order": (*READING, *TRAINING, "recmill/planning/hot", *HARNESS, "benchmarks/fae*.py"),
    "pss": (
        *_ops("shared_lookup"),
        "recmill/model/stores/shared",
        "recmill/planning/sharing",
        "benchmarks/harness.py",
        "benchmarks/pss*.py",
    ),
    "intune": (*READING, "recmill/tuning", "benchmarks/harness.py", "benchmarks/intune*.py"),
    "together": (
        *READING,
        *TRAINING,
        "recmill/planning",
        "recmill/tuning",
        *NETWORK,
        "benchmarks/harness.py",
        "benchmarks/together*.py",
    ),
    "serving": (
        "recmill/serving",
        "recmill/model/encoders",
        "recmill/model/*.py",
        *_ops("dense_layers", "dot_interaction", "encode_windows", "expand_rows", "pool_tables", "pool_windows"),
        *("kernels/shared_lookup", "kernels/take_rows"),
        *ENCODERS,
        "benchmarks/harness.py",
        "benchmarks/serving*.py",
    ),
}
SUFFIXES = (".py", ".cpp", ".h")


def hash_code(benchmark: str) -> dict[str, str]:
    """The hash of every part of the code that the benchmark measures; empty for scripts that no row comes from."""
    return {pattern: _hash_part(pattern) for pattern in CODE.get(benchmark, ())}


def changed_code(benchmark: str, stored: Mapping[str, str] | None) -> list[str]:
    """The parts that differ from those of a result; all of them for a result that has no hashes."""
    return [part for part in CODE[benchmark] if not stored or stored.get(part) != _hash_part(part)]


def files_of(pattern: str) -> list[Path]:
    """The source files of a folder, or those that match a pattern; third-party code is pinned by its version."""
    place = ROOT / pattern
    found = place.rglob("*") if place.is_dir() else ROOT.glob(pattern)
    return sorted(path for path in found if path.suffix in SUFFIXES and "third_party" not in path.parts)


@cache
def _hash_part(pattern: str) -> str:
    digest = hashlib.sha256()
    for path in files_of(pattern):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\n{code_of(path)}\n".encode())
    return digest.hexdigest()[:16]


@cache
def code_of(path: Path) -> str:
    """What a file does, without what only its readers see: bytecode of Python 3.11, the only version supported."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).split())
    return "\n".join(_instructions(compile(text, path.name, "exec", optimize=2, dont_inherit=True)))


def _instructions(code: CodeType) -> Iterator[str]:
    """Instructions, names and constants of a module and of everything in it, without line numbers."""
    yield f"{code.co_name} {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
        else:
            yield repr(sorted(constant, key=repr)) if isinstance(constant, frozenset) else repr(constant)
