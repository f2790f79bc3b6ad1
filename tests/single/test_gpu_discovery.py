# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The GPUs that Spark's discovery script tells of a host."""

from __future__ import annotations

import json

from farandole.spark import gpus


def test_gpus_are_printed_as_spark_reads_them(tmp_path, monkeypatch, capsys):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\n[ "$*" = "--query-gpu=index --format=csv,noheader" ] && printf "0\\n3\\n"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.main() == 0
    assert json.loads(capsys.readouterr().out) == {"name": "gpu", "addresses": ["0", "3"]}


def test_a_host_without_nvidia_smi_or_with_one_that_fails_has_no_gpus_for_spark(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.main() == 1
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    assert gpus.main() == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "nvidia-smi" in told.err
    assert "exit status 9" in told.err
