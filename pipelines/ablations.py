"""The ablation on a cluster: the same data and plan trained with none, each and all of the switches, side by side.

generate_data ─┬─ profile_access ── plan_shards ─┬─ for each variant: train_model ── compare_runs
               └─ tune_ingest ───────────────────┘
"""

from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from components.compare_runs.component import compare_runs
from components.generate_data.component import generate_data
from components.train_model.component import train_model
from pipelines.site import LOCAL, Site, field_of
from pipelines.train import steps_before_training
from recmill.training.switches import ablation_variants

NAME = "recmill-ablations"
# Variants as `recmill compare` trains them; those with all switches but one would double the trainings.
VARIANTS = [
    {"name": variant.name, "settings": variant.settings()} for variant in ablation_variants(leave_one_out=False)
]


def build_ablations(site: Site = LOCAL) -> BaseComponent:
    """The comparison of the baseline, each switch alone and all of them as one pipeline."""

    @dsl.pipeline(name=NAME, description="Each switch alone and all of them, on the same data and plan.")
    def compare_ablations(
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
        compress: str = "auto",
        settings: str = "{}",
        ablations: list = VARIANTS,
        tracking_uri: str = "",
        parent_run_id: str = "",
    ) -> None:
        tracked = {"tracking_uri": tracking_uri, "parent_run_id": parent_run_id}
        where = {"workdir": workdir, **tracked}
        source = {"preset": preset, "data": data, "data_settings": data_settings, "layout": layout}
        how = {"eval_fraction": eval_fraction, "engine": engine, "master": master}
        ranks = {"nproc": nproc, "num_nodes": num_nodes}
        budgets = {"memory_budget_bytes": memory_budget_bytes, "hot_budget": hot_budget}
        with site.closing(where):
            dataset = site.place("generate_data", generate_data(**source, **how, **where)).outputs["dataset"]
            made = steps_before_training(site, dataset, ranks, {**budgets, "compress": compress}, settings, where)
            with dsl.ParallelFor(ablations, name="ablations", parallelism=2) as variant:
                inputs = {"dataset": dataset, "plan": made["plan"], "allocation": made["allocation"]}
                own = {"variant": field_of(variant, "settings"), "subfolder": field_of(variant, "name")}
                folder = f"{workdir}/ablations"
                trained = site.place(
                    "train_model", train_model(**inputs, settings=settings, **own, workdir=folder, **ranks, **tracked)
                )
            site.place("compare_runs", compare_runs(models=dsl.Collected(trained.outputs["model"]), **where))

    return compare_ablations
