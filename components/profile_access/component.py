from kfp import dsl
from kfp.dsl import Artifact, Dataset, Input, Markdown, Output

from components.images import DATA, image


@dsl.component(base_image=image(DATA), install_kfp_package=False)
def profile_access(
    dataset: Input[Dataset],
    profile: Output[Artifact],
    access_summary: Output[Markdown],
    workdir: str,
) -> None:
    """Count how often every row of every table is read, and how much features repeat within a session."""
    from components.outputs import path_of, publish
    from components.summaries import access_rows, write_table
    from recmill.profiling.access import profile_access as count_accesses
    from recmill.tracking import step_run

    inputs = {"dataset": path_of(dataset)}
    with step_run("profile_access", workdir=workdir, inputs=inputs) as step:
        counted = count_accesses(path_of(dataset), out=step.path("profile"), progress=step.progress)
        step.count(counted.num_samples)
        publish(profile, step.wrote("profile", counted))
        write_table(access_summary, "Reads of each table", access_rows(counted))
