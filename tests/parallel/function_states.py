# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The table of torch.distributed's functions: the state of each, and the cases that show it."""

import dataclasses
import re

import torch

BEYOND_GLOO = [
    re.compile(text)
    for text in (
        "int16",  # Gloo has no such dtype
        "AVG u?int",  # Gloo makes floats of them, and fails
        "all_reduce PREMUL_SUM float32",
        "all_to_all ",  # lists of tensors of different sizes
        "^gather complex64",
        "all_reduce of a view",  # Gloo takes the memory as it lies
    )
]
"""Cases in which Gloo fails or is wrong, and Farandole is right."""

WITHOUT_ORACLE = {
    # torch calls monitored_barrier only of Gloo, and Gloo ends the process for other sizes
    "2.14": "monitored_barrier|^barrier$|of other sizes",
    # Gloo refuses these, and its reduce_scatter_tensor ignores the reduction
    "2.7": "AVG|^reduce_scatter|complex64",
}
"""Cases that are not compared with Gloo in versions of torch before these."""


def has_oracle(case):
    """Returns whether Gloo of this torch shows the right outcome of a case."""
    return not any(
        torch.__version__ < version and re.search(text, case)
        for version, text in WITHOUT_ORACLE.items()
    )


AS_GLOO = "as in Gloo"
MORE = "more than Gloo"
LOCAL = "torch's own"
REFUSED = "refused, as in Gloo"


@dataclasses.dataclass(frozen=True)
class FunctionState:
    """The state of a function of torch.distributed, and the beginnings of its cases."""

    state: str
    cases: tuple[str, ...] = ()
    note: str = ""


MESSAGE = "waits for the other rank"
REDUCTION = "every reduction and dtype of `all_reduce`"
OLD = "another name of"

LOCAL_FUNCTIONS = [
    "get_backend_impl",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "record_comm",
    "supports_complex",
]

# fmt: off
FUNCTIONS = {
    "all_gather": FunctionState(MORE, ("all_gather ",), "every dtype"),
    "all_gather_coalesced": FunctionState(AS_GLOO, ("all_gather_coalesced",)),
    "all_gather_into_tensor": FunctionState(MORE, ("all_gather_into_tensor",), "every dtype"),
    "all_gather_object": FunctionState(AS_GLOO, ("all_gather_object",)),
    "all_gather_single": FunctionState(MORE, ("all_gather_into",), f"{OLD} `all_gather_into_tensor`"),  # noqa: E501
    "all_reduce": FunctionState(MORE, ("all_reduce ", "DDP"), "also sparse tensors, 16-bit and unsigned whole numbers, `PREMUL_SUM`, and `AVG` of whole numbers, which rounds to zero"),  # noqa: E501
    "all_reduce_coalesced": FunctionState(AS_GLOO, ("coalesced all_reduce_coalesced",)),
    "all_to_all": FunctionState(MORE, ("all_to_all ",), "tensors of different sizes"),
    "all_to_all_single": FunctionState(MORE, ("all_to_all_single",), "every dtype"),
    "barrier": FunctionState(MORE, ("barrier",), "an error names the ranks that did not come"),
    "batch_isend_irecv": FunctionState(AS_GLOO, ("batch_isend_irecv",)),
    "broadcast": FunctionState(MORE, ("broadcast ",), "every dtype"),
    "broadcast_object_list": FunctionState(AS_GLOO, ("broadcast_object_list",)),
    "destroy_process_group": FunctionState(AS_GLOO, ("names",), "the links of a group end with the session"),  # noqa: E501
    "gather": FunctionState(MORE, ("gather ",), "every dtype"),
    "gather_into_tensor": FunctionState(AS_GLOO, ("gather_into_tensor",)),
    "gather_object": FunctionState(AS_GLOO, ("gather_object",)),
    "gather_single": FunctionState(AS_GLOO, ("gather_into",), f"{OLD} `gather_into_tensor`"),
    "get_backend": FunctionState(AS_GLOO, ("names", "split_group")),
    "get_backend_config": FunctionState(AS_GLOO, ("names",)),
    "init_process_group": FunctionState(MORE, ("names",), "`env://`, `tcp://`, `file://`, `store=`, and `farandole://`"),  # noqa: E501
    "irecv": FunctionState(AS_GLOO, ("isend and irecv",), MESSAGE),
    "isend": FunctionState(AS_GLOO, ("isend and irecv",), MESSAGE),
    "monitored_barrier": FunctionState(AS_GLOO, ("monitored_barrier",)),
    "new_group": FunctionState(MORE, ("new_group",), "ranks may create their groups in any order"),
    "new_subgroups": FunctionState(AS_GLOO, ("DDP post_localSGD_hook",)),
    "new_subgroups_by_enumeration": FunctionState(AS_GLOO, ("new_subgroups_by_enumeration",)),
    "recv": FunctionState(AS_GLOO, ("send and recv", "recv from any rank"), MESSAGE),
    "recv_object_list": FunctionState(AS_GLOO, ("send_object_list and recv_object_list",)),
    "reduce": FunctionState(MORE, ("reduce ",), REDUCTION),
    "reduce_scatter": FunctionState(MORE, ("reduce_scatter ",), REDUCTION),
    "reduce_scatter_single": FunctionState(MORE, ("reduce_scatter_tensor",), f"{OLD} `reduce_scatter_tensor`"),  # noqa: E501
    "reduce_scatter_tensor": FunctionState(MORE, ("reduce_scatter_tensor",), REDUCTION),
    "scatter": FunctionState(MORE, ("scatter ",), "every dtype"),
    "scatter_object_list": FunctionState(AS_GLOO, ("scatter_object_list",)),
    "send": FunctionState(AS_GLOO, ("send and recv",), MESSAGE),
    "send_object_list": FunctionState(AS_GLOO, ("send_object_list and recv_object_list",)),
    "set_timeout": FunctionState(AS_GLOO, ("set_timeout",)),
    "shrink_group": FunctionState(REFUSED, ("shrink_group",), "use an [elastic job](elastic.md)"),
    "split_group": FunctionState(AS_GLOO, ("split_group",)),
    **dict.fromkeys(LOCAL_FUNCTIONS, FunctionState(LOCAL)),
}
# fmt: on
"""The functions of torch.distributed."""


def format_table():
    """Returns the table of the functions, for the user guide."""
    lines = ["| function | state | notes |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {entry.state} | {entry.note} |" for name, entry in sorted(FUNCTIONS.items())
    ]
    return "\n".join(lines) + "\n"
