from kfp import dsl
from kfp.dsl import HTML, Artifact, Input, Model, Output

from components.images import TRAINER, image


@dsl.component(base_image=image(TRAINER), install_kfp_package=False)
def report(
    profile: Input[Artifact],
    plan: Input[Artifact],
    allocation: Input[Artifact],
    model: Input[Model],
    report_page: Output[HTML],
    workdir: str,
) -> None:
    """Write the page that shows the whole run. The inputs make this step wait for what the page shows."""
    import fsspec

    from components.outputs import path_of
    from recmill.report import build_report
    from recmill.tracking import step_run

    inputs = {"profile": path_of(profile), "plan": path_of(plan), "allocation": path_of(allocation)}
    with step_run(
        "report",
        workdir=workdir,
        inputs=inputs | {"model": path_of(model)},
    ) as step:
        written = build_report([workdir], out=step.path("report.html"))
        step.outputs["report"] = {"path": str(written)}
        with fsspec.open(str(written), "rb") as source, open(report_page.path, "wb") as target:
            step.record({"written_bytes": target.write(source.read())})
