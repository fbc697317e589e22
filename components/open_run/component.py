from typing import NamedTuple

from kfp import dsl

from components.images import DATA, image


@dsl.component(base_image=image(DATA), install_kfp_package=False)
def open_run(
    workdir: str,
    volume: str = "",
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
    settings: str = "{}",
    default_compress: str = "none",
    loop: str = "",
    partitions: list = [],  # noqa: B006
) -> NamedTuple(  # type: ignore[valid-type]
    "Opened",
    [
        ("workdir", str),
        ("loop_workdir", str),
        ("preset", str),
        ("data_settings", str),
        ("layout", str),
        ("eval_fraction", float),
        ("engine", str),
        ("master", str),
        ("memory_budget_bytes", int),
        ("compress", str),
        ("settings", str),
        ("start_from", str),
        ("deploy", str),
        ("data_version", str),
    ],
):
    """Check the form of a run before anything is computed, and choose the run's folder."""
    from dataclasses import asdict

    from components.form import check_partitions, folder_of_run, read_form, read_start
    from components.versions import version_of
    from recmill.artifacts import join_path
    from recmill.tracking import step_run

    folder = folder_of_run(workdir, volume)
    switches = {"dedup": dedup, "tiers": tiers, "hot_batches": hot_batches, "sharing": sharing, "tuning": tuning}
    source = {"data": data, "preset": preset, "labels": labels}
    ranks = {"nproc": nproc, "num_nodes": num_nodes}
    budgets = {"memory_budget": memory_budget, "hot_budget": hot_budget}
    form: dict = {**source, **ranks, **budgets, "settings": settings}
    with step_run("open_run", workdir=folder, inputs=form | switches):
        check_partitions(partitions)
        told = read_form(**form, switches=switches, default_compress=default_compress, start=read_start(settings))
        version = version_of(told.preset, data)
    return (folder, join_path(folder, loop) if loop else folder, *asdict(told).values(), version)
