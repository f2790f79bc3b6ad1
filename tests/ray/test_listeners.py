# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Listening sockets of jobs on Ray: the driver, which holds the registrar, and ranks of one
host.
"""

import sys

import pytest
from tests import sockets

import ray
from farandole.ray import RayBackend, RayExecutor

# Actors import no test.
for module in (sockets, sys.modules[__name__]):
    ray.cloudpickle.register_pickle_by_value(module)
LOOPBACK = "0100007F"
"""127.0.0.1, as the kernel writes it."""
EVERYWHERE = {"00000000", 32 * "0"}


def opened():
    """Returns the sockets that `init` opens in a rank. Ray has ports of its own in an actor."""
    import farandole.numpy as hvd

    before = sockets.listening()
    hvd.init()
    found = sockets.listening() - before
    hvd.allgather_object(None)
    return found


@pytest.mark.parametrize("bind", [None, "127.0.0.0/8"])
def test_the_registrar_of_a_backend_listens_where_it_is_told_to(resources, monkeypatch, bind):
    from farandole.ray import backend

    if bind is not None:
        monkeypatch.setenv("FARANDOLE_BIND_ADDRESS", bind)
    driver, conduct = set(), backend.run_gang
    before = sockets.listening()

    def watching(*given):
        driver.update(sockets.listening() - before)
        return conduct(*given)

    monkeypatch.setattr(backend, "run_gang", watching)
    ranks = RayBackend(2, verbose=0).run(opened)
    assert len(driver) == 1, "the registrar"
    ((address, _),) = driver
    assert address in (EVERYWHERE if bind is None else {LOOPBACK})
    assert {address for found in ranks for address, _ in found} <= {LOOPBACK}


def test_an_executor_of_one_host_listens_on_loopback_alone(resources):
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    executor.start()
    try:
        ranks = executor.run(opened)
    finally:
        executor.shutdown()
    assert ranks[0], "rank 0 has the registrar"
    assert {address for found in ranks for address, _ in found} == {LOOPBACK}
