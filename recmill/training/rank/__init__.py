"""What every training process runs: build the sharded model, read batches, take steps, evaluate, save."""

__all__ = ["dedup", "feed", "hot_schedule", "loop", "placement", "sharding", "state", "usage", "worker"]
