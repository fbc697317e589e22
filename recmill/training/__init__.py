"""Training: `trainer` launches torchrun, `rank` holds what every process runs; checkpoints, evaluation, export.

`config` has every setting with its default; `ablation` trains variants to show what each switch buys.
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
