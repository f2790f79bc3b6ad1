# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""tf.data's service for a training job: separate processes prepare batches, and trainers fetch
them.

Danger: TensorFlow's dispatchers and workers listen on all addresses of their hosts, without
password or key. Anybody who reaches their ports can run graphs there, which read and write files.
TensorFlow has no setting against that. So the service starts only with `open_to_the_network=True`,
which confirms that no one else can reach the ports. On the command line this is
`--open-to-the-network`, and for code that cannot be changed
`FARANDOLE_TF_DATA_OPEN_TO_THE_NETWORK=1`.

The meeting point, at which processes find each other, requires a key.

Example:
    # on hosts with CPUs to spare, in a network that no one else can reach:
    # farandole run -np 4 python -m farandole.tensorflow.data.compute_worker --open-to-the-network service.json
    config = TfDataServiceConfig.read("service.json", wait_for_file_creation=True)
    dataset = dataset.send_to_data_service(config, hvd.rank(), hvd.size())
    ...
    config.compute_client().shutdown()
"""  # noqa: E501

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

import farandole.tensorflow as hvd
from farandole import _variables as variables
from farandole._native.settings import read_setting
from farandole.tensorflow.data._registry import DataServiceRegistryClient, DataServiceRegistryServer

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "TfDataServiceConfig",
    "compute_worker_fn",
    "send_to_data_service",
    "serving",
    "tf_data_service",
]

DISPATCHER_SIDES = ("training", "compute")
CONSENT_VARIABLE = variables.TF_DATA_OPEN_TO_THE_NETWORK


def require_consent(given: bool) -> None:
    """Refuses to continue without consent to open ports, by the caller or the environment.

    Args:
        given: whether the caller has consented.

    Raises:
        PermissionError: the user has not consented.
        ValueError: the variable says neither yes nor no.
    """
    if not (read_setting(CONSENT_VARIABLE) or given):
        raise PermissionError(
            "tf.data's dispatchers and workers listen on all addresses of this host without a "
            "password: everyone who reaches their ports runs graphs here, which read and write "
            "files as this user. If a firewall keeps others "
            "from these ports, say so: open_to_the_network=True, --open-to-the-network, or "
            f"{CONSENT_VARIABLE}=1"
        )


@dataclasses.dataclass
class TfDataServiceConfig:
    """The data with which trainers and workers find each other.

    Args:
        dispatchers: Number of dispatchers; each has separate workers.
        workers_per_dispatcher: Number of workers of each dispatcher.
        dispatcher_side: `"compute"` when workers' processes hold the dispatchers, `"training"` when
            trainers' do.
        addresses: Addresses of the service, as host and port.
        key: Proves membership: keep it secret.
        timeout: Seconds that waits for each other last at most.
        open_to_the_network: Consent to ports that run the graphs of everyone who reaches them; see
            the module.

    Raises:
        ValueError: For another side.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: list[tuple[str, int]]
    key: bytes
    timeout: float = 60
    open_to_the_network: bool = False

    def __post_init__(self) -> None:
        """Checks the side."""
        if self.dispatcher_side not in DISPATCHER_SIDES:
            raise ValueError(
                f"dispatcher_side must be one of {DISPATCHER_SIDES}: {self.dispatcher_side!r}"
            )
        self.addresses = [(str(host), int(port)) for host, port in self.addresses]

    def require_consent(self) -> None:
        """Refuses to open ports that run the graphs of everyone who reaches them, if the user has
        not consented.

        Raises:
            PermissionError: The user has not consented.
        """
        require_consent(self.open_to_the_network)

    def compute_client(self, verbose: int = 1) -> DataServiceRegistryClient:
        """Returns a client of the service.

        Args:
            verbose: Accepted for compatibility with Horovod.
        """
        del verbose
        return DataServiceRegistryClient(self.addresses, self.key, self.timeout)

    def to_dict(self) -> dict[str, Any]:
        """Returns numbers, texts and lists; the key is in hexadecimal."""
        return {**dataclasses.asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: dict[str, Any]) -> TfDataServiceConfig:
        """Inverts `to_dict`."""
        return TfDataServiceConfig(**{**config, "key": bytes.fromhex(config["key"])})

    def write(self, filename: str) -> None:
        """Writes a file that only its owner can read. A reader finds all of it or nothing."""
        target = Path(filename)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(self.to_dict(), file)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def remove_written_file(self, filename: str) -> None:
        """Deletes the file of `write`, unless another service has replaced it meanwhile.

        Args:
            filename: The file.
        """
        path = Path(filename)
        try:
            found = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return
        if found == json.loads(json.dumps(self.to_dict())):
            path.unlink(missing_ok=True)

    @staticmethod
    def read(
        filename: str, wait_for_file_creation: bool = False, timeout: float = 600.0
    ) -> TfDataServiceConfig:
        """Reads the file of `write`.

        Args:
            filename: The file.
            wait_for_file_creation: Whether to wait for it.
            timeout: Longest wait in seconds.

        Raises:
            FileNotFoundError: When it is not there, or does not come.
        """
        end = time.monotonic() + timeout
        while wait_for_file_creation and not Path(filename).exists() and time.monotonic() < end:
            time.sleep(0.1)
        return TfDataServiceConfig.from_dict(json.loads(Path(filename).read_text()))


