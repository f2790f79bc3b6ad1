# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Every socket on which a job of one host takes connections, with its address: loopback alone."""

from __future__ import annotations

import sys

import cloudpickle
import pytest

from farandole.spark.common import LocalBackend

pytestmark = pytest.mark.timeout(300)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def addresses_of(found):
    return {address for address, _ in found}


def worker(with_torch):
    """What a rank listens on, with the engine up and, where asked for, Lightning's process group."""
    from tests.sockets import listening

    import farandole.torch as hvd

    hvd.init(process_sets="dynamic")
    if with_torch:
        import torch

        import farandole.torch.distributed  # noqa: F401 - registers the backend

        torch.distributed.init_process_group("farandole", init_method="farandole://")
        torch.distributed.barrier()
    found = listening()
    hvd.allgather_object(None)
    if with_torch:
        torch.distributed.destroy_process_group()
    hvd.shutdown()
    return found


def inventory(monkeypatch, with_torch, **env):
    from tests import sockets

    driver = set()

    class Watched(LocalBackend):
        pass

    from farandole.spark.common import backend

    conduct = backend.conduct

    def watching(*given):
        driver.update(sockets.listening())
        return conduct(*given)

    before = sockets.listening()
    monkeypatch.setattr(backend, "conduct", watching)
    ranks = Watched(2, env=env, verbose=0, warm=False).run(worker, (with_torch,))
    return driver - before, ranks


@pytest.mark.parametrize("with_torch", [False, True], ids=["engine", "torch.distributed"])
def test_a_local_job_listens_on_loopback_alone(monkeypatch, with_torch):
    driver, ranks = inventory(monkeypatch, with_torch)
    assert driver, "the registrar"
    assert addresses_of(driver) <= LOOPBACK
    assert any(ranks)
    for found in ranks:
        assert addresses_of(found) <= LOOPBACK


def test_the_store_of_torch_listens_in_the_range_of_ports(monkeypatch):
    alone = inventory(monkeypatch, False, FARANDOLE_PORT_RANGE="41820-41859")[1]
    _, ranks = inventory(monkeypatch, True, FARANDOLE_PORT_RANGE="41820-41859")
    assert sum(map(len, ranks)) > sum(map(len, alone))
    for found in ranks:
        assert all(41820 <= port <= 41859 for _, port in found)


def test_where_a_rank_may_listen(monkeypatch):
    from farandole.torch.distributed._listen import listener

    for variable in ("FARANDOLE_BIND_ADDRESS", "HOROVOD_BIND_ADDRESS"):
        with monkeypatch.context() as patched:
            patched.setenv(variable, "127.0.0.0/8")
            made, host = listener(one_host=False)
            with made:
                assert (made.getsockname()[0], host) == ("127.0.0.1", "127.0.0.1")
    for variable, wrong in (("BIND_ADDRESS", "here"), ("BIND_ADDRESS", "203.0.113.0/24"), ("PORT_RANGE", "9-1")):
        with monkeypatch.context() as patched:
            patched.setenv(f"FARANDOLE_{variable}", wrong)
            with pytest.raises(ValueError, match=f"FARANDOLE_{variable}.*{wrong}"):
                listener(one_host=False)
    taken, _ = listener(one_host=True)
    with taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("FARANDOLE_PORT_RANGE", str(port))
        with pytest.raises(OSError, match=f"no port from {port} to {port}"):
            listener(one_host=True)
