# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""States that go from the ranks that have them to those that lack them, on real ranks."""

import itertools
import os
import resource
import signal

import pytest
import torch

import farandole.torch as hvd
from farandole.torch._state_comparison import tensor_digest
from farandole.torch._state_transfer import ByteSpan, TransferPiece, part_offsets, split_into_pieces

PIECE, LARGE = 256, 64
"""Bytes, instead of MiB: so small tensors are cut, too."""
DTYPES = [
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int64",
    "bool",
    "uint8",
    "complex64",
    "float8_e4m3fn",
]


def small_pieces():
    from farandole.torch import _state_transfer

    _state_transfer._MAX_PIECE_BYTES, _state_transfer._LARGE_TENSOR_BYTES = PIECE, LARGE


def usual_pieces():
    from farandole.torch import _state_transfer

    _state_transfer._MAX_PIECE_BYTES, _state_transfer._LARGE_TENSOR_BYTES = 16 << 20, 1 << 20


def values(start):
    """Tensors of many kinds; their values depend on the number."""
    made = []
    kinds = [(name, (3,)) for name in DTYPES]
    kinds += [
        ("int64", ()),
        ("bfloat16", ()),
        ("float32", (0,)),
        ("bfloat16", (31, 11)),
        ("int64", (9, 9)),
    ]
    for name, shape in kinds:
        count = torch.Size(shape).numel()
        made.append(((torch.arange(count) + start) % 5).to(getattr(torch, name)).reshape(shape))
    turned = (torch.arange(33.0) + start).reshape(3, 11).t()
    images = torch.full((2, 3, 4, 5), float(start)).to(memory_format=torch.channels_last)
    complex_ones = torch.full((40,), start + 1j).conj()
    # one element, contiguous in spite of its stride
    column = (torch.arange(4.0) + start).reshape(1, 4)[:, 2]
    return [*made, turned, images, complex_ones, column]


def bits(tensors):
    dense = [
        tensor.resolve_conj().clone(memory_format=torch.contiguous_format) for tensor in tensors
    ]
    return [tensor.reshape(-1).view(torch.uint8).tolist() for tensor in dense]


def everybody_in_every_role():
    from farandole.torch._state_transfer import TensorLayouts, TransferRoles, transfer_tensors

    small_pieces()
    rank, size = hvd.rank(), hvd.size()
    # S sends, T takes, N does neither.
    for kinds in (
        itertools.product("STN", repeat=size) if size < 4 else ["STNS", "TSST", "TTNS", "NTST"]
    ):
        senders, takers = ([at for at, kind in enumerate(kinds) if kind == role] for role in "ST")
        if not senders or not takers:
            continue
        tensors = values(1 if rank in senders else 2 + rank)
        before = bits(tensors)
        if kinds[rank] == "N":
            tensors = TensorLayouts.from_tensors(tensors).meta_tensors()
        transfer_tensors("everybody", tensors, TransferRoles(senders, takers))
        if kinds[rank] == "N":
            assert all(tensor.is_meta for tensor in tensors)
        else:
            assert bits(tensors) == (bits(values(1)) if rank in takers else before), (kinds, rank)
    usual_pieces()


def test_takers_get_every_kind_of_tensor_from_any_sender_and_senders_keep_theirs(world):
    world.run(everybody_in_every_role)


def test_large_tensors_are_cut_and_small_ones_packed(monkeypatch):
    from farandole.torch import _state_transfer

    monkeypatch.setattr(_state_transfer, "_MAX_PIECE_BYTES", PIECE)
    monkeypatch.setattr(_state_transfer, "_LARGE_TENSOR_BYTES", LARGE)
    assert split_into_pieces([]) == []
    assert split_into_pieces([0, 0]) == []
    assert split_into_pieces([8, 600, 0, 63]) == [
        TransferPiece([ByteSpan(1, 0, 256)], is_packed=False),
        TransferPiece([ByteSpan(1, 256, 512)], is_packed=False),
        TransferPiece([ByteSpan(1, 512, 600)], is_packed=False),
        TransferPiece([ByteSpan(0, 0, 8), ByteSpan(3, 0, 63)], is_packed=True),
    ]
    assert [piece.byte_count for piece in split_into_pieces([63] * 9)] == [252, 252, 63]


