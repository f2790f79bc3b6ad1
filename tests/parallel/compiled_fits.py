# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A small fit whose step Keras compiles, on two ranks and in one process: for tests of both ways
to compile it.
"""


def equal_one_process(rows, options, tell):
    """Fits on both ranks, with each kind of optimizer and each of the options, equal one process
    with all rows.

    Args:
        rows: how many; what the batches of 8 leave over makes a smaller one.
        options: of `compile`, several.
        tell: called with each model and its options when it is compiled.
    """
    import keras
    import numpy as np

    import farandole.keras as hvd

    random = np.random.default_rng(3)
    x = random.normal(size=(rows, 5)).astype(np.float32)
    y = (x @ random.normal(size=(5, 1))).astype(np.float32)

    def build(optimizer, **options):
        kernels = [keras.initializers.GlorotUniform(seed) for seed in (1, 2)]
        layers = [
            keras.Input((5,)),
            keras.layers.Dense(4, activation="tanh", kernel_initializer=kernels[0]),
        ]
        model = keras.Sequential([*layers, keras.layers.Dense(1, kernel_initializer=kernels[1])])
        model.compile(optimizer, loss="mse", **options)
        return model

    def fit(model, chosen, batch):
        model.fit(x[chosen], y[chosen], batch_size=batch, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    kinds = {
        "plain": lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.1),
        "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    }
    mine = slice(hvd.rank(), None, 2)
    for what, make in kinds.items():
        expected = fit(build(make()), slice(None), 8)
        for chosen in options:
            model = build(hvd.DistributedOptimizer(make()), **chosen)
            tell(model, chosen)
            for ours, theirs in zip(fit(model, mine, 4), expected, strict=True):
                np.testing.assert_allclose(
                    ours, theirs, rtol=2e-5, atol=2e-6, err_msg=f"{what}, {chosen}"
                )