@contextlib.contextmanager
def serving(
    processes: int,
    dispatchers: int = 1,
    dispatcher_side: str = "compute",
    timeout: float = 60,
    *,
    open_to_the_network: bool = False,
) -> Iterator[Any]:
    """Runs the service's meeting point in this process for as long as the context lasts.

    Args:
        processes: Number of workers.
        dispatchers: Number of dispatchers.
        dispatcher_side: Side of the dispatchers.
        timeout: Seconds that waits for each other last at most.
        open_to_the_network: Consent to ports that run the graphs of everyone who reaches them; see
            the module.

    Yields:
        The `TfDataServiceConfig` of it.

    Raises:
        ValueError: When workers cannot be dealt out evenly.
    """
    if dispatchers <= 0 or processes % dispatchers:
        raise ValueError(
            f"the number of processes must be a multiple of the {dispatchers} dispatchers: "
            f"{processes}"
        )
    server = DataServiceRegistryServer(dispatchers, processes // dispatchers)
    try:
        workers = processes // dispatchers
        yield TfDataServiceConfig(
            dispatchers,
            workers,
            dispatcher_side,
            server.listen_addresses,
            server.key,
            timeout,
            open_to_the_network,
        )
    finally:
        server.close()


def _start_dispatcher(client: DataServiceRegistryClient, number: int) -> Any:
    """Starts a dispatcher in this process and makes it known."""
    server = tf.data.experimental.service.DispatchServer(
        tf.data.experimental.service.DispatcherConfig(port=0)
    )
    protocol, address = server.target.split("://", 1)
    client.register_dispatcher(
        number, f"{protocol}://{client.local_host()}:{address.rsplit(':', 1)[1]}"
    )
    return server


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Finds this trainer's dispatcher and waits for its workers; starts it first when trainers hold
    the dispatchers.

    Args:
        compute_config: Configuration of the service.
        rank: Rank of this trainer.

    Yields:
        The dispatcher's address, for `tf.data.experimental.service.distribute`.

    Raises:
        PermissionError: This process would hold a dispatcher, and the user has not consented to
            open ports.
        TimeoutError: When dispatcher or workers do not come in time.
    """
    client = compute_config.compute_client()
    own = None
    if compute_config.dispatcher_side == "training" and rank < compute_config.dispatchers:
        compute_config.require_consent()
        own = _start_dispatcher(client, rank)
    number = rank % compute_config.dispatchers
    address = client.wait_for_dispatcher_registration(number)
    client.wait_for_dispatcher_worker_registration(number)
    try:
        yield address
    finally:
        # It stops with its last reference. To stop it here would wait until the workers have gone.
        del own


_shared_jobs: dict[bytes, list[tuple[Any, ...]]] = {}
"""Jobs that this process shares through each service, by the service's key."""


def _shared_pass_name(key: bytes, dataset: tf.data.Dataset, *sharing: Any) -> str:
    """Returns the name of a pass that trainers share, which is the same on all of them: one name
    for every dataset and sharing mode.

    tf.data's service asks for a name. A later caller with a known name gets the job of the first
    caller.
    """
    shared = _shared_jobs.setdefault(key, [])
    identity = (int(dataset.fingerprint()) if tf.executing_eagerly() else 0, *map(str, sharing))
    if identity not in shared:
        shared.append(identity)
    return "job" if identity == shared[0] else ".".join(["job", *map(str, identity)])


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: Any = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """Lets the service compute a dataset; also a method of `tf.data.Dataset`.

    Args:
        dataset: The part to compute there; transformations after this call stay here.
        compute_config: The service's configuration, with dispatchers on the compute side.
        rank: Rank of this trainer.
        size: Number of trainers; needed for `round_robin`.
        processing_mode: As in `tf.data.experimental.service.distribute`.
        reuse_dataset: Whether trainers of one dispatcher share one pass over the data. Trainers
            that share several datasets must begin with the same dataset.
        round_robin: With `reuse_dataset`: whether the trainers take turns, so that each step's
            batches are alike.

    Returns:
        A dataset of the same elements.

    Raises:
        RuntimeError: When trainers hold the dispatchers: those end with the context of
            `tf_data_service`.
        ValueError: When `round_robin` lacks an argument that it needs.
        TimeoutError: When dispatcher or workers do not come in time.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "send_to_data_service needs dispatchers on the compute side: use tf_data_service and "
            "tf.data.experimental.service.distribute"
        )
    if round_robin and (size is None or not reuse_dataset):
        raise ValueError("round_robin needs size and reuse_dataset=True")
    consumers = size if round_robin else None
    with tf_data_service(compute_config, rank) as address:
        distribute = tf.data.experimental.service.distribute(
            processing_mode=processing_mode,
            service=address,
            job_name=_shared_pass_name(compute_config.key, dataset, processing_mode, consumers)
            if reuse_dataset
            else None,
            consumer_index=rank if round_robin else None,
            num_consumers=consumers,
        )
        return dataset.apply(distribute)


cast("Any", tf.data.Dataset).send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Works for the service until it is shut down; every compute process runs this.

    Args:
        compute_config: Configuration of the service; the number of ranks is the number of workers.

    Raises:
        ConnectionError: When the service is gone.
        PermissionError: The user has not consented to open ports; see the module.
        TimeoutError: When the dispatcher does not come in time.
    """
    compute_config.require_consent()
    hvd.init()
    client = compute_config.compute_client()
    number, position = divmod(hvd.rank(), compute_config.workers_per_dispatcher)
    dispatcher = None
    if compute_config.dispatcher_side == "compute" and position == 0:
        dispatcher = _start_dispatcher(client, number)
    address = client.wait_for_dispatcher_registration(number)
    service = tf.data.experimental.service
    worker = service.WorkerServer(
        service.WorkerConfig(
            dispatcher_address=address.split("://", 1)[1],
            worker_address=f"{client.local_host()}:%port%",
            heartbeat_interval_ms=1000,
        )
    )
    try:
        client.register_worker_for_dispatcher(number, hvd.rank())
        client.wait_for_shutdown()
    finally:
        del worker, dispatcher
