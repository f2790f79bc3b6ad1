# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The saved parts of a Keras estimator and model.

A model has the part "model", a `.keras` file. If it uses the user's classes and functions, it also
has the part "custom_objects", a pickle of these, and if it was trained with a `transformation_fn`,
the part "transformation", a pickle of it. Objects in a subclass's own parameters are the part
"parameters", a pickle, too. Loading a pickle runs code, loading the model does not. Where pickles
are refused, the model is loaded without transformation and these parameters.

An estimator has the parts "model" and "objects": a pickle of its optimizer, functions, callbacks
and the like.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Self

import cloudpickle

from farandole.common import pickling
from farandole.spark.common.saving.persistence import (
    ParamsReadable,
    ParamsReader,
    ParamsWritable,
    ParamsWriter,
    pop_subclass_objects,
    split_plain_json,
)
from farandole.spark.keras.saving import model_bytes
from farandole.spark.keras.saving.user_objects import (
    copy_callbacks_without_model,
    custom_objects,
    pickle_user_objects,
)
from farandole.stores.pickle_policy import PickleNotAllowedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farandole.spark.keras.estimator import KerasEstimator
    from farandole.spark.keras.model import KerasModel

_TRANSFORMATION_PART: Final = "transformation"
_SUBCLASS_PART: Final = "parameters"
_log = logging.getLogger("farandole")


class KerasModelWriter(ParamsWriter):
    """A writer of a `KerasModel`."""

    def split_plain_and_packed(
        self, values: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Like `ParamsWriter.split_plain_and_packed`."""
        model, given = values.pop("model"), values.pop("custom_objects", {})
        parts = {"model": model_bytes.pack_model(model)}
        objects = custom_objects(model, given)
        if objects:
            parts["custom_objects"] = pickling.pickle_by_value(objects)
        function = values.pop("transformation_fn", None)
        if function is not None:
            parts[_TRANSFORMATION_PART] = pickling.pickle_by_value(function)
        if more := pop_subclass_objects(self.instance, values):
            parts[_SUBCLASS_PART] = pickling.pickle_by_value(more)
        return values, parts


class KerasModelReader(ParamsReader["KerasModel"]):
    """A reader of a `KerasModel`."""

    def __init__(self, kind: type[KerasModel]) -> None:
        super().__init__(kind)
        self._given_objects: dict[str, Any] | None = None
        self._safe_mode = True
        self._safe_mode_requested = False

    def custom_objects(self, objects: Mapping[str, Any]) -> Self:
        """Uses these classes and functions instead of the saved ones, so that no saved code runs.

        Args:
            objects: classes and functions by name.
        """
        self._given_objects = dict(objects)
        return self

    def safe_mode(self, safe: bool) -> Self:
        """Chooses whether Keras refuses models with Python lambdas, whose code would run; it does
        by default.

        Asked for `True`, classes and functions that were pickled beside the model are refused, too.

        Args:
            safe: as in `keras.saving.load_model`.
        """
        self._safe_mode, self._safe_mode_requested = safe, safe
        return self

    def restore_packed_parts(self, loaded: KerasModel, parts: dict[str, bytes], path: str) -> None:
        """Like `ParamsReader.restore_packed_parts`."""
        objects = self._given_objects
        if objects is None and "custom_objects" in parts:
            if self._safe_mode_requested:
                self.allow_pickle(False)
            self.check_pickled_code(
                path, f", or use {self.kind.__name__}.read().custom_objects(...), which runs none"
            )
            objects = cloudpickle.loads(parts["custom_objects"])
        try:
            loaded.setModel(
                model_bytes.unpack_model(parts["model"], objects, safe_mode=self._safe_mode)
            )
        except ValueError as error:
            if not self._safe_mode:
                raise
            raise ValueError(
                f"{error}\n(to load a model with a lambda in it, which runs its code: "
                f"{self.kind.__name__}.read().safe_mode(False).load(path))"
            ) from error
        if objects:
            loaded.setCustomObjects(objects)
        if self._given_objects is not None or self._safe_mode_requested:
            return
        function = self._unpickle_if_allowed(parts.get(_TRANSFORMATION_PART), path)
        if function is not None:
            loaded.setTransformationFn(function)
        more = self._unpickle_if_allowed(parts.get(_SUBCLASS_PART), path, "own parameters")
        loaded.setParams(**(more or {}))

    def _unpickle_if_allowed(
        self, packed: bytes | None, path: str, what: str = "transformation_fn"
    ) -> Any:
        """Returns what a part holds; `None` if there is none, or after a warning if pickles are
        refused.
        """
        if packed is None:
            return None
        try:
            self.check_pickled_code(path)
        except PickleNotAllowedError:
            _log.warning("the %s saved at %s is not loaded, since it is a pickle", what, path)
            return None
        return cloudpickle.loads(packed)


class KerasEstimatorParamsWriter(ParamsWriter):
    """A writer of a `KerasEstimator`."""

    def split_plain_and_packed(
        self, values: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Like `ParamsWriter.split_plain_and_packed`."""
        parts: dict[str, bytes] = {}
        model = values.pop("model", None)
        plain, rest = split_plain_json(values)
        if model is not None:
            parts["model"] = model_bytes.pack_model(model)
            given = rest.get("custom_objects", {})
            rest["custom_objects"] = custom_objects(
                model, given, rest.get("optimizer"), rest.get("loss")
            )
        for name in ("callbacks", "checkpoint_callback"):
            if name in rest:
                copies = copy_callbacks_without_model(
                    rest[name] if isinstance(rest[name], list) else [rest[name]]
                )
                rest[name] = copies if isinstance(rest[name], list) else copies[0]
        return plain, {**parts, "objects": pickle_user_objects(rest)}


class KerasEstimatorParamsReader(ParamsReader["KerasEstimator"]):
    """A reader of a `KerasEstimator`."""

    def restore_packed_parts(
        self, loaded: KerasEstimator, parts: dict[str, bytes], path: str
    ) -> None:
        """Like `ParamsReader.restore_packed_parts`."""
        self.check_pickled_code(path)
        rest = cloudpickle.loads(parts["objects"])
        if "model" in parts:
            loaded.setModel(
                model_bytes.unpack_model(
                    parts["model"], rest.get("custom_objects"), safe_mode=False
                )
            )
        loaded.setParams(**rest)


class KerasEstimatorParamsWritable(ParamsWritable):
    """A mixin that saves an estimator by Spark ML's `write()`."""

    _writer_class = KerasEstimatorParamsWriter


class KerasEstimatorParamsReadable(ParamsReadable["KerasEstimator"]):
    """A mixin that loads an estimator by Spark ML's `read()`."""

    _reader_class = KerasEstimatorParamsReader
