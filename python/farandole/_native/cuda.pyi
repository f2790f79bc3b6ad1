# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The driver, the kernels and NCCL, each by itself: for checks on a GPU.

This is a low-level interface: the caller keeps the memory valid until the stream is done with it.
Libraries are searched in the named folders (separated by colons), among those that are loaded, in
the wheels of `packages`, and where the system's loader looks. Types are numbered as in
`farandole.torch`, streams are given by handle.
"""

from typing import final

def cuda_inventory(named: str, packages: list[str], /) -> list[tuple[str, bool, str]]:
    """Every library and GPU: its name, whether it can be used, and its version and place or why
    not.
    """

def has_driver_and_nccl_version(packages: list[str], /) -> tuple[bool, int]:
    """Returns whether there is a driver, and the version code of NCCL; 0 if either is missing."""

def packed_buffer_bytes(counts: list[int], number: int, /) -> int:
    """Bytes of the buffer that tensors of so many elements are packed into."""

@final
class GpuKernels:
    """The kernels on one GPU, compiled or taken from the folder `cache`. Calls put work on a stream
    and return.

    Raises:
        FarandoleEnvironmentError: When the driver, NVRTC or the GPU is not there.
    """

    def __new__(
        cls, ordinal: int, named: str, packages: list[str], cache: str, /
    ) -> GpuKernels: ...
    def pack_tensors(
        self,
        pack: bool,
        tensors: list[tuple[int, int]],
        tensor: int,
        buffer: int,
        base: int,
        factor: float,
        stream: int,
        /,
    ) -> None:
        """Packs tensors, given by address and number of elements, into a buffer, or unpacks
        them.
        """
    def reduce_buffers(
        self,
        number: int,
        op: int,
        addresses: list[int],
        prescale: float,
        postscale: float,
        out: int,
        count: int,
        stream: int,
        /,
    ) -> None:
        """Reduces buffers of `count` elements, in this order, into `out`."""
    @staticmethod
    def adasum_scratch(count: int, /) -> int:
        """Bytes that `adasum` needs for itself."""
    def adasum_vectors(
        self, number: int, a: int, b: int, out: int, count: int, scratch: int, stream: int, /
    ) -> None:
        """The Adasum of two vectors of `count` elements into `out`."""

@final
class SingleMemberNccl:
    """NCCL's communicator of one member, to compare the work around NCCL with NCCL itself.

    Raises:
        FarandoleEnvironmentError: When the driver, NCCL or the GPU is not there.
    """

    def __new__(cls, ordinal: int, named: str, packages: list[str], /) -> SingleMemberNccl: ...
    def allreduce(self, address: int, bytes: int, number: int, /) -> None:  # noqa: A002 - the name on the other side
        """Sums a tensor over the one member; returns when that is done."""
