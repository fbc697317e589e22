"""`recmill train`, `recmill evaluate`, `recmill predict`, `recmill export`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from recmill.artifacts import hash_file
from recmill.cli.output import BYTES, emit, json_option, progress_for, verify_option
from recmill.sizes import format_bytes

if TYPE_CHECKING:
    from recmill.serving.signature import TableForm


@click.command()
@click.argument("data")
@click.option("--out", required=True, help="Folder or URL (s3://...) of the run; the same command again resumes it.")
@click.option("--plan", help="Plan made by `recmill plan`. Default: whole tables, the largest to the emptiest process.")
@click.option("--allocation", help="Worker allocation made by `recmill tune`. Default: the plan's workers.")
@click.option(
    "--from",
    "start_from",
    metavar="CHECKPOINT",
    help="Go on with a trained model: DATA has the same features, its tables may have more rows. Settings default to "
    "the checkpoint's.",
)
@click.option("--nproc", default=1, help="Training processes on this machine.")
@click.option(
    "--table-memory",
    type=BYTES,
    help="Memory per process for tables and their optimiser state, e.g. 12GB; the largest tables beyond it are trained "
    "from disk, in OUT/tables. Default: no limit.",
)
@click.option("--port", default=0, show_default=False, help="Rendezvous port of the processes. Default: a free one.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Setting, e.g. model=dcn; repeatable.")
@verify_option
@json_option
def train(
    data: str,
    out: str,
    plan: str | None,
    allocation: str | None,
    start_from: str | None,
    nproc: int,
    table_memory: int | None,
    port: int,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train a model on the dataset DATA with torchrun; an interrupted run resumes.

    \b
    Settings (--set), among others:
      model=dlrm|dcn  epochs=2  batch_size=4096  top_layers=256,128  dropout=0.1
      dense_lr=1e-3  table_lr=0.05  table_optimiser=rowwise_adagrad|adagrad|sgd
      sequence_encoder=schema|mean|attention|transformer|standard_transformer|din|hstu  max_sequence_length=64
      dedup, tiers, hot_batches, sharing, tuning: each auto|true|false (tuning is false by default, the others auto)
      hot_batches=lookahead  lookahead_batches=8 (in the given order: rows of coming batches are fetched together)
      merge_requests=auto|true|false  wire=auto|float32|bfloat16 (how tiers cross between nodes; auto: as planned)
      multi_task=shared|mmoe|ple  num_experts=4  tower_layers=64  task_weights=1,2  (several labels in schema.json)
      eval_every=100  patience=3  max_steps=1000  seed=1
      checkpoint_every=500  checkpoint_async=auto|true|false (write checkpoints beside training, from a copy)
    """
    from recmill.training.config import TrainConfig, settings_from_flags
    from recmill.training.trainer import TrainingFailed, layout_note, settings_of_checkpoint
    from recmill.training.trainer import train as run_training

    base = settings_of_checkpoint(start_from) if start_from else None
    config = TrainConfig.from_overrides(settings_from_flags(settings), base)
    if table_memory is not None:
        config = replace(config, table_memory_bytes=table_memory)
    try:
        result = run_training(
            data,
            out=out,
            plan=plan,
            allocation=allocation,
            start_from=start_from,
            nproc=nproc,
            config=config,
            port=port,
            progress=progress_for(as_json),
        )
    except TrainingFailed as error:
        click.echo(f"recmill: error: {error}", err=True)
        sys.exit(1)
    emit({"path": out, **result}, [*_describe(result, out), *layout_note(result)], as_json=as_json)


