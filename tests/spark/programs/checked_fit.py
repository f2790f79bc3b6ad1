# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fit whose predictions a driver checks."""


def fit(spark, folder):
    import torch

    from farandole.spark.common import LocalStore
    from farandole.spark.torch import TorchEstimator

    rows = [(float(i % 7), float(i % 7) * 2 + 1) for i in range(400)]
    frame = spark.createDataFrame(rows, ["x", "y"])
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        num_proc=2,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=20,
        epochs=30,
        random_seed=1,
        input_shapes=[[-1, 1]],
        verbose=0,
        store=LocalStore(folder),
    )
    found = estimator.fit(frame).transform(frame).first()
    assert abs(found["y__output"] - found["y"]) < 0.5, found
    print("fitted")
