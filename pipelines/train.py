"""The pipeline: which step feeds which.

generate_data ─┬─ profile_access ── plan_shards ─┬─ train_model ── train_shared ── report
               └─ tune_ingest ── train_baseline ─┘

train_baseline and train_shared are optional. Trainings run one after the other: on one machine they would slow each
other down, and their speeds are compared. With partitions, generate_data runs once per partition, in parallel, and
merge_data joins the datasets.
"""

from typing import Any

from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from components.generate_data.component import generate_data
from components.merge_data.component import merge_data
from components.plan_shards.component import plan_shards
from components.profile_access.component import profile_access
from components.report.component import report
from components.train_baseline.component import train_baseline
from components.train_model.component import train_model
from components.train_shared.component import train_shared
from components.tune_ingest.component import tune_ingest
from pipelines.site import LOCAL, Site, field_of

STEPS = (
    *("generate_data", "profile_access", "plan_shards", "tune_ingest"),
    *("train_baseline", "train_model", "train_shared", "report"),
)
NAME = "recmill"
COMPRESS = "10"  # of the variant that shares parameters, if `compress` does not say


def steps_of(*, with_baseline: bool, with_sharing: bool) -> tuple[str, ...]:
    """The steps of the training pipeline in the order in which they run."""
    left_out = {"train_baseline": not with_baseline, "train_shared": not with_sharing}
    return tuple(step for step in STEPS if not left_out.get(step))


def build_pipeline(site: Site = LOCAL, *, with_baseline: bool = True, with_sharing: bool = False) -> BaseComponent:
    """The training pipeline, its steps running in the images of that tag; on a cluster, placed there.

    `with_baseline` trains a baseline first, `with_sharing` a variant with shared parameters last.
    """

    @dsl.pipeline(name=NAME, description="Raw interaction logs in; a trained, sharded recommendation model out.")
    def train(
        workdir: str,
        preset: str = "tiny",
        data: str = "",
        data_settings: str = "{}",
        layout: str = "auto",
        eval_fraction: float = 0.1,
        engine: str = "duckdb",
        master: str = "",
        nproc: int = 1,
        num_nodes: int = 1,
        memory_budget_bytes: int = 2**30,
        hot_budget: str = "auto",
        compress: str = "",
        settings: str = "{}",
        tracking_uri: str = "",
        parent_run_id: str = "",
    ) -> None:
        where = {"workdir": workdir, "tracking_uri": tracking_uri, "parent_run_id": parent_run_id}
        source = {"preset": preset, "data": data, "data_settings": data_settings, "layout": layout}
        how = {"eval_fraction": eval_fraction, "engine": engine, "master": master}
        ranks = {"nproc": nproc, "num_nodes": num_nodes}
        budgets = {"memory_budget_bytes": memory_budget_bytes, "hot_budget": hot_budget}
        with site.closing(where):
            made = generate_data(**source, **how, with_baseline=with_baseline, **where)
            generated = site.place("generate_data", made).outputs
            steps_after_data(
                site,
                generated["dataset"],
                ranks,
                {**budgets, "compress": compress},
                settings,
                where,
                baseline_data=generated["baseline_data"] if with_baseline else None,
                with_sharing=with_sharing,
            )

    return train


def build_partitioned_pipeline(site: Site = LOCAL) -> BaseComponent:
    """The same for a log that lies in several folders: each is clustered by a task of its own, side by side."""

    @dsl.pipeline(name=f"{NAME}-partitions", description="As recmill, with the raw log clustered in partitions.")
    def train_on_partitions(
        workdir: str,
        partitions: list,
        eval_fraction: float = 0.1,
        engine: str = "duckdb",
        master: str = "",
        nproc: int = 1,
        num_nodes: int = 1,
        memory_budget_bytes: int = 2**30,
        hot_budget: str = "auto",
        compress: str = "",
        settings: str = "{}",
        tracking_uri: str = "",
        parent_run_id: str = "",
    ) -> None:
        tracked = {"tracking_uri": tracking_uri, "parent_run_id": parent_run_id}
        where = {"workdir": workdir, **tracked}
        how = {"eval_fraction": eval_fraction, "engine": engine, "master": master}
        ranks = {"nproc": nproc, "num_nodes": num_nodes}
        budgets = {"memory_budget_bytes": memory_budget_bytes, "hot_budget": hot_budget}
        with site.closing(where):
            with dsl.ParallelFor(partitions, name="partitions", parallelism=4) as partition:
                source = {"preset": "parquet", "data": field_of(partition, "data"), "data_settings": "{}"}
                folder = {"workdir": f"{workdir}/partitions", "subfolder": field_of(partition, "name")}
                generated = site.place(
                    "generate_data", generate_data(**source, layout="session", **how, **folder, **tracked)
                )
            merged = site.place("merge_data", merge_data(datasets=dsl.Collected(generated.outputs["dataset"]), **where))
            steps_after_data(site, merged.outputs["dataset"], ranks, {**budgets, "compress": compress}, settings, where)

    return train_on_partitions


def steps_before_training(
    site: Site, dataset: Any, ranks: dict[str, Any], budgets: dict[str, Any], settings: Any, where: dict[str, Any]
) -> dict[str, Any]:
    """Profile, plan and tune on a dataset: the outputs profile, plan and allocation."""
    profile = site.place("profile_access", profile_access(dataset=dataset, **where)).outputs["profile"]
    planned = plan_shards(profile=profile, settings=settings, **budgets, **ranks, **where)
    tuned = tune_ingest(dataset=dataset, settings=settings, **where)
    plan, allocation = site.place("plan_shards", planned), site.place("tune_ingest", tuned)
    return {"profile": profile, "plan": plan.outputs["plan"], "allocation": allocation.outputs["allocation"]}


def steps_after_data(
    site: Site,
    dataset: Any,
    ranks: dict[str, Any],
    budgets: dict[str, Any],
    settings: Any,
    where: dict[str, Any],
    *,
    baseline_data: Any = None,
    with_sharing: bool = False,
) -> None:
    """Profile, plan, tune, train and report on a dataset; with `baseline_data`, train the baseline on it before."""
    made = steps_before_training(site, dataset, ranks, budgets, settings, where)
    profile, how = made["profile"], {"settings": settings, **ranks, **where}
    memory = {"memory_budget_bytes": budgets["memory_budget_bytes"]}
    inputs = {"dataset": dataset, "allocation": made["allocation"]}
    trained = site.place("train_model", train_model(plan=made["plan"], **inputs, **how))
    last = trained
    if baseline_data is not None:
        baseline = train_baseline(dataset=baseline_data, profile=profile, **memory, **how)
        baseline.after(made["allocation"].task)  # tuning measures speed, too
        trained.after(site.place("train_baseline", baseline))
    if with_sharing:
        budgets = {**memory, "hot_budget": budgets["hot_budget"], "compress": COMPRESS}
        last = site.place("train_shared", train_shared(profile=profile, **inputs, **budgets, **how)).after(trained)
    site.place("report", report(**made, model=trained.outputs["model"], **where)).after(last)
