"""The ablation on a cluster: the same data and plan trained with none, each and all of the switches, side by side.

open_run ── generate_data ─┬─ profile_access ── plan_shards ─┬─ for each variant: train_model ── compare_runs
                           └─ tune_ingest ───────────────────┘
"""

from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from components.compare_runs.component import compare_runs
from components.generate_data.component import generate_data
from components.train_model.component import train_model
from pipelines.fields import with_fields
from pipelines.site import LOCAL, Site, field_of
from pipelines.train import steps_before_training, steps_of, told_of_data
from recmill.training.switches import ablation_variants

NAME = "recmill-ablations"
STEPS = (*steps_of(with_baseline=False, with_sharing=False)[:-1], "compare_runs")  # instead of report
# Variants as `recmill compare` trains them; those with all switches but one would double the trainings.
VARIANTS = [
    {"name": variant.name, "settings": variant.settings()} for variant in ablation_variants(leave_one_out=False)
]


def build_ablations(site: Site = LOCAL) -> BaseComponent:
    """The comparison of the baseline, each switch alone and all of them as one pipeline."""

    @dsl.pipeline(name=NAME, description="Each switch alone and all of them, on the same data and plan.")
    def compare_ablations(
        data: str = "",
        preset: str = "auto",
        labels: str = "",
        nproc: int = 1,
        num_nodes: int = 1,
        memory_budget: str = "1GiB",
        hot_budget: str = "auto",
        workdir: str = "",
        settings: str = "{}",
        ablations: list = VARIANTS,
    ) -> None:
        source = {"data": data, "preset": preset, "labels": labels}
        ranks = {"nproc": nproc, "num_nodes": num_nodes}
        budgets = {"memory_budget": memory_budget, "hot_budget": hot_budget}
        with site.closing(workdir, STEPS):
            how = {"default_compress": "auto", "loop": "ablations"}
            told = site.open(workdir, **source, **ranks, **budgets, settings=settings, **how)
            made = site.place("generate_data", generate_data(data=data, **told_of_data(told)))
            dataset = made.outputs["dataset"]
            planned = steps_before_training(site, dataset, told, ranks, hot_budget)
            with dsl.ParallelFor(ablations, name="ablations", parallelism=2) as variant:
                inputs = {"dataset": dataset, "plan": planned["plan"], "allocation": planned["allocation"]}
                own = {"variant": field_of(variant, "settings"), "subfolder": field_of(variant, "name")}
                folder = {
                    "settings": told["settings"],
                    "workdir": told["loop_workdir"],
                    "start_from": told["start_from"],
                }
                trained = site.place("train_model", train_model(**inputs, **own, **folder, **ranks))
            models = dsl.Collected(trained.outputs["model"])
            site.place("compare_runs", compare_runs(models=models, workdir=told["workdir"]))

    return with_fields(compare_ablations)
