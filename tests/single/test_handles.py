# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Handles of operations: what an interrupted wait leaves behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from farandole.common import handles
from farandole.common.exceptions import FarandoleInternalError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def planned_answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces `wait` and returns its planned answers, in the order of the calls, with the
    members.
    """
    answers: list[Any] = []

    def wait(member: int, timeout: float | None = None) -> int:
        expected, answer = answers.pop(0)
        assert member == expected, "a member is waited for twice, or not at all"
        assert timeout is None, "no limit was asked for"
        if isinstance(answer, BaseException):
            raise answer
        return answer

    pending = SimpleNamespace(wait=wait, is_pending=lambda _: False, poll=lambda _: True)
    monkeypatch.setattr(handles, "engine", pending)
    return answers


@pytest.fixture
def table() -> Iterator[handles.HandleTable]:
    """A table of operations that were never started."""
    own = handles.HandleTable("test")
    yield own
    assert not own._entries
    assert not own._submitting


def test_a_wait_that_was_interrupted_continues_where_it_was(
    planned_answers: list[Any], table: handles.HandleTable
) -> None:
    handle = table.submit_operation(None, list, lambda: [7, 8, 9])
    planned_answers += [(7, 70), (8, KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        table.synchronize(handle)
    planned_answers += [(8, KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        table.synchronize(handle)
    assert table.poll(handle)
    planned_answers += [(8, 80), (9, 90)]
    assert table.synchronize(handle) == [70, 80, 90]
    with pytest.raises(ValueError, match="no operation has this handle"):
        table.synchronize(handle)


def test_a_group_is_waited_for_to_its_end_and_raises_its_first_failure(
    planned_answers: list[Any], table: handles.HandleTable
) -> None:
    handle = table.submit_operation(None, list, lambda: [1, 2, 3, 4])
    planned_answers += [(1, FarandoleInternalError("first")), (2, KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        table.synchronize(handle)
    planned_answers += [(2, 20), (3, FarandoleInternalError("second")), (4, 40)]
    with pytest.raises(FarandoleInternalError, match="first"):
        table.synchronize(handle)
    assert not planned_answers


def test_one_operation_gives_a_list_of_one_outcome(
    planned_answers: list[Any], table: handles.HandleTable
) -> None:
    planned_answers += [(5, None)]
    assert table.synchronize(table.submit_operation(None, list, lambda: 5)) == [None]


def test_a_refused_value_is_not_kept(table: handles.HandleTable) -> None:
    with pytest.raises(ZeroDivisionError):
        table.submit_operation(None, list, lambda: 1 // 0)
