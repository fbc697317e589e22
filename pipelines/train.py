"""The pipeline: which step feeds which.

open_run ── prepare_log ── generate_data ─┬─ profile_access ── plan_shards ─┬─ train_model ── train_shared ── report
                                          └─ tune_ingest ── train_baseline ─┘                                  │
                                                                                                        deploy_model

open_run checks the form of the run and tells the steps what to do. prepare_log, train_baseline, train_shared and
deploy_model are optional. The graph is fixed before a form is filled in: without prepare_log, generate_data prepares a
log.yaml itself. Trainings run one after the other: on one machine they would slow each other down, and their speeds are
compared. With partitions, generate_data runs once per partition, in parallel, and merge_data joins the datasets.
"""

from collections.abc import Mapping
from typing import Any

from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from components.deploy_model.component import deploy_model
from components.form import COMPRESS
from components.generate_data.component import generate_data
from components.merge_data.component import merge_data
from components.plan_shards.component import plan_shards
from components.prepare_log.component import prepare_log
from components.profile_access.component import profile_access
from components.report.component import report
from components.train_baseline.component import train_baseline
from components.train_model.component import train_model
from components.train_shared.component import train_shared
from components.tune_ingest.component import tune_ingest
from pipelines.fields import with_fields
from pipelines.site import LOCAL, Site, field_of
from recmill.report.runs import OPTIONAL_STEPS
from recmill.report.runs import STEPS as REPORTED

STEPS = ("open_run", *REPORTED)
NAME = "recmill"


def steps_of(
    *, with_baseline: bool, with_sharing: bool, with_preparation: bool = False, with_deployment: bool = False
) -> tuple[str, ...]:
    """The steps of the training pipeline in the order in which they run."""
    variants = (with_preparation, with_baseline, with_sharing, with_deployment)
    optional = dict(zip(OPTIONAL_STEPS, variants, strict=True))
    return tuple(step for step in STEPS if optional.get(step, True))


def build_pipeline(
    site: Site = LOCAL,
    *,
    with_baseline: bool = True,
    with_sharing: bool = False,
    with_preparation: bool = False,
    with_deployment: bool = False,
) -> BaseComponent:
    """The training pipeline, its steps running in the images of that tag; on a cluster, placed there.

    `with_baseline` trains a baseline first, `with_sharing` a variant with shared parameters last.
    `with_preparation` is for `data` that is a log.yaml: a step of its own prepares the log. `with_deployment` is for
    settings that say where to deploy the model.
    """
    optional = {"with_preparation": with_preparation, "with_deployment": with_deployment}
    steps = steps_of(with_baseline=with_baseline, with_sharing=with_sharing, **optional)

    @dsl.pipeline(name=NAME, description="Raw interaction logs in; a trained, sharded recommendation model out.")
    def train(
        data: str = "",
        preset: str = "auto",
        labels: str = "",
        dedup: str = "auto",
        tiers: str = "auto",
        hot_batches: str = "auto",
        sharing: str = "auto",
        tuning: str = "auto",
        nproc: int = 1,
        num_nodes: int = 1,
        memory_budget: str = "1GiB",
        hot_budget: str = "auto",
        workdir: str = "",
        settings: str = "{}",
    ) -> None:
        switches = {"dedup": dedup, "tiers": tiers, "hot_batches": hot_batches, "sharing": sharing, "tuning": tuning}
        source = {"data": data, "preset": preset, "labels": labels}
        ranks = {"nproc": nproc, "num_nodes": num_nodes}
        budgets = {"memory_budget": memory_budget, "hot_budget": hot_budget}
        with site.closing(workdir, steps):
            told = site.open(workdir, **source, **switches, **ranks, **budgets, settings=settings)
            raw = prepared(site, data, told) if with_preparation else {}
            made = generate_data(data=data, **raw, **told_of_data(told), with_baseline=with_baseline)
            generated = site.place("generate_data", made).outputs
            steps_after_data(
                site,
                generated["dataset"],
                told,
                ranks,
                hot_budget,
                baseline_data=generated["baseline_data"] if with_baseline else None,
                with_sharing=with_sharing,
                with_deployment=with_deployment,
            )

    return with_fields(train)


