# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The base class of loaders, and a mixin that creates batches ahead in its own thread.

Example:
    ```python
    class Lines(BaseDataLoader):
        def __len__(self):
            return 3

        def _iterate(self):
            yield from ("a", "b", "c")


    class AsyncLines(AsyncDataLoaderMixin, Lines):  # the mixin comes first
        pass


    for batch in AsyncLines(async_loader_queue_size=8): ...
    ```
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)

_QUEUE_POLL_SECONDS = 0.1
"""Seconds between two looks at whether the other side still lives."""

_THREAD_JOIN_SECONDS = 30.0
"""Seconds that closing waits for a batch in the making."""


class BaseDataLoader(ABC):
    """An iterable of batches. A subclass defines their number and how they are created."""

    _produced_at: Any = None
    """Position after the last batch from `_iterate`, in a loader that can be resumed."""
    _consumed_at: Any = None
    """Position after the last batch that was returned."""

    @abstractmethod
    def __len__(self) -> int:
        """Batches of one epoch."""

    @abstractmethod
    def _iterate(self) -> Iterator[Any]:
        """Makes the batches of one epoch."""

    def _process_batch(self, batch: Any) -> Any:
        """Changes a batch before it is handed out, on the consumer's thread."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        """Batches of one epoch."""
        for batch in self._iterate():
            self._consumed_at = self._produced_at
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Creates batches in a thread while the consumer works on earlier ones.

    Put it before the loader among the base classes. The thread lives as long as one iteration: an
    epoch that ends early leaves no batches, and the next iteration starts a new thread.
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Passes everything else on to the loader.

        Args:
            async_loader_queue_size: Number of batches that are created ahead. With 0 they are
                created on demand, without a thread.
            debug_data_loader: Logs how many batches wait and when the thread starts and ends.
            args: For the loader.
            kwargs: For the loader.
        """
        if async_loader_queue_size < 0:
            raise ValueError(
                f"async_loader_queue_size must not be negative: {async_loader_queue_size}"
            )
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._prefetch_threads: set[_PrefetchThread] = set()
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """Batches of one epoch, made ahead."""
        if self.async_loader_queue_size == 0:
            yield from super().__iter__()  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
            return
        loader: Any = self
        run = _PrefetchThread(loader, self.async_loader_queue_size, debug=self.debug_data_loader)
        self._prefetch_threads.add(run)
        try:
            for batch, position in run:
                loader._consumed_at = position  # noqa: SLF001 - internal to this package
                yield loader._process_batch(batch)  # noqa: SLF001
        finally:
            self._prefetch_threads.discard(run)
            run.close()

    def close_async_loader(self) -> None:
        """Ends the threads of all iterations. They raise no error and create no more batches."""
        for run in list(self._prefetch_threads):
            run.close()
        self._prefetch_threads.clear()


def close_iterator(batches: Any) -> None:
    """Ends an iteration and its threads, if it is a generator."""
    close = getattr(batches, "close", None)
    if close is not None:
        close()


class _EndOfEpoch:
    """The last item of a queue, with the error."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _PrefetchThread:
    """One epoch in a thread."""

    def __init__(self, loader: Any, size: int, *, debug: bool) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(size)
        self._closed = threading.Event()
        self._debug = debug
        self._thread = threading.Thread(
            target=self._produce_batches, args=(loader,), name="fd-async-loader", daemon=True
        )
        self._thread.start()

    def _produce_batches(self, loader: Any) -> None:
        error = None
        batches = loader._iterate()  # noqa: SLF001 - internal to this package
        try:
            for batch in batches:
                if not self._put_item((batch, loader._produced_at)):  # noqa: SLF001
                    break
        except BaseException as raised:  # noqa: BLE001 - the consumer raises it
            error = raised
        finally:
            close_iterator(batches)
        self._log_debug("the thread of an epoch ends")
        self._put_item(_EndOfEpoch(error))

    def _put_item(self, item: Any) -> bool:
        """Returns whether a consumer still waits for batches."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=_QUEUE_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self._log_debug("the thread of an epoch starts")
        while not self._closed.is_set():
            try:
                item = self._queue.get(timeout=_QUEUE_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(item, _EndOfEpoch):
                if item.error is not None:
                    raise item.error
                return
            self._log_debug("%d batches wait", self._queue.qsize())
            yield item

    def _log_debug(self, text: str, *values: object) -> None:
        if self._debug:
            _log.info(text, *values)

    def close(self) -> None:
        """Ends the thread; a batch in the making is waited for."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_THREAD_JOIN_SECONDS)
            if self._thread.is_alive():
                _log.warning(
                    "the loader's thread is still creating a batch after %.0f s; it was left "
                    "running",
                    _THREAD_JOIN_SECONDS,
                )
