"""What checks find, with numbers and rows as examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from recmill.artifacts import FORMAT_VERSION, InputError

MAX_EXAMPLES = 3

Level = Literal["warning", "info"]


@dataclass(frozen=True, kw_only=True)
class LogFinding:
    """One thing that a check found. A warning deserves a look; --strict makes it an error."""

    check: str  # which check: nulls, duplicates, ...
    level: Level
    subject: str  # the column, feature, table or split
    message: str  # one sentence with the numbers in it
    numbers: Mapping[str, float] = field(default_factory=dict)
    examples: tuple[Mapping[str, Any], ...] = ()  # rows, as column: value

    def describe(self) -> str:
        rows = "; ".join(describe_row(row) for row in self.examples[:1])
        return f"{self.check}: {self.message}" + (f" (e.g. {rows})" if rows else "")


@dataclass(frozen=True, kw_only=True)
class LogFindings:
    """The findings of all checks, in the order in which the checks ran."""

    checks: tuple[str, ...]  # that ran, also those that found nothing
    found: tuple[LogFinding, ...] = ()
    days: tuple[Mapping[str, Any], ...] = ()  # day, num_events and the rate of each label

    @property
    def warnings(self) -> list[LogFinding]:
        return [finding for finding in self.found if finding.level == "warning"]

    def with_more(self, other: LogFindings) -> LogFindings:
        return LogFindings(
            checks=self.checks + other.checks, found=self.found + other.found, days=self.days + other.days
        )

    def summary(self) -> str:
        return f"{_count(self.warnings, 'warning')} from {_count(self.checks, 'check')}"

    def lines(self) -> list[str]:
        """One line per finding, warnings first."""
        ordered = sorted(self.found, key=lambda finding: finding.level != "warning")
        return [f"  {finding.level:<8} {finding.describe()}" for finding in ordered]

    def refuse_warnings(self, where: str) -> None:
        """Raise if there is a warning: what --strict asks for."""
        if self.warnings:
            more = f", and {len(self.warnings) - 1} more" if len(self.warnings) > 1 else ""
            raise InputError(f"{where}: {self.warnings[0].describe()}{more}; without --strict this is a warning")

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        findings = tuple(LogFinding(**{**own, "examples": tuple(own["examples"])}) for own in found["findings"])
        return cls(checks=tuple(found["checks"]), found=findings, days=tuple(found["days"]))

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "checks": list(self.checks),
            "num_warnings": len(self.warnings),
            "findings": [asdict(finding) for finding in self.found],
            "days": list(self.days),
        }


def describe_row(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in row.items())


def _count(things: Sequence[Any], what: str) -> str:
    return f"{len(things)} {what}{'' if len(things) == 1 else 's'}"
