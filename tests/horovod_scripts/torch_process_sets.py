# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Process sets: given to init, added and removed later, used by collectives and by an optimizer."""

import horovod.torch as hvd
import torch

first = hvd.ProcessSet(iter([0]))
everyone = hvd.ProcessSet(range(2))
hvd.init(process_sets="dynamic")
for process_set in (first,):
    hvd.add_process_set(process_set)
second = hvd.add_process_set([1])

assert hvd.global_process_set.process_set_id == 0
assert first.included() == (hvd.rank() == 0)
mine = first if first.included() else second
assert mine.size() == 1
assert mine.rank() == 0
total = hvd.allreduce(torch.full((3,), hvd.rank() + 1.0), op=hvd.Sum, process_set=mine)
assert total.tolist() == [hvd.rank() + 1.0] * 3
assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == [0, 1]

layer = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(layer.weight)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(layer.parameters(), lr=1.0),
    named_parameters=layer.named_parameters(),
    process_set=mine,
)
(layer(torch.ones(1, 1)) * (hvd.rank() + 1)).sum().backward()
optimizer.step()
assert layer.weight.item() == -(hvd.rank() + 1.0)

try:
    hvd.add_process_set(everyone)
except ValueError as error:
    assert "process set 0" in str(error)
else:
    raise AssertionError("the ranks of the global set were registered again")
assert hvd.remove_process_set(second)
assert second.process_set_id is None
print("done", hvd.rank())
