"""A model of ingestion pipelines, calibrated on a real one, in which controllers practise and are compared."""

__all__ = ["calibration", "scenarios", "simulator", "stage_times"]
