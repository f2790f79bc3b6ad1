# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Point-to-point operations of a group.

A message is a broadcast in the process set of its two ranks. Its name has both ranks, the tag, and
a number that counts the messages with the same ranks and tag. So a receive finds the send with its
number, in any order of other messages. Sender and receiver wait for each other, as in Gloo. The
first message of two ranks opens their process set in the background; until the set is open,
messages are deferred.

A receive from any rank writes a request into the store of the group. A send that is not received
within a moment looks for such requests and claims one: the receiver then receives from that rank.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import distributed_c10d

from farandole._native import engine
from farandole.torch.distributed._groups import start_opening_member_set
from farandole.torch.distributed._tensors import copy_into, to_host
from farandole.torch.distributed._work import (
    FarandoleWork,
    OperationTimeoutError,
    PendingOperation,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    import torch

    from farandole.torch.distributed._groups import MemberSetOpening, WorldStore

_UINT8: Final = 0
"""The engine's number of bytes."""
_log = logging.getLogger("farandole")
_SEND_GRACE_PERIOD: Final = 0.005
"""Seconds after which a send that is not received looks for receives from any rank."""
_LONGEST_LOOK_PAUSE: Final = 0.05
_QUIET_PERIOD: Final = 1.0
"""Seconds without sends after which the thread of late sends sleeps."""
_WAITING_CALLS: Final = {
    inspect.unwrap(function).__code__ for function in (distributed_c10d.send, distributed_c10d.recv)
}
"""Functions of torch that start a message, and wait for it next."""
_MAX_CALLER_FRAMES: Final = 8
"""Frames between `_is_waited_at_once` and such a function, at most."""


def _is_waited_at_once() -> bool:
    """Returns whether `send` or `recv` of torch, which pass no option for it, made this call."""
    frame = sys._getframe(1)  # noqa: SLF001 - the cheapest way to the callers
    for _ in range(_MAX_CALLER_FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code in _WAITING_CALLS:
            return True
    return False


class MessageWork(FarandoleWork):
    """A send or a receive in progress.

    Args:
        pending: The operation.
        outputs: The received tensor.
        timeout: Limit of a wait.
    """

    def __init__(
        self, pending: PendingOperation, outputs: list[torch.Tensor], timeout: timedelta
    ) -> None:
        super().__init__(pending, outputs, None, timeout)
        self.source: int | None = None
        """The rank in the group that has sent the message, once it is known."""

    def source_rank(self) -> int:
        """Waits for the message; returns the rank in the group that has sent it.

        Raises:
            RuntimeError: This is a send.
        """
        self.wait()
        if self.source is None:
            return super().source_rank()
        return self.source


@dataclass
class _UnreceivedSend:
    """A send that has not been received yet."""

    pending: PendingOperation
    destination: int
    tag: int
    number: int
    claimed: bool = False


class PointToPoint:
    """The messages of one group.

    Args:
        name: Name of the group.
        rank: This process's rank in the group.
        members: The global ranks, in the order of the group.
        store: The store of the members; `None` if the group has no members yet.
    """

    def __init__(self, name: str, rank: int, members: list[int], store: WorldStore | None) -> None:
        self._name = name
        self._rank = rank
        self._members = members
        self._store = store
        self._lock = threading.Lock()
        self._sent: defaultdict[tuple[int, int], itertools.count[int]] = defaultdict(
            itertools.count
        )
        """The next number of a message by its destination and tag."""
        self._received: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        """Numbers of received messages that are not below the next one, by source and tag."""
        self._next_received: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._requests = itertools.count()
        self._pairs: dict[int, MemberSetOpening] = {}
        """The process sets of this rank and a peer, by the peer's rank in the group."""
        self._sends = UnreceivedSends(self)

    def close(self) -> None:
        """Ends the thread of late sends."""
        self._sends.close()

    def send(
        self, tensor: torch.Tensor, destination: int, tag: int, timeout: timedelta
    ) -> MessageWork:
        """Starts a send.

        Args:
            tensor: The tensor; must not change until the work is over.
            destination: The receiving rank in the group.
            tag: The tag; the receive has the same one.
            timeout: Limit of a wait.

        Raises:
            ValueError: The tag is negative, or the destination is this rank or no member.
        """
        self._check_message("send", destination, tag)
        data = to_host(tensor)
        with self._lock:
            number = next(self._sent[destination, tag])
        name = self._message_name(self._rank, destination, tag, number)
        pending = self._start_message(
            destination, name, data, self._rank, _discard_outcomes, timeout
        )
        self._sends.add(_UnreceivedSend(pending, destination, tag, number))
        return MessageWork(pending, [tensor], timeout)

    def receive(
        self, tensor: torch.Tensor, source: int, tag: int, timeout: timedelta
    ) -> MessageWork:
        """Starts a receive from a rank.

        Args:
            tensor: The tensor to overwrite; as many bytes as the sent one.
            source: The sending rank in the group.
            tag: The tag of the send.
            timeout: Limit of a wait.

        Raises:
            ValueError: The tag is negative, or the source is this rank or no member.
        """
        self._check_message("recv", source, tag)
        data = to_host(tensor)
        with self._lock:
            number = self._take_next_message_number(source, tag)
        name = self._message_name(source, self._rank, tag, number)
        finish = _make_message_store(tensor, data)
        pending = self._start_message(source, name, data, source, finish, timeout)
        work = MessageWork(pending, [tensor], timeout)
        work.source = source
        return work

    def receive_from_any(self, tensor: torch.Tensor, tag: int, timeout: timedelta) -> MessageWork:
        """Starts a receive from any rank; arguments as of `receive`."""
        if tag < 0:
            raise ValueError(f"recv needs a tag of 0 or more: {tag}")
        data = to_host(tensor)
        pending = PendingOperation(None, data, _make_message_store(tensor, data))
        work = MessageWork(pending, [tensor], timeout)
        # Requests are written in the order of the calls.
        request = self._publish_receive_request(tag)
        threading.Thread(
            target=self._await_any_sender,
            args=(work, pending, data, request, tag, timeout),
            name="farandole-receive",
            daemon=True,
        ).start()
        return work

    def _check_message(self, operation: str, peer: int, tag: int) -> None:
        if tag < 0:
            raise ValueError(f"{operation} needs a tag of 0 or more: {tag}")
        if peer == self._rank:
            raise ValueError(
                f"{operation} needs another rank than the own one, which is {self._rank} in the "
                "group: copy the tensor instead"
            )
        if not 0 <= peer < len(self._members):
            raise ValueError(f"{operation} needs a rank of 0 to {len(self._members) - 1}: {peer}")

    def _message_name(self, source: int, destination: int, tag: int, number: int) -> str:
        return f"{self._name}.message.{source}.{destination}.{tag}.{number}"

    def _take_next_message_number(self, source: int, tag: int) -> int:
        """Returns the number of the next message from a rank. The caller holds the lock."""
        received = self._received[source, tag]
        number = self._next_received[source, tag]
        while number in received:
            received.discard(number)
            number += 1
        self._next_received[source, tag] = number + 1
        return number

    def _claim_message_number(self, source: int, tag: int, number: int) -> bool:
        """Takes a certain message for a receive from any rank; returns whether it is free. The
        caller holds the lock.
        """
        received = self._received[source, tag]
        if number < self._next_received[source, tag] or number in received:
            return False
        received.add(number)
        return True

    def _start_message(
        self,
        peer: int,
        name: str,
        data: torch.Tensor,
        root: int,
        finish: Callable[[list[Any]], None],
        timeout: timedelta,
    ) -> PendingOperation:
        """Submits a message, now or once this rank and the peer are linked."""
        opening = self._start_opening_pair(peer, timeout)
        if opening.is_open:
            described = self._describe_message(
                name, data, root, opening.wait_for_number(), is_waited_at_once=_is_waited_at_once()
            )
            return PendingOperation(described, data, finish)
        pending = PendingOperation(None, data, finish)
        self._submit_when_open(pending, opening, name, data, root)
        return pending

    def _start_opening_pair(self, peer: int, timeout: timedelta) -> MemberSetOpening:
        opening = self._pairs.get(peer)
        if opening is None:
            low, high = sorted((self._members[self._rank], self._members[peer]))
            opening = start_opening_member_set((low, high), timeout.total_seconds())
            self._pairs[peer] = opening
        return opening

    def _submit_when_open(
        self,
        pending: PendingOperation,
        opening: MemberSetOpening,
        name: str,
        data: torch.Tensor,
        root: int,
    ) -> None:
        def submit_message(opened: int | Exception) -> None:
            if isinstance(opened, Exception):
                pending.fail_deferred(opened)
            else:
                pending.submit(
                    self._describe_message(name, data, root, opened, is_waited_at_once=False)
                )

        opening.call_when_open(submit_message)

    def _describe_message(
        self, name: str, data: torch.Tensor, root: int, number: int, *, is_waited_at_once: bool
    ) -> tuple[Any, ...]:
        """Returns the engine's function for a message, and its arguments."""
        address, shape = data.data_ptr(), (data.nbytes,)
        root_rank = self._members[root]
        return (
            engine.broadcast,
            name,
            _UINT8,
            shape,
            address,
            address,
            root_rank,
            number,
            is_waited_at_once,
        )

    # Receives from any rank.

    def receive_request_key(self, destination: int, request: int) -> str:
        """Returns the key of a request in the store."""
        return f"receive/{self._name}/{destination}/{request}"

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    @property
    def store(self) -> WorldStore | None:
        """The store of the members."""
        return self._store

    def _publish_receive_request(self, tag: int) -> int:
        assert self._store is not None  # noqa: S101 - a group without members has refused before
        with self._lock:
            request = next(self._requests)
            self._store.set(self.receive_request_key(self._rank, request), str(tag))
        return request

    def _await_any_sender(
        self,
        work: MessageWork,
        pending: PendingOperation,
        data: torch.Tensor,
        request: int,
        tag: int,
        timeout: timedelta,
    ) -> None:
        """Waits for a sender, in a thread of its own."""
        assert self._store is not None  # noqa: S101 - as above
        end = time.monotonic() + timeout.total_seconds()
        try:
            while True:
                key = f"{self.receive_request_key(self._rank, request)}/sender"
                if not self._store.wait_for_key(key, end):
                    raise OperationTimeoutError(  # noqa: TRY301 - the thread's only error path
                        f"no rank has sent a message with tag {tag} within "
                        f"{timeout.total_seconds():.3f} s"
                    )
                source, number = map(int, self._store.get(key).split())
                with self._lock:
                    claimed = self._claim_message_number(source, tag, number)
                if claimed:
                    break
                # A receive from that rank has taken the message meanwhile.
                request = self._publish_receive_request(tag)
            work.source = source
            name = self._message_name(source, self._rank, tag, number)
            opening = self._start_opening_pair(source, timeout)
            self._submit_when_open(pending, opening, name, data, source)
        except Exception as error:  # noqa: BLE001 - raised by the waiter
            pending.fail_deferred(error)


class UnreceivedSends:
    """Sends that are not received yet, which look for receives from any rank in a thread.

    Args:
        messages: The messages of the group.
    """

    def __init__(self, messages: PointToPoint) -> None:
        self._messages = messages
        self._added: deque[_UnreceivedSend] = deque()
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._next_request: defaultdict[int, int] = defaultdict(int)
        self._open_requests: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """Tags of requests without a sender, by destination and number."""

    def add(self, send: _UnreceivedSend) -> None:
        """Adds a send."""
        self._added.append(send)
        if not self._awake.is_set():
            self._awake.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._offer_unreceived_sends, name="farandole-sends", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._awake.set()

    def _offer_unreceived_sends(self) -> None:
        waiting: list[_UnreceivedSend] = []
        pause, last = _SEND_GRACE_PERIOD, time.monotonic()
        while not self._closed:
            time.sleep(pause)
            while self._added:
                waiting.append(self._added.popleft())
                pause, last = _SEND_GRACE_PERIOD, time.monotonic()
            waiting = [send for send in waiting if not send.pending.is_over and not send.claimed]
            try:
                for destination in {send.destination for send in waiting}:
                    self._claim_receive_requests(destination, waiting)
            except RuntimeError as error:
                # Usually the store has ended, and with it the program. The next send starts this
                # again.
                if not self._closed:
                    _log.debug("requests of receives are not looked for: %s", error)
                self._added.extend(waiting)
                self._thread = None
                self._awake.clear()
                return
            if waiting:
                pause = min(1.5 * pause, _LONGEST_LOOK_PAUSE)
            elif time.monotonic() - last > _QUIET_PERIOD:
                self._awake.clear()
                if not self._added:
                    self._awake.wait()
                last = time.monotonic()

    def _claim_receive_requests(self, destination: int, waiting: list[_UnreceivedSend]) -> None:
        store, rank = self._messages.store, self._messages.rank
        if store is None:
            return
        requests = self._open_requests[destination]
        while store.contains(self._next_request_key(destination)):
            requests[self._next_request[destination]] = int(
                store.get(self._next_request_key(destination))
            )
            self._next_request[destination] += 1
        for send in waiting:
            if send.destination != destination or time.monotonic() - send.pending.began < (
                _SEND_GRACE_PERIOD
            ):
                continue
            for request in [one for one, tag in requests.items() if tag == send.tag]:
                del requests[request]
                key = f"{self._messages.receive_request_key(destination, request)}/sender"
                if store.set_if_absent(key, f"{rank} {send.number}"):
                    send.claimed = True
                    break

    def _next_request_key(self, destination: int) -> str:
        return self._messages.receive_request_key(destination, self._next_request[destination])


def _discard_outcomes(_: list[Any]) -> None:
    """Stores no result."""


def _make_message_store(tensor: torch.Tensor, data: torch.Tensor) -> Any:
    def store_message(_: list[Any]) -> None:
        if data.data_ptr() != tensor.data_ptr():
            copy_into(tensor, data)

    return store_message
