# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tensors on GPUs, over a driver and an NCCL that are not there: `fake_cuda.c` plays both on host
memory.

Every tensor of torch's CPU counts as one on a GPU here; the stream that makes its values is one of
the fake's, whose work is late. So code that does not wait for a stream reads the old values.
"""

import ctypes
import os

import torch

from farandole.common.handles import HandleTable
from farandole.torch import _gpu_tensors, _handles

LATE_SECONDS = 0.3
"""Seconds that the framework's own work takes where it is late."""


def restore_host_tensors():
    """Ends the play: from now on torch's tensors are on the host."""
    if hasattr(_gpu_tensors, "real_functions"):
        (
            _gpu_tensors.gpu_ordinal_of,
            _gpu_tensors.current_stream_handle,
            HandleTable.submit_operation,
        ) = _gpu_tensors.real_functions
        _handles.table.__dict__.pop("wait_for_gpu_result", None)


class FakeGpu:
    """This rank's GPU and the framework's stream on it: from now on all tensors count as on it."""

    def __init__(self, ordinal):
        restore_host_tensors()
        _gpu_tensors.real_functions = (
            _gpu_tensors.gpu_ordinal_of,
            _gpu_tensors.current_stream_handle,
            HandleTable.submit_operation,
        )
        self.library = ctypes.CDLL(os.environ["FARANDOLE_CUDA_LIBRARIES"] + "/libcuda.so.1")
        self.library.fake_stream.restype = ctypes.c_void_p
        self.library.fake_count.restype = ctypes.c_long
        self.stream = ctypes.c_void_p(self.library.fake_stream())
        _gpu_tensors.gpu_ordinal_of = lambda _: ordinal
        _gpu_tensors.current_stream_handle = lambda _: self.stream.value
        # A GPU's memory goes from hand to hand in the order of streams; that of the host must be
        # kept.
        held = []

        def wrap_submit(submit):
            def submit_and_keep(table, keep, *arguments):
                held.append(keep)
                return submit(table, keep, *arguments)

            return submit_and_keep

        HandleTable.submit_operation = wrap_submit(_gpu_tensors.real_functions[2])

    def count(self, event):
        """Returns the number of events of a kind, such as `launches`."""
        return self.library.fake_count(event.encode())

    def fill(self, tensor, value, delay=0.0):
        address = ctypes.c_void_p(tensor.data_ptr())
        microseconds = ctypes.c_uint(int(delay * 1e6))
        count = ctypes.c_size_t(tensor.numel())
        self.library.fake_fill(self.stream, address, count, ctypes.c_float(value), microseconds)

    def read(self, tensor):
        """Returns the values of a tensor after all earlier work of the framework's stream."""
        found = torch.empty_like(tensor)
        to, source = ctypes.c_void_p(found.data_ptr()), ctypes.c_void_p(tensor.data_ptr())
        self.library.fake_copy(self.stream, to, source, ctypes.c_size_t(tensor.nbytes))
        self.library.fake_wait(self.stream)
        return found
