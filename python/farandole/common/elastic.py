# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Training that survives a change of the world: state that is committed, restored and broadcast,
and its loop.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import queue
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, runtime_checkable

from farandole._native import engine
from farandole.common import basics, commits, suspension, termination_notices
from farandole.common.commits import StoredCommits
from farandole.common.exceptions import (
    FarandoleInternalError,
    FarandoleUsageError,
    HostsUpdatedInterrupt,
    JobSuspended,
    WorkerDismissed,
)
from farandole.common.termination_notices import leave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farandole.common.suspension import SuspensionWatch
    from farandole.stores.store import Store

_Result = TypeVar("_Result")

_log = logging.getLogger("farandole")

__all__ = [
    "HostUpdateResult",
    "ObjectState",
    "Reader",
    "State",
    "leave",
    "leave_and_join",
    "run_fn",
]

MAX_FAILED_WORLDS = 3
"""Worlds in a row that may fail before one of them has committed: then the failure is not of a
passing kind.
"""


class HostUpdateResult:
    """Changes of the set of hosts, as bits."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


_SUSPENSION = 4
"""A further bit of `HostUpdateResult`: the launcher has requested the suspension of the job."""


class State:
    """The state from which training continues: kept in memory, restored after a failure, broadcast
    from rank 0.

    Args:
        bcast_object: Sends an object from rank 0 to all ranks.
        get_rank: Returns this rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0
        self._stored_commits: StoredCommits | None = None
        self._is_writer = False
        """Whether this process was rank 0 at the last commit."""
        self._is_committed = False
        """Whether the present state was committed."""
        self._suspension_watch: SuspensionWatch | None = None
        self._has_synced = False

    def save_to(self, store: Store | str, run_id: str, every: int = 1) -> None:
        """Writes commits to a store, too. If the job is started again, it continues from the last
        commit.

        Every rank calls it before the function of `elastic.run` begins. Rank 0 writes, in another
        thread. If no process has the state when that function begins, rank 0 reads it from the
        store. The last commit is written when the function has returned.

        Args:
            store: Store for the commits, or its URL, such as `"s3://bucket/jobs"`.
            run_id: Names the directory of this job in `<store>/runs`. Use the same name when the
                job is started again.
            every: Interval in commits between writes. While a commit is being written, others are
                skipped.

        Only one job at a time writes a run: the training function raises an error while another job
        or a fit has it.

        Raises:
            ValueError: `every` is below 1, or the store cannot be used.
            TypeError: An attribute cannot be saved to a store.
            NotImplementedError: This kind of state cannot.
        """
        stored = StoredCommits(store, run_id, every)
        self._refuse_unstorable_state()
        self._stored_commits = stored

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Registers functions that are called after every change of the world, for example to
        scale a rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Prepares the state for a new world."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Records a change of the set of hosts. `check_host_updates` informs all ranks."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keeps the present state for the case of a failure, and checks whether hosts have changed.

        Raises:
            HostsUpdatedInterrupt: On all ranks, if hosts were added or removed.
            JobSuspended: On all ranks, if the launcher requeues its batch job.
        """
        self._keep_commit()
        self._is_committed = True
        try:
            self.check_host_updates()
        finally:
            self._is_committed = False

    def _keep_commit(self) -> None:
        self.save()
        self._commits += 1
        self._write_commit_if_due()

    def check_host_updates(self) -> None:
        """Asks rank 0 whether the set of hosts has changed. Every rank calls this the same number
        of times.

        Raises:
            HostsUpdatedInterrupt: On all ranks, if hosts were added or removed.
            JobSuspended: On all ranks, if the launcher requeues its batch job.
        """
        for at, change in engine.host_changes():
            self.on_hosts_updated(at, change)
        latest, changes = self._last_updated_timestamp, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest, changes = timestamp, changes | change
        watch = self._suspension_watch
        if watch is not None and watch.is_requested():
            changes |= _SUSPENSION
        previous, latest, changes = self._bcast_object(
            (self._last_updated_timestamp, latest, changes)
        )
        self._last_updated_timestamp = latest
        if changes & _SUSPENSION and self._stored_commits is not None:
            self._suspend_job(self._stored_commits)
        if latest > previous:
            raise HostsUpdatedInterrupt(changes == HostUpdateResult.removed)

    def _suspend_job(self, stored: StoredCommits) -> NoReturn:
        """Writes the present state to the store, reports that to the launcher, and ends the ranks
        together.

        Raises:
            JobSuspended: The state is in the store.
            OSError: Rank 0 could not write it; on other ranks `ValueError` with the same text.
        """
        if not self._is_committed:
            self._keep_commit()

        def write_and_report() -> None:
            if self._rank() == 0:
                self._is_writer = True
                self._finish_commit_writes()
                suspension.report_suspension(stored, self._commits)

        # The others wait: a rank that ends early may have the launcher end rank 0.
        self._run_on_rank_zero(write_and_report)
        raise JobSuspended

    def _run_on_rank_zero(self, call: Callable[[], object]) -> None:
        """Calls a function, which acts on rank 0 only. If it fails there, all ranks raise an
        error.

        Raises:
            ValueError: On other ranks than 0, with the text of the error there.
        """
        failure: Exception | None = None
        try:
            call()
        except FarandoleInternalError:
            raise
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
        root_error = self._bcast_object(
            None if failure is None else f"{type(failure).__name__} on rank 0: {failure}"
        )
        if failure is not None:
            raise failure
        if root_error is not None:
            raise ValueError(root_error)

    def _watch_for_suspension(self) -> None:
        """Begins to follow requests of a launcher that requeues its batch job. Only rank 0 asks the
        registrar, and informs the other ranks at the next commit.
        """
        if not suspension.may_be_suspended() or self._rank() != 0:
            return
        # An earlier world may have been lost after its report.
        suspension.withdraw_report()
        if self._stored_commits is None:
            _log.warning(
                "farandole run --requeue continues a job from its last commit in a store, and this "
                "state has none: call its save_to(store, run_id), or the job is not requeued"
            )
            return
        if self._suspension_watch is None:
            self._suspension_watch = suspension.SuspensionWatch()
            self._suspension_watch.start_thread()

    def _end_suspension_watch(self) -> None:
        if self._suspension_watch is not None:
            self._suspension_watch.close()
            self._suspension_watch = None

    def save(self) -> None:
        """Keeps the present state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the state that was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcasts the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts to a new world; nothing to do by default."""

    def _write_commit_if_due(self) -> None:
        """Writes the last commit if it is due."""
        if self._stored_commits is None:
            return
        self._is_writer = self._rank() == 0
        if self._is_writer and self._stored_commits.is_write_due(self._commits):
            self._start_commit_write(self._stored_commits)

    def _start_commit_write(self, stored: StoredCommits) -> None:
        lent = self._pin_commit()
        stored.start_commit_write(
            self._commits,
            self._plain_values(lent),
            lambda: self._pack_commit(lent),
            self._unpin_commit,
        )

    def _finish_commit_writes(self) -> None:
        """Returns when the last commit is in the store.

        Raises:
            OSError: It could not be written.
        """
        if self._stored_commits is None:
            return
        self._wait_for_copies()
        failure = self._stored_commits.wait_for_commit_write()
        if self._is_writer and not self._stored_commits.is_commit_written(self._commits):
            self._start_commit_write(self._stored_commits)
            failure = self._stored_commits.wait_for_commit_write()
        if failure is not None:
            raise failure

    def _wait_for_commit_write(self) -> None:
        """Waits for a commit that is being written: this process may end, and another one write."""
        if self._stored_commits is not None:
            with contextlib.suppress(RuntimeError):
                self._wait_for_copies()
            self._stored_commits.wait_for_commit_write()

    def _hand_over_lease(self) -> None:
        """Leaves the run to the next rank 0 of this job."""
        if self._stored_commits is not None:
            self._stored_commits.hand_over_lease()

    def _release_lease(self) -> None:
        """Lets others write the run."""
        if self._stored_commits is not None:
            self._stored_commits.release_lease()

    def _load_commit_on_all_ranks(self) -> None:
        """Takes the state from the store, if there is one.

        If rank 0 cannot, all ranks raise an error. Otherwise each survivor would fail as the next
        rank 0, without end.

        Raises:
            ValueError: On other ranks than 0, with the text of the error there.
        """
        stored = self._stored_commits
        if stored is None:
            return
        self._run_on_rank_zero(lambda: self._load_commit_on_rank_zero(stored))
        # A later rank 0 must know it to see whether the job has progressed since.
        loaded = self._bcast_object(stored.loaded_contents)
        if loaded is not None:  # a new rank 0 has loaded nothing
            stored.loaded_contents = loaded

    def _load_commit_on_rank_zero(self, stored: StoredCommits) -> None:
        """Loads the state from the store on rank 0, if no rank of the world has the state. Rank 0
        holds the lease of the run.
        """
        if self._rank() != 0:
            stored.hand_over_lease()
            return
        stored.acquire_lease()
        if self._has_synced:
            return
        found = stored.read_last_commit()
        if found is None:
            return
        try:
            content = self._unpack_commit(found)
            self._apply_commit(content)
        except Exception as error:
            raise ValueError(
                f"the commit of run {stored.run_id!r} cannot be taken into this state: choose "
                f"another run_id, or move {stored.directory_url} elsewhere: {error}"
            ) from error
        stored.loaded_contents = commits.describe_contents(found, self._plain_values(content))

    def _wait_for_copies(self) -> None:
        """Waits for the background work of a commit; there is none by default."""

    def _refuse_unstorable_state(self) -> None:
        """Raises an error if the state cannot be saved to a store.

        Raises:
            NotImplementedError: This kind of state cannot be saved.
            TypeError: An attribute cannot be saved.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be saved to a store")

    def _pin_commit(self) -> Any:
        """Returns the state of the last commit, which does not change before `_unpin_commit`."""
        raise NotImplementedError

    def _unpin_commit(self) -> None:
        """Marks the result of `_pin_commit` as unused; called in another thread."""

    def _pack_commit(self, lent: Any) -> bytes:
        """Packs the result of `_pin_commit` into a zip archive; called in another thread."""
        raise NotImplementedError

    def _unpack_commit(self, data: bytes) -> Any:
        """Reverses `_pack_commit`."""
        raise NotImplementedError

    def _apply_commit(self, content: Any) -> None:
        """Applies the result of `_unpack_commit` to this state."""
        raise NotImplementedError

    def _saved_values(self) -> dict[str, Any]:
        """Returns attributes that are no arrays, as they were kept last."""
        raise NotImplementedError

    def _plain_values(self, content: Any) -> dict[str, Any]:
        """Returns the attributes that are no arrays, of a result of `_pin_commit` or
        `_unpack_commit`.
        """
        raise NotImplementedError


