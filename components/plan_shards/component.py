from kfp import dsl
from kfp.dsl import Artifact, Input, Markdown, Output

from components.images import TRAINER, image


@dsl.component(base_image=image(TRAINER), install_kfp_package=False)
def plan_shards(
    profile: Input[Artifact],
    plan: Output[Artifact],
    placement_summary: Output[Markdown],
    nproc: int,
    memory_budget_bytes: int,
    settings: str,
    workdir: str,
    num_nodes: int = 1,
    hot_budget: str = "auto",
    compress: str = "none",
) -> None:
    """Decide which rows live on which rank, which are hot (hot_budget) and which share parameters (compress)."""
    import json

    from components.form import read_hot_budget
    from components.outputs import path_of, publish
    from components.summaries import tier_rows, write_table
    from recmill.planning.planner import Topology
    from recmill.planning.planner import plan_shards as plan_tables
    from recmill.tracking import step_run
    from recmill.training.config import TrainConfig

    inputs = {
        "profile": path_of(profile),
        "nproc": nproc,
        "num_nodes": num_nodes,
        "memory_budget_bytes": memory_budget_bytes,
        "hot_budget": hot_budget,
        "compress": compress,
    }
    with step_run("plan_shards", workdir=workdir, inputs=inputs) as step:
        planned = plan_tables(
            path_of(profile),
            out=step.path("plan"),
            topology=Topology(nodes=num_nodes, ranks_per_node=nproc),
            memory_budget_bytes=memory_budget_bytes,
            hot_budget_bytes=read_hot_budget(hot_budget),
            compress=None if compress == "none" else compress,
            batch_size=TrainConfig.from_overrides(json.loads(settings)).batch_size,
            progress=step.progress,
        )
        step.record({"num_tables": len(planned.tables), "objective": planned.objective})
        publish(plan, step.wrote("plan", planned))
        write_table(placement_summary, "Where rows live", tier_rows(planned))
