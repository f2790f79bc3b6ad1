# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The queue of jobs for a number of slots."""

import threading
import time

import pytest

from farandole.runner.job_limits import start_timeout_seconds
from farandole.runner.job_slot_queue import SlotQueue


class Jobs:
    """Jobs in threads, each of which runs until it is released."""

    def __init__(self, total):
        self.slots = SlotQueue(lambda: total)
        self.began, self.messages, self.doors, self.threads = [], [], {}, {}

    def start(self, name, number):
        said = threading.Event()

        def note_message(text):
            self.messages.append(text)
            said.set()

        def run():
            with self.slots.hold_slots(number, note_message):
                self.began.append(name)
                said.set()
                assert self.doors[name].wait(20)

        self.doors[name] = threading.Event()
        self.threads[name] = threading.Thread(target=run)
        self.threads[name].start()
        assert said.wait(20), "a job runs, or says what it waits for"

    def end(self, name):
        self.doors[name].set()
        self.threads[name].join(20)

    def has(self, began):
        deadline = time.monotonic() + 20
        while self.began != began:
            assert time.monotonic() < deadline, self.began
            time.sleep(0.01)


def test_a_job_gets_all_of_its_slots_or_waits_and_says_so():
    jobs = Jobs(4)
    jobs.start("first", 3)
    jobs.start("second", 3)
    jobs.has(["first"])
    assert jobs.messages == [
        "a job of 3 processes waits for slots: 3 of 4 are held by 1 job, 0 jobs ahead in the queue"
    ]
    jobs.end("first")
    jobs.has(["first", "second"])
    jobs.end("second")


def test_a_large_job_is_not_passed_by_small_ones():
    jobs = Jobs(4)
    jobs.start("first", 3)
    jobs.start("large", 4)
    jobs.start("small", 1)
    jobs.has(["first"])
    jobs.end("first")
    jobs.has(["first", "large"])
    jobs.end("large")
    jobs.has(["first", "large", "small"])
    jobs.end("small")


def test_a_job_larger_than_all_slots_runs_alone():
    jobs = Jobs(2)
    jobs.start("small", 1)
    jobs.start("large", 5)
    jobs.has(["small"])
    jobs.end("small")
    jobs.has(["small", "large"])
    jobs.end("large")


def test_a_job_with_a_limit_waits_no_longer_and_leaves_the_queue():
    jobs = Jobs(2)
    jobs.start("first", 2)
    late = pytest.raises(
        TimeoutError,
        match=r"Timed out waiting for slots: 0 of 1 after 0.1 s; .*2 of 2 are held by 1 job",
    )
    with late, jobs.slots.hold_slots(1, jobs.messages.append, max_wait_seconds=0.1):
        pass
    jobs.end("first")
    jobs.start("second", 2)
    jobs.has(["first", "second"])
    jobs.end("second")


def test_the_wait_for_slots_is_a_part_of_a_given_start_timeout():
    jobs = Jobs(2)
    jobs.start("first", 2)
    left = []

    def second():
        with jobs.slots.hold_slots_within_start_timeout(
            2, jobs.messages.append, 60, 60.0
        ) as seconds:
            left.append(seconds)

    thread = threading.Thread(target=second)
    thread.start()
    deadline = time.monotonic() + 20
    while not jobs.messages:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.5)  # of its minute
    jobs.end("first")
    thread.join(20)
    assert 40 < left[0] < 59.6
    with jobs.slots.hold_slots_within_start_timeout(
        2, jobs.messages.append, None, 600.0
    ) as seconds:
        assert seconds == start_timeout_seconds(None)


def test_gangs_that_each_hold_half_do_not_come_to_be():
    """Four jobs of three slots want four: with less than all of its slots a job holds none."""
    slots, held, most = SlotQueue(lambda: 4), [], []

    def job():
        for _ in range(20):
            with slots.hold_slots(3, lambda _: None, max_wait_seconds=20):
                held.append(3)
                most.append(sum(held))
                held.pop()

    threads = [threading.Thread(target=job) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert most == [3] * 80