@runtime_checkable
class Reader(Protocol):
    """A reader that divides a data set among the ranks: a state stores the reader's position and
    adapts the reader to each world.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the training in the data, which is the same on every rank."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the position of a state."""
        ...

    def follow_world(self) -> None:
        """Divides the data among the ranks of the present world."""
        ...


class ObjectState(State):
    """State of plain objects, one attribute for each keyword.

    For a reader, such as a loader of `farandole.data`, its position is kept: each row of an epoch
    counts once, however the world changes.

    Args:
        bcast_object: Sends an object from rank 0 to all ranks.
        get_rank: Returns this rank.
        **kwargs: Attributes and their first values.
    """

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        self._saved_state = dict(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        ObjectState.save(self)
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        """Keeps the attributes: the objects themselves, not copies; of readers, their positions."""
        self._saved_state = {
            name: _value_to_save(getattr(self, name)) for name in self._saved_state
        }

    def restore(self) -> None:
        """Restores the attributes and the positions of readers that were kept last."""
        for name, value in self._saved_state.items():
            if isinstance(value, ReaderPosition):
                getattr(self, name).load_state_dict(value.state)
            else:
                setattr(self, name, value)

    def sync(self) -> None:
        """Broadcasts the present attributes of rank 0, and keeps them."""
        ObjectState.save(self)
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            ObjectState.restore(self)

    def on_reset(self) -> None:
        """Prepares the state and its readers for a new world."""
        for name in self._saved_state:
            reader = getattr(self, name)
            if isinstance(reader, Reader):
                reader.follow_world()
        super().on_reset()

    # Contents for the store of `save_to`: attributes, and arrays if a subclass has some.

    def _refuse_unstorable_state(self) -> None:
        commits.refuse_unstorable_values(
            self._saved_values(),
            commits.is_json_value,
            "numbers, strings, and lists and dicts of them, without tuples",
        )

    def _saved_values(self) -> dict[str, Any]:
        """Attributes as they were kept last; of readers their positions."""
        saved = self._saved_state.items()
        return {
            name: value.state if isinstance(value, ReaderPosition) else value
            for name, value in saved
        }

    def _last_saved_arrays(self) -> list[Any]:
        """Arrays that were kept last; nothing changes them."""
        return []

    def _pin_commit(self) -> Any:
        return self._last_saved_arrays(), copy.deepcopy(self._saved_values())

    def _pack_commit(self, lent: Any) -> bytes:
        return commits.pack_commit_archive(*lent)

    def _unpack_commit(self, data: bytes) -> Any:
        return commits.unpack_commit_archive(data)

    def _apply_commit(self, content: Any) -> None:
        arrays, plain = content
        mine = [_array_shape(array) for array in self._last_saved_arrays()]
        if mine != [_array_shape(array) for array in arrays]:
            raise ValueError(
                f"it has {len(arrays)} arrays, and this state {len(mine)}, or they differ in shape"
            )
        self._apply_plain_values(plain)
        self._apply_arrays(arrays)

    def _plain_values(self, content: Any) -> dict[str, Any]:
        _, plain = content
        return plain

    def _apply_arrays(self, arrays: list[Any]) -> None:
        """Takes over arrays that fit."""

    def _apply_plain_values(self, plain: dict[str, Any]) -> None:
        """Takes over attributes and positions.

        Raises:
            ValueError: The attributes are not the attributes of this state.
        """
        if sorted(plain) != sorted(self._saved_state):
            raise ValueError(
                f"it has the attributes {sorted(plain)}, and this state {sorted(self._saved_state)}"
            )
        for name, value in plain.items():
            known = getattr(self, name)
            if isinstance(known, Reader):
                known.load_state_dict(value)
            else:
                setattr(self, name, value)


def _array_shape(array: Any) -> tuple[int, ...]:
    return tuple(array.shape)


class ReaderPosition:
    """The position of a reader."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


def _value_to_save(value: Any) -> Any:
    return ReaderPosition(value.state_dict()) if isinstance(value, Reader) else value


def run_fn(func: Callable[..., _Result], reset: Callable[[], None]) -> Callable[..., _Result]:
    """Wraps a training function so that it is called again in a new world when the old one fails or
    changes.

    While it runs, SIGTERM and SIGPWR have a worker of an elastic job leave at its next commit; a
    second one ends it.

    Args:
        func: Takes a `State` first; continues from there.
        reset: Leaves the old world and joins the new one.

    Returns:
        A function of the same arguments and result.
    """

    @functools.wraps(func)
    def run_with_state(state: State, *args: Any, **kwargs: Any) -> _Result:
        with termination_notices.handle_notice_signals(), _with_stored_commits(state):
            return run_in_each_world(state, *args, **kwargs)

    def run_in_each_world(state: State, *args: Any, **kwargs: Any) -> _Result:
        failures, committed = 0, state._commits  # noqa: SLF001 - its own module's
        while True:
            try:
                state._load_commit_on_all_ranks()  # noqa: SLF001 - its own module's
                state._watch_for_suspension()  # noqa: SLF001 - its own module's
                # Always, also if hosts only left: if new workers joined as well, they would wait
                # for workers that skip this.
                state.sync()
                state._has_synced = True  # noqa: SLF001 - its own module's
                return func(state, *args, **kwargs)
            except FarandoleUsageError:
                raise  # another world would refuse it too
            except FarandoleInternalError:
                if state._commits != committed:  # noqa: SLF001 - its own module's
                    failures, committed = 0, state._commits  # noqa: SLF001 - its own module's
                failures += 1
                if failures > MAX_FAILED_WORLDS:
                    raise
                state.restore()
            except HostsUpdatedInterrupt:
                # Keeps the work since the last commit.
                state.save()
                state._wait_for_commit_write()  # noqa: SLF001 - its own module's
            reset()
            state.on_reset()

    return run_with_state


@contextlib.contextmanager
def _with_stored_commits(state: State) -> Iterator[None]:
    """Makes sure that the last commit of a training function is in the store when the function
    returns; surrounds all worlds of the function.
    """
    try:
        try:
            yield
        except BaseException:
            state._wait_for_commit_write()  # noqa: SLF001 - its own module's
            raise
        state._finish_commit_writes()  # noqa: SLF001 - its own module's
        if suspension.may_be_suspended() and state._is_writer:  # noqa: SLF001 - as above
            suspension.withdraw_report()  # the function may have caught `JobSuspended`
    except WorkerDismissed:
        state._hand_over_lease()  # noqa: SLF001 - its own module's
        raise
    finally:
        state._release_lease()  # noqa: SLF001 - its own module's
        state._end_suspension_watch()  # noqa: SLF001 - its own module's


def leave_and_join() -> None:
    """Leaves the world and joins the one that follows."""
    basics.shutdown()
    basics.init()
