"""`recmill train`, `recmill evaluate`, `recmill export`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import click

from recmill.cli.output import BYTES, emit, json_option, progress_for
from recmill.sizes import format_bytes


@click.command()
@click.argument("data")
@click.option("--out", required=True, help="Folder of the run. The same command again resumes what is there.")
@click.option("--plan", help="Shard plan made by `recmill plan`. Default: whole tables, the largest first.")
@click.option("--allocation", help="Worker allocation made by `recmill tune`.")
@click.option("--nproc", default=1, show_default=True, help="Training processes on this machine.")
@click.option(
    "--table-memory",
    type=BYTES,
    help="Bytes of tables and their state that the process keeps in memory, e.g. 12GB; larger tables are trained from "
    "disk, in OUT/tables. Default: all in memory.",
)
@click.option("--port", default=0, help="Port where the processes meet. Default: a free one.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Change a setting, e.g. --set model=dcn --set epochs=2.",
)
@json_option
def train(
    data: str,
    out: str,
    plan: str | None,
    allocation: str | None,
    nproc: int,
    table_memory: int | None,
    port: int,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train a model on the dataset DATA with torchrun; resumes by itself.

    \b
    Settings (--set), among others:
      model=dlrm|dcn  epochs=2  batch_size=4096  top_layers=256,128  dropout=0.1
      dense_lr=1e-3  table_lr=0.05  table_optimiser=rowwise_adagrad|adagrad|sgd
      sequence_encoder=schema|mean|attention|transformer  max_sequence_length=64
      dedup, tiers, hot_batches, sharing, tuning: each auto|true|false (tuning is false by default, the others auto)
      eval_every=100  patience=3  checkpoint_every=500  max_steps=1000  seed=1
    """
    from recmill.training.config import TrainConfig, settings_from_flags
    from recmill.training.trainer import TrainingFailed
    from recmill.training.trainer import train as run_training

    config = TrainConfig.from_overrides(settings_from_flags(settings))
    if table_memory is not None:
        config = replace(config, table_memory_bytes=table_memory)
    try:
        result = run_training(
            data,
            out=out,
            plan=plan,
            allocation=allocation,
            nproc=nproc,
            config=config,
            port=port,
            progress=progress_for(as_json),
        )
    except TrainingFailed as error:
        click.echo(f"recmill: error: {error}", err=True)
        sys.exit(1)
    emit({"path": out, **result}, _describe(result, out), as_json=as_json)


@click.command()
@click.argument("checkpoint")
@click.argument("data")
@click.option("--split", help="Split to evaluate on. Default: what training would hold out.")
@json_option
def evaluate(checkpoint: str, data: str, split: str | None, as_json: bool) -> None:
    """Measure the model CHECKPOINT on the dataset DATA: AUC, log loss, normalised entropy."""
    from recmill.training.serving import evaluate_checkpoint

    result = evaluate_checkpoint(checkpoint, data, split=split, progress=progress_for(as_json))
    emit(result, [f"{result['split']}: {_accuracy(result['metrics'])}"], as_json=as_json)


@click.command()
@click.argument("checkpoint")
@click.option("--out", required=True, help="Folder for the servable model.")
@json_option
def export(checkpoint: str, out: str, as_json: bool) -> None:
    """Turn CHECKPOINT into a servable model: a torch.export program and an MLflow model around it."""
    from recmill.training.serving import export_checkpoint

    result = export_checkpoint(checkpoint, out=out)
    emit(result, [f"model in {out}: {', '.join(result['files'])}"], as_json=as_json)


def _accuracy(metrics: dict[str, Any]) -> str:
    auc = "undefined (labels all alike)" if metrics["auc"] is None else f"{metrics['auc']:.4f}"
    entropy = "undefined" if metrics["normalised_entropy"] is None else f"{metrics['normalised_entropy']:.4f}"
    loss, count = metrics["log_loss"], metrics["num_samples"]
    return f"AUC {auc}, log loss {loss:.4f}, normalised entropy {entropy} ({count:,} samples)"


def _describe(result: dict[str, Any], out: str) -> list[str]:
    return [
        f"{result['model']['name']} on {result['world_size']} process(es): {result['num_steps']:,} steps, "
        f"{result['num_samples']:,} samples at {result['samples_per_s']:,.0f} a second",
        f"held out: {_accuracy(result['metrics'])}",
        f"peak memory of a process {format_bytes(result['peak_memory_bytes'])}; checkpoint in {out}/checkpoint",
    ]
