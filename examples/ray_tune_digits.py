# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Searches a learning rate for scikit-learn's scanned digits by Ray Tune; each trial trains on two
ranks.

python examples/ray_tune_digits.py --trials 4
"""

import argparse
import tempfile

import ray
from farandole.ray.tune import DistributedTrainableCreator
from ray import tune


def train(config):
    """One trial, on every rank of it."""
    import torch
    from sklearn.datasets import load_digits

    import farandole.torch as hvd
    from farandole.tuning import report

    hvd.init()
    torch.manual_seed(42)
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images.astype("float32") / 16)[hvd.rank() :: hvd.size()]
    y = torch.from_numpy(labels)[hvd.rank() :: hvd.size()]
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for epoch in range(config["epochs"]):
        # The ranks' parts differ by a row: all of them take the same number of steps.
        for start in range(0, 896, 32):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                model(x[start : start + 32]), y[start : start + 32]
            )
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(x).argmax(dim=1) == y).float().mean()
        report(epoch, accuracy=hvd.allreduce(right).item())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=4, help="learning rates that are tried")
    parser.add_argument("--num-proc", type=int, default=2, help="ranks of a trial")
    parser.add_argument("--epochs", type=int, default=5, help="times every sample is seen")
    arguments = parser.parse_args()

    ray.init(include_dashboard=False, num_cpus=max(2, arguments.num_proc))
    with tempfile.TemporaryDirectory() as folder:
        results = tune.Tuner(
            DistributedTrainableCreator(train, num_workers=arguments.num_proc),
            param_space={
                "lr": tune.grid_search([0.5 / 4**number for number in range(arguments.trials)]),
                "epochs": arguments.epochs,
            },
            tune_config=tune.TuneConfig(metric="accuracy", mode="max"),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        ).fit()
        best = results.get_best_result()
    print(f"best learning rate {best.config['lr']:g}: accuracy {best.metrics['accuracy']:.3f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
