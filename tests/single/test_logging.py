# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The engine's log in one process: what it shows, when its thread is there, and what a fork does
to it.
"""

import os
import subprocess
import sys

import pytest

ALONE = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith(("FARANDOLE_", "HOROVOD_"))
}


def python(code, **variables):
    """Standard output and standard error of a program that must end well, and soon."""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**ALONE, **variables}
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


WORLD = """
import os, threading
from farandole.common import basics
before = [thread.name for thread in threading.enumerate()]
basics.init()
print(before, "farandole-log" in [thread.name for thread in threading.enumerate()])
"""


def test_by_default_a_thread_waits_for_warnings_and_nothing_is_shown():
    assert python(WORLD) == ("['MainThread'] True\n", "")


def test_where_no_event_has_the_level_there_is_no_thread():
    assert python(WORLD, FARANDOLE_LOG_LEVEL="fatal") == ("['MainThread'] False\n", "")


def test_the_engines_beginning_and_end_are_shown_with_the_rank():
    _, shown = python(WORLD, FARANDOLE_LOG_LEVEL="Info", FARANDOLE_LOG_HIDE_TIME="1")
    lines = shown.splitlines()
    assert lines[0].startswith("INFO farandole.engine.engine: the engine runs rank=0 size=1"), shown
    assert lines[-1] == "INFO farandole.engine.engine: the engine has ended rank=0", shown


def test_a_line_begins_with_the_time():
    _, shown = python(WORLD, FARANDOLE_LOG_LEVEL="info")
    date, clock, level, _ = shown.split(" ", 3)
    assert (len(date), len(clock), level) == (10, 12, "INFO"), shown


def test_the_level_of_pythons_logger_counts_where_no_variable_is_set():
    asked = "import logging; logging.getLogger('farandole').setLevel(logging.INFO)\n"
    assert "the engine runs" in python(asked + WORLD)[1]
    assert python(asked + WORLD, FARANDOLE_LOG_LEVEL="error")[1] == ""


def test_a_program_with_a_handler_has_each_line_once():
    _, shown = python("import logging; logging.basicConfig()\n" + WORLD, FARANDOLE_LOG_LEVEL="info")
    assert next(line for line in shown.splitlines() if "the engine runs" in line).startswith(
        "INFO:farandole.engine"
    )
    assert shown.count("the engine runs") == 1


def test_every_operation_is_shown_by_a_trace():
    pytest.importorskip("numpy")
    code = (
        WORLD + "import numpy, farandole.numpy as hvd\nhvd.allreduce(numpy.ones(2), name='loss')\n"
    )
    _, shown = python(code, FARANDOLE_LOG_LEVEL="trace")
    [line] = [line for line in shown.splitlines() if ": submitted " in line and "loss" in line]
    assert "TRACE farandole.engine.engine" in line
    assert "rank=0" in line
    assert "process_set=0" in line


def test_a_driver_shows_what_its_registrar_decides():
    pytest.importorskip("cloudpickle")
    code = "import farandole; print(farandole.run(lambda: 7, num_proc=1))"
    told, shown = python(code, FARANDOLE_LOG_LEVEL="debug")
    assert told == "[7]\n"
    assert "DEBUG farandole.registrar.server.decision_effects: the registrar decides " in shown, (
        shown
    )


def test_a_word_that_is_no_level_is_refused_by_name():
    code = """
from farandole.common import basics
try:
    basics.init()
except ValueError as error:
    print(error)
"""
    told, _ = python(code, HOROVOD_LOG_LEVEL="loud")
    assert told == "HOROVOD_LOG_LEVEL must be trace, debug, info, warning, error or fatal: loud\n"


def test_a_forked_child_ends_and_says_nothing_twice():
    code = (
        WORLD
        + """
import sys
child = os.fork()
if child == 0:
    basics.shutdown()
    basics.init()
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    told, shown = python(code, FARANDOLE_LOG_LEVEL="info")
    assert told.splitlines()[-1] == "0", told
    # One each of parent and child.
    assert shown.count("the engine runs") == 2, shown
    assert shown.count("the engine has ended") == 2, shown


def test_a_handler_that_raises_and_a_filter_that_raises_cost_their_lines_only():
    code = """
import logging
class Bad(logging.Filter):
    def filter(self, record):
        if "runs" in record.getMessage():
            raise RuntimeError("a filter of a script")
        return True
logging.getLogger("farandole.engine.engine").addFilter(Bad())
"""
    _, shown = python(code + WORLD, FARANDOLE_LOG_LEVEL="info")
    assert "a filter of a script" in shown
    assert "the engine has ended rank=0" in shown
