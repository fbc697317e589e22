"""Metrics for Prometheus, of one process or of all workers together."""

from __future__ import annotations

import os

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # read by prometheus_client when it is imported


class ServerMetrics:
    """What the server counts. Names are those of /metrics."""

    def __init__(self) -> None:
        self.calls = Counter(
            "recmill_calls_total", "Calls that ask for scores, by protocol and status", ["protocol", "status"]
        )
        self.call_seconds = Histogram(
            "recmill_call_seconds", "Seconds from the whole request to the answer", ["protocol"], buckets=SECONDS
        )
        self.candidates = Counter("recmill_candidates_total", "Candidates scored")
        self.batch_calls = Histogram("recmill_batch_calls", "Calls that shared a batch", buckets=COUNTS[:9])
        self.batch_candidates = Histogram("recmill_batch_candidates", "Candidates per batch", buckets=COUNTS)
        self.score_seconds = Histogram(
            "recmill_score_seconds", "Seconds that the model took per batch", buckets=SECONDS
        )
        self.queue = Gauge("recmill_queue_calls", "Calls that wait for the scorer", multiprocess_mode="livesum")
        self.unknown_ids = Counter("recmill_unknown_ids_total", "Ids without a row of their own", ["feature"])
        self.reloads = Counter("recmill_reloads_total", "New versions, by what became of them", ["outcome"])
        self.version = Gauge(
            "recmill_model_info", "1 for the version that serves", ["version"], multiprocess_mode="livemax"
        )

    def scored(self, num_calls: int, num_candidates: int, seconds: float) -> None:
        self.candidates.inc(num_candidates)
        self.batch_calls.observe(num_calls)
        self.batch_candidates.observe(num_candidates)
        self.score_seconds.observe(seconds)

    def queued(self, num_calls: int) -> None:
        self.queue.set(num_calls)

    def serves(self, version: str, previous: str | None = None) -> None:
        if previous is not None:
            self.version.labels(previous).set(0)
        self.version.labels(version).set(1)


def render_metrics() -> tuple[bytes, str]:
    """All metrics as text with its content type; of all workers if several serve."""
    registry = REGISTRY
    if os.environ.get(SHARED_FOLDER):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
    return generate_latest(registry), CONTENT_TYPE_LATEST
