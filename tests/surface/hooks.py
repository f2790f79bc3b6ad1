# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The column of hooks: methods of Horovod's classes that a subclass may override.

Each row says when the method is called and with which arguments, or why it is not called. The rows
of a class are in the order of the first calls. `test_hooks.py` compares them with the calls of
recorded subclasses, and with the methods in `hooks.json`, which is made from Horovod's sources.
"""

FITS = ("fit", "fit_on_parquet")


def called(*arguments, by):
    """A row: the arguments, and the public calls in which the method is called."""
    return {"arguments": list(arguments), "by": (by,) if isinstance(by, str) else by}


TORCH = {
    "_fit": called("dataset", by="fit"),
    "_fit_on_parquet": called("dataset_idx", by="fit_on_parquet"),
    "getOptimizer": called(by=FITS),
    "_get_optimizer": called(by=FITS),
    "_get_or_create_backend": called(by=FITS),
    "_check_metadata_compatibility": called("metadata", by="fit"),
    "_check_params": called("metadata", by=FITS),
    "_has_checkpoint": called("run_id", by=FITS),
    "get_model_class": called(by=FITS),
    "_get_model_kwargs": called("model", "history", "optimizer", "run_id", "metadata", by=FITS),
}
CALLED = {
    "TorchEstimator": TORCH,
    "LightningEstimator": TORCH,
    "KerasEstimator": {
        **TORCH,
        "_get_model_kwargs": called("model", "history", "run_id", "metadata", "floatx", by=FITS),
    },
}
