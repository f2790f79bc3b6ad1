# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The programs that tests run in other processes: files in `programs` beside the test."""

from __future__ import annotations

from pathlib import Path


def program_path(test_file: str, name: str) -> Path:
    """Returns the path of a program of a test.

    Args:
        test_file: `__file__` of the test.
        name: Name of the program, without `.py`.
    """
    path = Path(test_file).with_name("programs") / f"{name}.py"
    assert path.is_file(), path
    return path


def program_text(test_file: str, name: str) -> str:
    """Returns the text of a program that a test copies to a host of its own, or changes.

    Args:
        test_file: `__file__` of the test.
        name: Name of the program, without `.py`.
    """
    return program_path(test_file, name).read_text()
