# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Helpers that the modules of all frameworks share."""

from __future__ import annotations

import itertools
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")

Average = 0
"""Sum divided by the number of ranks; integers divide as integers, truncating toward zero."""
Sum = 1
"""Sum."""
Adasum = 2
"""Adaptive summation: equal parts of ranks' gradients count once, orthogonal parts add up."""
Min = 3
"""Smallest."""
Max = 4
"""Largest."""
Product = 5
"""Product."""

OPERATION_NAMES = {
    Average: "Average",
    Sum: "Sum",
    Adasum: "Adasum",
    Min: "Min",
    Max: "Max",
    Product: "Product",
}
"""Names of the reductions on offer."""


_ROUNDED_OP_NUMBERS = {Average: 6, Sum: 7}
"""The engine's numbers of reductions whose partial sums of 16-bit floats are rounded between
hosts.
"""


def allows_rounded_sums(compression: object) -> bool:
    """Returns whether a compressor, Farandole's or the user's own, lets partial sums be rounded
    between hosts.
    """
    return bool(getattr(compression, "rounds_partial_sums", False))


def engine_op_number(op: int, rounds: bool = True) -> int:
    """Returns the engine's number of a reduction, with partial sums rounded between hosts if
    `rounds`.
    """
    return _ROUNDED_OP_NUMBERS.get(op, op) if rounds else op


def op_of_engine_number(number: int) -> int:
    """Returns the reduction that has this number in the engine, whether it rounds partial sums
    or not.
    """
    return next((op for op, theirs in _ROUNDED_OP_NUMBERS.items() if theirs == number), number)


def resolve_op_argument(op: int | None, average: bool | None) -> int:
    """Returns the reduction that results from `op` and the deprecated `average`.

    Raises:
        ValueError: When both are given, or `op` is not on offer.
    """
    if average is not None:
        if op is not None:
            raise ValueError("give either op or the deprecated average, not both")
        message = "Parameter `average` has been replaced with `op`, and is deprecated"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in OPERATION_NAMES:
        offered = ", ".join(OPERATION_NAMES.values())
        raise ValueError(f"op must be one of {offered}: {op!r}")
    return op


def num_rank_is_power_2(num_rank: int) -> bool:
    """Returns whether a number of ranks is a power of two. Adasum no longer requires it."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: list[_T], n: int) -> list[list[_T]]:  # noqa: E741 - Horovod's argument name
    """Divides a list into `n` consecutive parts whose lengths differ by at most one, the longer
    ones first.
    """
    each, longer = divmod(len(l), n)
    ends = [each * part + min(part, longer) for part in range(n + 1)]
    return [l[start:end] for start, end in itertools.pairwise(ends)]


def is_iterable(x: object) -> bool:
    """Returns whether something can be iterated over."""
    return isinstance(x, Iterable)


def get_average_backwards_compatibility_fun(
    reduce_ops: Any,
) -> Callable[[int | None, bool | None], int]:
    """Returns a function that takes `op` and the deprecated `average`, and returns the reduction
    for both.

    Args:
        reduce_ops: Not used: the numbers of reductions are this module's.
    """
    del reduce_ops
    return resolve_op_argument


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Returns whether a version is equal to or later than another one. A pre-release is earlier
    than its release.

    Args:
        ver: The version, such as `"2.16.1"` or `"2.17.0rc1"`.
        target: The version to compare with: three numbers.

    Raises:
        ValueError: When an argument is no text, or `target` is of another form.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions must be text: {ver!r}, {target!r}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", target):
        raise ValueError(f"the version to compare with must be major.minor.patch: {target!r}")
    found = re.match(r"\s*v?(\d+(?:\.\d+)*)(.*)", ver)
    if found is None:
        raise ValueError(f"not a version: {ver!r}")
    numbers = [int(part) for part in found[1].split(".")] + [0, 0]
    wanted = [int(part) for part in target.split(".")]
    early = (
        re.match(r"[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)", found[2], re.IGNORECASE)
        is not None
    )
    if early and not any(numbers[3:]):
        return numbers[:3] > wanted
    return numbers[:3] >= wanted


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets environment variables for a block, and restores the old values.

    Args:
        **kwargs: Names and values; a variable with value `None` is not changed.
    """
    wanted = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's signature
    """Returns whether the framework of that name, `"torch"` or `"tensorflow"`, sees a GPU in this
    process.

    Raises:
        ImportError: The framework is not installed.
    """
    if "tensorflow" in ext_base_name:
        import tensorflow as tf  # noqa: PLC0415 - only who asks loads it

        return bool(tf.config.list_physical_devices("GPU"))
    import torch  # noqa: PLC0415

    return torch.cuda.is_available()


EXTENSIONS = ["tensorflow", "torch", "mxnet"]
"""Frameworks for which Horovod had to be built; here their modules are there when the framework
is.
"""


def get_ext_suffix() -> str:
    """Returns the suffix of native Python modules."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Returns the path that Horovod's native library of a framework would have.

    Args:
        pkg_path: A file of the package.
        *args: The path from its folder, the library's name without its ending last.
    """
    return str(Path(pkg_path).parent.joinpath(*args)) + get_ext_suffix()


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether a framework is installed: one of `EXTENSIONS`.

    Args:
        ext_base_name: Its name.
        verbose: Whether to say so.
    """
    is_installed = ext_base_name in EXTENSIONS and find_spec(ext_base_name) is not None
    if verbose:
        print(f"{ext_base_name} is {'' if is_installed else 'not '}installed")  # noqa: T201 - `verbose` requests it
    return is_installed


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Returns where a framework is installed. No library has to be built for it.

    Args:
        ext_name: Horovod's name of the library, such as `"horovod.torch"`.
        ext_env_var: Not used.
        pkg_path: Not used.
        *args: Not used.

    Raises:
        ImportError: The framework is not installed.
    """
    del ext_env_var, pkg_path, args
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(
            f"{ext_name} needs {framework}: pip install farandole[{framework}]", name=framework
        )


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Does nothing: no part of Farandole is built for one version of a framework.

    Args:
        name: The framework.
        version: Its version.
        exception: The exception of its import.
    """


def mpi_built(verbose: bool = False) -> bool:
    """Like `farandole.common.basics.mpi_built`."""
    from farandole.common import basics  # noqa: PLC0415 - it imports this module

    del verbose
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Like `farandole.common.basics.gloo_built`."""
    from farandole.common import basics  # noqa: PLC0415 - it imports this module

    del verbose
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """Like `farandole.common.basics.nccl_built`."""
    from farandole.common import basics  # noqa: PLC0415 - it imports this module

    del verbose
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Returns whether IBM's DDL was compiled in: never."""
    del verbose
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Returns whether Intel's oneCCL was compiled in: never."""
    del verbose
    return False
