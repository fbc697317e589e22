"""Each step loads what it uses: a budget in modules, because seconds depend on the machine."""

import subprocess
import sys

import pytest

HEAVY = (
    *("torch", "torchrec", "triton", "stable_baselines3", "gymnasium", "pandas", "sklearn", "scipy", "duckdb", "ibis"),
    *("kubernetes", "kfp", "mlflow", "fbgemm_gpu"),
)

# What a step imports -> the heavy packages that it may load.
ALLOWED = {
    "recmill.cli": (),
    "pipelines.commands, pipelines.server.commands, recmill.cli.training, recmill.cli.report": (),  # recmill --help
    "recmill.tracking": (),
    "recmill.data.sources": (),
    "recmill.data.cluster": ("duckdb", "ibis"),
    "recmill.data.storage.record_format, recmill.data.storage.deduplicated, recmill.data.hot.layout": (),
    "components.merge_data.merging": (),
    "recmill.profiling.access": ("scipy",),
    "recmill.planning.planner, recmill.training.config": (),
    "components.train_model.step, components.train_model.planning, recmill.training.trainer": (),
    "recmill.training.agent, recmill.training.preload": (),
    "recmill.training.rank.worker, torch.distributed.run": (
        "torch",
        "torchrec",
        "fbgemm_gpu",
    ),  # what ranks are forked from
    "recmill.tuning.allocation": ("torch", "torchrec", "fbgemm_gpu", "scipy"),
    "recmill.cli.serve, recmill.serving.server.environment, recmill.serving.server.settings": (),
    "recmill.serving.model, recmill.serving.export": ("torch",),
    "recmill.serving.server.process, recmill.serving.server.versions, recmill.serving.server.rollout": ("torch",),
    "recmill.report, components.compare_runs.folders": (),
}


@pytest.mark.parametrize("modules", ALLOWED)
def test_a_step_loads_only_what_it_uses(modules):
    code = f"import sys, {modules}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) <= set(ALLOWED[modules])
