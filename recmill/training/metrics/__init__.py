"""How good predictions are: exact metrics in float64, pure NumPy, so that any step can use them.

`pointwise` has AUC and log loss, `lists` the metrics per session or user, `calibration` predicted against observed,
`bootstrap` standard errors, `slices` new, rare and frequent ids; `summary` measures all of it, `catalogue` names it.
"""

__all__ = ["bootstrap", "calibration", "catalogue", "lists", "pointwise", "slices", "summary"]
