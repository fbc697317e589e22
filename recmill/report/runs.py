"""A run folder as the report reads it: any part may be missing, none may be broken.

RUN/
  run.json             name, preset, start, seconds
  steps/<step>.json    seconds and metrics of each step
  dataset/  profile/  plan/  allocation/        the artifacts
  train/result.json    metrics, curves, ROC, ingestion
  baseline/  shared/   trainings beside it, each with its plan/ and train/, and dataset/ if it read other data
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec

from recmill.artifacts import InputError, check_format_version, is_remote, join_path, read_checked_json, read_json
from recmill.artifacts.manifest import check_manifest

# Steps of a training pipeline that a page shows, in the order in which they run; pipelines/train.py builds on them.
STEPS = (
    *("prepare_log", "generate_data", "profile_access", "plan_shards", "tune_ingest"),
    *("train_baseline", "train_model", "train_shared", "report", "deploy_model"),
)
OPTIONAL_STEPS = ("prepare_log", "train_baseline", "train_shared", "deploy_model")
INGEST_STAGES = ("read", "decode", "transform", "batch")
# Each part with its file, and what the page cannot show without it; that is listed in the notes.
PARTS = {
    "run": ("run.json", "the run's name, start and total time"),
    "dataset": ("dataset/dataset.json", "rows, sessions, layout and bytes of the data"),
    "schema": ("dataset/schema.json", "features, tables and the best reachable AUC"),
    "profile": ("profile/profile.json", "access skew and duplication"),
    "plan": ("plan/plan.json", "where the tables live"),
    "allocation": ("allocation/allocation.json", "the workers of each ingestion stage"),
    "training": ("train/result.json", "metrics, curves, ROC and ingestion"),
}
RESULT = PARTS["training"][0]
RECORDS = ("run", "training")
ARTIFACTS = ("dataset", "profile", "plan", "allocation")
KINDS = {**dict(zip(ARTIFACTS, ARTIFACTS, strict=True)), "run": "run", "training": "training"}


def number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def records(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list of objects."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def pairs(entries: Iterable[Mapping[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    """(x, y) of the entries that have both."""
    found = [(number(entry.get(x)), number(entry.get(y))) for entry in entries]
    return [(px, py) for px, py in found if px is not None and py is not None]


def in_order(stages: Mapping[str, Any]) -> dict[str, Any]:
    """Ingestion stages in the order of the data flow; JSON sorts them by name."""
    known = [name for name in INGEST_STAGES if name in stages]
    return {name: stages[name] for name in (*known, *(name for name in stages if name not in known))}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: its label on the page, the parts that were found, and its steps in execution order."""

    path: str
    label: str
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def part(self, name: str) -> Mapping[str, Any]:
        return self.parts.get(name, {})

    def number(self, part: str, *keys: str) -> float | None:
        """A number inside a part: run.number("training", "metrics", "auc")."""
        value: Any = self.part(part)
        for key in keys:
            value = mapping(value).get(key)
        return number(value)

    @property
    def missing(self) -> list[str]:
        """The missing parts of this run, as sentences for the notes."""
        parts = [PARTS[name] for name in PARTS if name not in self.parts]
        lacking = [f"{file} is missing: the page does not show {what}." for file, what in parts]
        if not self.steps:
            lacking.append("steps/*.json are missing: the page does not show the time of each stage.")
        return lacking

    @property
    def data_bytes(self) -> float | None:
        sizes = [number(part.get("bytes")) for part in records(self.part("dataset").get("parts"))]
        known = [size for size in sizes if size is not None]
        return sum(known) if known and len(known) == len(sizes) else None

    @property
    def stall_share(self) -> float | None:
        """Share of the time that the trainer waited for its next batch."""
        waited, whole = (self.number("training", "ingest", "consumer", key) for key in ("stall_seconds", "seconds"))
        return waited / whole if waited is not None and whole else None


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs with distinct labels; the first is the baseline."""
    if not paths:
        raise InputError("no run folder given, expected at least one")
    return label_apart([load_run(path) for path in paths])


def load_run(path: str | Path) -> Run:
    """A run folder, or a folder written by `recmill train` (then only the training is present)."""
    filesystem, root = fsspec.core.url_to_fs(str(path))
    if not filesystem.exists(root):
        raise InputError(f"{path}: no such folder; expected a run folder written by `recmill run --out`")
    if not filesystem.isdir(root):
        raise InputError(f"{path}: is a file; expected a run folder written by `recmill run --out`")
    files = {name: join_path(path, file) for name, (file, _) in PARTS.items()}
    if not filesystem.exists(join_path(root, RESULT)) and filesystem.exists(join_path(root, "result.json")):
        files["training"] = join_path(path, "result.json")
    parts = {}
    for name, file in files.items():
        if filesystem.exists(fsspec.core.url_to_fs(file)[1]):
            parts[name] = read_checked_json(file) if name in RECORDS else read_json(file)
            if name in ARTIFACTS:
                check_manifest(parts[name], file)
            found = parts[name].get("kind", KINDS.get(name))  # bare parts name none
            if found != KINDS.get(name):
                raise InputError(f"{file}: is a {found!r}, expected a {KINDS.get(name)!r}")
            check_format_version(parts[name], file)
    _check_schema(parts, files["schema"])
    found = sorted(filesystem.glob(join_path(root, "steps/*.json")))
    steps = [read_checked_json(filesystem.unstrip_protocol(file) if is_remote(path) else file) for file in found]
    if not parts and not steps:
        known = ", ".join(file for file, _ in PARTS.values())
        raise InputError(f"{path}: not a run folder: it contains none of {known}, steps/*.json")
    label = mapping(parts.get("run")).get("name") or Path(root).name
    return Run(path=str(path), label=str(label), parts=parts, steps=order_steps(steps))


def _check_schema(parts: Mapping[str, Any], file: str) -> None:
    """Raise if the dataset's schema is not the one that its manifest lists."""
    listed = {entry["name"]: entry["sha256"] for entry in records(mapping(parts.get("dataset")).get("files"))}
    if "schema" in parts and "schema.json" in listed:
        with fsspec.open(file, "rb") as opened:
            if f"sha256:{hashlib.file_digest(opened, 'sha256').hexdigest()}" != listed["schema.json"]:
                raise InputError(f"{file}: its content is not what dataset.json recorded")


