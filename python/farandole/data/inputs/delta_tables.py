# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Delta tables, by their log: `deltalake` reads it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from farandole._native import store as native
from farandole.data.inputs.delta_log_copies import (
    LOG_DIRECTORY,
    copy_deletion_vectors,
    hold_log_copy,
)
from farandole.data.inputs.optional_package_types import is_instance_by_name
from farandole.data.inputs.table_snapshot import (
    FIELD_ID_KEY,
    STORED_NAME_KEY,
    TableColumn,
    TableFile,
    TableSnapshot,
    field_name_in_files,
    full_file_path,
    refuse_local_files,
)
from farandole.data.lazy_pyarrow import pa
from farandole.stores.store_options import (
    CREDENTIALS_OPTION,
    StorageOptions,
    request_credentials,
)

if TYPE_CHECKING:
    import datetime as dt

    import numpy.typing as npt

_KNOWN_READER_FEATURES = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
"""Features without which a reader reads other rows or values, and that this module knows."""
_WIDENING_FEATURES = {"typeWidening", "typeWidening-preview"}
_MAPPING_READER_VERSION = 2
_PRIMITIVE_TYPES = {
    "string": "string",
    "long": "int64",
    "integer": "int32",
    "short": "int16",
    "byte": "int8",
    "float": "float32",
    "double": "float64",
    "boolean": "bool",
    "binary": "binary",
    "date": "date32",
}

_DELTA_CREDENTIAL_NAMES = {
    "s3": {
        "key": "aws_access_key_id",
        "AccessKeyId": "aws_access_key_id",
        "secret": "aws_secret_access_key",
        "SecretAccessKey": "aws_secret_access_key",
        "token": "aws_session_token",
        "SessionToken": "aws_session_token",
    },
    "az": {
        "sas_token": "azure_storage_sas_key",
        "account_key": "azure_storage_account_key",
        "token": "azure_storage_token",
    },
}
"""Options of deltalake for values of a function of credentials, by service."""
_SERVICES_OF_SCHEMES = {"s3": "s3", "az": "az", "ab": "az", "ad": "az"}
"""Services by the first two letters of the schemes of their URLs, such as `s3a` and `abfss`."""


def is_delta_table(value: Any) -> bool:
    """Returns whether a value is a table of deltalake, at any of its versions.

    Args:
        value: Anything.
    """
    return is_instance_by_name(value, "deltalake", "DeltaTable")


def read_delta_table(
    path: str, version: int | None = None, timestamp: dt.datetime | str | None = None
) -> TableSnapshot | None:
    """Returns the Delta table in a directory, read by its log; `None` where there is none.

    Args:
        path: A path or URL.
        version: Version of the table; default: the newest.
        timestamp: Chooses the newest version that is not younger.

    Raises:
        ImportError: There is one, and deltalake is not installed.
        ValueError: No such version, a table that deltalake cannot read, or a feature that is not
            read; the message names the table.
    """
    directory = native.Store(path)
    if any(magic in path for magic in "*?[") or not directory.exists(LOG_DIRECTORY):
        return None
    if directory.local_path is not None:
        return delta_snapshot(_load_table(directory.local_path, None, path, version, timestamp))
    url = directory.url
    if url.startswith("g") and StorageOptions.function_for_url(url) is not None:
        return _read_by_log_copy(path, url.rstrip("/"), version, timestamp)
    options = _delta_storage_options(path, url, native.object_store_options(url))
    return delta_snapshot(_load_table(url, options, path, version, timestamp))


def _read_by_log_copy(
    path: str, url: str, version: int | None, timestamp: dt.datetime | str | None
) -> TableSnapshot:
    is_newest = version is None and timestamp is None
    with hold_log_copy(url, whole=not is_newest) as copy:
        table = _load_table(str(copy), None, path, version, timestamp)
        if "deletionVectors" in (table.protocol().reader_features or ()):
            copy_deletion_vectors(url, copy)
        return delta_snapshot(table, url)


