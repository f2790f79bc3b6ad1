# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Commits that also go to a store: a new start of the job continues from the last one that was
written.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from farandole.spark.common import LocalStore
from farandole.stores.remote_store import RemoteStore

STEPS = 12


class Stops(Exception):
    """The job ends here."""


def made(hvd, seed, **options):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, seen=[], **options)


def training(hvd, until=STEPS, fails=False, before_commit=lambda _: None):
    """A training function, each step of which depends on its number and on all steps before."""

    @hvd.elastic.run
    def train(state):
        begun = state.step
        while state.step < until:
            torch.manual_seed(state.step)
            state.optimizer.zero_grad()
            state.model(torch.randn(8, 6)).square().mean().backward()
            state.optimizer.step()
            state.step += 1
            state.seen = [*state.seen, state.step]
            before_commit(state)
            state.commit()
        if fails:
            raise Stops
        return begun

    return train


def values(state):
    entries = [entry for one in state.optimizer.state.values() for entry in one.values()]
    return [one.detach().clone() for one in (*state.model.state_dict().values(), *entries)]


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def undisturbed(hvd):
    """The final values of an undisturbed job."""
    state = made(hvd, 1)
    assert training(hvd)(state) == 0
    return values(state)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_job_that_starts_again_continues_from_the_last_commit_in_the_store(
    hvd, tmp_path, undisturbed, in_background
):
    state = made(hvd, 1, in_background=in_background)
    state.save_to(str(tmp_path), "digits", every=3)
    with pytest.raises(Stops):
        training(hvd, until=7, fails=True)(state)
    again = made(hvd, 2, in_background=in_background)
    again.save_to(LocalStore(str(tmp_path)), "digits", every=3)
    begun = training(hvd)(again)
    assert 3 <= begun <= 7
    assert again.seen == list(range(1, STEPS + 1))
    assert same(values(again), undisturbed)
    # The last commit of a job that ends well is there, too.
    third = made(hvd, 3)
    third.save_to(str(tmp_path), "digits")
    assert training(hvd)(third) == STEPS
    assert same(values(third), undisturbed)
    other = made(hvd, 1)
    other.save_to(str(tmp_path), "letters")
    assert training(hvd)(other) == 0, "another job begins at its beginning"


def test_training_does_not_wait_for_the_store_and_what_is_written_is_what_was_committed(
    hvd, tmp_path, monkeypatch, undisturbed
):
    write, open_again, written = RemoteStore.write_checkpoint, threading.Event(), []

    def slow(remote, name, data):
        assert open_again.wait(60)
        written.append(data)
        write(remote, name, data)

    monkeypatch.setattr(RemoteStore, "write_checkpoint", slow)
    state = made(hvd, 1)
    state.save_to(str(tmp_path), "digits", every=2)
    committed = {}

    def note(state):
        committed[state.step] = values(state)
        if state.step == STEPS:
            open_again.set()

    training(hvd, before_commit=note)(state)
    assert same(values(state), undisturbed)
    steps = [state._unpack_commit(data)["plain"]["step"] for data in written]
    assert steps == [2, STEPS], "commits between them are skipped"
    for step, data in zip(steps, written, strict=True):
        content = state._unpack_commit(data)["handled"]
        entries = [
            entry for one in content["optimizer"]["state"].values() for entry in one.values()
        ]
        assert same([*content["model"].values(), *entries], committed[step])


def test_a_store_that_fails_causes_warnings_and_fails_only_the_end(
    hvd, tmp_path, monkeypatch, caplog
):
    def broken(_remote, _name, _data):
        raise OSError("the disk is full")

    state = made(hvd, 1)
    state.save_to(str(tmp_path), "digits")
    monkeypatch.setattr(RemoteStore, "write_checkpoint", broken)
    with pytest.raises(OSError, match="the disk is full"):
        training(hvd)(state)
    assert state.step == STEPS
    assert "could not be written" in caplog.text


def test_progress_is_another_content_than_that_of_the_commit_before(hvd, tmp_path, monkeypatch):
    monkeypatch.setenv("FARANDOLE_REQUEUE", "1")

    def stored(until):
        state = made(hvd, 1)
        state.save_to(str(tmp_path), "digits")
        training(hvd, until=until)(state)
        return state._stored_commits

    assert stored(4).has_progressed(), "the first commit of a run"
    # It has nothing to do, and writes nothing.
    assert not stored(4).has_progressed()
    assert stored(6).has_progressed()


