from kfp import dsl
from kfp.dsl import Input, Markdown, Model, Output

from components.images import TRAINER, image


@dsl.component(base_image=image(TRAINER), install_kfp_package=False)
def deploy_model(model: Input[Model], rollout_summary: Output[Markdown], deploy: str, workdir: str) -> None:
    """Serve the trained model if it beats the one that serves; go back to that one if servers do not take it."""
    from components.deploy_model.step import deploy_trained
    from components.outputs import path_of
    from recmill.tracking import step_run

    with step_run("deploy_model", workdir=workdir, inputs={"model": path_of(model), "deploy": deploy}) as step:
        deploy_trained(step, deploy, registered=str(model.metadata.get("version", "")), summary=rollout_summary)
