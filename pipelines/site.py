"""Where a pipeline's tasks run: their images and, on a cluster, resources, volumes, secrets and privileges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kfp import dsl, kubernetes

from components.close_run.component import close_run
from components.images import CUDA_SUFFIX, IMAGES, TAG, TRAINER, image
from components.placement import USER, VARIABLE, ClusterPlacement

STARTS_PODS = ("generate_data", "train_baseline", "train_model", "train_shared")


@dataclass(frozen=True, kw_only=True)
class Site:
    """Places tasks. Without a placement they run on this machine, where only the image's name matters."""

    image_tag: str = TAG
    registry: str = ""
    placement: ClusterPlacement | None = None

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
            _place_on_cluster(step, task, replace(self.placement, image=name))
        return task

    def image_of(self, step: str) -> str:
        needs_cuda = self.placement and IMAGES[step] == TRAINER and self.placement.step(step).gpus
        tag = self.image_tag + CUDA_SUFFIX if needs_cuda else self.image_tag
        return image(IMAGES[step], tag=tag, registry=self.registry)

    @contextmanager
    def closing(self, where: dict[str, Any]) -> Iterator[None]:
        """Whatever ends the tasks inside, a last task ends the MLflow run; `recmill run` does so itself."""
        if not self.placement:
            yield
            return
        closed = self.place("close_run", close_run(run_name=dsl.PIPELINE_JOB_NAME_PLACEHOLDER, **where))
        closed.set_caching_options(False)
        with dsl.ExitHandler(closed, name="run"):
            yield


LOCAL = Site()


def field_of(item: Any, name: str) -> Any:
    """A field of the current item of dsl.ParallelFor. Not `item.name`: that is kfp's name of the item.

    Pass it on unchanged: kfp's local runner does not find it inside a longer text.
    """
    return item.__getattr__(name)


def _place_on_cluster(step: str, task: dsl.PipelineTask, placement: ClusterPlacement) -> None:
    given = placement.step(step)
    task.set_cpu_request(given.cpu_request).set_cpu_limit(given.cpu)
    task.set_memory_request(given.memory_request).set_memory_limit(given.memory)
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
    logins = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    kubernetes.use_secret_as_env(task, placement.secret, {name: name for name in logins}, optional=True)
    task.set_env_variable("MLFLOW_TRACKING_URI", placement.tracking_uri)
    if step in STARTS_PODS:
        task.set_env_variable(VARIABLE, placement.to_json())
        kubernetes.use_field_path_as_env(task, "RECMILL_NAMESPACE", "metadata.namespace")
        kubernetes.use_field_path_as_env(task, "RECMILL_POD", "metadata.name")
        kubernetes.use_field_path_as_env(task, "RECMILL_POD_IP", "status.podIP")
