# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Limits of a job: which variable gives a timeout, and in which units."""

import pytest

from farandole.runner.job_limits import (
    elastic_timeout_seconds,
    spark_start_timeout_seconds,
    start_timeout_seconds,
)
from farandole.stores import checkpoint_signatures

READERS = {
    "START_TIMEOUT": start_timeout_seconds,
    "SPARK_START_TIMEOUT": spark_start_timeout_seconds,
    "ELASTIC_TIMEOUT": elastic_timeout_seconds,
}


@pytest.mark.parametrize("prefix", ["FARANDOLE", "HOROVOD"])
@pytest.mark.parametrize("knob", READERS)
def test_each_timeout_has_its_own_variable(monkeypatch, prefix, knob):
    monkeypatch.setenv(f"{prefix}_{knob}", "7")
    assert {name: read(None) for name, read in READERS.items()} == {
        name: 7.0 if name == knob else 600.0 for name in READERS
    }
    assert READERS[knob](3) == 3.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("1.5", 1.5), ("250ms", 0.25), ("2 m", 120.0), ("1h", 3600.0)],
)
def test_a_variable_is_a_duration(monkeypatch, text, seconds):
    monkeypatch.setenv("FARANDOLE_START_TIMEOUT", text)
    assert start_timeout_seconds(None) == seconds


@pytest.mark.parametrize("text", ["soon", "0", "-1", "1d", "nan", "1.2.3"])
def test_no_duration_is_an_error_with_the_name(monkeypatch, text):
    monkeypatch.setenv("FARANDOLE_START_TIMEOUT", text)
    with pytest.raises(ValueError, match="FARANDOLE_START_TIMEOUT"):
        start_timeout_seconds(None)


def test_no_time_at_all_is_an_error_with_the_name(monkeypatch):
    monkeypatch.setenv("FARANDOLE_ELASTIC_TIMEOUT", "0")
    with pytest.raises(ValueError, match="FARANDOLE_ELASTIC_TIMEOUT"):
        elastic_timeout_seconds(None)


def test_each_character_of_a_secret_counts(monkeypatch):
    keys = set()
    for secret in ("secret", "secret ", " secret", "secret\n"):
        monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, secret)
        keys.add(checkpoint_signatures.run_signing_key("run"))
    assert len(keys) == 4
