"""Training: `trainer` launches torchrun, `rank` holds what every process runs; checkpoints, evaluation, export.

`config` has every setting with its default, `switches` the five switches, `verdicts` what a trial found out about them
and `decisions` what they chose and why; `ablation` measures what each buys.
"""

__all__ = [
    "ablation",
    "checkpoint",
    "config",
    "decisions",
    "evaluation",
    "processes",
    "rank",
    "serving",
    "switches",
    "trainer",
    "verdicts",
]
