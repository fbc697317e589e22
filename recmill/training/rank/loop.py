"""The training loop of a rank: read a batch, take a step, evaluate and save at intervals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recmill.artifacts import (
    Checkpoint,
    Dataset,
    InputError,
    ShardPlan,
    WorkerAllocation,
    dump_record,
    is_remote,
    join_path,
    path_exists,
    record_json,
    write_text_atomically,
)
from recmill.artifacts.places.stores import remove_folder, scratch_folder
from recmill.data.hot.layout import COLD, HOT
from recmill.data.ikjt.batch import Batch
from recmill.data.ingest import IngestPipeline, evaluation_split
from recmill.data.schema import Schema
from recmill.model.stores.collectives import broadcast_json
from recmill.model.tasks import sum_losses
from recmill.training.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from recmill.training.config import TrainConfig
from recmill.training.decisions import decisions_of
from recmill.training.evaluation import PredictionCollector, Predictions, measure_predictions, metric_features
from recmill.training.processes import check_owner, num_sharing
from recmill.training.rank.dedup import DedupChoice
from recmill.training.rank.description import describe_hot, describe_model
from recmill.training.rank.feed import AHEAD, Feed, blank_ids, session_limit
from recmill.training.rank.sharding import ShardedModel
from recmill.training.rank.state import LossCurve, RunState
from recmill.training.rank.usage import UsageMeter, usage_of_all_ranks
from recmill.training.switches import looks_ahead
from recmill.training.tensors.saving import Saver
from recmill.training.verdicts import Verdicts
from recmill.tuning.online.tuner import OnlineTuner

HELD_OUT_BATCHES = 4  # evaluated after a turn of hot and cold batches
DISK_FOLDER = "tables"  # rows of tables beyond memory, in the run's folder until it is finished
LOG_EVERY = 20  # steps whose losses are summed over ranks in one message
Report = Callable[[str, int, int], None]


@dataclass(kw_only=True, eq=False)
class TrainingRun:
    """One rank's part of a training run in the folder `out`.

    `config` is what runs; in `settings`, the user's, switches that `verdicts` decided are still on "auto".
    """

    sharded: ShardedModel
    dataset: Dataset
    hot_dataset: Dataset | None
    schema: Schema
    config: TrainConfig
    settings: TrainConfig
    verdicts: Verdicts
    out: str  # local or remote
    device: torch.device
    dedup: DedupChoice
    plan: ShardPlan
    allocation: WorkerAllocation | None
    inputs: Mapping[str, str]
    report: Report
    owner: str = ""  # of the folder, if it is remote: this launch of the run

    def __post_init__(self) -> None:
        planned = self.plan.ingest.workers if self.plan.ingest else None
        self.workers = self.allocation.stages if self.allocation else planned
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.state = RunState()
        self.curve = LossCurve(join_path(self.out, "metrics.jsonl"), writes=self.rank == 0)
        self.saver = Saver(self.config.checkpoint_async)
        # What training used, and for how many samples and steps, since this start.
        self.meter, self.num_metered, self.num_metered_steps = UsageMeter(), 0, 0
        self.pending: list[tuple[int, int, Tensor]] = []  # (step, samples so far, loss summed over this rank)
        self.ingest = self._open_feed()

    def _open_feed(self) -> Feed:
        options: dict[str, Any] = {"epochs": self.config.epochs, "shuffle": self.config.shuffle}
        options["session_limit"] = session_limit(self.dataset, self.config)
        size, hot = self.config.batch_size, self.hot_dataset
        if hot is None or HOT not in hot.splits:
            ahead = self.config.lookahead_batches if looks_ahead(self.config) else AHEAD
            prefetch = None if self.sharded.prefetch is None else self.prefetch
            return Feed(self._open("train", size, **options), prefetch=prefetch, ahead=ahead)
        streams = {
            split: self._open(split, size, dataset=hot, **options) for split in (COLD, HOT) if split in hot.splits
        }
        return Feed(streams.get(COLD), streams[HOT])

    def _open(
        self, split: str, batch_size: int, *, dataset: Dataset | None = None, shuffle: bool = False, **options: Any
    ) -> IngestPipeline:
        return IngestPipeline(
            dataset or self.dataset,
            split=split,
            batch_size=batch_size,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.config.seed,
            shuffle=shuffle,
            workers=self.workers,
            dedup=self.dedup.groups or None,
            windows=self.dedup.windows,
            **options,
        )

    @property
    def num_steps(self) -> int:
        total = len(self.ingest)
        return min(total, self.config.max_steps) if self.config.max_steps else total

    def resume(self) -> bool:
        """Continue from the newest checkpoint, if there is one; steps logged after it are repeated."""
        found = newest_checkpoint(join_path(self.out, "checkpoints"))
        if found is None:
            return False
        saved = load_checkpoint(found, self.sharded)
        self.state = RunState.from_json(saved.run)
        self.ingest.load_state_dict(saved.ingest)
        self.curve.restore(self.state.step, saved.curve_crc32)
        return True

    def train(self) -> dict[str, Any]:
        """Train to the end and return the content of result.json (on rank 0; {} on the others)."""
        eval_every = self.config.eval_every or self.ingest.batches_per_epoch
        with self.ingest, self._tuned() as tuners:
            self.sharded.module.train()
            batches = iter(self.ingest)
            self.meter.start()
            while self.state.step < self.num_steps and not self.state.is_stopped:
                self.train_step(*self._next(batches))
                self.saver.check()
                is_last = self.state.step == self.num_steps
                if len(self.pending) == LOG_EVERY or is_last:
                    self._flush_losses()
                if self.state.step % eval_every == 0 or is_last:
                    self._evaluate_and_decide()
                if self.ingest.wants_loss and not is_last:
                    self.ingest.observe(self._held_out_loss())
                if self.state.step % self.config.checkpoint_every == 0:
                    self._flush_losses()
                    self._save(f"checkpoints/step-{self.state.step:08d}")
            stats = self.ingest.stats()
        self.meter.stop()
        self._flush_losses()
        return self._finish(stats, [entry for tuner in tuners for entry in tuner.history()])

    @property
    def is_tuned(self) -> bool:
        return self.config.tuning == "true" or (self.config.tuning == "auto" and self.allocation is not None)

    @contextmanager
    def _tuned(self) -> Iterator[list[OnlineTuner]]:
        """Let an agent adjust the ingestion workers while the block runs, if the config says so."""
        with ExitStack() as stack:
            if not self.is_tuned:
                yield []
                return
            yield [
                stack.enter_context(OnlineTuner(pipeline, allocation=self.allocation, num_sharing=num_sharing()))
                for pipeline in self.ingest.pipelines
            ]

    def _next(self, batches: Iterator[tuple[Batch, bool]]) -> tuple[Batch, bool]:
        """The next batch. Waiting for it counts as training time, except for the first, when ingestion starts."""
        started = time.perf_counter()
        found = next(batches)
        if self.num_metered:
            self.state.seconds += time.perf_counter() - started
        return found

    def train_step(self, batch: Batch, is_hot: bool) -> None:
        started = time.perf_counter()
        if is_hot:
            self.sharded.enter_hot()
        else:
            self.sharded.leave_hot()
        if self.device.type != "cpu":  # on the CPU a copy would lose the rows that were read ahead for this batch
            batch = batch.to(self.device)
        self.sharded.schedule_lr(self.config, step=self.state.step, num_steps=self.num_steps)
        logits = self._forward(batch, is_hot=is_hot)
        loss_sum = sum_losses(logits, batch.label_BT, self.config.task_weights)
        # Gradients are divided by the world size, so this makes the step the mean over all samples.
        torch.autograd.backward(loss_sum * (self.world_size / batch.num_global))
        self.sharded.dense_optimiser.step()
        self.sharded.dense_optimiser.zero_grad()
        self.state.step += 1
        self.state.num_samples += batch.num_global
        self.num_metered += batch.num_global
        self.num_metered_steps += 1
        self.pending.append((self.state.step, batch.num_global, loss_sum.detach()))
        self.state.seconds += time.perf_counter() - started

    def forget_steps(self) -> None:
        """Count no step so far, nor its loss: a trial only wants to know how long steps take."""
        self.state, self.num_metered, self.num_metered_steps = RunState(), 0, 0
        self.pending.clear()

    def prefetch(self, batch: Batch) -> None:
        """Announce a coming batch to the tables; without samples, what is looked up instead of it."""
        assert self.sharded.prefetch is not None
        self.sharded.prefetch(batch.ids if len(batch) else blank_ids(tuple(batch.ids.keys()), self.device))

    def _forward(self, batch: Batch, *, is_hot: bool = False) -> Tensor:
        """Logits of the batch. A rank without samples computes and drops a blank one: every rank must take part."""
        if len(batch):
            return self.sharded.module(batch.dense_BF, batch.ids, is_hot)
        blank = blank_ids(tuple(batch.ids.keys()), self.device)
        return self.sharded.module(batch.dense_BF.new_zeros(1, batch.dense_BF.shape[1]), blank, is_hot)[:0]

    def _flush_losses(self) -> None:
        """Sum the pending losses over ranks and append them to the curve and its file."""
        if not self.pending:
            return
        losses = torch.stack([loss.double() for _, _, loss in self.pending])
        dist.all_reduce(losses)
        samples = self.state.num_samples - sum(count for _, count, _ in self.pending)
        new = []
        for (step, count, _), loss in zip(self.pending, losses.tolist(), strict=True):
            samples += count
            if not math.isfinite(loss):
                raise InputError(f"the loss is {loss} at step {step}: lower dense_lr or table_lr, or check the data")
            entry = {"step": step, "samples": samples, "seconds": round(self.state.seconds, 4), "loss": loss / count}
            new.append(entry)
        self.pending.clear()
        self.curve.add(new)
        if self.rank == 0:
            self.report("train step", self.state.step, self.num_steps)

    def _evaluate_and_decide(self) -> None:
        """Evaluate the held-out split; keep the best weights and stop early if the config says so."""
        split = "valid" if "valid" in self.dataset.splits else evaluation_split(self.dataset)
        self.meter.stop()
        predictions = self.predict(split)
        accuracy = broadcast_json(predictions.accuracy() if predictions else None)
        epoch = self.state.step / self.ingest.batches_per_epoch
        when = {"step": self.state.step, "epoch": round(epoch, 3), "seconds": round(self.state.seconds, 4)}
        self.state.evaluations.append({**when, "split": split, **accuracy})
        auc = accuracy["auc"] if accuracy["auc"] is not None else -accuracy["log_loss"]
        is_best = auc > self.state.best_auc
        self.state.best_auc = max(auc, self.state.best_auc)
        self.state.num_worse = 0 if is_best else self.state.num_worse + 1
        if self.config.patience:
            if is_best:
                self._flush_losses()
                self._save("checkpoints/best")
            self.state.is_stopped = self.state.num_worse >= self.config.patience
        self.sharded.module.train()
        self.meter.start()

    @torch.no_grad()
    def predict(self, split: str, *, keeps_sessions: bool = False) -> Predictions | None:
        """The predictions of all ranks for a split, on rank 0; None on the others."""
        self.sharded.module.eval()
        self.sharded.write_hot_back()
        collector = PredictionCollector(
            labels=self.schema.labels, features=metric_features(self.schema) if keeps_sessions else ()
        )
        with self._open(split, self.config.eval_batch_size, keeps_sessions=keeps_sessions) as batches:
            for done, batch in enumerate(batches):
                collector.add(batch, self._forward(batch.to(self.device)))
                if self.rank == 0:
                    self.report(f"evaluate {split}", done + 1, len(batches))
        return collector.gather(self.device)

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        """The mean loss over the first held-out batches, from which the length of hot and cold turns follows."""
        self.meter.stop()
        self.sharded.module.eval()
        self.sharded.write_hot_back()
        total = torch.zeros(2, dtype=torch.float64)
        with self._open(evaluation_split(self.dataset), self.config.eval_batch_size) as batches:
            for _, batch in zip(range(HELD_OUT_BATCHES), batches, strict=False):
                logits = self._forward(batch.to(self.device)).cpu()
                loss = sum_losses(logits, batch.label_BT, self.config.task_weights)
                total += torch.tensor([float(loss), float(len(batch))], dtype=torch.float64)
        dist.all_reduce(total)
        self.sharded.module.train()
        self.meter.start()
        return float(total[0] / total[1].clamp(min=1))

    def _body(self) -> dict[str, Any]:
        return {
            "step": self.state.step,
            "config": self.settings.to_json(),
            "schema": self.schema.to_json(),
            "sharing": record_json(self.sharded.sharing),
            "world_size": self.world_size,
            "run": self.state.to_json(),
            "ingest": self.ingest.state_dict(),
            "curve_crc32": self.curve.crc32,
        }

    def _save(self, name: str, extra: Mapping[str, Any] | None = None) -> None:
        """Save to the folder `name` of the run; with `extra`, of a finished model, it is complete on return."""
        self.meter.stop()
        record_losses = self.curve.written()

        def before() -> None:
            check_owner(self.out, self.owner)
            record_losses()

        save_checkpoint(
            join_path(self.out, name),
            self.sharded,
            saver=self.saver,
            body={**self._body(), **(extra or {})},
            inputs=self.inputs,
            before=before,
            vocabulary_of=self.dataset.path if extra else None,  # step checkpoints are for this run, whose data has it
            is_last=bool(extra),
        )
        self.meter.start()

    def _finish(self, ingest_stats: Mapping[str, Any], tuning: list[dict[str, Any]]) -> dict[str, Any]:
        self.saver.wait()
        best = join_path(self.out, "checkpoints/best")
        if self.config.patience and path_exists(join_path(best, Checkpoint.manifest_name)):
            load_checkpoint(best, self.sharded)
        usage = usage_of_all_ranks(self.meter)
        predictions = self.predict(evaluation_split(self.dataset), keeps_sessions=True)
        cutoffs, seed = self.config.metric_cutoffs, self.config.seed
        metrics = measure_predictions(predictions, self.dataset, self.schema, cutoffs=cutoffs, seed=seed)
        self._save("checkpoint", {"metrics": metrics})
        self.saver.close()
        if self.rank != 0:
            return {}
        result = {
            "format_version": 1,
            "kind": "training",
            "config": self.settings.to_json(),
            "world_size": self.world_size,
            "num_steps": self.state.step,
            "num_samples": self.state.num_samples,
            "seconds": self.state.seconds,
            "samples_per_s": self.state.num_samples / max(self.state.seconds, 1e-9),
            "peak_memory_bytes": int(usage["peak_memory_bytes"]),
            "usage": {**usage, "num_samples": self.num_metered, "num_steps": self.num_metered_steps},
            "metrics": metrics,
            "curve": self.curve.entries,
            "evaluations": self.state.evaluations,
            "roc": predictions.roc() if predictions else {},
            "ingest": dict(ingest_stats),
            "saving": self.saver.to_json(),
            "tuning": tuning,
            "hot": describe_hot(self.ingest, self.sharded),
            "dedup": self.dedup.to_json(),
            "decisions": decisions_of(
                self.settings,
                self.plan,
                self.dataset,
                deduplicated=self.dedup.features,
                is_tuned=self.is_tuned,
                verdicts=self.verdicts,
            ),
            "trial_seconds": self.verdicts.seconds,
            "model": describe_model(self.sharded, self.config.model),
            "data": {
                "path": self.dataset.path,
                "layout": self.dataset.layout,
                "planned_layout": self.plan.dedup.layout if self.plan.dedup else None,
                "content_hash": self.dataset.content_hash,
            },
        }
        write_text_atomically(join_path(self.out, "result.json"), dump_record(result))
        remove_folder(join_path(self.out, "checkpoints"))
        remove_folder(disk_folder(self.out))
        return result


def disk_folder(out: str) -> Path:
    """Where the rows of tables beyond memory are: on this machine, also if the run's folder is not."""
    return scratch_folder(out, DISK_FOLDER) if is_remote(out) else Path(out) / DISK_FOLDER
