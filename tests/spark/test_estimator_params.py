# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Every parameter of every estimator: its accessors, its default, and what is said of a value
that cannot be.
"""

from __future__ import annotations

import inspect
import multiprocessing
import warnings

import keras
import pytest
import torch

from farandole.spark.common import LocalStore
from farandole.spark.common.runs.fingerprint import LENGTH_PARAMS, RESULT_PARAMS
from farandole.spark.keras import KerasEstimator
from farandole.spark.lightning import TorchEstimator as LightningEstimator
from farandole.spark.torch import TorchEstimator
from farandole.spark.transformers import TextClassifier
from farandole.spark.vision import ImageClassifier

ESTIMATORS = {
    "torch": TorchEstimator,
    "lightning": LightningEstimator,
    "keras": KerasEstimator,
    "text": TextClassifier,
    "image": ImageClassifier,
}

COUNTS = (
    "num_proc", "batch_size", "global_batch_size", "val_batch_size", "epochs",
    "partitions_per_process", "train_steps_per_epoch",
    "validation_steps_per_epoch", "backward_passes_per_step", "train_reader_num_workers",
    "val_reader_num_workers",
    "max_restarts",
)  # fmt: skip
FLAGS = (
    "shuffle",
    "use_gpu",
    "compress_sparse_cols",
    "allow_nan",
    "inmemory_cache_all",
    "mlflow",
    "wandb",
    "tensorboard",
)
NAMED = (
    "predictionCol", "rawPredictionCol", "probabilityCol", "predictedLabelCol", "labelIndexCol",
    "validation_stratify", "validation_group", "validation_time",
)  # fmt: skip
COLUMNS = [(3, TypeError), ([], ValueError), (["a", "a"], ValueError)]
SHAPES = [("x", TypeError), ([[0]], ValueError), ([[-1, -1]], ValueError)]
LIST = [("x", TypeError), ({}, TypeError)]
COMMON = {
    **{name: [(0, ValueError), (1.5, TypeError), (True, TypeError)] for name in COUNTS},
    **{name: [(1, TypeError)] for name in FLAGS},
    "verbose": [(-1, ValueError), ("all", TypeError)],
    "random_seed": [(-1, ValueError), (0.5, TypeError)],
    "tensorflow_dataset_prefetch_buffer_size": [(-1, ValueError)],
    "backend": [("local[2]", TypeError)],
    "store": [(3, TypeError)],
    "loss_weights": [(1.0, TypeError), (["a"], TypeError)],
    "sample_weight_col": [(3, TypeError), ("", ValueError)],
    "feature_cols": [*COLUMNS, ([["a", "b"], "a"], ValueError), ({"x": {}}, ValueError)],
    "label_cols": COLUMNS,
    "validation": [(1.0, ValueError), (-0.1, ValueError), ([], TypeError), ("", ValueError)],
    "run_id": [(7, TypeError), ("../x", ValueError)],
    "label_shapes": SHAPES,
    "gradient_compression": [("fp16", TypeError)],
    "callbacks": LIST,
    "continuous_cols": [(3, TypeError), (["a", "a"], ValueError)],
    "categorical_cols": [(3, TypeError), (["a", "a"], ValueError)],
    "fill": [([], TypeError), ({"x": []}, TypeError)],
    "categories": [("x", TypeError), ({"x": "y"}, TypeError), ({"x": True}, TypeError)],
    "ragged": [("x", TypeError), ({"x": 3}, TypeError)],
    "class_names": [(3, TypeError), ([], ValueError)],
    "output_form": [("odds", ValueError)],
    "thresholds": [
        (0.5, TypeError),
        ([0.5], ValueError),
        ([0, 0], ValueError),
        ([-1, 1], ValueError),
    ],
    **{name: [(3, TypeError), ("", ValueError)] for name in NAMED},
    "transformation_fn": [("x", TypeError)],
    "transformation_edit_fields": [(3, TypeError), ([("x", "float32")], TypeError)],
    "transformation_removed_fields": [(3, TypeError)],
    "reader_pool_type": [("ventilator", ValueError)],
    "mp_start_method": [("thread", ValueError)],
    "on_failure": [("ignore", ValueError)],
    "terminate_on_nan": [("yes", TypeError)],
    "statistics": [("yes", TypeError)],
    "resume": [("no", ValueError), (True, ValueError)],
    "gc_max_size": [
        ("30", ValueError),
        ("1PB", ValueError),
        ("9999999999TB", ValueError),
        (-1, ValueError),
        ([], TypeError),
    ],
    "gc_older_than": [
        ("30", ValueError),
        ("1y", ValueError),
        ("-1d", ValueError),
        (0, ValueError),
        ([], TypeError),
    ],
}
TORCH = {
    "metrics": [(["accuracy"], TypeError)],
    "input_shapes": SHAPES,
    "input_dtypes": [(["complex64"], ValueError), ({}, TypeError)],
    "loss_constructors": [("mse", TypeError)],
    "loss_reduction": [("median", ValueError)],
    "output": [(3, TypeError), ([], TypeError), ([""], TypeError)],
    "class_weight": [("even", ValueError), ({}, TypeError), ({0: -1}, ValueError)],
    "train_minibatch_fn": [(3, TypeError)],
    "precision": [("fp8", ValueError)],
    "gradient_clip_norm": [(0, ValueError), ("one", TypeError)],
    "sync_every": [(0, ValueError), (1.5, TypeError)],
    "shard_optimizer": [("yes", TypeError)],
    "strategy": [("zero", ValueError)],
    "fsdp_modules": [(3, TypeError), ([3], TypeError)],
    "ema_decay": [(1.0, ValueError), (0, ValueError), ("most", TypeError)],
    "lr_scheduler": [("cosinus", ValueError), (3, TypeError)],
    "warmup_steps": [(-1, ValueError), (1.0, ValueError), ("few", TypeError)],
    "parameter_groups": [
        ([], TypeError),
        ({"bias": 3}, TypeError),
        ({"(": {"lr": 1.0}}, ValueError),
        ({"bias": {}}, ValueError),
    ],
    "layer_decay": [(1.0, ValueError), (0, ValueError), ("some", TypeError)],
    "lr_scheduler_interval": [("hour", ValueError)],
    "early_stopping": [
        (0, ValueError),
        ({"mode": "up"}, ValueError),
        ({"patients": 3}, TypeError),
        (0.5, TypeError),
    ],
    "best_checkpoint": [({"mode": "up"}, ValueError), (3, TypeError)],
    "checkpoint_every": [(0, ValueError), ("epoch", TypeError)],
    "compile": [("yes", TypeError)],
    "deterministic": [(1, TypeError)],
    "max_steps": [(0, ValueError), (0.5, TypeError)],
    "max_time": [(0, ValueError), ("1h", TypeError)],
}
LIGHTNING = {
    **TORCH,
    "num_gpus": [(-1, ValueError), (0.5, TypeError)],
    "log_every_n_steps": [(0, ValueError)],
    "loader_num_epochs": [(0, ValueError)],
    "trainer_args": [([], TypeError), ({3: 4}, TypeError)],
    "debug_data_loader": [(1, TypeError)],
    "allow_pickle": [(1, TypeError)],
    "train_async_data_loader_queue_size": [("all", TypeError)],
    "val_async_data_loader_queue_size": [(True, TypeError)],
}
KERAS = {
    "loss": [([3], TypeError), (3, TypeError)],
    "loss_reduction": [("median", ValueError)],
    "custom_objects": [([], TypeError), ({3: 4}, TypeError)],
    "sync_every": [(0, ValueError), (1.5, TypeError)],
    "checkpoint_callback": [("best", TypeError), (keras.callbacks.History(), TypeError)],
    "backend_env": [({"A": 1}, TypeError), ("A=1", TypeError)],
}
TEXT = {
    **TORCH,
    "checkpoint": [(3, TypeError), ("", ValueError), (("model", "tokenizer"), TypeError)],
    "text_col": [(3, TypeError), ("", ValueError)],
    "label_col": [(["y"], TypeError), ("", ValueError)],
    "max_length": [(1, ValueError), (8.5, TypeError)],
    "length_multiple": [(0, ValueError)],
    "learning_rate": [(0, ValueError), ("fast", TypeError)],
    "optimizer": [("adam", TypeError)],
    "lora": [(0, ValueError), (True, TypeError), ("8", TypeError)],
}
IMAGE = {
    **TORCH,
    **{name: TEXT[name] for name in ("checkpoint", "label_col", "learning_rate", "optimizer")},
    "lora": TEXT["lora"],
    "backbone": [(3, TypeError), ("resnet18", TypeError)],
    "backbone_weights": [(3, TypeError), ("", ValueError)],
    "image_col": [(3, TypeError), ("", ValueError)],
    "image_root": [(3, TypeError), ("", ValueError)],
    "image_size": [(0, ValueError), ([1, 2, 3], ValueError), (8.5, TypeError)],
    "resize_mode": [("zoom", ValueError)],
    "image_mean": [(float("nan"), ValueError), ("gray", TypeError)],
    "image_std": [(0.0, ValueError), ("gray", TypeError)],
    "augmentations": [("flip", TypeError)],
    "freeze_backbone": [(1, TypeError)],
}
WRONG = {
    "torch": COMMON | TORCH,
    "lightning": COMMON | LIGHTNING,
    "keras": COMMON | KERAS,
    "text": COMMON | TEXT,
    "image": COMMON | IMAGE,
}
ANY = {
    "torch": {"model", "optimizer", "loss", "data_module", "shuffle_buffer_size"},
    "lightning": {
        "model",
        "optimizer",
        "loss",
        "data_module",
        "shuffle_buffer_size",
        "logger",
        "profiler",
    },
    "keras": {"model", "optimizer", "metrics", "data_module", "shuffle_buffer_size"},
    "text": {"model", "loss", "data_module", "shuffle_buffer_size"},
    "image": {"model", "loss", "data_module", "shuffle_buffer_size"},
}
"""Parameters that accept any value: it is checked with the others when a fit begins, or ignored."""

UNSET = {
    "num_proc", "model", "backend", "store", "optimizer", "loss", "loss_weights",
    "sample_weight_col", "feature_cols",
    "label_cols", "validation", "global_batch_size", "val_batch_size", "random_seed", "run_id",
    "train_steps_per_epoch",
    "validation_steps_per_epoch", "label_shapes", "gradient_compression", "continuous_cols",
    "categorical_cols",
    "shuffle_buffer_size", "transformation_fn", "transformation_edit_fields",
    "transformation_removed_fields",
    "mp_start_method", "fill", "data_module", "class_names", "output_form", "thresholds",
    "gc_older_than",
    "gc_max_size",
    *NAMED,
}  # fmt: skip
SET = {
    "metrics": [], "batch_size": 32, "epochs": 1, "verbose": 1, "shuffle": True,
    "partitions_per_process": 10,
    "use_gpu": True, "backward_passes_per_step": 1, "callbacks": [], "compress_sparse_cols": False,
    "allow_nan": False,
    "train_reader_num_workers": 2, "val_reader_num_workers": 2, "reader_pool_type": "thread",
    "inmemory_cache_all": False, "tensorflow_dataset_prefetch_buffer_size": 0,
    "on_failure": "raise",
    "max_restarts": 3, "mlflow": False, "wandb": False, "tensorboard": False, "resume": "auto",
    "terminate_on_nan": True, "statistics": False,
    "categories": {}, "ragged": {},
}  # fmt: skip
OF_TORCH = dict.fromkeys(
    ("input_shapes", "input_dtypes", "loss_constructors", "loss_reduction", "train_minibatch_fn",
        "output", "class_weight", "gradient_clip_norm", "fsdp_modules", "ema_decay", "lr_scheduler",
     "warmup_steps", "parameter_groups", "layer_decay",
     "early_stopping", "best_checkpoint", "checkpoint_every", "max_steps", "max_time")
) | {"precision": "fp32", "lr_scheduler_interval": "epoch", "compile": False,
    "deterministic": False, "sync_every": 1, "shard_optimizer": False,
    "strategy": "ddp"}  # fmt: skip
OF_LIGHTNING = dict.fromkeys(
    ("num_gpus", "logger", "loader_num_epochs", "profiler", "trainer_args",
        "train_async_data_loader_queue_size",
     "val_async_data_loader_queue_size", "allow_pickle")
) | {"log_every_n_steps": 50, "debug_data_loader": False}  # fmt: skip
OF_KERAS = {
    "custom_objects": {},
    "checkpoint_callback": None,
    "loss_reduction": None,
    "sync_every": None,
    "backend_env": {"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"},
}
OF_TEXT = dict.fromkeys(
    ("checkpoint", "text_col", "label_col", "max_length", "learning_rate", "lora")
) | {"length_multiple": 8}
OF_IMAGE = dict.fromkeys(
    ("checkpoint", "backbone", "backbone_weights", "image_col", "image_root", "image_size",
     "resize_mode", "image_mean", "image_std", "augmentations", "label_col", "learning_rate",
     "lora")
) | {"freeze_backbone": False}  # fmt: skip
DEFAULTS = {
    "torch": dict.fromkeys(UNSET) | SET | OF_TORCH,
    "lightning": dict.fromkeys(UNSET) | SET | OF_TORCH | OF_LIGHTNING,
    "keras": dict.fromkeys(UNSET) | SET | OF_KERAS,
    "text": dict.fromkeys(UNSET) | SET | OF_TORCH | OF_TEXT,
    "image": dict.fromkeys(UNSET) | SET | OF_TORCH | OF_IMAGE,
}


NEUTRAL_PARAMS = frozenset(
    {
        "num_proc", "backend", "store", "metrics", "val_batch_size", "verbose",
        "partitions_per_process", "run_id",
        "resume", "use_gpu", "num_gpus", "continuous_cols", "categorical_cols",
        "compress_sparse_cols", "allow_nan",
        "shuffle_buffer_size", "train_reader_num_workers", "val_reader_num_workers",
        "reader_pool_type",
        "inmemory_cache_all", "mp_start_method", "tensorflow_dataset_prefetch_buffer_size",
        "on_failure", "fsdp_modules",
        "max_restarts", "mlflow", "wandb", "tensorboard", "checkpoint_every", "compile", "logger",
        "log_every_n_steps",
        "loader_num_epochs", "terminate_on_nan", "profiler", "debug_data_loader",
        "train_async_data_loader_queue_size",
        "val_async_data_loader_queue_size", "custom_objects", "backend_env", "predictionCol",
        "rawPredictionCol",
        "probabilityCol", "predictedLabelCol", "labelIndexCol", "thresholds", "class_names",
        "output_form",
        "statistics", "gc_older_than", "gc_max_size", "allow_pickle",
    }
)  # fmt: skip
"""Parameters that do not change the result, or only its last digits."""
DERIVING_PARAMS = frozenset(OF_TEXT | OF_IMAGE)
"""Parameters from which a fit makes others: the model, the optimizer, the transformation of rows,
and the columns.
"""


@pytest.fixture(params=ESTIMATORS)
def kind(request):
    return request.param


def accessor(verb, name):
    return verb + "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def test_every_default_is_known(kind):
    made = ESTIMATORS[kind]()
    assert {param.name: made.getOrDefault(param) for param in made.params} == DEFAULTS[kind]


def test_every_parameter_decides_the_result_or_does_not(kind):
    for one in ESTIMATORS[kind]().params:
        homes = [
            table
            for table in (RESULT_PARAMS, LENGTH_PARAMS, NEUTRAL_PARAMS, DERIVING_PARAMS)
            if one.name in table
        ]
        assert len(homes) == 1, (
            f"{one.name} belongs in one table of farandole.spark.common.runs.fingerprint, or here "
            f"in NEUTRAL_PARAMS: {len(homes)}"
        )


def test_every_parameter_has_a_setter_that_returns_the_estimator_and_a_getter(kind):
    made = ESTIMATORS[kind]()
    for param in made.params:
        value = made.getOrDefault(param)
        assert getattr(made, accessor("set", param.name))(value) is made
        assert getattr(made, accessor("get", param.name))() == value
        assert param.doc


def test_every_parameter_is_judged_when_it_is_set_or_takes_anything(kind):
    assert {param.name for param in ESTIMATORS[kind]().params} == set(WRONG[kind]) | ANY[kind]
    assert not set(WRONG[kind]) & ANY[kind]


def test_the_constructor_takes_every_parameter_by_name_and_its_documentation_lists_it(kind):
    constructor, params = ESTIMATORS[kind].__init__, ESTIMATORS[kind]().params
    taken = inspect.signature(constructor).parameters
    assert set(taken) - {"self"} == {param.name for param in params}
    assert all(
        one.default is None and one.kind is one.KEYWORD_ONLY
        for name, one in taken.items()
        if name != "self"
    )
    assert all(taken[param.name].annotation for param in params)
    told = " ".join(inspect.getdoc(constructor).split())
    assert all(f"{param.name}: {param.doc}" in told for param in params)
    assert "batch_size: Rows per step and process. Default: `32`." in told


def test_none_is_the_default_and_unknown_parameters_are_refused(kind):
    made = ESTIMATORS[kind](batch_size=None, epochs=3)
    assert made.getBatchSize() == 32
    assert not made.isSet("batch_size")
    assert made.isSet("epochs")
    assert made.setEpochs(None).getEpochs() == 1
    assert made.setCallbacks(None).getCallbacks() == []
    with pytest.raises(
        AttributeError, match=r"epochs is a parameter: use setParams\(epochs=\.\.\.\)"
    ):
        made.epochs = 3
    with pytest.raises(TypeError, match=r"no parameter of .*: epoch$"):
        ESTIMATORS[kind](epoch=3)
    with pytest.raises(TypeError, match="positional"):
        ESTIMATORS[kind](3)


def test_a_default_is_never_shared_between_estimators(kind):
    ESTIMATORS[kind]().getCallbacks().append("mine")
    assert ESTIMATORS[kind]().getCallbacks() == []


def test_a_subclass_keeps_the_constructor_that_it_or_its_base_defines(kind):
    class Base(ESTIMATORS[kind]):
        def __init__(self, size):
            super().__init__(batch_size=size)

    class Derived(Base):
        pass

    assert Base(3).getBatchSize() == Derived(3).getBatchSize() == 3


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, names in WRONG.items() for name in names],
    indirect=["kind"],
)
def test_a_value_that_cannot_be_is_refused_with_the_name_of_its_parameter(kind, name):
    made = ESTIMATORS[kind]()
    for value, error in WRONG[kind][name]:
        with pytest.raises(error, match=name):
            getattr(made, accessor("set", name))(value)
        with pytest.raises(error, match=name):
            made.copy({made.getParam(name): value})
        with pytest.raises(error, match=name):
            made.setParams(**{name: value})
    assert not made.isSet(name)


@pytest.mark.parametrize("kind", ["torch", "lightning", "keras"], indirect=True)
def test_conflicting_parameters_are_refused_before_the_fit_begins(kind, tmp_path):
    if kind == "keras":
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        known = {"model": model, "optimizer": "sgd", "loss": "mse"}
    else:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        known = {"model": model, "optimizer": optimizer, "loss": torch.nn.MSELoss()}
    known |= {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "store": LocalStore(str(tmp_path)),
        "num_proc": 1,
    }
    for name in ("model", "optimizer", *(["loss"] if kind == "torch" else [])):
        with pytest.raises((TypeError, ValueError), match=name):
            ESTIMATORS[kind](**known | {name: 3}).fit_on_parquet()
    if kind == "keras":
        with pytest.raises(ValueError, match="feature_cols by argument are for PyTorch"):
            ESTIMATORS[kind](**known | {"feature_cols": {"x": "x"}}).fit_on_parquet()
    with pytest.raises((TypeError, ValueError), match="callback"):
        ESTIMATORS[kind](**known | {"callbacks": [3]}).fit_on_parquet()
    assert not list(tmp_path.iterdir())


def test_obsolete_arguments_are_accepted_with_a_warning(kind):
    with pytest.warns(DeprecationWarning, match="shuffle_buffer_size is deprecated"):
        ESTIMATORS[kind](shuffle_buffer_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in multiprocessing.get_all_start_methods():
            assert ESTIMATORS[kind](mp_start_method=method).getMpStartMethod() == method
