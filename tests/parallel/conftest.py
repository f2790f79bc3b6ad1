# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Worlds of real processes that run functions of the tests.

A world is started as any job is, by a registrar and agents; its workers then take functions over a
socket, run them at the same time and send back what they return. `world` shares worlds between
tests, `fresh_world` makes one that a test may break.
"""

import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path

import cloudpickle
import pytest
import torch  # noqa: F401 - most of these tests need it: without it they fail here

from farandole._native import launcher, registrar
from farandole.common import pickling

# Workers import no test: what they run comes with its module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LIMIT = 150.0
"""Seconds for starting a world, and for every function it runs."""
GRACE = 10.0
"""Seconds for the others when a rank failed."""


class Died:
    """In place of a result: the process ended before it answered."""

    def __repr__(self):
        return "Died()"


class Failed:
    """In place of a result: the function raised."""

    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


def serve(address, key):
    """The worker: runs functions until the test closes the connection."""
    # What a function needs beyond this, it imports: not every one is about torch.
    from farandole.common import basics

    basics.init()
    with Client(address, authkey=key) as connection:
        connection.send(basics.rank())
        while True:
            try:
                function, args = cloudpickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                answer = (True, function(*args))
            except BaseException:  # noqa: BLE001 - whatever it is, the test is told
                answer = (False, traceback.format_exc())
            connection.send_bytes(pickling.pickle_by_value(answer))


def describe(outcomes):
    """Describes how workers ended, for messages."""
    return "; ".join(
        f"{getattr(outcome, 'stderr_tail', outcome)}" for outcome in outcomes if outcome is not None
    )


class World:
    """Several ranks on this host."""

    def __init__(self, size, env=None):
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="farandole-test-"))
        self.registrar = registrar.Registrar(size, host="127.0.0.1", start_timeout=LIMIT)
        self.outcomes = [None] * size
        key = b"farandole"
        listener = Listener(str(self.folder / "socket"), authkey=key)
        payload = pickling.pickle_by_value((serve, (listener.address, key), {}))
        self.agents = [
            threading.Thread(target=self._agent, args=(task, payload, env or {}))
            for task in range(size)
        ]
        try:
            for agent in self.agents:
                agent.start()
            connections = [self._accept(listener, time.monotonic() + LIMIT) for _ in range(size)]
            self.connections: dict[int, Connection] = {
                connection.recv(): connection for connection in connections
            }
        except BaseException:
            listener.close()
            self.close()
            raise
        listener.close()

    def _accept(self, listener, end):
        listener._listener._socket.settimeout(0.2)
        while True:
            try:
                return listener.accept()
            except TimeoutError:
                ended = [outcome for outcome in self.outcomes if outcome is not None]
                if ended or time.monotonic() > end:
                    pytest.fail(
                        f"not all of {self.size} ranks started within {LIMIT} s: {describe(ended)}"
                    )

    def _agent(self, task, payload, env):
        command = [sys.executable, "-m", "farandole.runner.worker"]
        env = {"OMP_NUM_THREADS": "1", **env}
        try:
            self.outcomes[task] = launcher.run_agent(
                self.registrar.ticket, task, command, env=env, payload=payload, stream_output=False
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
            self.outcomes[task] = error

    def run(self, function, *args, tolerate=False):
        """Runs `function` on every rank and returns the results by rank.

        Unless `tolerate`, a rank that raised or died fails the test; else its place holds `Failed`
        or `Died`.
        """
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        try:
            for connection in self.connections.values():
                connection.send_bytes(pickling.pickle_by_value((function, args)))
        except OSError as error:
            # The next test gets a new world.
            self.close()
            pytest.fail(f"a rank has ended ({error}): {describe(self.outcomes)}")
        answers = {}
        end = time.monotonic() + LIMIT
        while len(answers) < self.size:
            waiting = {
                self.connections[rank]: rank for rank in self.connections if rank not in answers
            }
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                failed = "".join(
                    f"\nrank {rank}: {told}"
                    for rank, told in answers.items()
                    if isinstance(told, Failed)
                )
                pytest.fail(
                    f"ranks {sorted(waiting.values())} did not answer: "
                    f"{describe(self.outcomes)}{failed}"
                )
            for connection in ready:
                try:
                    good, answer = cloudpickle.loads(connection.recv_bytes())
                    answers[waiting[connection]] = answer if good else Failed(answer)
                    if not good and not tolerate:
                        # The others may wait for what this rank did not come to.
                        end = min(end, time.monotonic() + GRACE)
                except (EOFError, ConnectionResetError):
                    answers[waiting[connection]] = Died()
        results = [answers[rank] for rank in range(self.size)]
        bad = [rank for rank, result in enumerate(results) if isinstance(result, Failed | Died)]
        if bad and not tolerate:
            self.close()
            pytest.fail("\n".join(f"rank {rank}: {results[rank]}" for rank in bad))
        return results

    @property
    def is_open(self):
        return bool(self.connections)

    def close(self):
        """Ends the workers, in good order if they wait for work."""
        for connection in getattr(self, "connections", {}).values():
            connection.close()
        self.connections = {}
        for agent in self.agents:
            agent.join(timeout=5)
        self.registrar.close()
        for agent in self.agents:
            agent.join(timeout=10)
        assert not any(agent.is_alive() for agent in self.agents), "an agent outlived its job"
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def _shared():
    worlds = {}
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture(params=[2, 3, pytest.param(4, marks=pytest.mark.slow)], ids="{0} ranks".format)
def world(request, _shared):
    """A world of 2, 3 or 4 ranks, shared with other tests."""
    return _shared_world(_shared, request.param)


@pytest.fixture
def pair(_shared):
    """A world of two ranks, shared with other tests."""
    return _shared_world(_shared, 2)


@pytest.fixture
def trio(_shared):
    """A world of three ranks, shared with other tests."""
    return _shared_world(_shared, 3)


@pytest.fixture
def shared_world(_shared):
    """Makes a world for some kind of test, or gives the one that is there: by size, kind and
    variables.
    """
    return lambda size, kind, env: _shared_world(_shared, size, kind, env)


@pytest.fixture
def tensorflow_pair(_shared):
    """A world of two ranks for TensorFlow and Keras on it, shared with other tests: importing
    them takes its time.
    """
    env = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "KERAS_BACKEND": "tensorflow",
        "FARANDOLE_DYNAMIC_PROCESS_SETS": "1",
    }
    return _shared_world(_shared, 2, "tensorflow", env)


def _shared_world(worlds, size, kind="", env=None):
    key = (size, kind)
    if key not in worlds or not worlds[key].is_open:
        worlds[key] = World(size, env)
    return worlds[key]


@pytest.fixture
def fresh_world():
    """Makes a world of this test's own."""
    worlds = []

    def make(size, **options):
        worlds.append(World(size, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture(scope="session")
def cuda():
    """Builds the fake driver; yields the variables by which ranks find it."""
    with tempfile.TemporaryDirectory(prefix="farandole-cuda-") as folder:
        library = Path(folder) / "libcuda.so.1"
        source = Path(__file__).with_name("fake_cuda.c")
        command = [
            "cc",
            "-std=c11",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-pthread",
        ]
        subprocess.run([*command, "-o", library, source], check=True, timeout=60)
        for name in ("libnccl.so.2", "libnvrtc.so.13"):
            (Path(folder) / name).symlink_to(library)
        places = {"FARANDOLE_CUDA_LIBRARIES": folder, "FAKE_NCCL": folder, "XDG_CACHE_HOME": folder}
        yield {**places, "FARANDOLE_DYNAMIC_PROCESS_SETS": "1"}


@pytest.fixture
def gpus(cuda, shared_world):
    """Two ranks that find a GPU each, shared with other tests."""
    return shared_world(2, "cuda False", cuda)
