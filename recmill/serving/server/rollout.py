"""Puts a version of a model into the folder that servers watch, points to it, and takes that back if it is not served.

FOLDER/
  versions/<hash>/     models as `recmill export` wrote them
  current              name of the one that is served: `versions/<hash>`
  served.json          its quality, and what it replaced: the gate compares the next version with it
"""

from __future__ import annotations

import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recmill.artifacts import FORMAT_VERSION, InputError, dump_json, is_remote, read_json, write_text_atomically
from recmill.serving.signature import REQUEST_FOLDER, RequestManifest

POINTER, RECORD, VERSIONS = "current", "served.json", "versions"
VERSION_DIGITS = 12  # of the content hash: as the server names its version
KEPT = 3  # versions in the folder, so that a rollback by hand finds them
ANSWERS = 5  # of a service with several servers, one after another, that must name the new version
POLL_S = 1.0
LOWER_IS_BETTER = ("log_loss", "normalised_entropy", "ece")

Stage = Literal["serving", "refused", "rolled_back"]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What a new version must gain over the one that serves, by metric: 0 means not worse, -0.001 slightly worse.

    `floors` hold without a version that serves, too: bounds of the metric itself.
    """

    gains: Mapping[str, float]
    floors: Mapping[str, float]

    def reason_against(self, new: Mapping[str, float], old: Mapping[str, float] | None) -> str:
        """Why the version must not be served, in one sentence; "" if it may be."""
        for metric, floor in self.floors.items():
            value = _metric(new, metric, "the new version")
            if _better(metric, floor, value) > 0:
                return f"{metric} is {value:.5f}, the gate asks for {floor:.5f}"
        for metric, gain in self.gains.items():
            if old is None or metric not in old:
                continue
            value = _metric(new, metric, "the new version")
            gained = _better(metric, value, old[metric])
            if gained < gain:
                against = f"{metric} is {value:.5f}, that of the version that serves {old[metric]:.5f}"
                return f"{against}: the gate asks for a gain of {gain:g}"
        return ""


def _metric(metrics: Mapping[str, float], name: str, whose: str) -> float:
    if name not in metrics:
        raise InputError(f"gate: {whose} has no metric {name!r}, only {', '.join(sorted(metrics)) or 'none'}")
    return metrics[name]


def _better(metric: str, value: float, other: float) -> float:
    """By how much the value is better than the other."""
    return other - value if metric in LOWER_IS_BETTER else value - other


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """Where a model is rolled out to, and what decides. `url` "" waits for no server."""

    folder: str
    url: str = ""
    name: str = "recmill"  # of the model at the server
    timeout_s: float = 300.0
    gate: Gate

    @classmethod
    def from_settings(cls, text: str) -> RolloutPlan:
        """From the setting `deploy`: a folder, or JSON: {"folder": ..., "url": ..., "gains": {"auc": 0}}."""
        try:
            given = json.loads(text) if text.lstrip().startswith("{") else {"folder": text}
        except json.JSONDecodeError as error:
            raise InputError(f"deploy: expected a JSON object, received {text[:80]!r} ({error.msg})") from None
        known = {"folder": str, "url": str, "name": str, "timeout_s": int | float, "gains": dict, "floors": dict}
        if not isinstance(given, dict) or not given.get("folder"):
            raise InputError(f"deploy: expected an object with the key folder, received {text[:80]!r}")
        for key, value in given.items():
            if key not in known or not isinstance(value, known[key]):
                expected = ", ".join(known)
                raise InputError(
                    f"deploy: {key} is {value!r}; the keys are {expected}, thresholds are numbers by metric"
                )
        if is_remote(given["folder"]):
            raise InputError(f"deploy: folder is {given['folder']}, expected one on a volume that servers mount")
        thresholds = {key: given.pop(key, default) for key, default in (("gains", {"auc": 0.0}), ("floors", {}))}
        for key, entries in thresholds.items():
            for metric, number in entries.items():
                if isinstance(number, bool) or not isinstance(number, int | float):
                    raise InputError(f"deploy: {key}.{metric} is {number!r}, expected a number")
        return cls(**given, gate=Gate(**thresholds))


@dataclass(frozen=True, kw_only=True)
class RolloutOutcome:
    """What became of a version, and why."""

    stage: Stage
    version: str
    reason: str
    previous: str = ""  # the version that served before
    previous_registered: str = ""


def roll_out(
    model: str | Path, plan: RolloutPlan, *, metrics: Mapping[str, float], registered: str = ""
) -> RolloutOutcome:
    """Serve a model if it passes the gate; point back to the one before if servers do not take it.

    `registered` is the name of its version in a registry, kept beside its metrics. Rolling out what serves already does
    nothing.
    """
    folder, source = Path(plan.folder), Path(model)
    manifest = RequestManifest.load(source / REQUEST_FOLDER)
    version = manifest.content_hash.rpartition(":")[2][:VERSION_DIGITS]
    before = read_served(folder)
    told = {
        "version": version,
        "previous": before.get("version", ""),
        "previous_registered": before.get("registered", ""),
    }
    if before.get("version") == version:
        return RolloutOutcome(stage="serving", reason="this version serves already", **told)
    against = plan.gate.reason_against(metrics, before.get("metrics"))
    if against:
        return RolloutOutcome(stage="refused", reason=against, **told)
    target = folder / VERSIONS / version
    _copy_folder(source, target)
    pointer = _read_pointer(folder)
    _point(folder, f"{VERSIONS}/{version}")
    problem = wait_until_served(plan, version) if plan.url else ""
    if problem:
        _point(folder, pointer)
        return RolloutOutcome(stage="rolled_back", reason=problem, **told)
    record = {
        "format_version": FORMAT_VERSION,
        "kind": "served",
        "version": version,
        "registered": registered,
        "metrics": dict(metrics),
        "previous": before.get("version", ""),
        "since": time.time(),
    }
    write_text_atomically(str(folder / RECORD), dump_json(record))
    _drop_old(folder, keep=(version, before.get("version", "")))
    gained = f"it passes the gate against version {before['version']}" if before else "no version served before"
    return RolloutOutcome(stage="serving", reason=gained, **told)


def read_served(folder: Path) -> dict[str, Any]:
    """What served.json says; {} if nothing was rolled out yet."""
    path = folder / RECORD
    found = read_json(str(path)) if path.exists() else {}
    if found and (not isinstance(found.get("version"), str) or not isinstance(found.get("metrics"), dict)):
        raise InputError(f"{path}: is not what a rollout wrote")
    return found


def wait_until_served(plan: RolloutPlan, version: str) -> str:
    """Wait until the servers name the version several times in a row; why they did not, or ""."""
    deadline_s, named, last = time.monotonic() + plan.timeout_s, 0, "it did not answer"
    address = f"{plan.url.rstrip('/')}/v2/models/{plan.name}"
    while time.monotonic() < deadline_s:
        try:
            # Looks at once; a service reaches one of its servers each time.
            _ask(f"{plan.url.rstrip('/')}/v2/repository/models/{plan.name}/load", b"")
            serving = _ask(address).get("versions") or ["none"]
            named = named + 1 if serving[0] == version else 0
            last = f"it serves version {serving[0]}"
            if named >= ANSWERS:
                return ""
        except (OSError, ValueError) as error:
            named, last = 0, f"it did not answer ({error})"
        time.sleep(0.05 if named else POLL_S)
    return f"{address} did not take version {version} within {plan.timeout_s:g} seconds: {last}"


def _ask(address: str, body: bytes | None = None) -> dict[str, Any]:
    if not address.startswith(("http://", "https://")):
        raise InputError(f"deploy: url is {address!r}, expected http://HOST:PORT")
    with urllib.request.urlopen(urllib.request.Request(address, data=body), timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a model without its MLflow form; whole or not at all."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copytree(source, scratch, ignore=shutil.ignore_patterns("mlflow", "model.pt2", ".*"))
    scratch.rename(target)


def _read_pointer(folder: Path) -> str:
    path = folder / POINTER
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _point(folder: Path, target: str) -> None:
    if target:
        write_text_atomically(str(folder / POINTER), f"{target}\n")
    else:
        (folder / POINTER).unlink(missing_ok=True)


def _drop_old(folder: Path, *, keep: tuple[str, ...]) -> None:
    """Delete the oldest versions beyond `KEPT`, never one of `keep`."""
    found = sorted((folder / VERSIONS).iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in found[KEPT:]:
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)
