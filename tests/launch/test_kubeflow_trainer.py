# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The manifests of the page kubeflow-trainer.md fit the operator's schemas, and their commands run
on hosts with the names and the host file that the operator gives to pods.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, Final

import jsonschema
import pytest
import yaml
from tests.launch.conftest import WORLD, printed_json
from tests.launch.test_elastic import TRAIN, finish, members, pids
from tests.pages import ROOT, blocks_of

from farandole.runner.show.train_job_status import TrainJobProgress

pytestmark = pytest.mark.slow

BLOCKS: Final = blocks_of("docs/user-guide/running/kubeflow-trainer.md")
RUNTIME, JOB, ELASTIC_JOB = [yaml.safe_load(block.text) for block in BLOCKS if block.kind == "yaml"]
SCHEMAS: Final = ROOT / ".tools" / "kubeflow-trainer"
HOSTFILE: Final = "/run/job/hostfile"


def strict(schema: Any) -> Any:
    """The schema with an error for each field that it does not have, which a server drops."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(part) for name, part in schema.items()}
    open_ended = made.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(made.get("properties"), dict) and made.get("type") == "object" and not open_ended:
        made.setdefault("additionalProperties", False)
    if made.pop("x-kubernetes-int-or-string", False):
        made = {"type": ["integer", "string"]}
    return made


@functools.cache
def schema_of(kind: str) -> Any:
    """The schema of a kind of object, from the operator's custom resource definitions."""
    files = list(SCHEMAS.glob("trainer.kubeflow.org_*.yaml"))
    if not files:
        pytest.skip("not downloaded: make .tools/kubeflow-trainer/ready")
    definitions = [yaml.safe_load(file.read_text()) for file in files]
    (found,) = [one for one in definitions if one["spec"]["names"]["kind"] == kind]
    (version,) = found["spec"]["versions"]
    assert version["name"] == "v1alpha1"
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # the server's own
    return schema


@pytest.mark.parametrize("manifest", [RUNTIME, JOB, ELASTIC_JOB], ids=["runtime", "job", "elastic"])
def test_a_manifest_of_the_page_fits_the_operators_schema(manifest: dict[str, Any]) -> None:
    assert manifest["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    schema = schema_of(manifest["kind"])
    jsonschema.validate(manifest, schema)
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["unknownField"] = 1
    with pytest.raises(jsonschema.ValidationError, match="unknownField"):
        jsonschema.validate(wrong, schema)


def test_a_status_that_the_launcher_sends_fits_the_operators_schema() -> None:
    progress = TrainJobProgress()
    progress.take_row("run", {"state": "running", "size": 2, "restarts": 0})
    for step in (1, 2):
        row = {"epoch": 0, "epochs": 2, "step": step, "steps": 4, "loss": 1 / step}
        progress.take_row("step", row)
    status = progress.status()
    assert {"progressPercentage", "estimatedRemainingSeconds", "metrics"} < set(status)
    schema = schema_of("TrainJob")["properties"]["status"]
    jsonschema.validate({"trainerStatus": status}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"trainerStatus": {**status, "progressPercentage": 101}}, schema)


def node_pods(job: dict[str, Any]) -> list[str]:
    """The names of a job's pods that run processes, as a JobSet gives them."""
    name = job["metadata"]["name"]
    return [
        f"{name}-node-0-{number}.{name}" for number in range(job["spec"]["trainer"]["numNodes"])
    ]


class Pods:
    """The pods of a TrainJob as hosts, and what the operator gives to the launcher."""

    def __init__(self, hosts: Any, job: dict[str, Any], program: str) -> None:
        self.job, self.names = job, node_pods(job)
        self.cluster = hosts(*self.names)
        slots = job["spec"]["trainer"]["numProcPerNode"]
        self.cluster["head"].write(
            HOSTFILE, "".join(f"{name} slots={slots}\n" for name in self.names)
        )
        self.cluster.write("train.py", program)
        self.variables = {
            "OMPI_MCA_orte_default_hostfile": HOSTFILE,
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_set_default_slots": str(slots),
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        }

    @property
    def flags(self) -> list[str]:
        """The words between `farandole run` and the program."""
        command = self.job["spec"]["trainer"]["command"]
        assert command[:2] + command[-2:] == ["farandole", "run", "python", "train.py"]
        return command[2:-2]

    def end(self, name: str) -> None:
        """Ends a pod as a kubelet does: the hook first, then all processes."""
        jobs = {job["name"]: job for job in RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]}
        (container,) = jobs["node"]["template"]["spec"]["template"]["spec"]["containers"]
        hook = container["lifecycle"]["preStop"]["exec"]["command"]
        done = self.cluster[name].run(*hook)
        assert done.returncode == 0, done.stderr
        self.cluster[name].power_off()


def test_the_job_of_the_page_has_its_ranks_in_all_pods(hosts: Any) -> None:
    pods = Pods(hosts, JOB, WORLD)
    done = pods.cluster.launched(*pods.flags, "python", "train.py", **pods.variables)
    assert done.returncode == 0, done.stderr
    found = printed_json(done.stdout)
    assert [one["host"] for one in found] == [name for name in pods.names for _ in range(2)]
    assert all(one["right"] for one in found)


def test_an_elastic_job_of_the_page_uses_pods_that_start_later_and_survives_their_end(
    hosts: Any,
) -> None:
    pods = Pods(hosts, ELASTIC_JOB, TRAIN)
    first, second, third = pods.names
    pods.cluster[third].cut()  # it has not started yet
    running = pods.cluster.launch(*pods.flags, "python", "train.py", **pods.variables)
    two = members(running, first, second)
    pods.cluster[third].restore()
    three = members(running, first, second, third)
    assert pids(three)[:2] == pids(two), "the others keep their processes"
    pods.end(third)
    assert pids(members(running, first, second)) == pids(two)
    said = finish(pods.cluster, running, 2)
    assert "was ended by" not in said, "a pod that is given back is no failure"
