from kfp import dsl

from components.images import DATA, image


@dsl.component(base_image=image(DATA), install_kfp_package=False)
def close_run(
    status: dsl.PipelineTaskFinalStatus, workdir: str, tracking_uri: str, parent_run_id: str, run_name: str = ""
) -> None:
    """End the MLflow run of the pipeline with the status that the pipeline ended with."""
    import os

    from components.close_run.closing import end_run

    end_run(
        state=status.state,
        workdir=workdir,
        tracking_uri=tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", ""),
        parent_run_id=parent_run_id,
        pipeline_run_id=os.environ.get("KFP_RUN_ID", ""),
        run_name=run_name,
    )
