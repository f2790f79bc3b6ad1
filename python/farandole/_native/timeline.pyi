# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The timeline of this process."""

def start_timeline(path: str, mark_cycles: bool, /) -> None: ...
def stop_timeline() -> None: ...
def has_timeline() -> bool:
    """Returns whether a timeline is written in this process."""

def enter_step_phase(name: str, /) -> None:
    """A phase of a step begins, inside of those that have begun; nothing where no timeline is
    written.
    """

def leave_step_phase() -> None:
    """The phase that began last ends."""

def stack_request_descriptor() -> int: ...
def answer_stack_request(text: str, /) -> None: ...
