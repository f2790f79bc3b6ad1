# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks of `make gpu-check`, as far as a host without a GPU can run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole._native import cuda
from farandole.common.exceptions import FarandoleEnvironmentError

CHECK = Path(__file__).parents[2] / "bench" / "gpu_check.py"
PACKAGES = [folder for folder in sys.path if (Path(folder) / "nvidia").is_dir()]


def test_without_a_gpu_it_says_so_and_is_content():
    command = [
        sys.executable,
        "-c",
        (
            f"import runpy, sys; sys.argv = ['check']; runpy.run_path({str(CHECK)!r}, "
            "run_name='__main__')"
        ),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
    )
    assert (done.returncode, done.stdout) == (0, "no GPU here: nothing was checked\n"), done.stderr


def test_the_estimators_row_is_rehearsed_on_the_cpu():
    command = [sys.executable, str(CHECK), "--rehearse", "--only", "estimator"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("pass     a TorchEstimator is fed"), done.stdout


def test_every_library_is_named_with_its_version_or_why_it_was_refused():
    findings = {name: (works, detail) for name, works, detail in cuda.cuda_inventory("", PACKAGES)}
    assert list(findings)[:4] == ["libcuda", "libcudart", "libnvrtc", "libnccl"]
    if PACKAGES:
        works, detail = findings["libnccl"]
        assert works, detail
        assert "libnccl.so.2" in detail
    for name, (works, detail) in findings.items():
        assert works or f"{name} was not found" in detail


def test_a_named_folder_without_libraries_changes_nothing(tmp_path):
    assert cuda.cuda_inventory(str(tmp_path), PACKAGES) == cuda.cuda_inventory("", PACKAGES)


def test_tensors_are_packed_at_multiples_of_16_bytes():
    float32, bfloat16 = 7, 10
    assert cuda.packed_buffer_bytes([1, 4, 5], float32) == 16 + 16 + 32
    assert cuda.packed_buffer_bytes([1, 8, 9], bfloat16) == 16 + 16 + 32


@pytest.mark.skipif(cuda.cuda_inventory("", [])[0][1], reason="this host has a driver")
def test_kernels_without_a_driver_are_an_error_that_says_what_is_missing(tmp_path):
    with pytest.raises(FarandoleEnvironmentError, match="libcuda was not found"):
        cuda.GpuKernels(0, "", PACKAGES, str(tmp_path))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FarandoleEnvironmentError, match="libcuda was not found"):
        cuda.SingleMemberNccl(0, "", PACKAGES)
    assert os.listdir("/proc/self/fd") == before, "NCCL has opened a port"
