"""Training: `trainer` launches torchrun, `rank` holds what every process runs; checkpoints, evaluation, export.

`config` has every setting with its default, `switches` the five switches; `ablation` measures what each buys.
"""

__all__ = [
    "ablation",
    "checkpoint",
    "config",
    "evaluation",
    "processes",
    "pyfunc",
    "rank",
    "serving",
    "switches",
    "trainer",
]
