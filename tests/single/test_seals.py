# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The marker of a run: checkpoints that no job of it wrote are not used."""

from __future__ import annotations

import json
import pickle
import shutil
import sys

import cloudpickle
import pytest
from tests.single.test_checkpoint_safety import Recorder, archive, text_of, torch_fit
from tests.single.training import line, write

from farandole._native import store as native
from farandole.runner.agent import WorkerSpec
from farandole.runner.errors import FarandoleJobError
from farandole.spark.common import LocalBackend, LocalStore
from farandole.stores import checkpoint_signatures, durable_writes, run_keys

pytestmark = pytest.mark.timeout(300)


def run_of(folder, run_id="r"):
    return LocalStore(str(folder)).to_remote(run_id)


@pytest.fixture(params=[None, "the owner's secret"], ids=["plain", "keyed"])
def secret(request, monkeypatch):
    monkeypatch.delenv(checkpoint_signatures.SECRET_VARIABLE, raising=False)
    if request.param is not None:
        monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, request.param)
    return request.param


def test_the_last_two_are_known_and_foreign_files_are_not(tmp_path, secret, caplog):
    run, folder = run_of(tmp_path), tmp_path / "runs" / "r"
    for epoch in range(1, 6):
        run.write_checkpoint("checkpoint", archive(str(epoch)))
        assert text_of(run.read_checkpoint_to_resume()) == str(epoch)
    (folder / "checkpoint").write_bytes(archive("a stranger's"))
    assert text_of(run.read_checkpoint_to_resume()) == "4"
    assert "no job of this run wrote it" in caplog.text
    (folder / "checkpoint").write_bytes(archive("a stranger's"))
    (folder / "checkpoint.previous").write_bytes(archive("a stranger's"))
    with pytest.raises(ValueError, match="no usable checkpoint"):
        run.read_checkpoint_to_resume()


def test_a_foreign_best_checkpoint_is_not_used(tmp_path, secret):
    run = run_of(tmp_path)
    run.write_checkpoint("checkpoint.best", archive("best"))
    assert text_of(run.read_checkpoint("checkpoint.best")) == "best"
    (tmp_path / "runs" / "r" / "checkpoint.best").write_bytes(archive("a stranger's"))
    assert run.read_checkpoint("checkpoint.best") is None


def test_with_a_secret_a_foreign_marker_is_worth_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv(checkpoint_signatures.SECRET_VARIABLE, raising=False)
    run_of(tmp_path).write_checkpoint("checkpoint", archive("without"))
    assert text_of(run_of(tmp_path).read_checkpoint_to_resume()) == "without"
    monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, "mine")
    with pytest.raises(ValueError, match="no usable checkpoint"):
        run_of(tmp_path).read_checkpoint_to_resume()
    monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, "another's")
    run_of(tmp_path, "other").write_checkpoint("checkpoint", archive("another's"))
    monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, "mine")
    with pytest.raises(ValueError, match="no usable checkpoint"):
        run_of(tmp_path, "other").read_checkpoint_to_resume()
    # A run's files under another run's name, too.
    run_of(tmp_path, "mine").write_checkpoint("checkpoint", archive("mine"))
    shutil.copytree(tmp_path / "runs" / "mine", tmp_path / "runs" / "copy")
    assert text_of(run_of(tmp_path, "mine").read_checkpoint_to_resume()) == "mine"
    with pytest.raises(ValueError, match="no usable checkpoint"):
        run_of(tmp_path, "copy").read_checkpoint_to_resume()
    assert "mine" not in repr(run_of(tmp_path, "x").run_key or b"")
    assert "run_key" not in repr(run_of(tmp_path, "x"))


def test_a_run_of_before_there_were_markers_continues(tmp_path, monkeypatch):
    monkeypatch.delenv(checkpoint_signatures.SECRET_VARIABLE, raising=False)
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "checkpoint").write_bytes(archive("old"))
    run = run_of(tmp_path)
    assert text_of(run.read_checkpoint_to_resume()) == "old"
    run.write_checkpoint("checkpoint", archive("new"))
    (folder / "checkpoint").write_bytes(b"cut")
    assert text_of(run.read_checkpoint_to_resume()) == "old"


@pytest.mark.parametrize(
    "marker", [b"", b"[]", b'{"checkpoints": 1}', b'{"checkpoints": {"checkpoint": [1]}}']
)
def test_a_damaged_marker_is_as_none(tmp_path, monkeypatch, marker):
    monkeypatch.delenv(checkpoint_signatures.SECRET_VARIABLE, raising=False)
    run = run_of(tmp_path)
    run.write_checkpoint("checkpoint", archive("1"))
    (tmp_path / "runs" / "r" / checkpoint_signatures.MARKER_FILENAME).write_bytes(marker)
    assert text_of(run.read_checkpoint_to_resume()) == "1"
    run.write_checkpoint("checkpoint", archive("2"))
    assert text_of(run.read_checkpoint_to_resume()) == "2"


