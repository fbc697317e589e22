from kfp import dsl

from components.images import DATA, image


@dsl.component(base_image=image(DATA), install_kfp_package=False)
def close_run(status: dsl.PipelineTaskFinalStatus, workdir: str, volume: str = "", run_name: str = "") -> None:
    """End the MLflow run of the pipeline with the status that the pipeline ended with."""
    import os

    from components.close_run.closing import end_run
    from components.form import folder_of_run
    from recmill.tracking import find_server

    end_run(
        state=status.state,
        workdir=folder_of_run(workdir, volume),
        tracking_uri=find_server(),
        pipeline_run_id=os.environ.get("KFP_RUN_ID", ""),
        run_name=run_name,
    )
