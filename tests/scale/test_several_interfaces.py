# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Two hosts with two networks between them, each of which is limited by the kernel.

The hosts are network namespaces, joined by two veth pairs. Tensors must cross both networks side by
side, and a job must work with one of them.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pytest
from tests.launch import namespace_cluster
from tests.launch.namespace_cluster import Hold, checked
from tests.needs import skipped_without
from tests.programs import program_path
from tests.started import on_host, together

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.timeout(300),
    skipped_without(namespace_cluster.missing()),
]
SUBNETS: Final = ("10.231.80", "10.231.81")
NETWORKS: Final = tuple(f"{subnet}.0/24" for subnet in SUBNETS)
SLOW: Final = "100mbit"
"""Slow enough for the networks to decide, and not processors that other tests use, too."""
FAST: Final = "1gbit"
LENGTH: Final = 8 << 20
"""Elements of 4 bytes."""
ROUNDS: Final = 3
RANK: Final = program_path(__file__, "count_sent_bytes")


@contextmanager
def two_hosts(rate: str = FAST) -> Iterator[list[Hold]]:
    """Yields two hosts with the interfaces `eth0` and `eth1`."""
    hosts = [Hold("--net", "--uts", "--ipc") for _ in range(2)]
    try:
        for number, subnet in enumerate(SUBNETS):
            names = [f"fi{os.getpid() % 100000}{end}{number}" for end in "ab"]
            checked(["ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1]])
            for place, (name, host) in enumerate(zip(names, hosts, strict=True)):
                checked(["ip", "link", "set", name, "netns", str(host.pid)])
                inside, card = host.inside("--net"), f"eth{number}"
                checked([*inside, "ip", "link", "set", name, "name", card])
                address = f"{subnet}.{place + 1}/24"
                checked([*inside, "ip", "address", "add", address, "dev", card])
                checked([*inside, "ip", "link", "set", card, "up"])
                checked([*inside, "ip", "link", "set", "lo", "up"])
                shape = f"root tbf rate {rate} burst 256kb latency 100ms".split()
                checked([*inside, "tc", "qdisc", "add", "dev", card, *shape])
        yield hosts
    finally:
        for host in hosts:
            host.end()


def job(hosts, port, **extra):
    """Returns what each of two ranks printed, and what they logged."""
    told = {
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_SIZE": "1",
        "FARANDOLE_RENDEZVOUS": f"{SUBNETS[0]}.1:{port}",
        "FARANDOLE_JOB_SECRET": "a secret that both hosts were given",
        "FARANDOLE_PEER_TIMEOUT": "10",
        **extra,
    }
    environments = [{"HOROVOD_RANK": str(rank), **told} for rank in range(2)]
    prefixes = [
        [*host.inside("--net", "--uts", "--ipc"), *on_host(f"host-{rank}")]
        for rank, host in enumerate(hosts)
    ]
    ended = together(environments, RANK, prefixes, [str(LENGTH), str(ROUNDS)])
    assert [one.status for one in ended] == [0, 0], "".join(one.err for one in ended)
    return [json.loads(one.out) for one in ended], "".join(one.err for one in ended)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.timing
def test_an_allreduce_over_two_interfaces_takes_two_thirds_of_the_time_over_one():
    # A rank sends its input once, and each interface carries half of that.
    half = ROUNDS * LENGTH * 4 // 2
    best = {"both": math.inf, "one": math.inf}
    with two_hosts(SLOW) as hosts:
        # More turns only if other processes have had the processors.
        for turn in range(3):
            port = 47200 + 2 * turn
            both, said = job(hosts, port, FARANDOLE_BIND_ADDRESS=",".join(NETWORKS))
            one, _ = job(hosts, port + 1, FARANDOLE_BIND_ADDRESS=NETWORKS[0])
            assert "interface" not in said, said
            for rank in both:
                assert min(rank["sent"]["eth0"], rank["sent"]["eth1"]) > 0.9 * half, both
            assert all(rank["sent"]["eth1"] < half // 100 for rank in one), one
            for name, ranks in (("both", both), ("one", one)):
                best[name] = min(best[name], max(rank["seconds"] for rank in ranks))
            if best["both"] <= 0.65 * best["one"]:
                break
    assert best["both"] <= 0.65 * best["one"], best


def cut_by_the_dialer(hosts):
    """Takes the second interface of the host of rank 1, which dials."""
    checked([*hosts[1].inside("--net"), "ip", "link", "set", "eth1", "down"])


def cut_by_the_acceptor(hosts):
    """Takes the second interface of the host of rank 0."""
    checked([*hosts[0].inside("--net"), "ip", "link", "set", "eth1", "down"])


def cut_silently(hosts):
    """Lets packets of rank 1 on the second network go to a card that does not exist."""
    nowhere = ["lladdr", "02:00:00:00:00:99", "nud", "permanent"]
    entry = [f"{SUBNETS[1]}.1", *nowhere, "dev", "eth1"]
    checked([*hosts[1].inside("--net"), "ip", "neighbour", "add", *entry])


@pytest.mark.parametrize("cut", [cut_by_the_dialer, cut_by_the_acceptor, cut_silently])
def test_a_job_whose_second_network_is_cut_uses_the_first_and_says_so(cut):
    with two_hosts() as hosts:
        cut(hosts)
        ranks, said = job(hosts, 47210, FARANDOLE_BIND_ADDRESS=",".join(NETWORKS))
    assert all(rank["sent"]["eth0"] > ROUNDS * LENGTH * 4 for rank in ranks), ranks
    told = (
        f" do not use the interface with {SUBNETS[1]}.2, because no connection to {SUBNETS[1]}.1:"
    )
    assert said.count(told) == 1, said
    assert "links to rank 0 on host-0-" in said, said


def test_a_host_without_the_second_network_uses_the_first_and_says_so():
    with two_hosts() as hosts:
        checked([*hosts[0].inside("--net"), "ip", "address", "flush", "dev", "eth1"])
        ranks, said = job(hosts, 47211, FARANDOLE_BIND_ADDRESS=",".join(NETWORKS))
    assert all(rank["sent"]["eth0"] > ROUNDS * LENGTH * 4 for rank in ranks), ranks
    assert f"no address of this host is in {NETWORKS[1]} of FARANDOLE_BIND_ADDRESS" in said, said


def test_a_bad_entry_and_networks_that_no_host_has_are_named():
    for wish, named in [
        (f"{NETWORKS[0]},eth1", "such as 10.0.0.0/8: eth1"),
        ("10.1.2.0/24,10.1.3.0/24", "no address of this host is in 10.1.2.0/24,10.1.3.0/24"),
    ]:
        code = "import farandole.numpy as hvd\nhvd.init()"
        told = {
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(os.getpid()),
            "FARANDOLE_BIND_ADDRESS": wish,
        }
        (ended,) = together([{"HOROVOD_RANK": "0", **told}], code)
        assert ended.status != 0
        assert named in ended.err, ended.err
