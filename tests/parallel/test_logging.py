# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Log records of the engine's events in workers."""

import io
import logging
import threading
import time

import farandole.torch as hvd

LIMIT = 30.0


class Collected(logging.Handler):
    """Keeps records."""

    def __init__(self):
        super().__init__()
        self.records = []
        self.arrived = threading.Condition()

    def emit(self, record):
        with self.arrived:
            self.records.append(record)
            self.arrived.notify_all()

    def first(self, text):
        """The first record with this text, waiting for it."""

        def found():
            return [record for record in self.records if text in record.getMessage()]

        with self.arrived:
            assert self.arrived.wait_for(found, LIMIT), [
                record.getMessage() for record in self.records
            ]
            return found()[0]


def adds_sets():
    """A record of the engine in this process, as plain values, and its rank."""
    collected = Collected()
    logger = logging.getLogger("farandole")
    logger.addHandler(collected)
    try:
        before = time.time()
        # Each rank is in one of them, and hears of that one.
        added = [hvd.add_process_set([0]), hvd.add_process_set([1])]
        record = collected.first("a process set is added")
        for process_set in added:
            hvd.remove_process_set(process_set)
        return (
            hvd.rank(),
            (record.name, record.levelname, record.getMessage(), record.rank),
            before <= record.created <= time.time()
            and record.lineno > 0
            and record.pathname.endswith(".rs"),
            logger.level,
        )
    finally:
        logger.removeHandler(collected)


def test_every_rank_has_the_engines_events_in_pythons_logging_with_its_rank(fresh_world):
    world = fresh_world(
        2, env={"FARANDOLE_LOG_LEVEL": "debug", "FARANDOLE_DYNAMIC_PROCESS_SETS": "1"}
    )
    for expected, (rank, (name, level, text, told), plausible, logger_level) in enumerate(
        world.run(adds_sets)
    ):
        assert (rank, told) == (expected, expected)
        assert (name, level, logger_level) == ("farandole.engine.engine", "DEBUG", logging.DEBUG)
        assert f"process_set={rank + 1}" in text, text
        assert f"rank={rank}" in text, text
        assert plausible


def fallback_shows():
    """Returns the lines on stderr without a handler, and with one."""
    import sys

    own, stderr = io.StringIO(), sys.stderr
    sys.stderr = io.StringIO()
    handler = logging.StreamHandler(own)
    logger = logging.getLogger("farandole.engine")
    try:
        logger.debug("without a handler")
        logger.addHandler(handler)
        logger.debug("with a handler")
        return sys.stderr.getvalue(), own.getvalue()
    finally:
        logger.removeHandler(handler)
        sys.stderr = stderr


def test_lines_go_to_stderr_unless_the_program_has_a_handler(fresh_world):
    world = fresh_world(1, env={"HOROVOD_LOG_LEVEL": "DEBUG", "HOROVOD_LOG_HIDE_TIME": "1"})
    [(stderr, own)] = world.run(fallback_shows)
    assert stderr == "DEBUG farandole.engine: without a handler\n"
    assert own == "with a handler\n"


def is_quiet():
    """Returns whether the engine's log lets only warnings through, and the script's settings are
    as they were.
    """
    logger = logging.getLogger("farandole")
    return logger.level == logging.NOTSET and not logger.isEnabledFor(logging.INFO)


def test_nothing_is_shown_and_no_level_is_set_by_default(fresh_world):
    world = fresh_world(2)
    assert world.run(is_quiet) == [True, True]