def a_sender_is_lost():
    from farandole.common.exceptions import FarandoleInternalError
    from farandole.torch import _state_transfer
    from farandole.torch._state_transfer import TransferRoles, transfer_tensors

    small_pieces()
    if hvd.rank() == 1:
        start = _state_transfer._StateTransfer.start_piece

        def end_before_the_tenth(mover, piece):
            if mover._count == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            return start(mover, piece)

        _state_transfer._StateTransfer.start_piece = end_before_the_tenth
    tensor = torch.full((1000,), float(hvd.rank()))
    try:
        transfer_tensors("lost", [tensor], TransferRoles([0, 1], [2]))
    except FarandoleInternalError:
        return tensor.tolist()
    return None


@pytest.mark.slow
def test_all_ranks_hear_of_a_sender_that_is_lost_in_a_transfer(fresh_world):
    first, _, taker = fresh_world(3).run(a_sender_is_lost, tolerate=True)
    assert first == [0.0] * 1000
    assert taker[-1] == 2.0  # the last piece cannot have come


MEBIBYTES = 96


def memory_of_a_rank_that_has_nothing_to_do():
    from farandole.torch._state_transfer import TensorLayouts, TransferRoles, transfer_tensors

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

    rank = hvd.rank()
    if rank == 2:
        tensors = TensorLayouts([((MEBIBYTES << 20,), torch.uint8)]).meta_tensors()
    else:
        tensors = [torch.full((MEBIBYTES << 20,), rank, dtype=torch.uint8)]
    hvd.barrier()
    before = peak()
    transfer_tensors("memory", tensors, TransferRoles([0], [1]))
    return peak() - before


@pytest.mark.slow
def test_a_rank_that_neither_sends_nor_takes_needs_no_memory(fresh_world):
    *_, idle = fresh_world(3).run(memory_of_a_rank_that_has_nothing_to_do)
    assert idle < MEBIBYTES / 4


def test_parts_end_between_two_elements():
    assert part_offsets(72, 2) == [0, 32, 72]
    assert part_offsets(256, 3) == [0, 80, 160, 256]
    assert part_offsets(8, 3) == [0, 0, 0, 8]


def test_equal_bytes_have_equal_digests_wherever_they_are(monkeypatch):
    from farandole.torch import _state_comparison

    monkeypatch.setattr(_state_comparison, "_WORDS_PER_SUM", 4)
    for count in (0, 1, 3, 15, 16, 17, 33, 1000):
        numbers = (torch.arange(count + 1) % 251).to(torch.uint8)
        shifted = torch.cat([numbers[:1], numbers])[1:]
        assert tensor_digest(numbers[:count]) == tensor_digest(shifted[:count])
    turned = torch.arange(12.0).reshape(3, 4).t()
    assert tensor_digest(turned) == tensor_digest(turned.contiguous())


DIFFERENCES = {
    "two elements exchanged": (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 3.0])),
    "one up and one down": (torch.tensor([4, 4]), torch.tensor([5, 3])),
    "two signs": (torch.tensor([1.0, 1.0]).double(), torch.tensor([-1.0, -1.0]).double()),
    "four signs": (torch.ones(4).double(), -torch.ones(4).double()),
    "the last byte": (
        torch.zeros(7, dtype=torch.uint8),
        torch.tensor([0] * 6 + [1], dtype=torch.uint8),
    ),
    "the sign of zero": (torch.zeros(1), -torch.zeros(1)),
    "two chunks exchanged": (torch.arange(16), torch.cat([torch.arange(8, 16), torch.arange(8)])),
}


@pytest.mark.parametrize("one, other", DIFFERENCES.values(), ids=DIFFERENCES)  # noqa: PT006
def test_different_bytes_have_different_digests(monkeypatch, one, other):
    from farandole.torch import _state_comparison

    monkeypatch.setattr(_state_comparison, "_WORDS_PER_SUM", 4)
    assert tensor_digest(one) != tensor_digest(other)


def model(dtype=torch.float32):
    network = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Linear(16, 1))
    return network.to(dtype)


OPTIMIZERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "AdamW of tensors": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def states_of_a_new_rank(name, dtype, new):
    """Returns the states of all ranks after some ranks have trained alike and new ranks have
    joined.
    """
    from farandole.torch._fault_tolerance import FaultTolerance

    small_pieces()
    torch.manual_seed(hvd.rank() if hvd.rank() in new else 100)
    network = model(getattr(torch, dtype))
    optimizer = OPTIMIZERS[name](network.parameters())
    seen = torch.zeros((), dtype=torch.int64)
    tolerance = FaultTolerance(optimizer, False, lambda: [seen])
    if hvd.rank() not in new:
        for _ in range(3):
            network(torch.ones(2, 6, dtype=getattr(torch, dtype))).sum().backward()
            optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        seen += hvd.rank()
        tolerance.steps, tolerance._has_whole_state, tolerance._is_new = 3, True, False
    assert tolerance.agree_with_new_world() == (hvd.rank() in new)
    assert tolerance.steps == 3
    usual_pieces()
    states = [optimizer.state[parameter] for parameter in network.parameters()]
    told = [
        {
            key: (str(value.dtype), value.tolist())
            for key, value in state.items()
            if value is not None
        }
        for state in states
    ]
    weights = [parameter.tolist() for parameter in network.parameters()]
    return weights, told, float(optimizer.param_groups[0]["lr"]), int(seen)


@pytest.mark.parametrize("new", [[2], [0], [0, 1]], ids="new {0}".format)
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, "float32") for name in OPTIMIZERS] + [("Adam", "bfloat16")]
)
def test_a_new_rank_has_the_parameters_and_the_state_of_the_others(trio, name, dtype, new):
    results = trio.run(states_of_a_new_rank, name, dtype, new)
    old = [rank for rank in range(3) if rank not in new]
    for rank in range(3):
        assert results[rank][:3] == results[old[0]][:3]
        assert results[rank][2] == pytest.approx(0.05)
        # Buffers differ between ranks: all of them come from one rank.
        assert results[rank][3] == (old[0] if rank in new else rank)


def a_rank_with_another_state():
    """The state of the second rank has other tensors, as with an optimizer that creates them
    when it needs them.
    """
    from farandole.torch._fault_tolerance import FaultTolerance

    rank = hvd.rank()
    network = model()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(float(rank))
    optimizer = OPTIMIZERS["SGD"](network.parameters())
    tolerance = FaultTolerance(optimizer, False)
    if rank < 2:
        if rank == 1:
            optimizer.state[network[0].weight]["momentum_buffer"] = torch.ones(16, 6)
        tolerance.steps, tolerance._has_whole_state, tolerance._is_new = 1, True, False
    tolerance.agree_with_new_world()
    return [parameter.unique().tolist() for parameter in network.parameters()], len(optimizer.state)


def test_only_ranks_whose_state_has_the_same_tensors_send_parts(trio):
    *_, (weights, states) = trio.run(a_rank_with_another_state)
    assert weights == [[0.0]] * 4
    assert states == 0


def senders_that_differ():
    """Returns the state that a new rank gets in parts from two ranks that did not reduce one of
    two parameters.
    """
    from farandole.torch import _fault_tolerance

    small_pieces()
    rank = hvd.rank()
    parameters = [torch.nn.Parameter(torch.full((1000,), float(start))) for start in (7, rank)]
    optimizer = OPTIMIZERS["SGD with momentum"](parameters)
    tolerance = _fault_tolerance.FaultTolerance(optimizer, False)
    if rank < 2:
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        tolerance.steps, tolerance._has_whole_state, tolerance._is_new = 1, True, False
    moved, move = {}, _fault_tolerance.transfer_tensors

    def watched(name, tensors, roles):
        moved[name] = len(tensors), roles.senders
        move(name, tensors, roles)

    _fault_tolerance.transfer_tensors = watched
    try:
        tolerance.agree_with_new_world()
    finally:
        _fault_tolerance.transfer_tensors = move
        usual_pieces()
    state = [
        optimizer.state[parameter]["momentum_buffer"].unique().tolist() for parameter in parameters
    ]
    return [parameter.unique().tolist() for parameter in parameters], state, moved


def test_tensors_that_differ_between_senders_come_from_one_of_them(trio):
    first, second, new = trio.run(senders_that_differ)
    assert new[:2] == first[:2]
    assert new[:2] != second[:2]
    assert [said[2] for said in (first, second, new)] == [
        {"tolerant.state": (2, [0, 1]), "tolerant.other": (2, [0])},
    ] * 3