@click.command()
@click.argument("checkpoint")
@click.argument("data")
@click.option("--split", help="Split to evaluate on. Default: the split that training holds out.")
@click.option(
    "--at",
    "cutoffs",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="K",
    help="List length K of NDCG@K, recall@K and hit rate@K; repeatable. Default: metric_cutoffs of the training.",
)
@click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="FEATURE=VALUE",
    help="Only samples with this value, as the log has it (DATA has a vocabulary); repeatable.",
)
@verify_option
@json_option
def evaluate(
    checkpoint: str,
    data: str,
    split: str | None,
    cutoffs: tuple[int, ...],
    conditions: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure the model CHECKPOINT on the dataset DATA, with standard errors.

    DATA may have been prepared later, with a vocabulary that extends the model's: new ids read the unknown row.

    \b
    AUC, GAUC (per user, or session if the schema names no user), log loss, normalised entropy,
    calibration, ECE, MRR, NDCG@K, recall@K, hit rate@K, and new, rare and frequent users and items.
    """
    from recmill.cli.quality import quality_lines
    from recmill.data.known_rows import describe_new_reads
    from recmill.training.config import settings_from_flags
    from recmill.training.serving import evaluate_checkpoint

    where = settings_from_flags(conditions, option="--where")
    progress = progress_for(as_json)
    result = evaluate_checkpoint(checkpoint, data, split=split, cutoffs=cutoffs, where=where, progress=progress)
    lines = quality_lines(result["split"], result["metrics"])
    emit(result, [*lines, *describe_new_reads(result.get("new_reads", {}))], as_json=as_json)


@click.command()
@click.argument("model")
@click.argument("data")
@click.option("--out", required=True, help="Folder for the scores; the same command again resumes.")
@click.option("--split", help="Split of a dataset to score. Default: all rows.")
@click.option("--nproc", default=1, help="Processes on this machine; each holds the model.")
@click.option("--rows-per-part", default=262_144, help="Least rows per file of scores; whole row groups.")
@click.option(
    "--share",
    default="",
    show_default=False,
    metavar="INDEX/COUNT",
    help="Score one of COUNT shares, INDEX from 0: several machines fill one OUT, the last one writes scores.json.",
)
@click.option(
    "--dedup",
    type=click.Choice(["auto", "off"]),
    default="auto",
    help="Compute lists that repeat inside a batch once (checkpoints only).",
)
@verify_option
@json_option
def predict(
    model: str,
    data: str,
    out: str,
    split: str | None,
    nproc: int,
    rows_per_part: int,
    dedup: str,
    share: str,
    as_json: bool,
) -> None:
    """Score every row of DATA with MODEL, each exactly once.

    MODEL is a checkpoint or an exported model, DATA a dataset or a raw log, which needs no labels. OUT/part-*.parquet
    have the session, the time, the file and row in DATA, and a score (a probability) per label; OUT/scores.json says
    that they are complete. DATA may have a later version of the model's vocabulary: new ids read the unknown row.

    \b
    Examples:
      recmill predict work/train/checkpoint work/dataset --split test --out scores
      recmill predict work/model monday/raw --out scores --nproc 2
    """
    from recmill.data.known_rows import describe_new_reads
    from recmill.training.prediction.predictor import PredictionFailed, predict_scores
    from recmill.training.processes import keep_freed_memory

    keep_freed_memory()
    try:
        result = predict_scores(
            model,
            data,
            out=out,
            split=split,
            nproc=nproc,
            rows_per_part=rows_per_part,
            dedup=dedup,
            share=share,
            progress=progress_for(as_json),
        )
    except PredictionFailed as error:
        click.echo(f"recmill: error: {error}", err=True)
        sys.exit(1)
    if result.get("missing"):
        line = (
            f"share {share}: {result['num_rows']:,} rows scored in {out}; {result['missing']} file(s) of other shares"
        )
        emit({"path": out, **result}, [f"{line} are missing"], as_json=as_json)
        return
    lines = [
        f"{result['num_rows']:,} rows scored in {out}: {len(result['parts'])} file(s), {', '.join(result['columns'])}"
    ]
    emit({"path": out, **result}, [*lines, *describe_new_reads(result.get("new_reads", {}))], as_json=as_json)


@click.command()
@click.argument("checkpoint")
@click.option("--out", required=True, help="Folder for the servable model.")
@click.option(
    "--tables",
    "form",
    type=click.Choice(("float32", "bf16", "int8", "int4")),
    default="float32",
    show_default=True,
    help="Form of the tables' rows in OUT/request.",
)
@click.option(
    "--user-feature",
    "user_features",
    multiple=True,
    metavar="NAME",
    help="A feature that all candidates of a request share; name all of them. Default: sequences, the user's id and "
    "features of the schema's groups.",
)
@click.option(
    "--profile",
    help="Profile of the data: the most read rows are stored first, and features that hardly change inside sessions "
    "are the user's. Default: counts of the vocabulary, if there is one.",
)
@click.option("--data", help="Dataset to measure every form of the tables on, with the split that training holds out.")
@click.option(
    "--no-program",
    is_flag=True,
    help="Write OUT/request only. Tables are read one after another, so only the largest must fit into memory.",
)
@verify_option
@json_option
def export(
    checkpoint: str,
    out: str,
    form: TableForm,
    user_features: tuple[str, ...],
    profile: str | None,
    data: str | None,
    no_program: bool,
    as_json: bool,
) -> None:
    """Turn CHECKPOINT into a servable model.

    \b
    OUT/request   scores requests of one user and many candidates (recmill.serving)
    OUT/model.pt2 the model as a torch.export program, OUT/mlflow an MLflow model around it
    """
    from recmill.training.serving import export_checkpoint

    result = export_checkpoint(
        checkpoint,
        out=out,
        tables=form,
        user_features=user_features,
        profile=profile,
        data=data,
        has_program=not no_program,
        progress=progress_for(as_json),
    )
    emit(
        result,
        [f"model in {out}: {', '.join(result['files'])}", *_describe_request(result["request"])],
        as_json=as_json,
    )


def _describe_request(request: Mapping[str, Any]) -> list[str]:
    names = ", ".join(request["user_features"]) or "none"
    return [
        f"request model: tables as {request['tables']}, {format_bytes(request['bytes'])} in total",
        f"features of the user: {names} ({request['user_features_from']})",
        *(
            f"  {form:8} {format_bytes(own['bytes']):>10}  {_accuracy(own)}"
            for form, own in request.get("forms", {}).items()
        ),
    ]


@click.command()
@click.argument("old")
@click.option("--out", required=True, help="Folder for what is converted; for a policy, a file NAME.safetensors.")
@json_option
def convert_checkpoint(old: str, out: str, as_json: bool) -> None:
    """Write OLD, made by an older recmill, as safetensors and JSON.

    OLD is a checkpoint, an allocation of `recmill tune` with its policy, or a policy's file NAME.zip. All three contain
    pickles. Only names that old checkpoints need are unpickled, tensors with weights_only.
    """
    from recmill.artifacts import WorkerAllocation
    from recmill.training.tensors.conversion import convert_checkpoint as convert
    from recmill.tuning.conversion import convert_allocation, convert_policy

    if Path(old).suffix == ".zip":
        result = {"path": out, "policy": hash_file(convert_policy(old, out=out)), "files": [Path(out).name]}
        kind = "policy"
    else:
        is_allocation = Path(old, WorkerAllocation.manifest_name).exists()
        kind = "allocation" if is_allocation else "checkpoint"
        converted = convert_allocation(old, out=out) if is_allocation else convert(old, out=out)
        result = {"path": out, kind: converted.content_hash, "files": [entry.name for entry in converted.files]}
    emit(result, [f"{kind} in {out}: {', '.join(result['files'])}"], as_json=as_json)


def _accuracy(metrics: Mapping[str, Any]) -> str:
    auc = "undefined (all labels are equal)" if metrics["auc"] is None else f"{metrics['auc']:.4f}"
    entropy = "undefined" if metrics["normalised_entropy"] is None else f"{metrics['normalised_entropy']:.4f}"
    loss, count = metrics["log_loss"], metrics["num_samples"]
    return f"AUC {auc}, log loss {loss:.4f}, normalised entropy {entropy} ({count:,} samples)"


def _held_out(metrics: dict[str, Any]) -> list[str]:
    from recmill.training.metrics.catalogue import metrics_by_label

    tasks = metrics_by_label(metrics)
    return [f"held out{f', {name}' if name else ''}: {_accuracy(own)}" for name, own in tasks.items()]


def _describe(result: dict[str, Any], out: str) -> list[str]:
    return [
        f"{result['model']['name']} on {result['world_size']} process(es): {result['num_steps']:,} steps, "
        f"{result['num_samples']:,} samples, {result['samples_per_s']:,.0f} samples/s",
        *_held_out(result["metrics"]),
        f"peak memory per process {format_bytes(result['peak_memory_bytes'])}; checkpoint in {out}/checkpoint",
    ]
