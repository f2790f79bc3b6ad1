# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The settings of a launcher, which scripts pass on."""

from __future__ import annotations

from typing import Any


class BaseSettings:
    """Settings of a job.

    Args:
        num_proc: Number of processes.
        verbose: How much is said.
        ssh_port: Port of sshd on all hosts.
        ssh_identity_file: Private key for ssh.
        extra_mpi_args: Not used: there is no MPI.
        tcp_flag: Not used.
        binding_args: Not used.
        key: A secret key.
        start_timeout: A `Timeout`.
        output_filename: Folder for the output of processes.
        run_func_mode: Whether a function runs, and no command.
        nics: Network interfaces.
        elastic: Whether the number of processes may change.
        prefix_output_with_timestamp: Whether lines carry the time.
    """

    def __init__(
        self,
        num_proc: int | None = None,
        verbose: int = 0,
        ssh_port: int | None = None,
        ssh_identity_file: str | None = None,
        extra_mpi_args: str | None = None,
        tcp_flag: bool | None = None,
        binding_args: str | None = None,
        key: bytes | None = None,
        start_timeout: Any = None,
        output_filename: str | None = None,
        run_func_mode: bool | None = None,
        nics: Any = None,
        elastic: bool = False,
        prefix_output_with_timestamp: bool = False,
    ) -> None:
        self.num_proc = num_proc
        self.verbose = verbose
        self.ssh_port = ssh_port
        self.ssh_identity_file = ssh_identity_file
        self.extra_mpi_args = extra_mpi_args
        self.tcp_flag = tcp_flag
        self.binding_args = binding_args
        self.key = key
        self.start_timeout = start_timeout
        self.output_filename = output_filename
        self.run_func_mode = run_func_mode
        self.nics = nics
        self.elastic = elastic
        self.prefix_output_with_timestamp = prefix_output_with_timestamp


class Settings(BaseSettings):
    """Settings of a job on given hosts.

    Args:
        hosts: Hosts and slots, as `a:2,b:2`.
        **kwargs: As of `BaseSettings`.
    """

    def __init__(self, hosts: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hosts = hosts
