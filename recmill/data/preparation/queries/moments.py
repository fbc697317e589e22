"""Mean and standard deviation of a dense feature, the same from every engine."""

from __future__ import annotations

import math
from typing import Any

import ibis

from recmill.data.preparation.queries.tables import QueryEngine
from recmill.data.preparation.spec import FeatureSpec

MEAN_BITS = 24  # of means and deviations: engines add up in different orders


def weighted_moments(table: Any, feature: FeatureSpec, engine: QueryEngine) -> tuple[float, float]:
    """Of a table with numbers `x` and their `weight`: after nulls, and after log1p if the feature has it."""
    table = table.mutate(x=(table.x.isnan() | table.x.isinf()).ifelse(ibis.null("float64"), table.x))
    if feature.null_value is not None:
        table = table.mutate(x=table.x.fill_null(feature.null_value))
    if "log1p" in feature.transform:
        table = table.mutate(x=(table.x.clip(lower=0.0) + 1.0).ln())
    table = table.filter(table.x.notnull())
    sums = engine.fetch(table.aggregate(total=(table.x * table.weight).sum(), weight=table.weight.sum()))
    total, weight = (float(sums[name][0].as_py() or 0.0) for name in ("total", "weight"))
    if weight == 0:
        return 0.0, 1.0
    mean = _rounded(total / weight)
    away = table.x - ibis.literal(mean, "float64")
    total = float(engine.fetch(table.aggregate(total=(away * away * table.weight).sum()))["total"][0].as_py())
    return mean, _rounded(math.sqrt(total / weight))


def _rounded(number: float) -> float:
    """The number with MEAN_BITS bits, so that the last digits of a sum, which depend on its order, do not show."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(mantissa, MEAN_BITS)), exponent - MEAN_BITS)