def build_partitioned_pipeline(site: Site = LOCAL) -> BaseComponent:
    """The same for a log that lies in several folders: each is clustered by a task of its own, side by side."""
    first, generate, *later = steps_of(with_baseline=False, with_sharing=False)

    @dsl.pipeline(name=f"{NAME}-partitions", description="As recmill, with the raw log clustered in partitions.")
    def train_on_partitions(
        partitions: list,
        dedup: str = "auto",
        tiers: str = "auto",
        hot_batches: str = "auto",
        sharing: str = "auto",
        tuning: str = "auto",
        nproc: int = 1,
        num_nodes: int = 1,
        memory_budget: str = "1GiB",
        hot_budget: str = "auto",
        workdir: str = "",
        settings: str = "{}",
    ) -> None:
        switches = {"dedup": dedup, "tiers": tiers, "hot_batches": hot_batches, "sharing": sharing, "tuning": tuning}
        ranks = {"nproc": nproc, "num_nodes": num_nodes}
        budgets = {"memory_budget": memory_budget, "hot_budget": hot_budget}
        with site.closing(workdir, (first, generate, "merge_data", *later)):
            form = {"partitions": partitions, "loop": "partitions"}
            told = site.open(workdir, **form, **switches, **ranks, **budgets, settings=settings)
            with dsl.ParallelFor(partitions, name="partitions", parallelism=4) as partition:
                source = {"preset": "parquet", "data": field_of(partition, "data"), "layout": "session"}
                folder = {"workdir": told["loop_workdir"], "subfolder": field_of(partition, "name")}
                made = generate_data(**told_of_data(told) | {"data_settings": "{}"} | source | folder)
                generated = site.place("generate_data", made)
            parts = dsl.Collected(generated.outputs["dataset"])
            merged = site.place("merge_data", merge_data(datasets=parts, workdir=told["workdir"]))
            steps_after_data(site, merged.outputs["merged_dataset"], told, ranks, hot_budget)

    return with_fields(train_on_partitions)


def prepared(site: Site, data: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """The input of generate_data that a step in front of it makes of a log.yaml."""
    names = ("workdir", "preset", "data_settings", "data_version", "engine", "master", "start_from")
    task = prepare_log(data=data, **{name: told[name] for name in names})
    return {"raw_log": site.place("prepare_log", task).outputs["raw_log"]}


def told_of_data(told: Mapping[str, Any]) -> dict[str, Any]:
    """What generate_data is told by open_run."""
    names = ("workdir", "preset", "data_settings", "layout", "eval_fraction", "engine", "master", "data_version")
    return {name: told[name] for name in (*names, "start_from")}


def steps_before_training(
    site: Site, dataset: Any, told: Mapping[str, Any], ranks: dict[str, Any], hot_budget: Any
) -> dict[str, Any]:
    """Profile, plan and tune on a dataset: the outputs profile, plan and allocation."""
    how = {"settings": told["settings"], "workdir": told["workdir"]}
    profile = site.place("profile_access", profile_access(dataset=dataset, workdir=told["workdir"])).outputs["profile"]
    budgets = {"memory_budget_bytes": told["memory_budget_bytes"], "hot_budget": hot_budget}
    planned = plan_shards(profile=profile, compress=told["compress"], **budgets, **ranks, **how)
    tuned = tune_ingest(dataset=dataset, **how)
    plan, allocation = site.place("plan_shards", planned), site.place("tune_ingest", tuned)
    return {"profile": profile, "plan": plan.outputs["plan"], "allocation": allocation.outputs["allocation"]}


def steps_after_data(
    site: Site,
    dataset: Any,
    told: Mapping[str, Any],
    ranks: dict[str, Any],
    hot_budget: Any,
    *,
    baseline_data: Any = None,
    with_sharing: bool = False,
    with_deployment: bool = False,
) -> None:
    """Profile, plan, tune, train and report on a dataset; with `baseline_data`, train the baseline on it before."""
    made = steps_before_training(site, dataset, told, ranks, hot_budget)
    profile = made["profile"]
    how = {"settings": told["settings"], "workdir": told["workdir"], "start_from": told["start_from"], **ranks}
    memory = {"memory_budget_bytes": told["memory_budget_bytes"]}
    inputs = {"dataset": dataset, "allocation": made["allocation"]}
    trained = site.place("train_model", train_model(plan=made["plan"], **inputs, **how))
    last = trained
    if baseline_data is not None:
        baseline = train_baseline(dataset=baseline_data, profile=profile, **memory, **how)
        baseline.after(made["allocation"].task)  # tuning measures speed, too
        trained.after(site.place("train_baseline", baseline))
    if with_sharing:
        budgets = {**memory, "hot_budget": hot_budget, "compress": COMPRESS}
        last = site.place("train_shared", train_shared(profile=profile, **inputs, **budgets, **how)).after(trained)
    written = report(**made, model=trained.outputs["model"], workdir=told["workdir"])
    reported = site.place("report", written).after(last)
    if with_deployment:
        rollout = deploy_model(model=trained.outputs["model"], deploy=told["deploy"], workdir=told["workdir"])
        # Never taken from Kubeflow's cache: what serves may have changed.
        site.place("deploy_model", rollout).set_caching_options(False).after(reported)
