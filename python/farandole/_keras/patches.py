# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Patches of two Keras functions that do not know about other ranks, for distributed optimizers."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import keras

_lock = threading.Lock()
_installed = False


def install_patches() -> None:
    """Patches Keras, once; models and optimizers that are not distributed behave as before.

    - `LossScaleOptimizer.check_finite`: one rank's inf must skip the step on all ranks, or the
      others would wait for it in their reduction. `compile` may wrap a distributed optimizer by
      itself, so a subclass would not do.
    - Whether a model may be compiled by XLA: on TensorFlow that depends on whether the collectives
      can, or the step be split around them; `jit_compile="auto"` never splits.
    """
    global _installed  # noqa: PLW0603 - the patched functions are global, too
    with _lock:
        if _installed:
            return
        _installed = True
        _patch_check_finite()
        _patch_jit_compile_choice()


def _patch_check_finite() -> None:
    from farandole._keras.optimizer import _DistributedOptimizerMixin  # noqa: PLC0415 - imports this module

    scaling = keras.optimizers.LossScaleOptimizer
    check_here = scaling.check_finite

    def check_finite(self: Any, grads: Any) -> Any:
        finite = check_here(self, grads)
        inner = self.inner_optimizer
        if isinstance(inner, _DistributedOptimizerMixin):
            return inner._farandole.reducer.is_true_on_all_ranks(finite)  # noqa: SLF001
        return finite

    scaling.check_finite = check_finite


def _patch_jit_compile_choice() -> None:
    from farandole._keras.optimizer import is_distributed  # noqa: PLC0415 - imports this module

    try:
        trainer: Any = importlib.import_module("keras.src.trainers.trainer")
        supports, resolve = trainer.model_supports_jit, trainer.Trainer._resolve_auto_jit_compile  # noqa: SLF001
    except (ImportError, AttributeError):
        # A Keras that asks elsewhere: its users set jit_compile=False themselves.
        return

    def is_distributed_on_tensorflow(model: Any) -> bool:
        return keras.backend.backend() == "tensorflow" and is_distributed(
            getattr(model, "optimizer", None)
        )

    def model_supports_jit(model: Any) -> bool:
        if is_distributed_on_tensorflow(model):
            from farandole.tensorflow import xla, xla_function_splitting  # noqa: PLC0415 - the backend

            return (
                xla.xla_unsupported_reason() is None or xla_function_splitting.is_split_possible()
            ) and supports(model)
        return supports(model)

    def resolve_auto_jit_compile(model: Any) -> bool:
        chosen = resolve(model)
        if chosen and is_distributed_on_tensorflow(model):
            from farandole.tensorflow import xla  # noqa: PLC0415 - the backend

            # A split step is for callers that ask for it.
            return xla.xla_unsupported_reason() is None
        return chosen

    trainer.model_supports_jit = model_supports_jit
    trainer.Trainer._resolve_auto_jit_compile = resolve_auto_jit_compile  # noqa: SLF001
