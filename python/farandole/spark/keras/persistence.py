# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What of Keras's estimator and model is saved, and in which form.

A model has the parts "model", a `.keras` file, and, where it is made of the user's classes and functions,
"custom_objects", a pickle of these; loading the latter runs code and needs consent, loading the former does not.

An estimator has the parts "model" and "objects": a pickle of its optimizer, functions, callbacks and the like.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import cloudpickle

from farandole.common import trust
from farandole.spark.common.outputs import describe
from farandole.spark.common.persistence import ParamsReader, ParamsWriter, is_plain
from farandole.spark.keras import payload
from farandole.spark.keras.objects import custom_objects, dumps, travelling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farandole.spark.keras.estimator import KerasEstimator
    from farandole.spark.keras.model import KerasModel


class KerasModelWriter(ParamsWriter):
    """Writes a `KerasModel`."""

    def parts(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
        """As `ParamsWriter.parts`."""
        model, given = values.pop("model"), values.pop("custom_objects", {})
        if "outputs" in values:
            values["outputs"] = describe(values["outputs"])
        parts = {"model": payload.pack(model)}
        objects = custom_objects(model, given)
        if objects:
            parts["custom_objects"] = cloudpickle.dumps(objects)
        return values, parts


class KerasModelReader(ParamsReader["KerasModel"]):
    """Reads a `KerasModel`."""

    def __init__(self, kind: type[KerasModel]) -> None:
        super().__init__(kind)
        self._objects: dict[str, Any] | None = None

    def custom_objects(self, objects: Mapping[str, Any]) -> Self:
        """Takes these classes and functions instead of those that were saved, of which none runs.

        Args:
            objects: by name.
        """
        self._objects = dict(objects)
        return self

    def safe_mode(self, safe: bool) -> Self:
        """Keras's word for `trust_code`, turned around: with `False`, saved classes and Python lambdas run.

        Args:
            safe: as in `keras.saving.load_model`.
        """
        return self.trust_code(not safe)

    def restore(self, loaded: KerasModel, parts: dict[str, bytes], path: str) -> None:
        """As `ParamsReader.restore`."""
        objects = self._objects
        name = self.kind.__name__
        if objects is None and "custom_objects" in parts:
            instead = f", or use {name}.read().custom_objects({{...}}).load(path), which runs none"
            self.require_trust(path, "pickled classes and functions", instead)
            objects = cloudpickle.loads(parts["custom_objects"])
        trusted = trust.given() if self.trusted is None else self.trusted
        try:
            loaded.setModel(payload.unpack(parts["model"], objects, safe_mode=not trusted))
        except ValueError as error:
            if trusted:
                raise
            raise trust.CodeNotTrustedError(
                f"{error}\n(to load a model with a lambda in it, which runs its code: "
                f"{name}.read().trust_code().load(path), or {trust.VARIABLE}=1)"
            ) from error
        if objects:
            loaded.setCustomObjects(objects)


class KerasEstimatorParamsWriter(ParamsWriter):
    """Writes a `KerasEstimator`; its backend and store are not saved."""

    def parts(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
        """As `ParamsWriter.parts`."""
        parts: dict[str, bytes] = {}
        model = values.pop("model", None)
        plain = {name: value for name, value in values.items() if is_plain(value)}
        rest = {name: value for name, value in values.items() if name not in plain}
        if model is not None:
            parts["model"] = payload.pack(model)
            given = rest.get("custom_objects", {})
            rest["custom_objects"] = custom_objects(model, given, rest.get("optimizer"), rest.get("loss"))
        for name in ("callbacks", "checkpoint_callback"):
            if name in rest:
                copies = travelling(rest[name] if isinstance(rest[name], list) else [rest[name]])
                rest[name] = copies if isinstance(rest[name], list) else copies[0]
        return plain, {**parts, "objects": dumps(rest)}


class KerasEstimatorParamsReader(ParamsReader["KerasEstimator"]):
    """Reads a `KerasEstimator`; its backend and store are unset."""

    def restore(self, loaded: KerasEstimator, parts: dict[str, bytes], path: str) -> None:
        """As `ParamsReader.restore`."""
        self.require_trust(path, "a pickled optimizer, functions and callbacks")
        rest = cloudpickle.loads(parts["objects"])
        if "model" in parts:
            loaded.setModel(payload.unpack(parts["model"], rest.get("custom_objects"), safe_mode=False))
        loaded.setParams(**rest)