def a_sender_with_other_options():
    from farandole.torch import _fault_tolerance

    rank = hvd.rank()
    optimizer = OPTIMIZERS["SGD"]([torch.nn.Parameter(torch.ones(8))])
    tolerance = _fault_tolerance.FaultTolerance(optimizer, False)
    if rank < 2:
        optimizer.param_groups[0]["lr"] = 0.5 + rank
        tolerance.steps, tolerance._has_whole_state, tolerance._is_new = 1, True, False
    senders, move = [], _fault_tolerance.transfer_tensors
    _fault_tolerance.transfer_tensors = lambda name, tensors, roles: (
        senders.append(roles.senders) or move(name, tensors, roles)
    )
    try:
        tolerance.agree_with_new_world()
    finally:
        _fault_tolerance.transfer_tensors = move
    return senders, optimizer.param_groups[0]["lr"]


def test_a_rank_with_other_options_than_the_first_sender_sends_nothing(trio):
    assert trio.run(a_sender_with_other_options) == [([[0], [0]], lr) for lr in (0.5, 1.5, 0.5)]


class Counter:
    """An object that a script shares."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def a_source_that_has_not_shared():
    """Rank 0 gets a state from rank 2, and sends it to rank 1 before it shares its own object."""
    from farandole.torch._fault_tolerance import FaultTolerance

    rank = hvd.rank()
    counter = Counter(5 if rank == 2 else 0)

    def tolerance_of_a_new_rank():
        return FaultTolerance(OPTIMIZERS["SGD"]([torch.nn.Parameter(torch.ones(8))]), False)

    tolerance = tolerance_of_a_new_rank()
    if rank == 2:
        tolerance.share_stateful_objects({"counter": counter})
        tolerance.steps, tolerance._has_whole_state, tolerance._is_new = 1, True, False
    tolerance.agree_with_new_world()
    if rank == 1:
        tolerance = tolerance_of_a_new_rank()
    tolerance.agree_with_new_world()
    if rank != 2:
        tolerance.share_stateful_objects({"counter": counter})
    return counter.count


def test_a_source_sends_what_has_come_for_objects_that_it_has_not_shared(trio):
    assert trio.run(a_source_that_has_not_shared) == [5, 5, 5]


def another_model():
    from farandole.torch._fault_tolerance import FaultTolerance

    network = torch.nn.Linear(3, 2 + (hvd.rank() == 1))
    try:
        FaultTolerance(OPTIMIZERS["SGD"](network.parameters()), False).agree_with_new_world()
    except ValueError as error:
        return str(error)
    return None


def test_all_ranks_hear_that_one_has_another_model(trio):
    said = trio.run(another_model)
    assert said[0] == said[1] == said[2]
    assert "those of rank 0 differ from those of ranks: 1. " in said[0]
    assert "Rank 0 has parameter 0 of group 0 with shape (2, 3) and torch.float32, where" in said[0]
    assert "rank 1 has parameter 0 of group 0 with shape (3, 3) and torch.float32" in said[0]


def other_groups():
    from farandole.torch._fault_tolerance import FaultTolerance

    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [one]} for one in weights] if hvd.rank() == 2 else weights
    try:
        FaultTolerance(torch.optim.SGD(groups, lr=0.1), False).agree_with_new_world()
    except ValueError as error:
        return str(error)
    return None


def test_all_ranks_hear_that_one_has_other_groups(trio):
    said = trio.run(other_groups)
    assert said[0] == said[1] == said[2]
    assert "Rank 0 has parameter 1 of group 0" in said[0]
    assert "rank 2 has parameter 0 of group 1" in said[0]


def another_model_and_a_rank_behind():
    """With DDP: rank 1 lacks the results of the last reduction, and rank 2 is new and has
    another model.
    """
    import torch.distributed as dist

    import farandole.torch.distributed  # noqa: F401 - registers the backend
    from farandole.torch.distributed._fault_tolerant import _GradientFaultTolerance

    rank = hvd.rank()
    dist.init_process_group("farandole", init_method="farandole://")
    try:
        names = {"weight" if rank < 2 else "factor": torch.nn.Parameter(torch.ones(1000))}
        tolerance = _GradientFaultTolerance(
            OPTIMIZERS["SGD"](list(names.values())), False, list, names
        )
        if rank < 2:
            tolerance.steps, tolerance._has_whole_state, tolerance._is_new = 2 - rank, True, False
            tolerance.results = {"weight": torch.ones(1000)}
        tolerance.agree_with_new_world()
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return None


def test_all_ranks_hear_of_another_model_before_results_are_sent(trio):
    said = trio.run(another_model_and_a_rank_behind)
    assert said[0] is not None
    assert said[0] == said[1] == said[2]
    assert (
        "Rank 0 has weight with shape (1000,) and torch.float32, where rank 2 has factor" in said[0]
    )
