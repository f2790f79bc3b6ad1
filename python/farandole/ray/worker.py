# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The actor that is a rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from farandole.ray import ray_logger, utils

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class BaseHorovodWorker:
    """One rank, in a Ray actor's process.

    Args:
        world_rank: The rank.
        world_size: Number of ranks.
    """

    executable: Any = None
    """The object that `start_executable` made."""

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        utils.import_ray()
        self.world_rank = world_rank
        self.world_size = world_size
        self.update_env_vars(
            {
                "HOROVOD_HOSTNAME": self.node_id(),
                "HOROVOD_RANK": str(world_rank),
                "HOROVOD_SIZE": str(world_size),
            }
        )

    def node_id(self) -> str:
        """Ray's id of the node that the actor runs on, in hexadecimal digits."""
        return utils.import_ray().get_runtime_context().get_node_id()

    def hostname(self) -> str:
        """Address of the node by which the actor was placed."""
        return utils.import_ray().util.get_node_ip_address()

    def get_gpu_ids(self) -> list[Any]:
        """Returns the GPUs that Ray assigned to the actor."""
        return utils.import_ray().get_gpu_ids()

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Sets variables of this process. Libraries that are already loaded may have read their
        variables before.
        """
        os.environ.update(
            {name: str(value) for name, value in env_vars.items() if value is not None}
        )

    def env_vars(self) -> dict[str, str]:
        """Returns the environment of this process."""
        return dict(os.environ)

    def start_executable(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Creates the object that `execute` passes to functions; its constructor may call `init`.

        Args:
            executable_cls: Class of the object; `None` creates no object.
            executable_args: Arguments of its constructor.
            executable_kwargs: Keyword arguments of its constructor.
        """
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Calls `func(executable)` in this process.

        If the function raises, this rank leaves the world, so the others do not wait for it.
        """
        try:
            return func(self.executable)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leaves the world, if this process is in one; the next `init` forms another one."""
        from farandole.common import basics  # noqa: PLC0415 - loaded in the rank's process only

        basics.shutdown()

    def set_queue(self, queue: Any) -> None:
        """Lets `ray_logger.log` of this process send records to a queue."""
        ray_logger.configure(queue)

    def where(self) -> str:
        """Returns the identity of the host: ranks with the same identity can share memory."""
        from farandole._native import engine  # noqa: PLC0415 - loaded in the rank's process only

        return engine.shared_memory_identity()

    def host(self, one_host: bool) -> str:
        """Hosts the registrar of the world until this process ends; called on rank 0.

        Args:
            one_host: Whether all ranks are on this host, so that the registrar listens on loopback
                alone.

        Returns:
            The ticket that lets ranks in.
        """
        from farandole._native import engine  # noqa: PLC0415 - as above

        return engine.host_registrar(self.world_size, one_host)

    def take_place(self, ticket: str) -> None:
        """Makes every `init` in this process join the world of a ticket."""
        from farandole.common import basics  # noqa: PLC0415 - as above

        basics.set_world_ticket(ticket, self.world_rank)
