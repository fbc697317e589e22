from kfp import dsl
from kfp.dsl import HTML, Input, Markdown, Model, Output

from components.images import TRAINER, image


@dsl.component(base_image=image(TRAINER), install_kfp_package=False)
def compare_runs(
    models: Input[list[Model]],
    comparison_page: Output[HTML],
    comparison_summary: Output[Markdown],
    workdir: str,
) -> None:
    """Compare trainings on the same data; the first is the baseline."""
    import fsspec

    from components.compare_runs.folders import order_runs, result_rows
    from components.outputs import path_of
    from components.summaries import comparison_rows, write_table
    from recmill.report import build_report
    from recmill.tracking import step_run

    runs = order_runs([path_of(model) for model in models])
    with step_run(
        "compare_runs",
        workdir=workdir,
        inputs={"runs": ", ".join(runs)},
    ) as step:
        written = build_report(runs, out=step.path("comparison.html"))
        step.outputs["report"] = {"path": str(written)}
        with fsspec.open(str(written), "rb") as source, open(comparison_page.path, "wb") as target:
            step.record({"written_bytes": target.write(source.read())})
        rows = result_rows(runs)
        for name, row in rows.items():
            variant = name.removeprefix("+")  # MLflow allows no plus sign in the name of a metric
            step.record({f"auc_{variant}": row["auc"], f"samples_per_s_{variant}": row["samples_per_s"]})
        write_table(comparison_summary, "Each switch against the baseline", comparison_rows(rows))