def test_an_equal_state_is_no_progress_although_its_archive_has_other_bytes(
    hvd, tmp_path, monkeypatch
):
    monkeypatch.setenv("FARANDOLE_REQUEUE", "1")
    state = made(hvd, 1)
    state.save_to(str(tmp_path), "digits")
    training(hvd, until=4)(state)
    again = made(hvd, 2)
    again.save_to(str(tmp_path), "digits")

    @hvd.elastic.run
    def commit_only(state):
        state.commit()

    commit_only(again)
    assert not again._stored_commits.has_progressed()
    again.step += 1

    commit_only(again)
    assert again._stored_commits.has_progressed()


def test_a_state_without_tensors_that_commits_once_per_start_makes_progress(
    hvd, tmp_path, monkeypatch
):
    monkeypatch.setenv("FARANDOLE_REQUEUE", "1")

    @hvd.elastic.run
    def train_one_epoch(state, epochs):
        state.epoch += epochs
        state.commit()

    def has_progressed(epochs):
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0, model="")
        state.save_to(str(tmp_path), "plain")
        train_one_epoch(state, epochs)
        return state._stored_commits.has_progressed()

    assert [has_progressed(1) for _ in range(3)] == [True] * 3
    assert not has_progressed(0)


def test_the_commit_before_takes_the_place_of_a_damaged_one(hvd, tmp_path):
    state = made(hvd, 1)
    state.save_to(str(tmp_path), "digits")
    training(hvd, until=4)(state)
    training(hvd, until=6)(state)
    (checkpoint,) = Path(tmp_path).rglob("checkpoint")
    data = checkpoint.read_bytes()
    checkpoint.write_bytes(data[: len(data) // 2])
    again = made(hvd, 2)
    again.save_to(str(tmp_path), "digits")
    assert 1 <= training(hvd)(again) < 6


def test_values_that_a_store_cannot_return_are_refused(hvd, tmp_path):
    state = made(hvd, 1, callback=made)
    with pytest.raises(TypeError, match=r"state\.callback is builtins.function"):
        state.save_to(str(tmp_path), "digits")
    with pytest.raises(ValueError, match="every must be at least 1: 0"):
        made(hvd, 1).save_to(str(tmp_path), "digits", every=0)
    with pytest.raises(ValueError, match="keeps no runs"):
        made(hvd, 1).save_to(LocalStore(str(tmp_path), save_runs=False), "digits")
    kept = made(hvd, 1)
    kept.save_to(str(tmp_path), "digits")
    training(hvd, until=1)(kept)
    other = made(hvd, 1, epoch=0)
    other.save_to(str(tmp_path), "digits")
    with pytest.raises(ValueError, match=r"run 'digits' cannot be taken into this state.*'epoch'"):
        training(hvd)(other)


def test_plain_values_alone_go_to_a_store_too(hvd, tmp_path):
    def made_plain(**values):
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, **values)
        state.save_to(str(tmp_path), "plain")
        return state

    @hvd.elastic.run
    def count(state):
        state.step += 1
        state.seen = {**state.seen, f"step {state.step}": [state.step, None, 0.5]}
        state.commit()

    count(made_plain(step=0, seen={}))
    again = made_plain(step=0, seen={})
    count(again)
    assert again.step == 2
    assert again.seen == {"step 1": [1, None, 0.5], "step 2": [2, None, 0.5]}
    with pytest.raises(TypeError, match=r"state\.pair is builtins.tuple"):
        made_plain(pair=(1, 2))


def test_contents_of_a_commit_take_any_plain_value(monkeypatch):
    """Dicts of a state may have keys of several types, which JSON does not sort."""
    from farandole.common import commits

    data = commits.pack_commit_archive([[1.0]], {})
    first = {"seen": {(0, 1): 2, "a": None, 3: [object()]}}
    other = {"seen": {3: [object()], "a": None, (0, 1): 2}}
    assert commits.commit_contents(data, first) == commits.commit_contents(data, other)
    changed = {"seen": {(0, 1): 3, "a": None, 3: [object()]}}
    assert commits.commit_contents(data, first) != commits.commit_contents(data, changed)
    assert commits.describe_contents(b"no archive", {}) is None
    monkeypatch.setenv("FARANDOLE_REQUEUE", "1")
    assert commits.describe_contents(b"no archive", {}) is None


def test_a_launcher_that_does_not_confirm_a_withdrawal_is_logged(monkeypatch, caplog):
    from farandole._native import launcher
    from farandole.common import suspension

    monkeypatch.setattr(launcher, "report_record", lambda *_: None)
    for is_confirmed in (True, False):
        monkeypatch.setattr(launcher, "flush_reports", lambda _, answer=is_confirmed: answer)
        suspension.withdraw_report()
        assert ("may requeue the job once more" in caplog.text) != is_confirmed
