"""How numbers of the original data became a dense feature, so that callers of a model give the numbers they know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class DenseValues:
    """What log.yaml says about a dense feature, with the mean and scale of the log that it was prepared from first."""

    null_value: float | None = None  # replaces nulls before the transforms
    transform: tuple[str, ...] = ()
    mean: float = 0.0  # subtracted by standardise
    scale: float = 1.0
    fill: float = 0.0  # replaces nulls after the transforms, if null_value does not

    def apply(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """The feature: after nulls, which NaN and infinity are too, and transforms. tracking/pyfunc.py repeats it."""
        numbers = values.astype(np.float64)
        is_null = ~np.isfinite(numbers)
        numbers[is_null] = 0.0 if self.null_value is None else self.null_value
        for step in self.transform:
            numbers = np.log1p(np.maximum(numbers, 0.0)) if step == "log1p" else (numbers - self.mean) / self.scale
        if self.null_value is None:
            numbers[is_null] = self.fill
        return numbers.astype(np.float32)

    def has_rules_of(self, other: DenseValues) -> bool:
        """Whether log.yaml says the same about both."""
        return (self.null_value, self.transform) == (other.null_value, other.transform)
