"""Policies of older versions, written by stable-baselines3 as archives with pickles, as safetensors.

Numbers of an archive's `data` are plain JSON; entries that are pickles stay unread. Weights and the optimiser's state
are files of `torch.save`, read with `weights_only=True`.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from recmill.artifacts import InputError, WorkerAllocation, read_record, write_folder
from recmill.tuning.policy import SUFFIX, PolicySettings, make_policy, name_tensors, save_policy

MAX_MEMBER_BYTES = 256 * 2**20
CONSTANT = re.compile(r"ConstantSchedule\(val=([0-9.e+-]+)\)")
# What a damaged archive leads to.
ARCHIVE_ERRORS = (
    *(zipfile.BadZipFile, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError),
    *(NotImplementedError, OSError, RecursionError, RuntimeError, TypeError, ValueError),
)


def convert_policy(old: str | Path, *, out: str | Path) -> Path:
    """Write the archive `old` to the file `out` in today's format: the same weights and settings."""
    target = Path(out)
    if target.suffix != SUFFIX:
        raise InputError(f"{out}: expected the name of a file that ends in {SUFFIX}")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        save_policy(_read_archive(Path(old)), temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def convert_allocation(old: str | Path, *, out: str | Path) -> WorkerAllocation:
    """Write the allocation `old` to the folder `out` with its policy in today's format."""
    from recmill.tuning.allocation import AGENT_FILE

    allocation = WorkerAllocation.load(old, verify=True)
    if not allocation.agent or not allocation.agent.endswith(".zip"):
        raise InputError(f"{old}: holds no policy of an older version: there is nothing to convert")
    policy = _read_archive(Path(old) / allocation.agent)
    with write_folder(out, manifest_name=WorkerAllocation.manifest_name) as folder:
        save_policy(policy, folder / AGENT_FILE)
        replace(allocation, agent=AGENT_FILE, path="", content_hash="", files=()).seal(folder)
    return WorkerAllocation.load(out)


def _read_archive(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: _read_member(archive, name) for name in ("data", "policy.pth", "policy.optimizer.pth")}
        found = json.loads(members["data"])
        weights, optimiser = (_read_state(members[name], name) for name in ("policy.pth", "policy.optimizer.pth"))
        settings = {
            **found,
            "net_arch": found["policy_kwargs"]["net_arch"],
            "clip_range": _constant(found["clip_range"]),
            "num_updates": found["_n_updates"],
            "format_version": 1,
        }
        tensors = name_tensors(weights, optimiser["state"])
        return make_policy(read_record(PolicySettings, settings, where=str(path)), tensors, where=str(path))
    except InputError:
        raise
    except ARCHIVE_ERRORS as error:
        raise InputError(f"{path}: is not a readable policy ({' '.join(str(error).split())[:200]})") from None


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > MAX_MEMBER_BYTES:
        raise ValueError(f"{name} is larger than any policy")
    return archive.read(name)


def _read_state(data: bytes, name: str) -> Any:
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, *ARCHIVE_ERRORS):
        raise ValueError(f"{name} holds something else than tensors") from None


def _constant(entry: Any) -> float:
    """The value of a constant schedule: beside its pickle, an archive describes it as text."""
    text = CONSTANT.search(str(entry["value_schedule"])) if isinstance(entry, dict) else None
    if text is None:
        raise ValueError("clip_range is not a constant")
    return float(text[1])
