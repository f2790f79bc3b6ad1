# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Saving and loading estimators and models with Spark ML's own `write()` and `read()`, alone or in
a pipeline.

Plain parameters, the URLs of a store and the numbers of a backend are saved as JSON. Everything
else is in named parts. `farandole.spark.common.saving.save_directory` describes the files.
"""

# ruff: noqa: N802, SLF001 - Spark ML's names and its own helpers

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

from pyspark.ml.util import DefaultParamsReader, MLReadable, MLReader, MLWritable, MLWriter

from farandole.spark.common.data.column_metadata import metadata_as_plain_values
from farandole.spark.common.model.output_columns import outputs_as_dicts
from farandole.spark.common.parameter import Parameter
from farandole.spark.common.saving import store_backend
from farandole.spark.common.saving.save_directory import SaveDirectory
from farandole.stores.pickle_policy import ALLOW_PICKLE_PARAMETER, require_unpickling_allowed
from farandole.stores.small_files import raise_as_damaged_file

if TYPE_CHECKING:
    from pyspark.ml.param import Params

T = TypeVar("T", bound=MLReadable)

_SEPARATELY_SAVED_PARAMS = ("backend", "store")
"""Parameters that `store_backend` saves without secrets. A file sets them in no other way."""
_log = logging.getLogger("farandole")


class ParamsWriter(MLWriter):
    """A writer of an object with parameters. `split_plain_and_packed` returns the parts that JSON
    cannot hold.

    Args:
        instance: the object.
    """

    def __init__(self, instance: Params) -> None:
        super().__init__()
        self.instance = instance

    def split_plain_and_packed(
        self, values: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Splits the parameters that are set.

        Args:
            values: by name; never backend and store.

        Returns:
            Plain values by name, and parts.
        """
        raise NotImplementedError

    def _handleOverwrite(self, path: str) -> None:
        """Leaves the old object, which Spark ML would delete first, until the new one can be
        read.
        """

    def saveImpl(self, path: str) -> None:
        """Writes the object to a path."""
        instance, session = self.instance, self.sparkSession
        values = {
            param.name: value for param, value in instance._paramMap.items() if value is not None
        }
        if "outputs" in values:
            values["outputs"] = outputs_as_dicts(values["outputs"])
        if "_metadata" in values:
            values["_metadata"] = metadata_as_plain_values(values["_metadata"])
        values.pop(
            ALLOW_PICKLE_PARAMETER, None
        )  # a file must not contain the consent to run what it contains
        plain, parts = self.split_plain_and_packed(
            {name: value for name, value in values.items() if name not in _SEPARATELY_SAVED_PARAMS}
        )
        metadata = {
            "class": f"{type(instance).__module__}.{type(instance).__name__}",
            "timestamp": round(time.time() * 1000),
            "sparkVersion": session.version,
            "uid": instance.uid,
            "paramMap": plain,
            "places": store_backend.describe_store_and_backend(values),
            "defaultParamMap": {
                param.name: value
                for param, value in instance._defaultParamMap.items()
                if param.name != ALLOW_PICKLE_PARAMETER
                and not _needs_pickling(instance, param.name, value)
            },
        }
        SaveDirectory(path, session).write_object_version(
            metadata, parts, overwrite=self.shouldOverwrite
        )


class ParamsReader(MLReader[T]):
    """A reader of an object with parameters; `restore_packed_parts` sets its parts.

    Args:
        kind: class of the object.
    """

    def __init__(self, kind: type[T]) -> None:
        super().__init__()
        self.kind = kind
        self.allowed: bool | None = None

    def allow_pickle(self, allowed: bool = True) -> Self:
        """Permits or forbids pickled code that was saved; by default, `FARANDOLE_ALLOW_PICKLE`
        decides.

        Args:
            allowed: refused before anything runs, where it is `False`.
        """
        self.allowed = allowed
        return self

    def check_pickled_code(self, path: str, instead: str = "") -> None:
        """Refuses pickled code, or says that it runs now.

        Args:
            path: of the object to load.
            instead: how to do without, in a clause.

        Raises:
            PickleNotAllowedError: it is not allowed.
        """
        require_unpickling_allowed(path, self.allowed, instead)
        _log.warning(
            "loading from %s runs the code pickled in it: load only what you trust%s", path, instead
        )

    def restore_packed_parts(self, loaded: T, parts: dict[str, bytes], path: str) -> None:
        """Sets the parts that are no JSON.

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
        saved = SaveDirectory(path, self.sparkSession)
        metadata = saved.read_metadata(f"{self.kind.__module__}.{self.kind.__name__}")
        loaded: Any = self.kind()
        with raise_as_damaged_file(f"{path}/metadata"):
            loaded._resetUid(str(metadata["uid"]))
            known, defaults = (
                {
                    name: value
                    for name, value in metadata[which].items()
                    if loaded.hasParam(name)
                    and name not in (*_SEPARATELY_SAVED_PARAMS, ALLOW_PICKLE_PARAMETER)
                }
                for which in ("paramMap", "defaultParamMap")
            )
            DefaultParamsReader.getAndSetParams(
                loaded, metadata | {"paramMap": known, "defaultParamMap": defaults}
            )
        self.restore_packed_parts(loaded, saved.read_parts(metadata), path)
        if loaded.hasParam(ALLOW_PICKLE_PARAMETER):  # the parts must not contain the consent either
            loaded.clear(loaded.getParam(ALLOW_PICKLE_PARAMETER))
        store_backend.restore_store_and_backend(loaded, metadata.get("places"), path)
        return loaded


class ParamsWritable(MLWritable):
    """A mixin that saves an object by Spark ML's `write()`."""

    _writer_class: ClassVar[type[ParamsWriter]]

    def write(self) -> ParamsWriter:
        """Returns the writer; `write().overwrite().save(path)` replaces the old directory."""
        return self._writer_class(cast("Any", self))


class ParamsReadable(MLReadable[T]):
    """A mixin that loads an object by Spark ML's `read()`."""

    _reader_class: ClassVar[type[ParamsReader[Any]]]

    @classmethod
    def read(cls) -> ParamsReader[Any]:
        """Returns the reader; loading runs the code that was pickled with the object."""
        return cls._reader_class(cls)


def pop_subclass_objects(instance: Params, values: dict[str, Any]) -> dict[str, Any]:
    """Takes out of the values those of a subclass's own parameters that JSON cannot hold.

    Args:
        instance: the object.
        values: by name.
    """
    names = [name for name, value in values.items() if _needs_pickling(instance, name, value)]
    return {name: values.pop(name) for name in names}


def _needs_pickling(instance: Params, name: str, value: Any) -> bool:
    """Returns whether JSON cannot hold a value of a parameter that a subclass has added."""
    own = isinstance(getattr(type(instance), name, None), Parameter)
    return not own and not _is_plain_json(value)


def split_plain_json(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values that JSON holds as they are, and the others, by name."""
    plain = {name: value for name, value in values.items() if _is_plain_json(value)}
    return plain, {name: value for name, value in values.items() if name not in plain}


def _is_plain_json(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain_json(one) for one in value)
    return value is None or isinstance(value, str | int | float | bool)