def load_beside(run: Run, folder: str, *, label: str = "") -> Run | None:
    """A training beside that of a run, in RUN/folder; None if there is none. What it shares is taken from the run."""
    filesystem, root = fsspec.core.url_to_fs(join_path(run.path, folder))
    if not filesystem.exists(join_path(root, RESULT)):
        return None
    own = load_run(join_path(run.path, folder))
    return replace(own, label=label or folder, parts={**run.parts, **own.parts})


def order_steps(steps: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Steps by name: known ones in pipeline order, then others by start time."""
    named = [step for step in steps if isinstance(step.get("step"), str)]

    def place(step: Mapping[str, Any]) -> tuple[int, float]:
        known = STEPS.index(step["step"]) if step["step"] in STEPS else len(STEPS)
        return known, number(step.get("started_at")) or 0.0

    return {step["step"]: step for step in sorted(named, key=place)}


def label_apart(runs: list[Run]) -> list[Run]:
    """Runs with the same name are labelled by folder, or by position if the folders have the same name too."""
    names = [run.label for run in runs]
    folders = [Path(run.path).name for run in runs]
    labelled = []
    for position, run in enumerate(runs):
        text = run.label
        if names.count(text) > 1:
            text = folders[position] if folders.count(folders[position]) == 1 else f"{text} ({position + 1})"
        labelled.append(replace(run, label=text))
    return labelled
