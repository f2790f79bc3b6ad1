# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Torch's debug server in a job of Farandole: its pages show our ranks, and a page of ours what
they wait for.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import urllib.request

import pytest
import torch
import torch.distributed as dist

import farandole.numpy as hvd
from farandole.numpy.plain_value_exchange import broadcast_plain


def cells(port, path="farandole"):
    with urllib.request.urlopen(f"http://localhost:{port}/{path}", timeout=30) as answer:
        page = answer.read().decode()
    return page, [
        re.findall(r"<td>([^<]*)</td>", line) for line in re.findall(r"<tr>(.*?)</tr>", page)
    ][1:]


def until(fits, limit=30):
    deadline = time.monotonic() + limit
    while not fits():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def a_page_shows_the_ranks_and_what_they_wait_for(folder):
    from farandole.torch.distributed import debug

    dist.init_process_group("farandole")
    rank, size = dist.get_rank(), dist.get_world_size()
    with socket.create_server(("", 0)) as free:
        port = broadcast_plain(free.getsockname()[1], 0, "port")
    before = {
        name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    }
    with pytest.raises(ValueError, match="open_to_the_network=True"):
        debug.start_debug_server(port)
    debug.start_debug_server(port, open_to_the_network=True, dump_dir=folder, dump_interval=0.2)
    assert {name: os.environ.get(name) for name in before} == before
    pids = hvd.allgather_object(os.getpid())
    if rank == 0:
        until(lambda: socket.socket().connect_ex(("localhost", port)) == 0)
        # Ranks 1 and 2 have begun a reduction for which they wait, because this rank has not.
        until(lambda: [bool(line[-1]) for line in cells(port)[1]] == [False, True, True])
        page, lines = cells(port)
        assert "Farandole Ranks" in page
        assert [line[0] for line in lines] == [f"{number} of {size}" for number in range(size)]
        assert [int(line[2]) for line in lines] == pids
        assert all(
            re.fullmatch(r"torch\.distributed\.\S+ for [\d.]+ s", line[-1]) for line in lines[1:]
        ), lines
        assert f"0: {list(range(size))}" in lines[0][6]
        stacks, _ = cells(port, "stacks")
        assert "a_page_shows_the_ranks" in stacks, "torch's own pages reach the ranks, too"
        until(lambda: any(name.startswith("farandole_") for name in os.listdir(folder)))
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor[0] == size
    if rank == 0:
        assert not any(line[-1] for line in cells(port)[1])
        (dump, *_) = sorted(name for name in os.listdir(folder) if name.startswith("farandole_"))
        with open(os.path.join(folder, dump)) as file:
            assert [json.loads(line)["rank"] for line in file.read().splitlines()] == list(
                range(size)
            )
    hvd.barrier()
    debug.stop_debug_server()
    dist.destroy_process_group()


def test_a_page_shows_the_ranks_and_what_they_wait_for(trio, tmp_path):
    trio.run(a_page_shows_the_ranks_and_what_they_wait_for, str(tmp_path))
