# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Saving and loading estimators and models with Spark ML's own `write()` and `read()`, alone or in a pipeline.

`farandole.spark.common.saved` says how it lies in a directory.
"""

# ruff: noqa: N802, SLF001 - Spark ML's names and its own helpers

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pyspark.ml.util import DefaultParamsReader, MLReadable, MLReader, MLWriter

from farandole.common import trust
from farandole.spark.common.saved import Place

if TYPE_CHECKING:
    from pyspark.ml.param import Params

T = TypeVar("T", bound=MLReadable)

_NEVER_SAVED = ("backend", "store")


class ParamsWriter(MLWriter):
    """Writes an object with parameters; `parts` says what of it is no JSON.

    Args:
        instance: the object.
    """

    def __init__(self, instance: Params) -> None:
        super().__init__()
        self.instance = instance

    def parts(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Splits the parameters that are set.

        Args:
            values: by name; never backend and store.

        Returns:
            Plain values by name, and parts.
        """
        raise NotImplementedError

    def _handleOverwrite(self, path: str) -> None:
        """Keeps what is there, where Spark ML would delete it: `saveImpl` replaces it when the new object is there."""

    def saveImpl(self, path: str) -> None:
        """Writes the object to a path."""
        instance, session = self.instance, self.sparkSession
        values = {param.name: value for param, value in instance._paramMap.items() if value is not None}
        plain, parts = self.parts({name: value for name, value in values.items() if name not in _NEVER_SAVED})
        metadata = {
            "class": f"{type(instance).__module__}.{type(instance).__name__}",
            "timestamp": round(time.time() * 1000),
            "sparkVersion": session.version,
            "uid": instance.uid,
            "paramMap": plain,
            "defaultParamMap": {param.name: value for param, value in instance._defaultParamMap.items()},
        }
        Place(path, session).write(metadata, parts, overwrite=self.shouldOverwrite)


class ParamsReader(MLReader[T]):
    """Reads an object with parameters; `restore` says what becomes of its parts.

    Args:
        kind: class of the object.
    """

    def __init__(self, kind: type[T]) -> None:
        super().__init__()
        self.kind = kind
        self.trusted: bool | None = None

    def trust_code(self, trusted: bool = True) -> Self:
        """Consents to run the code in what is loaded, or refuses it whatever `FARANDOLE_TRUST_CODE` says.

        Saved classes, functions, optimizers and callbacks are pickles: who wrote them decides what they do. Without
        consent they are not loaded.

        Args:
            trusted: whether you trust who could write there.
        """
        self.trusted = trusted
        return self

    def require_trust(self, path: str, what: str, instead: str = "") -> None:
        """Refuses to go on where nobody has consented to run code.

        Args:
            path: of what is loaded.
            what: in it is code.
            instead: how to do without, in a clause.

        Raises:
            CodeNotTrustedError: nobody has.
        """
        name = self.kind.__name__
        trust.require(path, what, f"{name}.read().trust_code().load(path){instead}", self.trusted)

    def restore(self, loaded: T, parts: dict[str, bytes], path: str) -> None:
        """Sets what is no JSON.

        Args:
            loaded: with its plain parameters.
            parts: as the writer made them.
            path: for messages.
        """
        raise NotImplementedError

    def load(self, path: str) -> T:
        """Reads the object at a path.

        Args:
            path: where it was saved.
        """
        metadata, parts = Place(path, self.sparkSession).read()
        loaded: Any = self.kind()
        loaded._resetUid(metadata["uid"])
        known = {name: value for name, value in metadata["paramMap"].items() if loaded.hasParam(name)}
        defaults = {name: value for name, value in metadata["defaultParamMap"].items() if loaded.hasParam(name)}
        DefaultParamsReader.getAndSetParams(loaded, metadata | {"paramMap": known, "defaultParamMap": defaults})
        self.restore(loaded, parts, path)
        return loaded


def is_plain(value: Any) -> bool:
    """Whether JSON holds a value as it is."""
    if isinstance(value, list):
        return all(is_plain(one) for one in value)
    return value is None or isinstance(value, str | int | float | bool)
