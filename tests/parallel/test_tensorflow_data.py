# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""tf.data's service: workers in processes of their own compute what trainers ask for."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

if find_spec("tensorflow") is None:
    pytest.skip("needs TensorFlow", allow_module_level=True)


def fetches(path):
    """A trainer: squares by the service, deterministic batches by turns, and the calls it
    refuses.
    """
    import os

    import tensorflow as tf

    import farandole.tensorflow as hvd
    from farandole.tensorflow.data.compute_service import TfDataServiceConfig, send_to_data_service

    config = TfDataServiceConfig.read(path, wait_for_file_creation=True, timeout=140)
    assert os.stat(path).st_mode & 0o077 == 0, "the key is for nobody else"
    assert TfDataServiceConfig.from_dict(config.to_dict()) == config
    numbers = tf.data.Dataset.range(20).map(lambda number: number**2)
    # Every trainer its own pass over all elements.
    alone = sorted(
        int(square) for square in numbers.send_to_data_service(config, hvd.rank(), hvd.size())
    )
    assert alone == [number**2 for number in range(20)]
    # All trainers one pass: what one gets, no other does.
    shared = send_to_data_service(numbers, config, hvd.rank(), hvd.size(), reuse_dataset=True)
    mine = [int(square) for square in shared]
    assert sorted(square for others in hvd.allgather_object(mine) for square in others) == alone
    # Of another dataset, too.
    more = tf.data.Dataset.range(100, 110).send_to_data_service(
        config, hvd.rank(), hvd.size(), reuse_dataset=True
    )
    assert sorted(
        number for others in hvd.allgather_object(list(map(int, more))) for number in others
    ) == list(range(100, 110))
    # By turns: in each round the trainers get what follows each other in one worker's endless pass.
    endless = numbers.repeat()
    rounds = endless.send_to_data_service(
        config, hvd.rank(), hvd.size(), "parallel_epochs", reuse_dataset=True, round_robin=True
    )
    first, second = hvd.allgather_object([round(int(square) ** 0.5) for square in rounds.take(8)])
    assert [(after - before) % 20 for before, after in zip(first, second, strict=True)] == [1] * 8
    with pytest.raises(ValueError, match="round_robin needs"):
        send_to_data_service(numbers, config, hvd.rank(), round_robin=True)
    hvd.allgather_object(None)
    if hvd.rank() == 0:
        config.compute_client().shutdown()
    return len(mine)


def test_workers_of_their_own_compute_for_two_trainers(tensorflow_pair, tmp_path):
    config = tmp_path / "service.json"
    command = [sys.executable, "-m", "farandole", "run", "-np", "2", sys.executable]
    command += ["-m", "farandole.tensorflow.data.compute_worker", str(config), "--timeout", "140"]
    command += ["--open-to-the-network"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as workers:
        try:
            fetched = tensorflow_pair.run(fetches, str(config))
            printed = workers.communicate(timeout=140)[0]
        finally:
            workers.kill()
    assert sum(fetched) == 20
    assert workers.returncode == 0, printed
    assert not config.exists()


def holds_the_dispatcher():
    """Rank 0 trains and holds the dispatcher, rank 1 works for it."""
    import threading

    import tensorflow as tf

    import farandole.tensorflow as hvd
    from farandole.tensorflow.data import compute_service
    from farandole.tensorflow.data._registry import DataServiceRegistryClient

    # Rank 1 has a meeting point, too, which is not announced.
    with compute_service.serving(
        1, dispatcher_side="training", timeout=20, open_to_the_network=True
    ) as own:
        config = hvd.broadcast_object(own, name="service")
        stopped = []
        if hvd.rank() == 1:
            # A service of one worker: which is what this rank would be in a job of its own.
            config.workers_per_dispatcher = 2
            worker = threading.Thread(
                target=lambda: stopped.append(compute_service.compute_worker_fn(config))
            )
            worker.start()
            worker.join(60)
            assert stopped == [None]
        else:
            numbers = tf.data.Dataset.range(10)
            with pytest.raises(RuntimeError, match="compute side"):
                compute_service.send_to_data_service(numbers, config, 0)
            with compute_service.tf_data_service(config, 0) as address:
                distribute = tf.data.experimental.service.distribute("parallel_epochs", address)
                assert sorted(map(int, numbers.apply(distribute))) == list(range(10))
            client = config.compute_client()
            with pytest.raises(ValueError, match="there is no dispatcher 7"):
                client.wait_for_dispatcher_registration(7)
            with pytest.raises(TimeoutError, match="no result from the data service"):
                client.wait_for_shutdown(timeout=0.1)
            with pytest.raises(ConnectionError, match="another key"):
                DataServiceRegistryClient(config.addresses, b"another key", 1.0).shutdown()
            client.shutdown()
        hvd.allgather_object(None, name="end")
    if hvd.rank() == 0:
        with pytest.raises(ConnectionError):
            config.compute_client().shutdown()


def test_a_trainer_may_hold_the_dispatcher(tensorflow_pair):
    tensorflow_pair.run(holds_the_dispatcher)


def refuses():
    import os

    from tests.sockets import listening

    from farandole.spark.tensorflow import compute_worker as on_spark
    from farandole.tensorflow.data import compute_worker
    from farandole.tensorflow.data.compute_service import (
        TfDataServiceConfig,
        compute_worker_fn,
        serving,
        tf_data_service,
    )

    before = listening()
    closed = pytest.raises(PermissionError, match="open_to_the_network=True")
    with closed:
        compute_worker_fn(TfDataServiceConfig(1, 1, "compute", [("127.0.0.1", 9)], b"key"))
    with (
        closed,
        tf_data_service(TfDataServiceConfig(1, 1, "training", [("127.0.0.1", 9)], b"key"), 0),
    ):
        pass
    for command in (
        lambda: compute_worker.main(1, "compute", "service.json", 1.0),
        lambda: on_spark.main("service.json"),
    ):
        with closed:
            command()
    assert listening() == before, "nothing has been opened"
    os.environ["FARANDOLE_TF_DATA_OPEN_TO_THE_NETWORK"] = "perhaps"
    with pytest.raises(
        ValueError, match=r"FARANDOLE_TF_DATA_OPEN_TO_THE_NETWORK must be a boolean .*: perhaps"
    ):
        compute_worker.main(1, "compute", "service.json", 1.0)
    del os.environ["FARANDOLE_TF_DATA_OPEN_TO_THE_NETWORK"]

    with (
        pytest.raises(ValueError, match="must be a multiple of the 2 dispatchers: 3"),
        serving(3, 2),
    ):
        pass
    with pytest.raises(ValueError, match="dispatcher_side must be one of"):
        TfDataServiceConfig(1, 1, "elsewhere", [], b"")


def test_uneven_workers_and_unknown_sides_are_refused(tensorflow_pair):
    tensorflow_pair.run(refuses)


def test_the_file_of_a_later_service_stays(tmp_path):
    from farandole.tensorflow.data.compute_service import TfDataServiceConfig

    first, later = (TfDataServiceConfig(1, 1, "compute", [("h", 9)], key) for key in (b"1", b"2"))
    path = tmp_path / "service.json"
    first.remove_written_file(str(path))
    first.write(str(path))
    later.write(str(path))
    first.remove_written_file(str(path))
    assert TfDataServiceConfig.read(str(path)) == later
    later.remove_written_file(str(path))
    assert not path.exists()
