# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""All processes of an elastic job are killed at once; new ones continue from the commit in the
store.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.launcher.conftest import Launch

    Start = Callable[..., Launch]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

SCRIPT = """
import os, signal, sys, time
import torch
import farandole.torch as hvd
from farandole.stores.remote_store import RemoteStore

write = RemoteStore.write_checkpoint

def write_and_print(*arguments):
    print(f"written by {hvd.rank()}", flush=True)
    write(*arguments)

RemoteStore.write_checkpoint = write_and_print
torch.set_num_threads(1)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
hvd.init()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)
state.save_to(sys.argv[1], "job", every=2)

@hvd.elastic.run
def train(state):
    print(f"begins at {state.step} of {hvd.size()}", flush=True)
    while state.step < 40:
        optimizer.zero_grad()
        (-model(torch.ones(1, 1))).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        time.sleep(0.02)
        if state.step == 20 and not os.path.exists(f"killed-{hvd.rank()}"):
            open(f"killed-{hvd.rank()}", "w").close()
            while not (os.path.exists("killed-0") and os.path.exists("killed-1")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

train(state)
print(f"ends with {model.weight.item():g} on {hvd.size()}", flush=True)
"""


def test_new_processes_continue_from_the_store_when_all_are_killed(
    launch: Start, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ("-np", 2, "--min-np", 2, "--blacklist-cooldown-range", 1, 2)
    run = launch(*flags, sys.executable, tmp_path / "script.py", tmp_path / "store")
    assert run.process.wait(300) == 0, run.err.read_text()
    output = run.out.read_text()
    assert sorted((run.out.parent).glob("killed-*")), output
    begun = [int(step) for step in re.findall(r"begins at (\d+) of 2", output)]
    assert begun[:2] == [0, 0]
    assert len(begun) == 4, output
    assert begun[2] == begun[3]
    assert 2 <= begun[2] <= 20
    assert re.findall(r"ends with (\S+) on 2", output) == ["40", "40"]
    assert set(re.findall(r"written by (\d)", output)) == {"0"}