def _load_table(
    at: str,
    options: dict[str, str] | None,
    path: str,
    version: int | None,
    timestamp: dt.datetime | str | None,
) -> Any:
    try:
        from deltalake import DeltaTable  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"{path} is a Delta table, reading it needs deltalake: pip install 'farandole[delta]'"
        ) from error
    try:
        table = DeltaTable(at, version=version, storage_options=options)
        if timestamp is not None:
            table.load_as_version(timestamp)
    except Exception as error:
        raise _explain_delta_error(error, f"the Delta table {path}") from error
    return table


def _delta_storage_options(path: str, url: str, options: dict[str, str]) -> dict[str, str]:
    """Returns options as deltalake knows them. Credentials of a function are the present ones: only
    the log is read with them.

    Raises:
        ValueError: There is an option that deltalake does not know.
    """
    given = {name: value for name, value in options.items() if name != CREDENTIALS_OPTION}
    names = _DELTA_CREDENTIAL_NAMES.get(_SERVICES_OF_SCHEMES.get(url[:2], ""), {})
    unknown = sorted({"profile"} & set(given))
    credentials = request_credentials(url)
    for name, value in credentials.items():
        if name in names:
            given[names[name]] = value
        elif name not in ("expires", "Expiration"):
            unknown.append(f"{CREDENTIALS_OPTION}: {name}")
    if unknown:
        raise ValueError(
            f"{path} is a Delta table, and deltalake, which reads its log, does not know the "
            f"storage option {unknown[0]!r}: give keys as options, or in the environment "
            "(AWS_PROFILE for a profile)"
        )
    return given


def _explain_delta_error(error: Exception, name: str) -> Exception:
    # The extension of deltalake has no package in its name.
    if name in str(error):
        return error
    package = type(error).__module__.partition(".")[0]
    if package not in ("deltalake", "_internal") and not isinstance(error, ValueError):
        return error
    return ValueError(f"{name} cannot be read: {error}")


def delta_snapshot(table: Any, url: str | None = None) -> TableSnapshot:
    """Returns a table at the version that it has been loaded at.

    Args:
        table: Table of deltalake.
        url: URL of its files, if `table` is a copy of its log.

    Raises:
        ValueError: The table has a feature that is not read; the message names both.
    """
    read_at = full_file_path("", unquote(table.table_uri)).rstrip("/")
    location = read_at if url is None else url
    name = f"the Delta table {location}"
    try:
        features = _reader_features(table, name)
        columns = _table_columns(table, features, name)
        actions = pa.table(table.get_add_actions())
        deleted = {
            f"{location}{path.removeprefix(read_at)}"
            if path.startswith(f"{read_at}/")
            else path: rows
            for path, rows in _deleted_rows(table, features, name).items()
        }
    except Exception as error:
        raise _explain_delta_error(error, name) from error
    kinds = {one.name: one.arrow_field.type for one in columns}
    partitions = table.metadata().partition_columns
    values = actions["partition"].to_pylist() if "partition" in actions.schema.names else None
    files = []
    for index, encoded in enumerate(actions["path"].to_pylist()):
        path = unquote(encoded)
        row = {} if values is None else values[index]
        defaults = {one: pa.scalar(row.get(one), kinds[one]) for one in partitions}
        full = full_file_path(location, path)
        files.append(TableFile(full, defaults, deleted.pop(full, None)))
    if deleted:
        raise ValueError(
            f"{name} has deleted rows of a file that is not in it: {next(iter(deleted))}"
        )
    refuse_local_files(name, location, files)
    # The order of the log depends on its checkpoints.
    files.sort(key=lambda file: file.path)
    version = table.version()
    return TableSnapshot(
        name,
        location,
        str(version),
        columns,
        tuple(files),
        f"delta {location} {version}",
        bool(features & _WIDENING_FEATURES),
    )


