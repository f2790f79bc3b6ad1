# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A log that cannot be written is a warning. A checkpoint that cannot be written is an error."""

from __future__ import annotations

import errno
import io
import logging

import pytest
from tests.single.test_checkpoint_safety import data, keras_fit, lightning_fit, torch_fit

from farandole.runner.gang import JobOutput
from farandole.runner.rank_files import RankOutputFiles
from farandole.stores import durable_writes
from farandole.stores.remote_store import RemoteStore

__all__ = ["data"]
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(
        "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree).*"
    ),
]
FITS = [torch_fit, lightning_fit, keras_fit]


def full(*_, **__):
    raise OSError(errno.ENOSPC, "no space left on device")


def fail_for_logs(monkeypatch, refused):
    write = RemoteStore.write

    def write_others(self, name, data):
        if name.startswith("logs/") or name in ("_record.json", "timeline.json"):
            refused.append(name)
            full()
        write(self, name, data)

    monkeypatch.setattr(RemoteStore, "write", write_others)


@pytest.mark.parametrize("fit", FITS)
def test_a_fit_whose_logs_cannot_be_written_ends_well_and_says_so(data, monkeypatch, caplog, fit):
    refused = []
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "farandole"):
        fail_for_logs(patched, refused)
        assert fit(data, "r", 2) is not None
    assert "logs/history.jsonl of the run cannot be written, the training continues" in caplog.text
    assert refused.count("logs/history.jsonl") >= 2, "each epoch tries it again"
    assert any("tfevents" in name for name in refused)
    folder = data / "runs" / "r"
    for name in ("checkpoint", "checkpoint.previous"):
        assert durable_writes.find_damage((folder / name).read_bytes()) is None
    assert not (folder / "logs").exists()
    # The next fit of the run has room again, and writes all epochs.
    fit(data, "r", 3)
    assert (folder / "logs/history.jsonl").read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("fit", FITS)
def test_a_fit_whose_checkpoint_cannot_be_written_is_an_error(data, monkeypatch, fit):
    fit(data, "r", 1)
    with monkeypatch.context() as patched:
        patched.setattr(durable_writes, "_write_locally", full)
        with pytest.raises(OSError, match="no space left"):
            fit(data, "r", 2)
    fit(data, "r", 2)


def test_output_of_ranks_that_cannot_be_written_to_files_stays_on_the_stream(
    tmp_path, monkeypatch, caplog
):
    output = JobOutput(io.StringIO(), io.StringIO(), files=RankOutputFiles(tmp_path, 1))
    output.write_line(0, "stdout", "first")
    monkeypatch.setattr(RankOutputFiles, "write_line", full)
    for text in ("second", "third"):
        output.write_line(0, "stdout", text)
    assert "third" in output.stdout.getvalue()
    assert caplog.text.count("no longer written to files") == 1
    assert (tmp_path / "rank.0" / "stdout").read_text() == "first\n"
