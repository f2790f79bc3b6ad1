# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A relay between two hosts forwards handshakes and then does harm.

The ranks end with an error that names the connection, and no rank returns a sum that its peer did
not send. `crates/transport/tests/integration/relay` has the same for every offset; here is a whole
job, with its real network.
"""

from __future__ import annotations

import pytest
from tests.launch import namespace_cluster
from tests.needs import skipped_without
from tests.programs import program_path
from tests.started import on_host, together
from tests.trust.between import ACCEPTOR, ADDRESSES, BEAT, DIALER, LINK, PORTS, Harm, hosts

pytestmark = [
    pytest.mark.timeout(200),
    skipped_without(namespace_cluster.missing()),
]
# Sums whose every element is known; a rank that gets another one says so.
SUMS = program_path(__file__, "sum_over_relay")
TOLD = {
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_SIZE": "1",
    "FARANDOLE_RENDEZVOUS": f"{ADDRESSES[0]}:{PORTS[0]}",
    "FARANDOLE_PORT_RANGE": f"{PORTS[1]}-{PORTS[-1]}",
    "FARANDOLE_JOB_SECRET": "a secret that both hosts were given",
    "FARANDOLE_PEER_TIMEOUT": "5",
}


def job(harm, rounds, length, pause):
    """Returns the outcomes of two ranks, and the relay between them."""
    arguments = [str(rounds), str(length), str(pause)]
    with hosts(harm) as (relay, inside):
        environments = [{"HOROVOD_RANK": str(rank), **TOLD} for rank in range(2)]
        prefixes = [[*prefix, *on_host(f"host-{rank}")] for rank, prefix in enumerate(inside)]
        return together(environments, SUMS, prefixes, arguments), relay


def test_a_relay_that_only_forwards_is_not_noticed():
    ended, relay = job(None, rounds=5, length=100_000, pause=0)
    assert [one.out for one in ended] == ["done\n", "done\n"], "".join(one.err for one in ended)
    assert {LINK, BEAT} <= relay.seen, "both kinds of connections went through the relay"


@pytest.mark.parametrize("side", [DIALER, ACCEPTOR], ids=["from_dialer", "from_acceptor"])
@pytest.mark.parametrize(
    "does",
    [
        pytest.param(
            lambda part: part[:2000] + bytes([part[2000] ^ 1]) + part[2001:], id="changed"
        ),
        pytest.param(lambda part: part[:1000] + part[3000:], id="dropped"),
        pytest.param(lambda part: part + part, id="repeated"),
        pytest.param(lambda part: part[:1000] + bytes(500) + part[1000:], id="injected"),
    ],
)
def test_changed_bytes_of_a_link_end_the_job_with_the_links_name(does, side):
    ended, relay = job(Harm(LINK, side, 50_000, 4096, does), rounds=1000, length=100_000, pause=0)
    assert relay.harmed, "harm was done"
    assert_told(ended, "on connection ")


def test_a_changed_heartbeat_ends_the_job_with_the_links_name():
    flipped = Harm(BEAT, DIALER, 0, 160, lambda part: part[:20] + bytes([part[20] ^ 1]) + part[21:])
    ended, relay = job(flipped, rounds=400, length=100, pause=0.05)
    assert relay.harmed, "harm was done"
    assert_told(ended, "heartbeat")


def assert_told(ended, words):
    """Both ranks ended with an error, of which one says what was noticed; neither had a wrong
    result.
    """
    said = "".join(one.out for one in ended)
    assert "wrong" not in said, said
    assert all(one.out.startswith("error: ") for one in ended), ended
    assert "is not what its sender sealed" in said, said
    assert words in said, said
