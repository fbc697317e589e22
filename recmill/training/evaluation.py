"""Predictions for held-out samples, collected on rank 0 with what metrics group them by, and measured there.

Rank 0 holds 4 bytes per sample and label for the logits, as many for the labels, and for the full metrics 8 each for
session, user and item: 32 bytes per sample with one label. Measuring takes about 150 more: 1.8 GB for 10 million.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from recmill.artifacts import Dataset
from recmill.data.id_counts import NO_ID, count_ids, first_ids
from recmill.data.ikjt.batch import Batch
from recmill.data.schema import Schema
from recmill.model.stores.collectives import broadcast_json, broadcast_values, message_device
from recmill.training.metrics.pointwise import measure_accuracy, roc_points, thin_curve
from recmill.training.metrics.summary import HeldOut, measure_quality

# N = samples, B = samples of a batch, T = labels


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """Logits and labels of held-out samples of all ranks; sessions and ids only if they were collected."""

    labels: Sequence[str]
    logits_NT: npt.NDArray[np.float32]
    label_NT: npt.NDArray[np.float32]
    session_N: npt.NDArray[np.int64]
    ids: Mapping[str, npt.NDArray[np.int64]]

    def select(self, rows: Mapping[str, int]) -> Predictions:
        """Those of samples whose features have these rows; the features' ids were collected."""
        kept = np.ones(len(self.session_N), bool)
        for name, row in rows.items():
            kept &= self.ids[name] == row
        return replace(
            self,
            logits_NT=self.logits_NT[kept],
            label_NT=self.label_NT[kept],
            session_N=self.session_N[kept],
            ids={name: ids_N[kept] for name, ids_N in self.ids.items()},
        )

    def accuracy(self) -> dict[str, Any]:
        """AUC, log loss, normalised entropy, base rate and number of samples of the first label; all under `tasks`."""
        return self.by_label(lambda logits_N, labels_N: asdict(measure_accuracy(logits_N, labels_N)))

    def by_label(self, measure: Callable[[Any, Any], dict[str, Any]]) -> dict[str, Any]:
        """What `measure` finds for the first label; with several, all of them under "tasks" and their order."""
        columns = zip(self.labels, self.logits_NT.T, self.label_NT.T, strict=True)
        found = {name: measure(np.ascontiguousarray(x), np.ascontiguousarray(y)) for name, x, y in columns}
        first = found[self.labels[0]]
        return {**first, "tasks": found, "labels": list(self.labels)} if len(found) > 1 else first

    def roc(self) -> dict[str, list[float]]:
        """A thinned ROC curve; thresholds are probabilities."""
        curve = roc_points(self.logits_NT[:, 0].astype(np.float64), self.label_NT[:, 0])
        fpr, tpr, threshold = thin_curve(curve)
        return {"fpr": fpr.tolist(), "tpr": tpr.tolist(), "threshold": (1 / (1 + np.exp(-threshold))).tolist()}


@dataclass(kw_only=True, eq=False)
class PredictionCollector:
    """Collects this rank's predictions, batch by batch. `features` are those whose ids the metrics need."""

    labels: Sequence[str]
    features: tuple[str, ...] = ()
    logits: list[Tensor] = field(default_factory=list)
    truth: list[Tensor] = field(default_factory=list)
    sessions: list[Tensor] = field(default_factory=list)
    ids: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, batch: Batch, logits: Tensor) -> None:
        # Copies: a view would keep the reader's buffers alive, 600 bytes per sample instead of 30.
        self.logits.append(logits.cpu().flatten())
        self.truth.append(batch.label_BT.flatten().cpu().clone())
        if batch.session_B is not None:
            self.sessions.append(batch.session_B.clone())
            for name in self.features:
                self.ids.setdefault(name, []).append(torch.from_numpy(first_ids(batch.ids, name)))

    def gather(self, device: torch.device | str = "cpu") -> Predictions | None:
        """The predictions of all ranks in rank order, on rank 0; None on the others."""
        none = torch.empty(0, dtype=torch.int64)
        found = [
            gather_on_rank_zero(torch.cat(parts or [none]).to(device))
            for parts in (self.logits, self.truth, self.sessions, *(self.ids.get(name) for name in self.features))
        ]
        if found[0] is None:
            return None
        logits, truth, sessions, *ids = (part.cpu().numpy() for part in found if part is not None)
        named = dict(zip(self.features, ids, strict=True)) if len(sessions) else {}
        shape = (-1, len(self.labels))
        return Predictions(
            labels=self.labels,
            logits_NT=logits.reshape(shape),
            label_NT=truth.reshape(shape),
            session_N=sessions,
            ids=named,
        )


def metric_features(schema: Schema) -> tuple[str, ...]:
    """The features whose ids the metrics need: the user's and the item's, where the schema names them."""
    return tuple(name for name in (schema.user, schema.item) if name)


def measure_predictions(
    predictions: Predictions | None, dataset: Dataset, schema: Schema, *, cutoffs: Sequence[int], seed: int = 0
) -> dict[str, Any]:
    """All metrics of every label, on rank 0; {} on the others, which help to count the training ids."""
    counts = _training_counts(predictions, dataset, schema)
    if predictions is None:
        return {}
    user_N = predictions.ids.get(schema.user)

    def measure(logits_N: Any, labels_N: Any) -> dict[str, Any]:
        session_N = predictions.session_N
        held_out = HeldOut(logits_N=logits_N, labels_N=labels_N, session_N=session_N, user_N=user_N, counts=counts)
        return measure_quality(held_out, cutoffs=cutoffs, seed=seed).to_json()

    return predictions.by_label(measure)


def _training_counts(
    predictions: Predictions | None, dataset: Dataset, schema: Schema
) -> dict[str, npt.NDArray[np.int64]]:
    """How often the training split holds each held-out sample's ids; -1 where the sample has none."""
    features = metric_features(schema)
    wanted, places = {}, {}
    for name, ids_N in predictions.ids.items() if predictions else ():
        wanted[name], places[name] = np.unique(ids_N, return_inverse=True)
    sent = wanted
    if is_distributed():
        none = np.zeros(0, np.int64)
        names = broadcast_json(list(wanted))
        sent = {name: broadcast_values(torch.from_numpy(wanted.get(name, none))).numpy() for name in names}
    if not features or not sent:
        return {}
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
    counts = count_ids(dataset, schema, sent, rank=rank, world_size=world_size)
    if world_size > 1:
        counts = {name: _sum_over_ranks(own) for name, own in counts.items()}
    return {name: np.where(wanted[name] == NO_ID, -1, counts[name])[place_N] for name, place_N in places.items()}


def _sum_over_ranks(counts_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    summed_N = torch.from_numpy(counts_N).to(message_device())
    dist.all_reduce(summed_N)
    total_N: npt.NDArray[np.int64] = summed_N.cpu().numpy()
    return total_N


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def gather_on_rank_zero(values_N: Tensor) -> Tensor | None:
    """Every rank's values joined in rank order, on rank 0; None on the others. Ranks may hold different numbers."""
    if not is_distributed():
        return values_N
    world_size = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64, device=values_N.device) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([values_N.numel()], device=values_N.device))
    longest = max(int(size) for size in sizes)
    padded = torch.nn.functional.pad(values_N, (0, longest - values_N.numel()))
    if dist.get_rank() != 0:
        dist.gather(padded, dst=0)
        return None
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.gather(padded, gathered, dst=0)
    return torch.cat([part[: int(size)] for part, size in zip(gathered, sizes, strict=True)])
