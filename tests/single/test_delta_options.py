# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Delta tables: credentials as deltalake knows them, and states of loaders at a version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from farandole._native import store as native
from farandole.data import ParquetLoader, open_table
from farandole.data.inputs.delta_tables import _delta_storage_options
from farandole.stores.store_options import StorageOptions

if TYPE_CHECKING:
    from pathlib import Path

AZURE_NAMES = {"azure_storage_sas_key"}
S3_NAMES = {"aws_access_key_id", "aws_secret_access_key"}


def options_of(url: str) -> set[str]:
    """Names of deltalake's options of a URL whose credentials a function returns."""
    keys = {"key": "k", "secret": "s"} if url.startswith("s3") else {"sas_token": "sig=a"}
    StorageOptions((url,), {"credentials": lambda: {**keys, "expires": 9e9}}).apply_to_process()
    try:
        return set(_delta_storage_options(url, url, {}))
    finally:
        native.configure_options(url, {})


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b/t", S3_NAMES),
        ("s3a://b/t", S3_NAMES),
        ("az://c/t", AZURE_NAMES),
        ("azure://c/t", AZURE_NAMES),
        ("abfss://c@a.dfs.core.windows.net/t", AZURE_NAMES),
    ],
)
def test_credentials_of_a_function_have_the_names_of_deltalake(
    url: str, expected: set[str]
) -> None:
    assert options_of(url) == expected


def test_a_state_of_another_version_of_a_table_says_how_to_open_it(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed")
    path = str(tmp_path / "clicks")
    deltalake.write_deltalake(path, pa.table({"x": [1.0]}))
    state = ParquetLoader(path, 1).state_dict()
    deltalake.write_deltalake(path, pa.table({"x": [2.0]}), mode="append")
    with pytest.raises(ValueError, match=r"is at version 1 here, and the state at version 0"):
        ParquetLoader(path, 1).load_state_dict(state)
    ParquetLoader(open_table(path, version=0), 1).load_state_dict(state)
