# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Links the process of a trial with its ranks: runs the function, and provides `ray.tune.report` in
the ranks.

Ray Tune knows the process of the trial, and the ranks are other processes. A rank gets a session
that sends its reports to the process of the trial, which reports them to Tune. Rank 0 writes a
checkpoint to the storage of the experiment, because it may be on another node than the process of
the trial.
"""

from __future__ import annotations

import json
import os
import pickle
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TUNE_RECORD_KIND: Final = "ray tune"


@dataclass
class RankTuneSession:
    """The session that `ray.tune` uses in a rank, instead of the session of the trial's process.

    Attributes:
        experiment_name: Like the session of Tune.
        trial_name: Like the session of Tune.
        trial_id: Like the session of Tune.
        trial_dir: The directory of the trial in its process.
        trial_resources: The placement group of the trial.
        loaded_checkpoint: The checkpoint from which the trial continues.
        storage: The file system of the experiment.
        folder: Folder in which rank 0 writes checkpoints for the process of the trial.
        rank: The rank of this process.
        world_rank: None: Ray recognizes a session of Tune by this value.
    """

    experiment_name: str
    trial_name: str
    trial_id: str
    trial_dir: str
    trial_resources: Any
    loaded_checkpoint: Any
    storage: Any
    folder: str
    rank: int = -1
    world_rank: None = None

    @classmethod
    def session_of_trial(cls) -> RankTuneSession:
        """Returns the resources of the ranks of this process's trial."""
        session = _ray_session_module().get_session()
        names = (
            "experiment_name",
            "trial_name",
            "trial_id",
            "trial_dir",
            "trial_resources",
            "loaded_checkpoint",
        )
        storage = session.storage
        return cls(
            **{name: getattr(session, name) for name in names},
            storage=storage.storage_filesystem,
            folder=f"{storage.trial_fs_path}/reported",
        )

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
        """Sends a report of rank 0 to the process of the trial; reports of other ranks are dropped.

        Args:
            metrics: Numbers, texts and lists of them by name.
            checkpoint: A `ray.tune.Checkpoint`, which is copied before this returns.

        Raises:
            TypeError: A metric is not of these types.
        """
        from farandole.spark import task  # noqa: PLC0415 - only ranks need it

        if self.rank != 0:
            return
        plain_metrics = json.loads(json.dumps(dict(metrics), default=_to_python_scalar))
        name = self._copy_checkpoint(checkpoint) if checkpoint is not None else None
        task.report({"kind": _TUNE_RECORD_KIND, "metrics": plain_metrics, "checkpoint": name})

    def _copy_checkpoint(self, checkpoint: Any) -> str:
        from pyarrow import fs  # noqa: PLC0415 - Ray Tune brings it

        # Another process may have been rank 0 before, and its checkpoint may still be there.
        name = uuid.uuid4().hex
        target = f"{self.folder}/{name}"
        self.storage.create_dir(target, recursive=True)
        fs.copy_files(checkpoint.path, target, checkpoint.filesystem, self.storage)
        return name

    def forward_report(self, record: Mapping[str, Any]) -> None:
        """Passes a rank's report to Tune; called in the process of the trial.

        Args:
            record: The record that `Backend.run` passes to `on_progress`; records of other kinds
                are ignored.
        """
        if record.get("kind") != _TUNE_RECORD_KIND:
            return
        from ray import tune  # noqa: PLC0415 - loaded already in this process

        name = record["checkpoint"]
        if name is None:
            tune.report(record["metrics"])
            return
        path = f"{self.folder}/{name}"
        tune.report(record["metrics"], checkpoint=tune.Checkpoint(path, self.storage))
        self.storage.delete_dir(path)

    def remove_checkpoint_copies(self) -> None:
        """Removes copies of checkpoints that were not passed to Tune."""
        from pyarrow import fs  # noqa: PLC0415 - as above

        if self.storage.get_file_info(self.folder).type == fs.FileType.Directory:
            self.storage.delete_dir(self.folder)


class LazilyUnpickledFunction:
    """A function that is unpickled only in the process that calls it.

    Args:
        payload: The result of `farandole.runner.gang.pickle_payload` for the function.
    """

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def __call__(self, *args: Any) -> Any:
        """Calls the function."""
        return pickle.loads(self._payload)[0](*args)  # noqa: S301 - the driver pickled it, for its own ranks


def with_rank_session(
    train: Callable[[dict[str, Any]], Any], session: RankTuneSession
) -> Callable[[dict[str, Any]], Any]:
    """Returns a training function in which `ray.tune.report` works.

    Args:
        train: Runs on every rank.
        session: Session of the trial.
    """

    def call_in_session(config: dict[str, Any]) -> Any:
        session.rank = int(os.environ["HOROVOD_RANK"])
        _ray_session_module()._session = session  # noqa: SLF001 - Ray has no public way
        return train(config)

    return call_in_session


def _to_python_scalar(value: Any) -> Any:
    """Returns a scalar of NumPy or torch as Python's."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"a metric is a number, a text or a list of them: {value!r}")
    return item()


def _ray_session_module() -> Any:
    from ray.train._internal import session  # noqa: PLC0415 - `ray.tune` reads the session there

    return session
