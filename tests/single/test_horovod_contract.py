# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Promises of Horovod to programs that build on it, where no framework is needed."""

import itertools
import subprocess
import sys

import pytest

import farandole
from farandole.common import basics, util
from farandole.runner.backend import Backend, LocalBackend
from farandole.runner.foreign_backend import ForeignBackend, adapt_backend
from farandole.spark.common import param_checks
from farandole.spark.common.util import host_hash

LAUNCHERS = {
    "none": ({}, False),
    "horovodrun": ({"FARANDOLE_JOB": "job"}, False),
    "mpirun of Open MPI": ({"OMPI_COMM_WORLD_RANK": "0"}, True),
    "mpirun of MPICH": ({"PMI_RANK": "0"}, True),
    "mpirun_rsh": ({"MV2_COMM_WORLD_RANK": "0"}, True),
    "jsrun": ({"JSM_NAMESPACE_RANK": "0"}, True),
    "horovodrun in mpirun": ({"FARANDOLE_JOB": "job", "OMPI_COMM_WORLD_RANK": "0"}, False),
}
"""Variables of a launcher, and whether it is one of MPI."""


def test_the_version_is_horovods_and_ours_has_its_own_name():
    program = (
        "import horovod; assert horovod.__version__ == '0.28.1'; "
        f"assert horovod.__farandole_version__ == {farandole.__version__!r}; "
        "assert {'__version__', '__farandole_version__'} <= set(horovod.__all__)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("imported", "convention"), list(itertools.product([False, True], ["farandole", "horovod"]))
)
def test_only_horovods_names_have_gloo_or_mpi(monkeypatch, launcher, imported, convention):
    variables, is_mpi = LAUNCHERS[launcher]
    for name in {name for one, _ in LAUNCHERS.values() for name in one}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FARANDOLE_GRADIENT_CONVENTION", convention)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "horovod", sys)
    speaks = imported or convention == "horovod"
    assert basics.gloo_built() is util.gloo_built() is speaks
    assert basics.gloo_enabled() is (speaks and not is_mpi)
    assert basics.mpi_enabled() is basics.mpi_built() is util.mpi_built() is (speaks and is_mpi)


def test_an_empty_salt_is_none():
    assert host_hash("") == host_hash() == host_hash(None)
    assert host_hash("a") != host_hash()


class Recorder:
    """Returns its arguments."""

    def num_processes(self):
        return 3


def all_four(_, fn, args, kwargs, env):
    return fn, args, kwargs, env


def without_kwargs(_, fn, args=(), env=None):
    return fn, args, {}, env


def anything(_, fn, **given):
    assert "on_progress" not in given
    return fn, given["args"], given["kwargs"], given["env"]


@pytest.mark.parametrize("base", [object, Backend])
@pytest.mark.parametrize("run", [all_four, without_kwargs, anything])
def test_a_backend_is_anything_with_horovods_two_methods(base, run):
    kind = type("Own", (Recorder, base), {"run": run})
    own = kind()
    assert param_checks.check_backend("backend", own) is own
    adapted = adapt_backend(own)
    assert isinstance(adapted, Backend)
    assert adapted.through(None).num_processes() == 3
    adapted.check()
    assert adapted.num_processes() == adapted.max_processes() == 3
    progress = {"on_progress": print} if adapted is not own else {}
    found = adapted.run(len, args=([1],), kwargs={}, env={"A": "b"}, **progress)
    assert found == (len, ([1],), {}, {"A": "b"})
    assert adapted.run(len, args=(), kwargs={}, env={}) == (len, (), {}, {})


def test_a_backend_without_a_needed_argument_is_named():
    own = type("Bare", (Recorder,), {"run": lambda _, fn, args=(): fn(*args)})()
    adapted = adapt_backend(own)
    assert adapted.run(len, ([1, 2],)) == 2
    with pytest.raises(TypeError, match="run of Bare must take env: a backend has run"):
        adapted.run(len, ([1],), env={"A": "b"})
    with pytest.raises(TypeError, match="run of Bare must take kwargs, env"):
        adapted.run(len, ([1],), {"a": 1}, {"A": "b"})


def test_what_a_foreign_backend_has_is_used_and_ours_stay_as_they_are():
    local = LocalBackend(1)
    assert adapt_backend(local) is local
    seen = []

    class Own(Recorder):
        def run(self, fn, args, kwargs, env, on_progress):  # noqa: ARG002
            seen.append(on_progress)

        def check(self):
            seen.append("checked")

        def max_processes(self):
            return 5

        def through(self, store):
            return Own() if store else local

    adapted = adapt_backend(Own())
    adapted.check()
    adapted.run(len, on_progress=print)
    assert seen == ["checked", print]
    assert adapted.max_processes() == 5
    assert adapted.through(None) is local
    assert isinstance(adapted.through("store"), ForeignBackend)
