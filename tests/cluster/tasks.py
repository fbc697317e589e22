"""Tasks of the compiled pipeline as Jobs, doing what Kubeflow's launcher does.

The container, its command, its environment and its limits are those of the compiled YAML. Kubeflow would fill in the
executor input and read the executor output; here the test does, over the volume of the runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.deployment import TestSite

CHANNEL = "pipelinechannel--"


@dataclass(kw_only=True)
class PipelineRun:
    """One run of a compiled pipeline whose tasks are started one by one."""

    site: TestSite
    run_id: str
    arguments: dict[str, Any]
    spec: dict[str, Any]
    on_cluster: dict[str, Any]
    artifacts: dict[str, dict[str, Any]] = field(default_factory=dict)  # task: {output: artifact}
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)  # task: {output: value}

    @classmethod
    def load(cls, path: Path, *, site: TestSite, run_id: str, arguments: dict[str, Any]) -> PipelineRun:
        spec, platform = yaml.safe_load_all(path.read_text(encoding="utf-8"))
        on_cluster = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        defaults = {
            name: entry["defaultValue"]
            for name, entry in spec["root"]["inputDefinitions"]["parameters"].items()
            if "defaultValue" in entry
        }
        return cls(site=site, run_id=run_id, arguments=defaults | arguments, spec=spec, on_cluster=on_cluster)

    def start(self, task: str, *, retries: int = 0) -> str:
        """Create the Job of a task and return its name."""
        entry = self.find(task)
        component = self.spec["components"][entry["componentRef"]["name"]]
        container = self.spec["deploymentSpec"]["executors"][component["executorLabel"]]["container"]
        given = self.on_cluster[component["executorLabel"]]
        folder = f"/runs/kfp/{self.run_id}/{task}"
        executor_input = json.dumps(self.executor_input(entry, component, folder))
        environment = [{"name": e["name"], "value": e["value"]} for e in container.get("env", [])]
        environment += [
            {"name": e["name"], "valueFrom": {"fieldRef": {"fieldPath": e["fieldPath"]}}}
            for e in given["fieldPathAsEnv"]
        ]
        for secret in given["secretAsEnv"]:
            name = secret["secretNameParameter"]["runtimeValue"]["constant"]
            environment += [
                {"name": key["envVar"], "valueFrom": {"secretKeyRef": {"name": name, "key": key["secretKey"]}}}
                for key in secret["keyToEnv"]
            ]
        name = f"{task}-{self.run_id}"
        job = self.site.job(
            name,
            {
                "image": container["image"],
                "command": container["command"],
                "args": [text.replace("{{$}}", executor_input) for text in container["args"]],
                "env": environment,
                "resources": {
                    kind + "s": {name: given_size(container, name, kind) for name in ("cpu", "memory")}
                    for kind in ("request", "limit")
                },
            },
            has_token=True,
            retries=retries,
            labels={"pipeline/runid": self.run_id, **given.get("podMetadata", {}).get("labels", {})},
        )
        self.site.cluster.delete("job", name, namespace=self.site.namespace)
        self.site.cluster.apply(job, namespace=self.site.namespace)
        return name

    def run(self, task: str, *, timeout_s: float = 300) -> None:
        """Start a task, wait for it, and record its outputs."""
        name = self.start(task)
        self.site.cluster.finish_job(name, namespace=self.site.namespace, timeout_s=timeout_s)
        made = self.spec["components"][self.find(task)["componentRef"]["name"]].get("outputDefinitions")
        if made is None:
            return
        said = self.site.shell(f"out-{task}-{self.run_id}", f"cat /runs/kfp/{self.run_id}/{task}/output.json")
        output = json.loads(said)
        self.artifacts[task] = {  # a step does not say what type its artifacts have; Kubeflow remembers it
            key: {**value["artifacts"][0], "type": made["artifacts"][key]["artifactType"]}
            for key, value in output.get("artifacts", {}).items()
        }
        self.parameters[task] = output.get("parameterValues", {})

    def close(self, state: str) -> None:
        """What Kubeflow does at the end: COMPLETE, FAILED, or RUNNING for a terminated run; it gives no reason."""
        status = {"state": state, "pipelineJobResourceName": self.run_id, "pipelineTaskName": "exit-handler-1"}
        self.arguments["status"] = json.dumps(status)
        parameters = self.find("close-run")["inputs"]["parameters"]
        parameters["status"] = {"runtimeValue": {"constant": status | {"error": {}}}}
        self.site.cluster.finish_job(self.start("close-run"), namespace=self.site.namespace)

    def find(self, task: str) -> dict[str, Any]:
        for dag in (self.spec["root"]["dag"], self.spec["components"]["comp-exit-handler-1"]["dag"]):
            if task in dag["tasks"]:
                found: dict[str, Any] = dag["tasks"][task]
                return found
        raise AssertionError(f"no task {task}")

    def executor_input(self, entry: dict[str, Any], component: dict[str, Any], folder: str) -> dict[str, Any]:
        inputs = entry.get("inputs", {})
        definitions = component.get("inputDefinitions", {}).get("parameters", {})
        parameters = {name: e["defaultValue"] for name, e in definitions.items() if "defaultValue" in e}
        for name, source in inputs.get("parameters", {}).items():
            if "runtimeValue" in source:
                parameters[name] = source["runtimeValue"]["constant"]
            elif "componentInputParameter" in source:
                parameters[name] = self.arguments[source["componentInputParameter"].removeprefix(CHANNEL)]
            elif "taskOutputParameter" in source:
                producer, key = (source["taskOutputParameter"][part] for part in ("producerTask", "outputParameterKey"))
                if producer not in self.parameters:
                    self.run(producer)
                parameters[name] = self.parameters[producer][key]
        for name, value in parameters.items():  # protobuf has only one number type
            if definitions.get(name, {}).get("parameterType") == "NUMBER_INTEGER":
                parameters[name] = int(value)
        artifacts = {}
        for name, source in inputs.get("artifacts", {}).items():
            produced = source["taskOutputArtifact"]
            artifacts[name] = {"artifacts": [self.artifacts[produced["producerTask"]][produced["outputArtifactKey"]]]}
        outputs = {
            name: {"artifacts": [{"name": name, "type": e["artifactType"], "uri": f"{folder}/{name}", "metadata": {}}]}
            for name, e in component.get("outputDefinitions", {}).get("artifacts", {}).items()
        }
        values = {
            name: {"outputFile": f"{folder}/{name}"}
            for name in component.get("outputDefinitions", {}).get("parameters", {})
        }
        return {
            "inputs": {"parameterValues": parameters, "artifacts": artifacts},
            "outputs": {"artifacts": outputs, "parameters": values, "outputFile": f"{folder}/output.json"},
        }


def given_size(container: dict[str, Any], name: str, kind: str) -> str:
    """A request or limit of the compiled pipeline."""
    return str(container["resources"][f"resource{name.title()}{kind.title()}"])
