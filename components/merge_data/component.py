from kfp import dsl
from kfp.dsl import Dataset, Input, Markdown, Output

from components.images import DATA, image


@dsl.component(base_image=image(DATA), install_kfp_package=False)
def merge_data(
    datasets: Input[list[Dataset]],
    merged_dataset: Output[Dataset],
    merged_summary: Output[Markdown],
    workdir: str,
) -> None:
    """Join the datasets that partitions of a log became into one."""
    from components.merge_data.merging import merge_datasets
    from components.outputs import path_of, publish
    from components.summaries import part_rows, write_table
    from recmill.tracking import step_run

    paths = sorted(path_of(part) for part in datasets)
    with step_run(
        "merge_data",
        workdir=workdir,
        inputs={"datasets": ", ".join(paths)},
    ) as step:
        merged = merge_datasets(paths, out=step.path("dataset"), progress=step.progress)
        step.count(merged.num_rows)
        step.record({"num_sessions": merged.num_sessions, "data_bytes": merged.data_bytes})
        publish(merged_dataset, step.wrote("dataset", merged))
        write_table(merged_summary, "Dataset", part_rows(merged))
