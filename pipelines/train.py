"""The pipeline: which step feeds which.

generate_data ─┬─ profile_access ── plan_shards ─┬─ train_model ── report
               └─ tune_ingest ───────────────────┘
"""

from kfp import dsl, kubernetes
from kfp.dsl.base_component import BaseComponent

from components.generate_data.component import generate_data
from components.images import DATA, TAG, TRAINER, image
from components.plan_shards.component import plan_shards
from components.profile_access.component import profile_access
from components.report.component import report
from components.train_model.component import train_model
from components.tune_ingest.component import tune_ingest

STEPS = ("generate_data", "profile_access", "plan_shards", "tune_ingest", "train_model", "report")
NAME = "recmill"


def build_pipeline(*, image_tag: str = TAG, registry: str = "") -> BaseComponent:
    """The training pipeline, its steps running in the images of that tag."""
    data_image = image(DATA, tag=image_tag, registry=registry)
    trainer_image = image(TRAINER, tag=image_tag, registry=registry)

    def placed(task: dsl.PipelineTask, container_image: str) -> dsl.PipelineTask:
        task.set_container_image(container_image)
        # Not a parameter: an id that changes with every run would defeat Kubeflow's cache.
        return kubernetes.use_field_path_as_env(task, "KFP_RUN_ID", "metadata.labels['pipeline/runid']")

    @dsl.pipeline(name=NAME, description="Raw interaction logs in; a trained, sharded recommendation model out.")
    def train(
        workdir: str,
        preset: str = "tiny",
        data: str = "",
        data_settings: str = "{}",
        layout: str = "session",
        eval_fraction: float = 0.1,
        nproc: int = 1,
        memory_budget_bytes: int = 2**30,
        settings: str = "{}",
        tracking_uri: str = "",
        parent_run_id: str = "",
    ) -> None:
        where = {"workdir": workdir, "tracking_uri": tracking_uri, "parent_run_id": parent_run_id}
        generated = generate_data(
            preset=preset, data=data, data_settings=data_settings, layout=layout, eval_fraction=eval_fraction, **where
        )
        profiled = profile_access(dataset=generated.outputs["dataset"], **where)
        planned = plan_shards(
            profile=profiled.outputs["profile"],
            nproc=nproc,
            memory_budget_bytes=memory_budget_bytes,
            settings=settings,
            **where,
        )
        tuned = tune_ingest(dataset=generated.outputs["dataset"], settings=settings, **where)
        trained = train_model(
            dataset=generated.outputs["dataset"],
            plan=planned.outputs["plan"],
            allocation=tuned.outputs["allocation"],
            nproc=nproc,
            settings=settings,
            **where,
        )
        reported = report(
            profile=profiled.outputs["profile"],
            plan=planned.outputs["plan"],
            allocation=tuned.outputs["allocation"],
            model=trained.outputs["model"],
            **where,
        )
        for task in (generated, profiled):
            placed(task, data_image)
        for task in (planned, tuned, trained, reported):
            placed(task, trainer_image)

    return train
