# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Installs a built wheel into empty environments and uses it there.

Usage: `python release/smoke.py DIRECTORY [--emulated PYTHON] [NAME...]`. `NAME` is a key of
`TRIALS`. Without a name all of them run. Each trial runs on the oldest and on the newest Python of
this machine that the package supports, or on the newest one for which the packages of the trial
exist. With `--emulated`, trials run on that Python only, and the time of `import farandole` has no
limit, because an emulator runs it. `torch-oldest` and `torch-newest` train a model on two ranks.
`spark-oldest` and `spark-newest` fit an estimator on Spark with `farandole demo`. `source` builds a
wheel from the source distribution, as pip does where no wheel fits, does the same as `bare` with
it, and runs on the oldest Python only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14", "3.15")
"""Versions of Python that are looked for."""
IMPORT_LIMIT = 0.010
"""Most seconds of processor time that `import farandole` may take."""

ROOT = Path(__file__).resolve().parents[1]
MADE = ("libfarandole_tensorflow.so", "farandole-spark.jar", "viewer.js")
"""Files that every wheel contains."""
RELEASED = (*MADE, "LICENSE-THIRD-PARTY.txt", "cdx.json")
"""Files that a released wheel contains."""

BARE = f"""
import time
before = time.process_time()
import farandole
took = time.process_time() - before
assert EMULATED or took <= {IMPORT_LIMIT}, f"import farandole took {{took:.4f}} s of processor time"
from farandole import _native
assert _native.__version__ == farandole.__version__
import importlib.metadata
files = [str(file) for file in importlib.metadata.files("farandole")]
for name in NAMED:
    assert any(file.endswith(name) for file in files), f"no {{name}} in the wheel"
print(f"import {{took * 1e3:.1f}} ms")
"""
REDUCE = """
import numpy as np
import {module} as hvd
hvd.init()
total = np.asarray(hvd.allreduce({tensor}, op=hvd.Sum))
assert hvd.size() == 2, hvd.size()
assert total.tolist() == [1.0] * 3, total
print("sum of two ranks", total.tolist())
"""
TRAIN = """
import torch
import farandole.torch as hvd
hvd.init()
assert hvd.size() == 2, hvd.size()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
rows = torch.randn(64, 4)
labels = rows @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
losses = []
for step in range(50):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(rows), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
weights = hvd.allgather(torch.cat([model.weight.detach(), model.bias.detach()[None]], dim=1))
assert torch.equal(weights[0], weights[1]), weights
assert losses[-1] < 0.01 * losses[0], losses
print("torch", torch.__version__, "trained on two ranks, loss", round(losses[0], 3), "to",
    round(losses[-1], 6))
"""
DEMO = """
import subprocess
import pyspark
import torch
import farandole.spark
if __name__ == "__main__":
    from pyspark.sql import SparkSession
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled",
        "false").getOrCreate()
    def rank_of():
        import farandole.numpy as hvd
        hvd.init()
        return hvd.rank(), hvd.size()
    ranks = farandole.spark.run(rank_of, num_proc=2)
    assert ranks == [(0, 2), (1, 2)], ranks
    spark.stop()
    fit = subprocess.run(["farandole", "demo"], stdout=subprocess.PIPE, text=True, check=True)
    assert f"training on Spark {pyspark.__version__}" in fit.stdout, fit.stdout
    print("pyspark", pyspark.__version__, "torch", torch.__version__, ranks, "and farandole demo")
"""


@dataclass(frozen=True)
class Trial:
    """One environment: its packages, and the program that runs in it.

    Attributes:
        packages: Requirements besides the wheel.
        script: The program.
        ranks: How many processes `farandole run` starts; 0 for `python` itself.
        extra: Other wheels of the directory, by prefix.
        source: Whether the wheel is built from the source distribution.
        extras: Extras of the wheel, as in `pip install 'farandole[torch,spark]'`.
        until: Newest Python for which the packages exist, as their indexes say; empty for any.
        on_newest: Whether it also runs on the newest Python.
    """

    packages: tuple[str, ...]
    script: str
    ranks: int = 0
    extra: tuple[str, ...] = ()
    source: bool = False
    extras: str = ""
    until: str = ""
    on_newest: bool = True


TRIALS = {
    "bare": Trial((), f"NAMED = {RELEASED}\n{BARE}"),
    "numpy": Trial(
        ("numpy>=1.26",),
        REDUCE.format(module="farandole.numpy", tensor="np.full(3, float(hvd.rank()))"),
        2,
    ),
    "horovod": Trial(
        ("numpy>=1.26",),
        "import horovod, horovod.runner\nprint('import horovod')",
        extra=("farandole_horovod-",),
    ),
    "petastorm": Trial(
        (),
        "import petastorm, petastorm.spark\nprint('import petastorm')",
        extra=("farandole_petastorm-",),
        extras="[data]",
        on_newest=False,
    ),
    "source": Trial((), f"NAMED = {MADE}\n{BARE}", source=True, on_newest=False),
    "torch-oldest": Trial(("torch==2.6.*",), TRAIN, 2, extras="[torch]", until="3.13"),
    "torch-newest": Trial((), TRAIN, 2, extras="[torch]"),
    # pyspark 3.5 imports distutils, which Python has removed in 3.12 and setuptools provides.
    "spark-oldest": Trial(
        ("pyspark==3.5.*", "torch==2.6.*", "setuptools"), DEMO, extras="[torch,spark]", until="3.13"
    ),
    "spark-newest": Trial((), DEMO, extras="[torch,spark]"),
}


