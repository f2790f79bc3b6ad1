# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains a small network on scikit-learn's scanned digits by Ray actors, which keep it between two
calls.

python examples/ray_torch_digits.py --num-proc 2
"""

import argparse

import ray
from farandole.ray import RayExecutor


class Trainer:
    """A rank's state and methods."""

    def __init__(self, lr):
        import torch
        from sklearn.datasets import load_digits

        import farandole.torch as hvd

        hvd.init()
        torch.manual_seed(42)
        images, labels = load_digits(return_X_y=True)
        self.x = torch.from_numpy(images.astype("float32") / 16)[hvd.rank() :: hvd.size()]
        self.y = torch.from_numpy(labels)[hvd.rank() :: hvd.size()]
        self.steps = len(labels) // hvd.size() // 32
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )
        optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=self.model.named_parameters()
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def train(self, epochs):
        """The mean loss of the last epoch over all ranks."""
        import torch

        import farandole.torch as hvd

        losses = []
        for _ in range(epochs):
            losses = []
            for start in range(0, 32 * self.steps, 32):
                self.optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(
                    self.model(self.x[start : start + 32]), self.y[start : start + 32]
                )
                loss.backward()
                self.optimizer.step()
                losses.append(loss.detach())
        return hvd.allreduce(torch.stack(losses).mean()).item()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-proc", type=int, default=2, help="ranks")
    parser.add_argument(
        "--epochs", type=int, default=5, help="times every sample is seen, in each of two calls"
    )
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    arguments = parser.parse_args()

    ray.init(include_dashboard=False, num_cpus=arguments.num_proc)
    executor = RayExecutor(
        RayExecutor.create_settings(timeout_s=60), num_workers=arguments.num_proc
    )
    executor.start(executable_cls=Trainer, executable_args=[arguments.lr])
    for _ in range(2):
        losses = executor.execute(lambda trainer: trainer.train(arguments.epochs))
        print(f"loss {losses[0]:.4f} on each of {len(losses)} ranks")
    executor.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
