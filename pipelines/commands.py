"""The commands that use Kubeflow Pipelines: `recmill run`, `compile` and `submit`."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from components.form import FIELDS, read_start
from pipelines.options import (
    PIPELINES,
    check_form,
    form_options,
    is_deployed,
    is_prepared,
    package_options,
    read_options,
    variant_options,
)
from pipelines.server.commands import finish_waiting, server_options, wait_for_run, waiting_options
from recmill.artifacts import InputError, explain_write_errors, is_remote, join_path, path_exists
from recmill.cli.output import emit, json_option, verify_option

if TYPE_CHECKING:
    from components.placement import ClusterPlacement


@click.command()
@form_options
@click.option("--out", help="Folder or URL of the run; the same command resumes it. Default: runs/PRESET.")
@variant_options
@click.option("--no-tracking", is_flag=True, help="Do not write to MLflow.")
@verify_option
@json_option
def run(
    out: str | None, no_tracking: bool, with_baseline: bool, with_sharing: bool, as_json: bool, **options: Any
) -> None:
    """Run the whole pipeline on this machine: data, profile, plan, tuning, a baseline, training, report.

    Every optimisation that leaves the model unchanged decides for itself whether it pays on this data; the report says
    what each one decided and why, beside a baseline that was trained without any.

    \b
    Examples:
      recmill run --preset demo --nproc 2
      recmill run --data my_log/ --out runs/mine --set epochs=2 --set model=dcn --nproc 2
      recmill run --data log.yaml --out runs/shop
      recmill run --data tuesday/log.yaml --from runs/monday/train/checkpoint --out runs/tuesday
      recmill run --preset small --nproc 2 --no-baseline --hot-batches off --compress 10
    """
    from pipelines.local import LOG, StepFailed

    given = read_options(options)
    preset = check_form(given).preset  # checked now, not minutes later in the training step
    if given.get("num_nodes", 1) > 1:
        raise InputError("--num-nodes: a run on this machine has one node; recmill submit trains on several")
    out = out or f"runs/{preset}"
    defaults = {name: field.default for name, field in FIELDS.items() if name not in ("partitions", "ablations")}
    arguments = defaults | given | {"preset": preset, "workdir": _absolute(out)}
    if arguments["data"]:
        arguments["data"] = _absolute(arguments["data"])
    arguments["settings"] = _with_absolute_start(arguments["settings"])
    variants = {
        "with_baseline": with_baseline,
        "with_sharing": with_sharing,
        "with_preparation": is_prepared(arguments),
        "with_deployment": is_deployed(arguments),
    }
    try:
        results = _run_tracked(arguments, variants, no_tracking, as_json)
    except StepFailed as error:
        click.echo(f"recmill: {error}; its output is in {join_path(_absolute(out), LOG)}", err=True)
        sys.exit(1)
    from pipelines.results import describe_results

    emit(results, describe_results(results), as_json=as_json)


def _with_absolute_start(settings: str) -> str:
    """The settings with the path of the model that goes on, if there is one, checked and absolute."""
    start = read_start(settings)
    return json.dumps(json.loads(settings) | {"from": _absolute(start["checkpoint"])}) if start else settings


def _absolute(path: str) -> str:
    return path if is_remote(path) else str(Path(path).absolute())


def _run_tracked(
    arguments: dict[str, Any], variants: dict[str, bool], no_tracking: bool, as_json: bool
) -> dict[str, Any]:
    """Run the pipeline between the opening and the closing of its MLflow run."""
    from pipelines.follower import Follower
    from pipelines.local import RECORD, beside_database, log_of, prepare_folder, run_locally
    from pipelines.results import collect_results
    from pipelines.site import LOCAL
    from pipelines.train import build_pipeline, steps_of
    from recmill import tracking
    from recmill.training.config import TrainConfig
    from recmill.training.preload import preloaded_ranks
    from recmill.training.processes import ending_stopped, threads_of

    steps = steps_of(**variants)
    workdir, run_id = arguments["workdir"], str(uuid.uuid4())
    prepare_folder(arguments)
    is_off = no_tracking or tracking.is_tracking_off()
    tracking_uri = "" if is_off else tracking.default_tracking_uri(beside_database(workdir))
    record_run = partial(
        tracking.write_run_record,
        workdir,
        preset=arguments["preset"],
        pipeline_run_id=run_id,
        mlflow_run=tracking.RunReference(tracking_uri=tracking_uri),
        arguments=arguments,
    )
    if not path_exists(
        join_path(workdir, RECORD)
    ):  # a folder that is not empty and has none would be refused next time
        record_run()
    replayer = None
    if not is_off:
        replayer = tracking.Replayer(
            tracking_uri,
            name=workdir.rstrip("/").rsplit("/", 1)[-1],
            pipeline_run_id=run_id,
            url=join_path(workdir if is_remote(workdir) else Path(workdir).as_uri(), "report.html"),
            params=arguments,
        )
    status, metrics = "FAILED", {}
    try:
        record_run()
        settings = json.loads(check_form(arguments).settings)
        config = TrainConfig.from_overrides(settings)
        threads = threads_of(config.threads, arguments["nproc"])
        with (
            preloaded_ranks(threads),
            ending_stopped(config.timeout_s) as stopped,
            log_of(workdir) as log_path,
            Follower(steps=steps, is_silent=as_json) as follower,
        ):
            run_locally(
                build_pipeline(LOCAL, **variants),
                arguments,
                steps=steps,
                log_path=log_path,
                environment={"KFP_RUN_ID": run_id, "RECMILL_TRACKING": "off" if is_off else "on"}
                | ({"MLFLOW_TRACKING_URI": tracking_uri} | replayer.environment if replayer else {}),
                follow=follower,
                causes=stopped,
            )
        results = collect_results(workdir, steps)
        status, metrics = "FINISHED", results["metrics"] | {"seconds": results["seconds"]}
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        if replayer:
            mlflow_run = replayer.close(status=status, metrics=metrics)
            tracking.name_mlflow_run(workdir, mlflow_run)
    return results | ({"mlflow": mlflow_run.to_json()} if replayer else {})


@click.command("compile")
@click.option("--out", default="build", help="Folder for the pipeline's YAML.")
@package_options
@form_options
@json_option
def compile_pipeline(out: str, as_json: bool, **options: Any) -> None:
    """Write the pipeline as YAML for Kubeflow Pipelines; the same input gives the same bytes.

    Upload it in Kubeflow's UI. Its form is filled in with the values given here; every field can be changed there.
    """
    from pipelines.requests import PipelineRequests
    from recmill.artifacts import hash_file

    given = read_options(options)
    check_form(given)
    package: dict[str, Any] = {"with_preparation": is_prepared(given), "with_deployment": is_deployed(given)}
    package["nproc"] = given.get("nproc", 1)
    path = _compile_to(Path(out), given, **package, **options)
    asked = PipelineRequests.load(path, num_nodes=given.get("num_nodes", 1)).describe()
    result = {"path": str(path), "sha256": hash_file(path), "bytes": path.stat().st_size, "requests": asked}
    emit(result, [f"wrote {path} ({path.stat().st_size:,} bytes)", asked], as_json=as_json)


def _compile_to(
    folder: Path,
    given: Mapping[str, Any],
    *,
    kind: str,
    image_tag: str | None,
    registry: str,
    placement: str | None,
    profile: str | None,
    gpus: int | None,
    gpu_type: str | None,
    with_baseline: bool,
    with_sharing: bool,
    with_preparation: bool,
    with_deployment: bool,
    nproc: int,
) -> Path:
    from kfp import compiler

    from components.images import TAG
    from pipelines.ablations import build_ablations
    from pipelines.fields import with_defaults
    from pipelines.site import Site
    from pipelines.train import build_partitioned_pipeline, build_pipeline

    builders: dict[str, Callable[[Site], Any]] = {
        "train": partial(
            build_pipeline,
            with_baseline=with_baseline,
            with_sharing=with_sharing,
            with_preparation=with_preparation,
            with_deployment=with_deployment,
        ),
        "partitions": build_partitioned_pipeline,
        "ablations": build_ablations,
    }
    tag = TAG if image_tag is None else image_tag
    site = Site(
        image_tag=tag,
        registry=registry,
        placement=_read_placement(placement, profile, gpus, gpu_type),
        nproc=nproc,
    )
    pipeline = with_defaults(builders[kind](site), given)
    if folder.is_file():
        raise InputError(f"{folder}: is a file, expected a folder for --out")
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / PIPELINES[kind]
        temporary = folder / f".{path.stem}.{uuid.uuid4().hex[:8]}.yaml"
        compiler.Compiler().compile(pipeline, str(temporary))
        temporary.replace(path)
    return path


def _read_placement(path: str | None, profile: str | None, gpus: int | None, gpu_type: str | None) -> ClusterPlacement:
    from components.placement import ClusterPlacement

    changes = {"profile": profile} if profile else {}
    placement = (
        ClusterPlacement.load(path, **changes) if path else ClusterPlacement.from_body(changes, where="--profile")
    )
    if gpu_type:
        placement = replace(placement, gpu_type=gpu_type)
    return placement if gpus is None else placement.with_step("train_model", gpus=gpus)


@click.command()
@server_options
@click.option("--experiment", default="recmill", help="Experiment of the run.")
@click.option("--run-name", help="Name of the run. Default: 'recmill', the preset or data, and the time.")
@form_options
@click.option("--workdir", help=f"{FIELDS['workdir'].about}")
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="Pipeline parameter; repeatable.")
@package_options
@click.option(
    "--pipeline-name", help="Keep the pipeline on the server under this name, with a new version if its YAML changed."
)
@click.option("--cron", help="Run on this schedule, e.g. '0 3 * * *' for every night at three; needs --pipeline-name.")
@click.option("--wait", is_flag=True, help="Follow the run until it ends; exit code 1 if it fails.")
@waiting_options
@json_option
def submit(
    host: str,
    namespace: str | None,
    token: str | None,
    experiment: str,
    run_name: str | None,
    params: tuple[str, ...],
    pipeline_name: str | None,
    cron: str | None,
    wait: bool,
    timeout_s: float,
    poll_s: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Submit the pipeline to Kubeflow Pipelines and, with --wait, follow it to its end.

    \b
    Examples:
      recmill submit --host http://localhost:8080 --preset small --nproc 2 --wait
      recmill submit --host URL --pipeline-name nightly --cron "0 3 * * *" --data /runs/log --set epochs=2
    """
    import tempfile

    from pipelines.requests import PipelineRequests
    from pipelines.server.client import open_server, submit_run
    from pipelines.server.keeping import check_cron, keep_version, schedule_runs
    from pipelines.server.parameters import parse_parameters, proposed_nproc

    if cron and (wait or not pipeline_name):
        raise InputError("--cron needs --pipeline-name, and cannot be combined with --wait")
    if cron:
        check_cron(cron)
    given = read_options(options)
    server = open_server(host, namespace=namespace, token=token)
    with tempfile.TemporaryDirectory(prefix="recmill-") as scratch:
        package: dict[str, Any] = {"with_preparation": is_prepared(given), "with_deployment": is_deployed(given)}
        package["nproc"] = proposed_nproc(params, given)
        path = _compile_to(Path(scratch), {}, **package, **options)
        parameters = parse_parameters(params, given, path)
        check_form(parameters)
        asked = PipelineRequests.load(path, num_nodes=int(parameters.get("num_nodes", 1))).describe()
        name = run_name or default_run_name(parameters)
        version = keep_version(server, path, name=pipeline_name) if pipeline_name else None
        if cron:
            scheduled = schedule_runs(
                server, version, parameters, cron=cron, experiment=experiment, name=run_name or str(pipeline_name)
            )
            emit(scheduled, [f"{scheduled['name']} runs on the schedule {cron!r}"], as_json=as_json)
            return
        submitted = submit_run(server, path, parameters, experiment=experiment, name=name, version=version)
    if not as_json:
        click.echo(f"run {submitted['run_id']}: {submitted['url']}\n{asked}", err=True)
    if not wait:
        emit(submitted, [f"run {submitted['run_id']} submitted"], as_json=as_json)
        return
    run_id = submitted["run_id"]
    outcome = wait_for_run(server, run_id, timeout_s=timeout_s, poll_s=poll_s, as_json=as_json)
    finish_waiting(submitted | outcome, run_id, as_json=as_json)


def default_run_name(parameters: Mapping[str, Any]) -> str:
    """What people look for in a list of runs: the data or preset, and when."""
    data = str(parameters.get("data") or "").rstrip("/").rsplit("/", 1)[-1]
    return f"recmill {data or check_form(parameters).preset} {time.strftime('%Y-%m-%d %H:%M')}"
