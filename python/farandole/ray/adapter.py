# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The interface of a job for `RayExecutor`, static or elastic."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass
class BaseParams:
    """The resources of one worker.

    Attributes:
        cpus_per_worker: CPUs that Ray reserves for a worker.
        use_gpu: Whether a worker gets GPUs.
        gpus_per_worker: GPUs of a worker; 1 by default with `use_gpu`, else 0.

    Raises:
        ValueError: `gpus_per_worker` without `use_gpu`, or below 1 with it.
    """

    cpus_per_worker: int = 1
    use_gpu: bool = False
    gpus_per_worker: int | None = None

    def __post_init__(self) -> None:
        """Refuses numbers that contradict each other, before anything starts."""
        self.gpus_per_worker = resolve_gpu_count(
            self.gpus_per_worker, self.use_gpu, "gpus_per_worker"
        )


def resolve_gpu_count(number: int | None, use_gpu: bool, name: str) -> int:
    """Returns the number of GPUs of a worker.

    Args:
        number: Number that the user gave.
        use_gpu: Whether a worker gets GPUs.
        name: Name of the argument, for messages.

    Raises:
        ValueError: The two contradict each other.
    """
    if number and not use_gpu:
        raise ValueError(f"{name} is set, but use_gpu is False: {number}")
    if use_gpu and number is not None and number < 1:
        raise ValueError(f"{name} must be at least 1 with use_gpu: {number}")
    return (number or 1) if use_gpu else 0


def resolve_deprecated_argument(name: str, value: Any, current: str, default: Any) -> Any:
    """Returns the value of an argument that also has an older name.

    Args:
        name: The older name.
        value: Its argument; `None` for nothing.
        current: The current name.
        default: The argument under the current name.
    """
    if value is None:
        return default
    warnings.warn(f"{name} is deprecated: use {current}", DeprecationWarning, stacklevel=3)
    return value


class Adapter(ABC):
    """Starts the workers of a job and runs functions on them."""

    @abstractmethod
    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the workers.

        Args:
            executable_cls: A class. Each worker creates an object of it for `execute`.
            executable_args: Arguments of its constructor.
            executable_kwargs: Keyword arguments of its constructor.
            extra_env_vars: Variables of the workers' environment; they are set before a worker's
                process starts.
        """

    @abstractmethod
    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None
    ) -> list[Any]:
        """Calls `fn(executable)` on every worker and returns the results by rank."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on every worker and returns the results by rank."""

    @abstractmethod
    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Like `run`, and returns references to the results at once."""

    @abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls `fn(executable)` on rank 0."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and releases their resources."""