def pythons() -> dict[str, str]:
    """Returns the interpreters on the path and in pyenv by version, oldest first. Nothing is
    downloaded.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for version in VERSIONS:
        candidates = [
            shutil.which(f"python{version}"),
            *sorted(pyenv.glob(f"{version}.*/bin/python")),
        ]
        works = [str(one) for one in candidates if one and _is(version, str(one))]
        if works:
            found[version] = works[0]
    return found


def _is(version: str, python: str) -> bool:
    """Returns whether an interpreter is of this version; a shim of pyenv may lead nowhere."""
    command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return (
        subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        == version
    )


def tool(name: str) -> str:
    """Returns a program beside this interpreter."""
    return str(Path(sys.executable).parent / name)


def built(directory: Path, python: str, out: Path) -> Path:
    """Builds a wheel from the source distribution with its own backend, in an environment that
    uv makes for it.
    """
    (source,) = directory.glob("farandole-*.tar.gz")
    # `make wheel` has compiled the same dependencies
    env = {"CARGO_TARGET_DIR": str(ROOT / "target"), **os.environ}
    command = [
        tool("uv"),
        "build",
        "--quiet",
        "--wheel",
        "--python",
        python,
        "--out-dir",
        str(out),
        str(source),
    ]
    subprocess.run(command, env=env, check=True)
    (wheel,) = out.glob("farandole-*.whl")
    return wheel


def attempt(
    name: str, trial: Trial, python: str, directory: Path, place: Path, *, emulated: bool
) -> str:
    """Makes the environment, installs, runs the script; what the script has printed last."""
    environment = place / "venv"
    if trial.source:
        wheel = built(directory, python, place)
    else:
        (wheel,) = directory.glob("farandole-*.whl")
    extra = [str(file) for prefix in trial.extra for file in directory.glob(f"{prefix}*.whl")]
    uv = tool("uv")
    subprocess.run(
        [uv, "venv", "--quiet", "--no-project", "--python", python, str(environment)], check=True
    )
    inside = environment / "bin" / "python"
    install = [uv, "pip", "install", "--quiet", "--python", str(inside)]
    subprocess.run([*install, f"{wheel}{trial.extras}", *extra, *trial.packages], check=True)
    script = place / f"smoke_{name.replace('-', '_')}.py"
    script.write_text(f"EMULATED = {emulated}\n{trial.script}")
    command = [str(inside), str(script)]
    if trial.ranks:
        command = [str(environment / "bin" / "farandole"), "run", "-np", str(trial.ranks), *command]
    # Nothing of this machine's environment may help: no PYTHONPATH, no settings of Farandole.
    kept = {key: value for key, value in os.environ.items() if key in {"HOME", "LANG", "JAVA_HOME"}}
    env = {
        **kept,
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "PYSPARK_PYTHON": str(inside),
    }
    ended = subprocess.run(
        command, cwd=place, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    if ended.returncode != 0:
        raise SystemExit(f"{name} failed on {python}:\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout.strip().splitlines()[-1]


def versions(trial: Trial, found: list[str]) -> list[str]:
    """Returns the versions of Python on which a trial runs, of those that were found, oldest
    first.
    """
    usable = [
        one
        for one in found
        if not trial.until or VERSIONS.index(one) <= VERSIONS.index(trial.until)
    ]
    if not usable:
        raise SystemExit(f"no Python up to {trial.until} on this machine")
    return list(dict.fromkeys((usable[0], usable[-1]) if trial.on_newest else usable[:1]))


def main(directory: Path, names: list[str], emulated: str | None) -> None:
    """Runs the trials and prints one line for each."""
    found = pythons()
    if not found and not emulated:
        raise SystemExit(f"no Python of {', '.join(VERSIONS)} on this machine")
    for name in names or list(TRIALS):
        trial = TRIALS[name]
        used = (
            {"in the emulator": emulated}
            if emulated
            else {one: found[one] for one in versions(trial, list(found))}
        )
        for version, python in used.items():
            start = time.monotonic()
            place = Path(tempfile.mkdtemp(prefix="farandole-smoke-"))
            try:
                told = attempt(name, trial, python, directory, place, emulated=bool(emulated))
            finally:
                shutil.rmtree(place)
            sys.stdout.write(
                f"smoke: {name}, Python {version}: {told} ({time.monotonic() - start:.0f} s)\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--emulated", metavar="PYTHON")
    given = parser.parse_intermixed_args()  # names come after the option, too
    main(given.directory.resolve(), given.names, given.emulated)
