"""A model of ingestion pipelines in which the agent practises, and the times of the real stages."""

__all__ = ["scenarios", "simulator", "stage_times"]
