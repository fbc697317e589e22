from kfp import dsl
from kfp.dsl import Dataset, Input, Markdown, Output

from components.images import DATA, image


@dsl.component(base_image=image(DATA), install_kfp_package=False)
def merge_data(
    datasets: Input[list[Dataset]],
    dataset: Output[Dataset],
    summary: Output[Markdown],
    workdir: str,
    tracking_uri: str,
    parent_run_id: str,
) -> None:
    """Join the datasets that partitions of a log became into one."""
    from components.merge_data.merging import merge_datasets
    from components.outputs import path_of, publish, write_table
    from recmill.tracking import step_run

    paths = sorted(path_of(part) for part in datasets)
    with step_run(
        "merge_data",
        workdir=workdir,
        tracking_uri=tracking_uri,
        parent_run_id=parent_run_id,
        inputs={"datasets": ", ".join(paths)},
    ) as step:
        merged = merge_datasets(paths, out=step.path("dataset"), progress=step.progress)
        step.count(merged.num_rows)
        step.record({"num_sessions": merged.num_sessions, "data_bytes": merged.data_bytes})
        publish(dataset, step.wrote("dataset", merged))
        write_table(summary, "Dataset", {part["file"]: part for part in merged.to_json()["parts"]})
