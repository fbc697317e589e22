"""Where a pipeline's tasks run: their images and, on a cluster, resources, volumes, secrets and privileges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kfp import dsl, kubernetes

from components.close_run.component import close_run
from components.images import CUDA_SUFFIX, IMAGES, TAG, TRAINER, image
from components.open_run.component import open_run
from components.placement import USER, VARIABLE, ClusterPlacement
from recmill.tracking.server import LOGIN, TRACKING_URI

SHORT_NAMES = {step: step.split("_")[0] for step in IMAGES} | {"train_baseline": "baseline", "train_shared": "shared"}
STARTS_PODS = ("prepare_log", "generate_data", "train_baseline", "train_model", "train_shared")


@dataclass(frozen=True, kw_only=True)
class Site:
    """Places tasks. Without a placement they run on this machine, where only the image's name matters.

    `nproc` is the number of training processes per pod that the form of a run proposes.
    """

    image_tag: str = TAG
    registry: str = ""
    placement: ClusterPlacement | None = None
    nproc: int = 1

    def place(self, step: str, task: dsl.PipelineTask) -> dsl.PipelineTask:
        """The task in the image of its step, with the resources that the placement gives the step."""
        name = self.image_of(step)
        task.set_container_image(name)
        # Not a parameter: an id that changes with every run would defeat Kubeflow's cache.
        kubernetes.use_field_path_as_env(task, "KFP_RUN_ID", "metadata.labels['pipeline/runid']")
        kubernetes.use_field_path_as_env(
            task, "KFP_RUN_NAME", "metadata.annotations['pipelines.kubeflow.org/run_name']"
        )
        if self.placement:
            _place_on_cluster(step, task, replace(self.placement, image=name), self.nproc)
        return task

    def image_of(self, step: str) -> str:
        needs_cuda = self.placement and IMAGES[step] == TRAINER and self.placement.step(step).gpus
        tag = self.image_tag + CUDA_SUFFIX if needs_cuda else self.image_tag
        return image(IMAGES[step], tag=tag, registry=self.registry)

    def open(self, workdir: Any, **form: Any) -> Mapping[str, Any]:
        """The first task: it checks the form of the run. Its outputs are the run's folder and what steps are told."""
        opened = self.place("open_run", open_run(workdir=workdir, volume=self.volume, **form))
        told: Mapping[str, Any] = opened.set_caching_options(False).outputs
        return told

    @contextmanager
    def closing(self, workdir: Any, steps: Iterable[str]) -> Iterator[None]:
        """Whatever ends the tasks inside, a last task ends the MLflow run; `recmill run` does so itself.

        Kubeflow's picture of a run shows the tasks inside as one box, so its name lists them.
        """
        if not self.placement:
            yield
            return
        name = dsl.PIPELINE_JOB_NAME_PLACEHOLDER
        closed = self.place("close_run", close_run(workdir=workdir, volume=self.volume, run_name=name))
        closed.set_caching_options(False)
        with dsl.ExitHandler(closed, name=", ".join(SHORT_NAMES[step] for step in steps)):
            yield

    @property
    def volume(self) -> str:
        """Where steps see the volume of the runs; "" on this machine."""
        return self.placement.mount if self.placement else ""


LOCAL = Site()


def field_of(item: Any, name: str) -> Any:
    """A field of the current item of dsl.ParallelFor. Not `item.name`: that is kfp's name of the item.

    Pass it on unchanged: kfp's local runner does not find it, or any output of a task, inside a longer text of a loop.
    """
    return item.__getattr__(name)


def _place_on_cluster(step: str, task: dsl.PipelineTask, placement: ClusterPlacement, nproc: int) -> None:
    given = placement.step(step)
    requests = given.resources(nproc)["requests"]
    task.set_cpu_request(requests["cpu"]).set_cpu_limit(given.cpu)
    task.set_memory_request(requests["memory"]).set_memory_limit(given.memory)
    if given.gpus:
        task.set_accelerator_type(placement.gpu_type).set_accelerator_limit(given.gpus)
    if given.retries:
        task.set_retry(given.retries, backoff_duration="30s", backoff_factor=2, backoff_max_duration="600s")
    kubernetes.set_timeout(task, given.timeout_s)
    kubernetes.set_image_pull_policy(task, "IfNotPresent")  # tags never move
    kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
    kubernetes.mount_pvc(task, placement.claim, placement.mount)
    for key, value in placement.labels("step").items():
        kubernetes.add_pod_label(task, key, value)
    for key, value in given.node_selector.items():
        kubernetes.add_node_selector(task, key, value)
    for toleration in given.tolerations:
        kubernetes.add_toleration(task, **toleration.to_manifest())
    if given.shm:
        kubernetes.empty_dir_mount(task, "shm", "/dev/shm", medium="Memory", size_limit=given.shm)
    # Only the names of the secret and its keys are in the pipeline; a server without logins needs no secret.
    logins = {name: name.replace("MLFLOW", "RECMILL") for name in LOGIN}
    kubernetes.use_secret_as_env(task, placement.secret, logins, optional=True)
    task.set_env_variable(TRACKING_URI, placement.tracking_uri)
    if step in STARTS_PODS:
        task.set_env_variable(VARIABLE, placement.to_json())
        kubernetes.use_field_path_as_env(task, "RECMILL_NAMESPACE", "metadata.namespace")
        kubernetes.use_field_path_as_env(task, "RECMILL_POD", "metadata.name")
        kubernetes.use_field_path_as_env(task, "RECMILL_POD_IP", "status.podIP")