def _reader_features(table: Any, name: str) -> set[str]:
    protocol = table.protocol()
    features: set[str] = set(protocol.reader_features or ())
    unknown = sorted(features - _KNOWN_READER_FEATURES)
    if unknown:
        raise ValueError(
            f"{name} has features that are not read: {', '.join(unknown)}. Read it with Spark, and "
            "fit on the DataFrame"
        )
    if protocol.min_reader_version == _MAPPING_READER_VERSION:
        features.add("columnMapping")
    return features


def _table_columns(table: Any, features: set[str], name: str) -> tuple[TableColumn, ...]:
    mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if "columnMapping" not in features:
        mode = "none"
    if mode not in ("none", "name", "id"):
        raise ValueError(f"{name} has a column mapping that is not read: {mode}")
    schema = json.loads(table.schema().to_json())
    fields = [_arrow_field(one, mode, name) for one in schema["fields"]]
    return tuple(TableColumn(one, (field_name_in_files(one),)) for one in fields)


def _arrow_field(entry: dict[str, Any], mode: str, table: str) -> pa.Field:
    metadata: dict[bytes, bytes] = {}
    if mode != "none":
        stored = entry["metadata"].get("delta.columnMapping.physicalName", entry["name"])
        metadata[STORED_NAME_KEY] = stored.encode()
    if mode == "id":
        metadata[FIELD_ID_KEY] = str(entry["metadata"]["delta.columnMapping.id"]).encode()
    column_label = f"column {entry['name']!r} of {table}"
    kind = _arrow_type(entry["type"], mode, column_label)
    return pa.field(entry["name"], kind, metadata=metadata or None)


def _arrow_type(stored_type: Any, mode: str, column_label: str) -> pa.DataType:
    if isinstance(stored_type, dict):
        kind = stored_type["type"]
        if kind == "struct":
            return pa.struct(
                [_arrow_field(part, mode, column_label) for part in stored_type["fields"]]
            )
        if kind == "array":
            return pa.list_(
                pa.field("element", _arrow_type(stored_type["elementType"], mode, column_label))
            )
        if kind == "map":
            key, value = (
                _arrow_type(stored_type[f"{part}Type"], mode, column_label)
                for part in ("key", "value")
            )
            return pa.map_(key, value)
    elif stored_type in _PRIMITIVE_TYPES:
        return pa.type_for_alias(_PRIMITIVE_TYPES[stored_type])
    elif stored_type in ("timestamp", "timestamp_ntz"):
        return pa.timestamp("us", "UTC" if stored_type == "timestamp" else None)
    elif stored_type.startswith("decimal("):
        precision, scale = stored_type[len("decimal(") : -1].split(",")
        return pa.decimal128(int(precision), int(scale))
    raise ValueError(
        f"{column_label} is a {stored_type}, which is not read: read the table with Spark"
    )


def _deleted_rows(table: Any, features: set[str], name: str) -> dict[str, npt.NDArray[np.uint64]]:
    """Returns the positions of deleted rows by file."""
    if "deletionVectors" not in features:
        return {}
    if not hasattr(table, "deletion_vectors"):
        raise ValueError(f"{name} has deletion vectors: reading them needs deltalake 1.6 or newer")
    if features & _WIDENING_FEATURES:
        try:
            vectors = pa.table(table.deletion_vectors())
        except Exception as error:
            raise ValueError(
                f"{name} has type widening and deletion vectors, which deltalake does not read "
                f"together ({error}). REORG TABLE ... APPLY (PURGE) and dropping the feature "
                "deletionVectors make it readable; or read it with Spark, and fit on the DataFrame"
            ) from error
    else:
        vectors = pa.table(table.deletion_vectors())
    deleted = {}
    for batch in vectors.to_batches():
        for path, mask in zip(batch["filepath"], batch["selection_vector"], strict=True):
            keep = mask.values.to_numpy(zero_copy_only=False)
            positions = np.flatnonzero(~keep).astype(np.uint64)
            if positions.size:
                deleted[full_file_path("", unquote(path.as_py()))] = positions
    return deleted
