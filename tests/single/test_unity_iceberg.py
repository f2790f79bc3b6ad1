# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks of answers and manifests of Iceberg tables of Unity Catalog, without pyiceberg.
`tests/storage/test_unity_iceberg.py` reads tables.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from farandole.data.inputs.iceberg_tables import _manifest_entries
from farandole.data.inputs.unity_iceberg import _service_options

LOCATION = "s3://bucket/table"


def count_entries(path: str, *, is_bound: bool) -> int:
    """Entries of a snapshot with a data file in the table, and a delete file at a path."""
    paths = (f"{LOCATION}/0.parquet", path)
    entries = [SimpleNamespace(data_file=SimpleNamespace(file_path=each)) for each in paths]
    manifest = SimpleNamespace(fetch_manifest_entry=lambda _, **_options: entries)
    snapshot = SimpleNamespace(manifests=lambda _: [manifest])
    table = SimpleNamespace(io=None)
    return len(_manifest_entries(table, snapshot, "the table", LOCATION, is_bound=is_bound))


def test_files_elsewhere_are_refused_before_one_is_read() -> None:
    assert count_entries(f"{LOCATION}/deletes.parquet", is_bound=True) == 2
    assert count_entries("s3://elsewhere/deletes.parquet", is_bound=False) == 2
    for path in ("s3://elsewhere/deletes.parquet", f"{LOCATION}2/deletes.parquet"):
        with pytest.raises(ValueError, match="a file that is not below its location"):
            count_entries(path, is_bound=True)
    with pytest.raises(ValueError, match="a file of this host"):
        count_entries("file:///etc/deletes.parquet", is_bound=False)


def test_options_of_the_user_replace_those_of_the_catalog_by_all_their_names() -> None:
    answer = {"config": {"s3.endpoint": "theirs", "client.region": "theirs"}}
    assert _service_options(answer, {}) == {"endpoint_url": "theirs", "region": "theirs"}
    given = {"aws_endpoint_url": "ours", "region_name": "ours"}
    assert _service_options(answer, given) == given
