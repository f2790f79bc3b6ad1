# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The load of a host, a process and a GPU, by files and a library that stand in for the real
ones.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from farandole.runner.load_reports import LoadSampler, NvmlGpu

STAT = "cpu  {user} 0 100 {idle} 50 0 0 0 0 0\ncpu0 1 2 3\n"
FAKE = """
#include <string.h>
struct use { unsigned gpu, memory; };
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(long)(index + 1); return index > 3;
}
int nvmlDeviceGetHandleByUUID(const char *name, void **handle) { *handle = (void *)9L; return strcmp(name, "GPU-a"); }
int nvmlDeviceGetUtilizationRates(void *handle, struct use *use) { use->gpu = 10 * (long)handle; return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    memory->total = 1000; memory->used = 100 * (long)handle; return (long)handle == 3;
}
"""  # noqa: E501


@pytest.fixture
def proc(tmp_path):
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "stat").write_text(STAT.format(user=100, idle=800))
    (folder / "meminfo").write_text(
        "MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable:  250 kB\nHugePages_Total: 0\n"
    )
    (folder / "self" / "status").write_text("Name:\tpython\nVmRSS:\t  64 kB\n")
    return folder


def test_shares_are_of_the_time_since_the_last_look(proc):
    load = LoadSampler(proc)
    (proc / "stat").write_text(STAT.format(user=130, idle=870))
    seen = load.sample_load()
    assert seen == {
        "cpu": pytest.approx(0.3), "memory": 750 * 1024, "memory_total": 1000 * 1024,
        "process_memory": 64 * 1024,
    }  # fmt: skip
    assert "cpu" not in load.sample_load(), "no time has passed"


def test_a_host_without_proc_says_nothing(tmp_path):
    assert LoadSampler(tmp_path).sample_load() == {}


def test_this_host_says_something_that_can_be():
    seen = LoadSampler().sample_load()
    assert 0 < seen["process_memory"] <= seen["memory"] < seen["memory_total"]


def test_nvml_is_asked_for_the_gpu_that_the_process_sees(tmp_path, monkeypatch):
    source, library = tmp_path / "fake.c", str(tmp_path / "libnvidia-ml.so.1")
    source.write_text(FAKE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu = NvmlGpu.find_gpu(1, library)
    assert gpu is not None
    assert gpu.sample_load() == {"gpu": 0.2, "gpu_memory": 200, "gpu_memory_total": 1000}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2,GPU-a")
    masked, named = NvmlGpu.find_gpu(0, library), NvmlGpu.find_gpu(2, library)
    assert masked is not None
    assert masked.sample_load()["gpu"] == 0.4
    assert named is not None
    assert named.sample_load()["gpu_memory"] == 900
    partial = NvmlGpu.find_gpu(1, library)
    assert partial is not None
    assert partial.sample_load() == {"gpu": 0.3}, "memory that NVML does not tell is left out"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert NvmlGpu.find_gpu(0, library) is None
    assert NvmlGpu.find_gpu(0, str(tmp_path / "nothing.so")) is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