def test_a_marker_of_a_newer_version_is_refused_and_kept(tmp_path, monkeypatch):
    monkeypatch.delenv(checkpoint_signatures.SECRET_VARIABLE, raising=False)
    run = run_of(tmp_path)
    run.write_checkpoint("checkpoint", archive("1"))
    path = tmp_path / "runs" / "r" / checkpoint_signatures.MARKER_FILENAME
    newer = json.dumps(
        {**json.loads(path.read_bytes()), "version": checkpoint_signatures.MARKER_VERSION + 1}
    )
    path.write_text(newer)
    told = (
        rf"runs/r/_run\.json has format {checkpoint_signatures.MARKER_VERSION + 1}, and this "
        rf"version of Farandole knows "
        rf"up to format"
    )
    with pytest.raises(ValueError, match=told):
        run.read_checkpoint_to_resume()
    with pytest.raises(ValueError, match=told):
        run.write_checkpoint("checkpoint", archive("2"))
    assert path.read_text() == newer


def test_a_loss_of_power_at_any_moment_leaves_a_checkpoint_that_the_marker_knows(
    tmp_path, secret, monkeypatch
):
    disk = Recorder(tmp_path / "runs" / "r")
    monkeypatch.setattr(durable_writes, "_LOCAL_FILES", disk)
    monkeypatch.setattr(
        durable_writes.write_durably, "__kwdefaults__", {"keeps": False, "disk": disk}
    )
    run = run_of(tmp_path)
    for epoch in range(1, 4):
        run.write_checkpoint("checkpoint", archive(str(epoch)))
        disk.done(epoch)
    monkeypatch.undo()
    if secret is not None:
        monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, secret)
    seen = set()
    for index, (done, files) in enumerate(disk.losses()):
        after = tmp_path / f"after-{index}" / "runs" / "r"
        after.mkdir(parents=True)
        for name, data in files.items():
            (after / name).write_bytes(data)
        found = run_of(tmp_path / f"after-{index}").read_checkpoint_to_resume()
        epoch = 0 if found is None else int(text_of(found))
        assert epoch in (done, done + 1), (done, epoch, sorted(files))
        seen.add((done, epoch))
        shutil.rmtree(tmp_path / f"after-{index}")
    assert {(0, 0), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)} <= seen


def test_a_fit_continues_from_its_own_checkpoints_alone(tmp_path, monkeypatch):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, "mine")
    torch_fit(tmp_path, "r", 1)
    assert len(torch_fit(tmp_path, "r", 2).getHistory()) == 2
    marker = json.loads(
        native.Store(str(tmp_path / "runs" / "r")).read(checkpoint_signatures.MARKER_FILENAME)
    )
    assert marker["run"] == "r"
    assert all("seal" in one for one in marker["checkpoints"]["checkpoint"])
    monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, "another's")
    with pytest.raises(ValueError, match="no usable checkpoint"):
        torch_fit(tmp_path, "r", 3)


def commits(folder, until):
    """Returns the position at which a job continues from the store."""
    import farandole.numpy as hvd
    from farandole.common import elastic

    hvd.init()
    state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
    state.save_to(folder, "job")

    def loop(state):
        begun = state.step
        while state.step < until:
            state.step += 1
            state.commit()
        return begun

    return elastic.run_fn(loop, elastic.leave_and_join)(state)


def test_workers_without_the_secret_get_the_key_of_their_run_from_the_driver(tmp_path, monkeypatch):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, "mine")
    backend = LocalBackend(
        2, verbose=0, warm=False, env={checkpoint_signatures.SECRET_VARIABLE: None}
    )
    folder = str(tmp_path)
    assert backend.run(commits, (folder, 2)) == [0, 0]
    assert run_of(tmp_path, "job").read_checkpoint_to_resume() is not None, (
        "the seal is that of the driver's secret"
    )
    assert backend.run(commits, (folder, 4)) == [2, 2]
    monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, "another's")
    with pytest.raises(FarandoleJobError, match="no usable checkpoint"):
        backend.run(commits, (folder, 5))


def test_a_driver_that_does_not_answer_leaves_commits_neither_written_nor_used(
    tmp_path, monkeypatch
):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, "mine")
    monkeypatch.setattr("farandole.runner.event_handler.run_keys.publish_run_key", lambda *_: None)
    backend = LocalBackend(
        2, verbose=0, warm=False, env={checkpoint_signatures.SECRET_VARIABLE: None}
    )

    def briefly(folder, until):

        run_keys._KEY_REQUEST_TIMEOUT, run_keys._KEY_REQUEST_INTERVAL = 1.0, 0.3
        return commits(folder, until)

    with pytest.raises(FarandoleJobError, match="did not give this worker the key of run 'job'"):
        backend.run(briefly, (str(tmp_path), 2))
    assert not (tmp_path / "runs/job/checkpoint").exists()


def test_neither_the_secret_nor_a_key_is_in_what_is_sent_to_a_task(monkeypatch):
    monkeypatch.delenv(checkpoint_signatures.SECRET_VARIABLE, raising=False)
    assert not WorkerSpec("a ticket", b"").keys
    monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, "hunter2")
    key = checkpoint_signatures.run_signing_key("job")
    assert key is not None
    sent = pickle.dumps(WorkerSpec("a ticket", b""))
    assert pickle.loads(sent).keys, "the worker is told to ask"
    assert b"hunter2" not in sent
    assert key not in sent
