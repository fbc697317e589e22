"""The parts of a benchmark: kept as they finish, so that a run that was killed or failed resumes after its last part.

Parts are kept in RESULT.json.parts until all are measured. They count as long as the code that is measured, the size,
the seed and the machine are the same. A part that fails leaves the others alone: its metrics are missing from the
result, `failed` of the JSON says why, the script exits with 1 and the next call measures that part again.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Metric, Options, describe_commit, describe_machine, finish, say
from measured_code import hash_code

from recmill.artifacts import write_text_atomically


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a part measured; all of it is JSON. `extra` adds keys to the result, merged with those of other parts."""

    metrics: Mapping[str, Metric] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


class Parts:
    """Runs the parts of a benchmark and collects what they found."""

    def __init__(self, options: Options) -> None:
        self.options = options
        is_file = options.json_path not in (None, "-")
        self.path = Path(f"{options.json_path}.parts") if is_file else None
        self.metrics: dict[str, Metric] = {}
        self.skipped: dict[str, str] = {}
        self.extra: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.left_out: list[str] = []  # by --only
        code = hash_code(options.benchmark) or describe_commit()
        self._key = {"size": options.size, "seed": options.seed, "code": code, "machine": describe_machine()}
        self._kept: dict[str, Any] = self._read()

    def _read(self) -> dict[str, Any]:
        if self.path is None or not self.path.exists():
            return {}
        found = json.loads(self.path.read_text(encoding="utf-8"))
        if found["key"] != self._key:
            say(f"{self.path.name}: kept by another form, seed, machine or version of the code; not used")
            return {}
        return dict(found["parts"])

    def measure(self, name: str, run: Callable[[], Found]) -> None:
        """Run a part, unless a call before did, and add what it found."""
        if self.options.only and name not in self.options.only and name not in self:
            self.left_out.append(name)
            return
        try:
            if name in self:
                say(f"{name}: kept from an earlier call")
            else:
                self.keep(name, vars(run()))
        except Exception as error:  # noqa: BLE001 - whatever broke, the other parts can still be measured
            traceback.print_exc()
            self.failed[name] = f"{type(error).__name__}: {error}"
            say(f"{name} failed; the other parts follow")
            return
        found = self[name]
        self.metrics |= found["metrics"]
        self.skipped |= found["skipped"]
        for key, value in found["extra"].items():
            self.extra[key] = _merged(self.extra.get(key), value)

    def keep(self, name: str, value: Any) -> None:
        """Keep a value (JSON), such as one run of a long part."""
        self._kept[name] = json.loads(json.dumps(value, allow_nan=False))
        if self.path is not None:
            text = json.dumps({"key": self._key, "parts": self._kept}, allow_nan=False)
            write_text_atomically(self.path, text + "\n")

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def __getitem__(self, name: str) -> Any:
        return self._kept[name]

    def finish(self) -> None:
        """Print the table, write the JSON, and exit with 1 if a part failed.

        Parts that --only left out, and no call before measured, are named in `left_out` of the JSON: their rows of the
        results are not measured yet.
        """
        lacking = {name: own for name, own in (("failed", self.failed), ("left_out", self.left_out)) if own}
        finish(self.options, self.metrics, skipped=self.skipped, extra={**self.extra, **lacking})
        if self.failed:
            raise SystemExit(f"{self.options.benchmark}: failed: {', '.join(self.failed)}; run it again to resume")
        if self.left_out:
            say(f"still to be measured: {', '.join(self.left_out)}")
        elif self.path is not None:
            self.path.unlink(missing_ok=True)


def _merged(before: Any, more: Any) -> Any:
    """Keys of dicts and entries of lists add up; anything else is replaced."""
    if isinstance(before, dict) and isinstance(more, dict):
        return {**before, **more}
    return [*before, *more] if isinstance(before, list) and isinstance(more, list) else more
