# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Every way in that OpenSSH knows is a launcher's, too: keys, ports, aliases, jump hosts,
addresses, other programs.
"""

from __future__ import annotations

import sys

import pytest
from tests.launch.conftest import WORLD, printed_json
from tests.launch.namespace_cluster import HOME, SUBNET_V6

pytestmark = pytest.mark.slow


def world(cluster, *arguments, size=2, **env):
    """The hosts of the ranks of a world, in order; without arguments its size is not asked for
    either.
    """
    cluster.write("world.py", WORLD)
    asked = ["-np", size] if arguments else []
    done = cluster.launched(*asked, *arguments, sys.executable, "world.py", **env)
    assert done.returncode == 0, done.stderr
    words = printed_json(done.stdout)
    assert [(word["rank"], word["size"], word["right"]) for word in words] == [
        (rank, size, True) for rank in range(size)
    ]
    return [word["host"] for word in words]


def test_four_hosts_are_one_world(hosts):
    cluster = hosts("h1", "h2", "h3", "h4")
    found = world(cluster, "-H", "h1:2,h2:2,h3:2,h4:2", size=8)
    assert found == ["h1", "h1", "h2", "h2", "h3", "h3", "h4", "h4"]


def test_a_port_and_an_identity_file_are_sshs(hosts):
    cluster = hosts("h1", "h2", listen=False)
    for name in ("h1", "h2"):
        cluster[name].listen(port=2222)
    cluster.login(cluster["head"], key="/run/job/mine")
    assert world(cluster, "-H", "h1:1,h2:1", "-p", 2222, "-i", "mine") == ["h1", "h2"]
    assert world(
        cluster, "-H", "h1:1,h2:1", "--ssh-port", 2222, "--ssh-identity-file", "/run/job/mine"
    ) == ["h1", "h2"]


def test_an_alias_of_the_users_configuration_is_a_host(hosts):
    cluster = hosts("h1", "h2", listen=False)
    cluster["h1"].listen(port=2201)
    cluster["h2"].listen(port=2202)
    config = f"""
Host left
    HostName h1
    Port 2201
Host right
    HostName {cluster["h2"].address}
    Port 2202
Host left right
    User root
    IdentityFile ~/.ssh/cluster
