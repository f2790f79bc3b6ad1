# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Every example of the pages about running does what the page says, on hosts with the names of
the page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tests.launch.conftest import WORLD, printed_json
from tests.launch.namespace_cluster import HOME
from tests.launch.test_elastic import TRAIN, finish, members, pids
from tests.pages import blocks_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NODES = ["node1", "node1", "node2", "node2"]


def blocks(page):
    """The examples of a page that tests execute, in order: their kind and their text."""
    found = blocks_of(f"docs/user-guide/running/{page}")
    return [(block.kind, block.text) for block in found if block.why_not is None]


@pytest.fixture
def cluster(hosts):
    cluster = hosts("node1", "node2")
    cluster.login(cluster["head"], key=f"{HOME}/.ssh/cluster")
    cluster.login(cluster["node1"])
    cluster.login(cluster["head"])
    cluster.write("train.py", WORLD)
    return cluster


def ran(cluster, script, **env):
    """The hosts of the ranks of the world that a script starts, in order."""
    done = cluster["head"].run("bash", "-e", "-c", script, "bash", **env)
    assert done.returncode == 0, script + done.stderr
    words = printed_json(done.stdout)
    assert [(word["rank"], word["right"]) for word in words] == [
        (rank, True) for rank in range(len(words))
    ], script
    return [word["host"] for word in words]


def test_the_page_about_hosts(cluster):
    commands = 0
    for kind, text in blocks("hosts.md"):
        if kind == "ssh-config":
            cluster["head"].write(f"{HOME}/.ssh/config", text, mode=0o600)
            continue
        assert kind == "sh", f"nothing runs this: {text}"
        for script in re.split(r"^(?=farandole run )", text, flags=re.MULTILINE):
            starts = script.startswith("farandole run ")
            wanted = NODES[: 3 if "-np 3" in script else 4] if starts else []
            assert ran(cluster, script) == wanted, script
            commands += starts
    assert commands >= 10


# What the systems tell their jobs. Their own ways to a host are not here: hosts are reached by ssh.
SYSTEMS = {
    "#SBATCH": {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_TASKS_PER_NODE": "2(x2)",
    },
    "#BSUB": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "node1 2 node2 2"},
    "#PBS": {"PBS_JOBID": "7.front", "PBS_NODEFILE": "/run/job/nodes", "PBS_O_WORKDIR": "/run/job"},
    "#$ ": {"JOB_ID": "7", "PE_HOSTFILE": "/run/job/pe"},
}

SKYPILOT = {
    "SKYPILOT_NODE_IPS": "node1\nnode2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NUM_GPUS_PER_NODE": "2",
}


def test_the_page_about_batch_systems(cluster):
    head = cluster["head"]
    head.write("nodes", "node1\nnode1\nnode2\nnode2\n")
    head.write("pe", "node1 2 all.q@node1 UNDEFINED\nnode2 2 all.q@node2 UNDEFINED\n")
    head.write("hostfile", "node1 slots=2\nnode2 slots=2\n")
    path = head.without_programs("srun", "blaunch", "qrsh")
    seen = set()
    for kind, text in blocks("batch-systems.md"):
        if kind == "bash":
            (mark,) = [mark for mark in SYSTEMS if f"\n{mark}" in text]
            assert ran(cluster, text, PATH=path, **SYSTEMS[mark]) == NODES, text
        elif text.startswith("lifecycle:"):
            continue  # the next test
        elif kind == "yaml":
            launcher = yaml.safe_load(text)["spec"]["mpiReplicaSpecs"]["Launcher"]["template"][
                "spec"
            ]["containers"][0]
            script = " ".join(launcher["command"])
            assert (
                ran(cluster, script, OMPI_MCA_orte_default_hostfile="/run/job/hostfile") == NODES
            ), text
        else:
            assert kind == "sh", f"nothing runs this: {text}"
            variables = SKYPILOT if "SKYPILOT" in text else {}
            assert ran(cluster, text, **variables) == NODES, text
        seen.add(kind)
    assert seen == {"bash", "yaml", "sh"}


def test_the_hook_of_the_page_makes_the_workers_of_a_pod_leave_before_it_ends(hosts):
    (text,) = [text for _, text in blocks("batch-systems.md") if text.startswith("lifecycle:")]
    hook = yaml.safe_load(text)["lifecycle"]["preStop"]["exec"]["command"]
    cluster = hosts("h1", "h2")
    cluster.write("train.py", TRAIN)
    flags = ("-H", "h1:1,h2:1", "--min-np", 1, "--blacklist-cooldown-range", 600, 600)
    running = cluster.launch(*flags, "python", "train.py")
    before = members(running, "h1", "h2")
    done = cluster["h2"].run(*hook)
    assert done.returncode == 0, done.stderr
    assert not [one for one in cluster["h2"].processes() if one.argv == ("python", "train.py")]
    cluster["h2"].power_off()
    assert pids(members(running, "h1")) == pids(before)[:1]
    said = finish(cluster, running, 1)
    for word in ("h2", "lost", "was ended by"):
        assert word not in said, said


def test_the_example_of_digits_trains_one_model_on_two_hosts_of_two(hosts):
    cluster = hosts("h1", "h2")
    example = (ROOT / "examples/torch_digits.py").read_text()
    cluster.write("torch_digits.py", example)
    words = ["-np", 4, "-H", "h1:2,h2:2", "python", "torch_digits.py", "--epochs", 3]
    done = cluster.launched(*words, limit=240.0)
    assert done.returncode == 0, done.stderr
    accuracy = re.findall(
        r"^\[0\]<stdout>:epoch 3: .*accuracy (\d\.\d+)$", done.stdout, re.MULTILINE
    )
    assert len(accuracy) == 1, done.stdout
    assert float(accuracy[0]) > 0.8, done.stdout
