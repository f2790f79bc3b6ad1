# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""itwinai's TorchTrainer and its Horovod strategy; a rank of `horovodrun`."""

import os
import sys
from pathlib import Path

import torch
from itwinai.torch.distributed import HorovodStrategy
from itwinai.torch.trainer import TorchTrainer
from torch.utils.data import TensorDataset

EPOCHS, RATE = 5, 0.05
rank = int(os.environ["HOROVOD_RANK"])
torch.manual_seed(0)
rows = torch.randn(16, 3)
labels = rows @ torch.tensor([[1.0], [-2.0], [0.5]])


def make_model(own=0.0):
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight += own
    return model


trainer = TorchTrainer(
    config={
        "batch_size": 8,
        "optimizer": "sgd",
        "optim_lr": RATE,
        "optim_momentum": 0.0,
        "loss": "mse",
        "num_workers_dataloader": 0,
    },
    epochs=EPOCHS,
    model=make_model(own=float(rank)),  # rank 0 sends its own
    strategy="horovod",
    checkpoints_location=sys.argv[1],
    checkpoint_every=EPOCHS,
    disable_tqdm=True,
)
assert isinstance(trainer.strategy, HorovodStrategy)
trainer.execute(TensorDataset(rows, labels), TensorDataset(rows, labels))

# One process with all rows and the rate that the strategy scales by the number of ranks.
plain = make_model()
optimizer = torch.optim.SGD(plain.parameters(), lr=2 * RATE)
for _ in range(EPOCHS):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(plain(rows), labels).backward()
    optimizer.step()
weights = trainer.model.state_dict()
assert torch.allclose(weights["weight"], plain.weight, atol=1e-5), (weights, plain.weight)
assert torch.allclose(weights["bias"], plain.bias, atol=1e-5)
if rank == 0:
    assert list(Path(sys.argv[1]).rglob("model.pt")), "rank 0 writes checkpoints"

strategy = HorovodStrategy()
strategy.init()
assert strategy.global_world_size() == strategy.local_world_size() == 2
assert strategy.allgather_obj({"rank": strategy.global_rank()}) == [{"rank": 0}, {"rank": 1}]
gathered = strategy.gather(torch.tensor([float(strategy.local_rank())]), dst_rank=1)
assert (gathered is None) == (rank == 0)
assert gathered is None or torch.cat(gathered).tolist() == [0.0, 1.0]
assert strategy.broadcast_obj(["of", rank], src_rank=1) == ["of", 1]
strategy.barrier()
strategy.clean_up()
print(f"rank {rank} has the weights of one process", flush=True)