"""
    cluster.login(cluster["head"], key=f"{HOME}/.ssh/cluster", config=config)
    assert world(cluster, "-H", "left:1,right:1") == ["h1", "h2"]


def test_a_host_behind_a_jump_host_is_reached_through_it(hosts):
    cluster = hosts("jump", "h1", "h2", listen=False)
    cluster["jump"].listen()
    # Whoever does not come from the jump host is not let in.
    for name in ("h1", "h2"):
        cluster[name].listen(options=f"AllowUsers root@{cluster['jump'].address}")
    cluster.login(cluster["head"])
    assert "Permission denied" in cluster["head"].run("ssh", "h1", "true").stderr
    cluster.login(cluster["head"], config="Host h1 h2\n    ProxyJump jump\n")
    assert world(cluster, "-H", "h1:1,h2:1") == ["h1", "h2"]


def test_a_user_may_stand_before_the_host(hosts):
    cluster = hosts("h1")
    assert world(cluster, "-H", "root@h1:2") == ["h1", "h1"]


def test_this_host_needs_no_ssh_by_any_of_its_names(hosts):
    cluster = hosts("h1")  # `head` has no sshd
    for name in (
        "localhost",
        "head",
        cluster["head"].address,
        "127.0.0.1",
        f"[{cluster['head'].address_v6}]",
    ):
        assert world(cluster, "-H", f"{name}:1,h1:1") == ["head", "h1"], name


def test_ipv6_addresses_are_hosts_on_the_command_line_and_in_a_file(hosts):
    cluster = hosts("h1", "h2")
    first, second = cluster["h1"].address_v6, cluster["h2"].address_v6
    assert world(cluster, "-H", f"[{first}]:1,[{second}]:1") == ["h1", "h2"]
    cluster["head"].write("hostfile", f"{first} slots=1\n[{second}]:1\n")
    assert world(cluster, "-hostfile", "hostfile") == ["h1", "h2"]


def test_hosts_may_have_ipv6_alone(hosts):
    cluster = hosts("h1", "h2")
    for host in cluster.hosts.values():
        done = host.run("ip", "-4", "address", "flush", "dev", "eth0")
        assert done.returncode == 0, done.stderr
    assert SUBNET_V6 in cluster["h1"].run("ip", "address").stdout
    assert world(cluster, "-H", "h1-v6:1,h2-v6:1") == ["h1", "h2"]


def test_a_host_file_has_comments_blank_lines_and_hosts_without_slots(hosts):
    cluster = hosts("h1", "h2", "h3")
    cluster["head"].write("hostfile", "# the cluster\n\nh1 slots=2  # the big one\nh2:1\n   h3\n")
    assert world(cluster, "--hostfile", "hostfile", size=4) == ["h1", "h1", "h2", "h3"]
    # Slots beyond `-np` stay free.
    assert world(cluster, "--hostfile", "/run/job/hostfile", size=3) == ["h1", "h1", "h2"]


def test_a_login_shell_that_prints_disturbs_nothing(hosts):
    cluster = hosts("h1", "h2")
    for name in ("h1", "h2"):
        cluster[name].write(
            f"{HOME}/.bashrc", "echo Welcome to the cluster\nprintf 'no end of line' >&2\n"
        )
    assert "Welcome" in cluster["head"].run("ssh", "h1", "true").stdout
    assert world(cluster, "-H", "h1:1,h2:1") == ["h1", "h2"]


# What Kubeflow's operator gives to its launchers, with ssh in the place of the cluster's own way
# into a container.
KUBEXEC = """#!/bin/sh
pod=$1
shift
exec ssh -o BatchMode=yes "$pod" "$*"
"""
# `kubectl exec -i POD -- PROGRAM ARGUMENTS...`: each argument as it came.
KUBECTL = """#!/bin/bash
[ "$1 $2" = "exec -i" ] && [ "$4" = -- ] || exit 9
pod=$3
shift 4
exec ssh -o BatchMode=yes "$pod" "${*@Q}"
"""


def test_another_program_than_ssh_reaches_hosts(hosts):
    cluster = hosts("h1", "h2")
    cluster["head"].write("kubexec.sh", KUBEXEC, mode=0o755)
    assert world(cluster, "-H", "h1:1,h2:1", "--ssh-command", "/run/job/kubexec.sh") == ["h1", "h2"]


def test_ssh_takes_options_of_the_users(hosts):
    cluster = hosts("h1", "h2", listen=False)
    for name in ("h1", "h2"):
        cluster[name].listen(port=2222)
    cluster.login(cluster["head"])
    (cluster["head"].root / HOME[1:] / ".ssh/config").rename(
        cluster["head"].root / "run/job/my config"
    )
    cluster["head"].write("my config", "Host *\n    Port 2222\n")
    assert world(cluster, "-H", "h1:1,h2:1", "--ssh-command", "ssh -F '/run/job/my config' -C") == [
        "h1",
        "h2",
    ]


def test_inside_an_mpijob_hosts_and_the_way_to_them_are_known(hosts):
    cluster = hosts("h1", "h2")
    cluster["head"].write("hostfile", "h1 slots=1\nh2 slots=1\n")
    cluster["head"].write("bin/kubectl", KUBECTL, mode=0o755)
    cluster["head"].write("kubexec.sh", KUBEXEC, mode=0o755)
    env = {
        "OMPI_MCA_orte_default_hostfile": "/run/job/hostfile",
        "OMPI_MCA_plm_rsh_agent": "/run/job/kubexec.sh",
        "PATH": f"/run/job/bin:{cluster['head'].environment()['PATH']}",
    }
    assert world(cluster, **env) == ["h1", "h2"]


@pytest.mark.parametrize(
    ("files", "variables"),
    [
        (
            {},
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "h[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"},
        ),
        ({}, {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 2 h2 2"}),
        ({"nodes": "h1\nh1\nh2\nh2\n"}, {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "/run/job/nodes"}),
        ({"nodes": "h1\nh1\nh2\nh2\n"}, {"PBS_JOBID": "7.front", "PBS_NODEFILE": "/run/job/nodes"}),
        (
            {"nodes": "h1 2 all.q@h1 UNDEFINED\nh2 2 all.q@h2 UNDEFINED\n"},
            {"PE_HOSTFILE": "/run/job/nodes"},
        ),
    ],
    ids=["slurm", "lsf", "lsf-file", "pbs", "grid-engine"],
)
def test_inside_a_batch_system_hosts_are_not_asked_for(hosts, files, variables):
    cluster = hosts("h1", "h2")
    for name, text in files.items():
        cluster["head"].write(name, text)
    # The systems' own programs, if this machine has them, have no such job: hosts are reached by
    # ssh.
    found = world(
        cluster,
        size=4,
        PATH=cluster["head"].without_programs("srun", "blaunch", "qrsh"),
        **variables,
    )
    assert found == ["h1", "h1", "h2", "h2"]
