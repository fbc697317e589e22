"""A row of the results tables: a claim with what its benchmark measured, and its verdict.

met       the bad end of the 95% interval meets the target, over at least 9 pairs of the full form
open      the interval straddles the target, or it has too few pairs to say more
missed    even the good end of the interval does not meet the target
stale     the code that the row measures has changed since
skipped   not measured: no such data, no network namespaces, only one run, failed, or no run yet
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claims import CLAIMS, Claim
from measured_code import changed_code

RESULTS = Path(__file__).parent / "results"
MIN_PAIRS = 9


@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim with the result of its benchmark; `result` is empty before the first run."""

    claim: Claim
    benchmark: str
    result: dict[str, Any]
    changed: tuple[str, ...] = ()  # parts of the measured code that differ from the result's

    @property
    def metric(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.result.get("metrics", {}).get(self.claim.metric)
        return found

    @property
    def why_skipped(self) -> str:
        """Why nothing can be said; empty for a row with a number."""
        metric = self.metric
        if metric is None:
            failed = "; ".join(f"{part} failed: {error}" for part, error in self.result.get("failed", {}).items())
            return str(self.result.get("skipped", {}).get(self.claim.metric, failed or "not measured yet"))
        if not self.is_stale and self._ends is None:
            return "only one run"
        return ""

    @property
    def is_stale(self) -> bool:
        return bool(self.changed)

    @property
    def _ends(self) -> tuple[float, float] | None:
        ends = (self.metric or {}).get("spread", {}).get("interval")
        return (ends[0], ends[1]) if ends else None

    @property
    def verdict(self) -> str:
        if self.why_skipped:
            return "skipped"
        if self.is_stale:
            return "stale"
        return self._judge()

    def _judge(self) -> str:
        claim, metric, ends = self.claim, self.metric, self._ends
        assert metric is not None
        assert ends is not None
        if claim.target is None:
            return ""
        low, high = ends
        if claim.is_below:
            good = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
            is_met, is_missed = max(abs(low), abs(high)) <= claim.target, good > claim.target
        else:
            is_met, is_missed = low >= claim.target, high < claim.target
        has_enough = (metric["is_exact"] or metric["pairs"] >= MIN_PAIRS) and not self.result["quick"]
        return "missed" if is_missed else "met" if is_met and has_enough else "open"

    @property
    def measured(self) -> str:
        metric = self.metric
        if self.why_skipped or metric is None:
            return self.why_skipped
        if self._is_plain:
            return _number(metric["ours"], metric["unit"])
        return f"{metric['ratio']:.2f}x"

    @property
    def interval(self) -> str:
        metric, ends = self.metric, self._ends
        if self.why_skipped or metric is None or ends is None:
            return ""
        if metric["is_exact"]:
            return "exact count"
        low, high = (_number(end, metric["unit"]) if self._is_plain else f"{end:.2f}" for end in ends)
        return f"{low} to {high}"

    @property
    def pairs(self) -> str:
        metric = self.metric or {}
        return "" if self.why_skipped or metric.get("is_exact") else str(metric.get("pairs", ""))

    @property
    def _is_plain(self) -> bool:
        return self.claim.is_value or self.metric is None or self.metric["ratio"] is None

    @property
    def target(self) -> str:
        claim = self.claim
        if claim.target is None:
            return ""
        if claim.is_below:
            return f"at most {_number(claim.target, 'bytes' if claim.target > 1e6 else '')}"
        return _number(claim.target, "") if claim.is_value else f"{claim.target:.3g}x"

    @property
    def machine(self) -> str:
        """Processor and cores of "x86_64, AMD EPYC, 2 cores, 24 GiB, Linux, ..."."""
        parts = str(self.result["machine"]).split(", ")
        return f"{parts[1].replace('(R)', '').removesuffix(' Processor')}, {parts[2]}"

    @property
    def origin(self) -> tuple[str, str, str]:
        """Commit, date and machine; empty without a number."""
        if self.why_skipped:
            return "", "", ""
        return self.result["commit"][:10], self.result["date"], self.machine


def _number(value: float, unit: str) -> str:
    if unit in ("bytes", "B"):
        return f"{value / 2**20:,.0f} MiB"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def read_result(folder: Path, benchmark: str) -> dict[str, Any]:
    path = folder / f"{benchmark}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def read_rows(folder: Path = RESULTS) -> Iterator[Row]:
    for benchmark, claims in CLAIMS.items():
        result = read_result(folder, benchmark)
        changed = tuple(changed_code(benchmark, result.get("code"))) if result else ()
        for claim in claims:
            yield Row(claim=claim, benchmark=benchmark, result=result, changed=changed)
