# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The fingerprint of a run: data, model, loss, optimizer, and every parameter that decides the
result.

A run continues from its checkpoint only with the same fingerprint. A different value of one of
`RESULT_PARAMS` makes another run. `LENGTH_PARAMS` decide only when a run ends. All others do not
change the result, or only its last digits: they choose hosts, reading speed and displays.
`num_proc` decides how many steps an epoch has and how the learning rate is scaled, and is among
these others nevertheless, because a run must be able to continue with the available processes, as
an elastic job does.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from farandole._native import prepare as native
from farandole._native.store import Store as NativeStore
from farandole.common.counted_noun import format_counted_noun
from farandole.spark.common.runs.digests import brief_description, value_digest
from farandole.stores import small_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from farandole.data.prepare import PreparedData
    from farandole.spark.common.params import EstimatorParams

RESULT_PARAMS = frozenset(
    {
        "model", "optimizer", "loss", "loss_constructors", "loss_weights", "loss_reduction",
        "sample_weight_col",
        "feature_cols", "output", "class_weight",
        "label_cols", "validation", "batch_size", "global_batch_size", "random_seed", "shuffle",
        "train_steps_per_epoch",
        "validation_steps_per_epoch", "label_shapes", "input_shapes", "input_dtypes",
        "backward_passes_per_step",
        "gradient_compression", "callbacks", "fill", "categories", "ragged", "validation_stratify",
        "validation_group", "validation_time", "transformation_fn", "transformation_edit_fields",
        "transformation_removed_fields", "train_minibatch_fn", "data_module", "precision",
        "gradient_clip_norm", "sync_every", "shard_optimizer", "strategy", "ema_decay",
        "lr_scheduler", "lr_scheduler_interval", "best_checkpoint", "deterministic", "trainer_args",
        "checkpoint_callback", "warmup_steps", "parameter_groups", "layer_decay",
    }
)  # fmt: skip
"""Parameters that decide the result: another value makes another run."""
_DEFAULTS_WITHOUT_PART = {"strategy": "ddp"}
"""Defaults of parameters that earlier versions did not have, whose runs have no such part."""
LENGTH_PARAMS = frozenset({"epochs", "max_steps", "max_time", "early_stopping"})
"""Parameters that say when a run ends: a run may continue for longer, and each fit of a tuner
has its own.
"""
TRAINING, VALIDATION = "training data", "validation data"
"""The parts of the rows on each side."""
INITIAL_WEIGHTS = "initial weights"
"""The part that a continued run does not need, because its checkpoint has newer weights."""
LOGGING_CALLBACKS = frozenset(
    {
        "CSVLogger", "History", "ModelCheckpoint", "BackupAndRestore", "ProgbarLogger",
        "RemoteMonitor", "TensorBoard",
        "TerminateOnNaN", "BestModelCheckpoint", "DeviceStatsMonitor", "LearningRateMonitor",
        "ModelSummary",
        "RichModelSummary", "RichProgressBar", "TQDMProgressBar", "ProgressBar", "Timer",
        "OnExceptionCheckpoint",
    }
)  # fmt: skip
"""Callbacks that write or show something and leave training alone."""
_DISPLAY_TRAINER_ARGS = frozenset(
    {
        "accelerator", "callbacks", "default_root_dir", "devices", "enable_checkpointing",
        "enable_model_summary",
        "enable_progress_bar", "fast_dev_run", "log_every_n_steps", "logger", "max_epochs",
        "num_sanity_val_steps",
        "profiler",
    }
)  # fmt: skip
_FOOTER_READER_THREADS = 16
_PARQUET_TAIL_BYTES = 8
_DIGEST_CHARACTERS = 16
_DIGEST_VERSION = 3
"""Version of the digests. Digests of different versions cannot be compared."""


@dataclass(frozen=True)
class FingerprintPart:
    """One thing that decides the result."""

    name: str
    digest: str
    description: str
    """A short description of the value, for messages."""
    together: str | None = None
    """Digest of the value of all processes together, where a run may continue with the same value
    spread over another number of processes.
    """

    @classmethod
    def from_value(cls, name: str, value: Any, description: str | None = None) -> Self:
        """Returns the part of a fingerprint for a value.

        Args:
            name: name of the part in messages.
            value: any value.
            description: description of the value for messages; default: a short text of the value.
        """
        return cls(
            name,
            value_digest(value),
            brief_description(value) if description is None else description,
        )


@dataclass(frozen=True)
class FingerprintDifference:
    """A part that has changed."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        """Returns one clause about it."""
        if self.before == self.after:
            return f"{self.name} is another {self.after}"
        return f"{self.name} was {self.before} and is {self.after}"


@dataclass(frozen=True)
class Fingerprint:
    """All parts of a run, and how long it shall be."""

    parts: tuple[FingerprintPart, ...]
    length: tuple[FingerprintPart, ...] = ()

    def differences_to(self, now: Fingerprint) -> list[FingerprintDifference]:
        """Returns the differences, except differences of initial weights and of the run's length.

        Args:
            now: the fingerprint of the fit that wants to continue.
        """
        mine, theirs = (
            {one.name: one for one in each.parts if one.name != INITIAL_WEIGHTS}
            for each in (self, now)
        )
        nothing = FingerprintPart("", "", "None")
        pairs = [
            (mine.get(name, nothing), theirs.get(name, nothing), name)
            for name in {**mine, **theirs}
        ]
        # What is the same on each process may differ in total, as with another number of processes.
        # If something differs on each process, all parts with totals must have the same totals.
        has_totals = any(
            old.digest != new.digest and old.together == new.together is not None
            for old, new, _ in pairs
        )
        return [
            FingerprintDifference(name, old.description, new.description)
            for old, new, name in pairs
            if (
                old.together != new.together
                if has_totals and None not in (old.together, new.together)
                else old.digest != new.digest
            )
        ]

    def has_other_initial_weights(self, now: Fingerprint) -> bool:
        """Returns whether a fit's model and its run have different initial weights.

        Args:
            now: the fingerprint of the fit.
        """
        mine, theirs = (
            [one.digest for one in each.parts if one.name == INITIAL_WEIGHTS]
            for each in (self, now)
        )
        return mine != theirs

    def with_process_independent_totals(self, totals: Mapping[str, str], processes: int) -> Self:
        """Returns a fingerprint with which a run continues if the totals of some parts are the
        same, whatever the number of processes.

        Args:
            totals: digests of the values of all processes together, by name of the part.
            processes: of the fit.
        """
        where = "" if processes == 1 else f" on {format_counted_noun(processes, 'process')}"
        parts = (
            replace(one, together=totals[one.name], description=f"{one.description}{where}")
            if one.name in totals
            else one
            for one in self.parts
        )
        return replace(self, parts=tuple(parts))

    @property
    def digest(self) -> str:
        """The digest of everything, with length and initial weights: equal fits have equal
        digests.
        """
        whole = json.dumps(sorted([one.name, one.digest] for one in (*self.parts, *self.length)))
        return hashlib.sha256(whole.encode()).hexdigest()[:_DIGEST_CHARACTERS]

    def to_json(self) -> str:
        """Returns the fingerprint as text for a file."""
        parts = [
            {"name": one.name, "digest": one.digest, "told": one.description}
            | ({} if one.together is None else {"together": one.together})
            for one in self.parts
        ]
        return json.dumps({"version": _DIGEST_VERSION, "parts": parts}, indent=1)

    @classmethod
    def from_json(cls, text: bytes | str, place: str = "a fingerprint") -> Self | None:
        """Returns the fingerprint of a file; `None` if it is of another version.

        Args:
            text: what `to_json` returned.
            place: of the text, for the message.

        Raises:
            DamagedFileError: the text is not what `to_json` returned.
        """
        whole = small_files.parse_json(text, place)
        with small_files.raise_as_damaged_file(place):
            if whole["version"] != _DIGEST_VERSION:
                return None
            return cls(
                tuple(
                    FingerprintPart(
                        str(one["name"]), str(one["digest"]), str(one["told"]), one.get("together")
                    )
                    for one in whole["parts"]
                )
            )


def parameter_parts(
    estimator: EstimatorParams, without: Iterable[str], names: frozenset[str] = RESULT_PARAMS
) -> list[FingerprintPart]:
    """Returns the parameters of an estimator that decide the result.

    Args:
        estimator: whose they are.
        without: names that the framework's own parts stand for.
        names: which parameters count.
    """
    found = []
    for name in sorted(
        one.name for one in estimator.params if one.name in names.difference(without)
    ):
        value = estimator.getOrDefault(name)
        if name == "callbacks":
            value = [one for one in value or [] if type(one).__name__ not in LOGGING_CALLBACKS]
        elif name == "trainer_args":
            value = {
                key: one for key, one in (value or {}).items() if key not in _DISPLAY_TRAINER_ARGS
            }
        elif name == "checkpoint_callback" and value is not None:
            value = [type(value).__name__, getattr(value, "monitor", None)]
        if value not in (None, [], {}, _DEFAULTS_WITHOUT_PART.get(name)):
            found.append(FingerprintPart.from_value(name, value))
    return found


def data_parts(prepared: PreparedData) -> list[FingerprintPart]:
    """Returns the rows on each side, by what their manifests say, or the footers of files from
    other programs.

    Args:
        prepared: the data.
    """
    parts = [_data_part(TRAINING, prepared.train_url, prepared.train_rows)]
    if prepared.val_url is not None:
        parts.append(_data_part(VALIDATION, prepared.val_url, prepared.val_rows))
    return parts


def _data_part(name: str, url: str, rows: int) -> FingerprintPart:
    manifest = json.loads(native.read_manifest(url) or "{}")
    files, columns = manifest.get("files", []), manifest.get("columns", [])
    shape = sorted([one["name"], one["element"], one["shape"]] for one in columns)
    if files and all(one.get("content") for one in files):
        # in whatever order and files rows are
        content: Any = sum(int(one["content"], 16) for one in files) % 2**64
    elif files and all(one.get("checksum") for one in files):
        content = sorted([one["rows"], one["chunks"] or one["checksum"]] for one in files)
    else:
        content = _footer_digests(manifest.get("base") or url, files)
    made = value_digest([rows, shape, content])
    return FingerprintPart(
        name, made, f"{rows:,} rows of {len(columns)} columns with digest {made[:8]}"
    )


def _footer_digests(base: str, files: list[dict[str, Any]]) -> list[Any]:
    """Returns sizes from the footers of Parquet files and, by column and row group, the smallest
    and largest value.
    """
    store = NativeStore(base)

    def footer_digest(file: dict[str, Any]) -> list[Any]:
        size = file["bytes"]
        tail = store.read_range(file["path"], max(0, size - _PARQUET_TAIL_BYTES), size)
        start = max(0, size - _PARQUET_TAIL_BYTES - int.from_bytes(tail[:4], "little"))
        text = store.read_range(file["path"], start, size)
        return [
            file["rows"],
            hashlib.sha256(text).hexdigest(),
            sorted(file.get("values", {}).items()),
        ]

    with ThreadPoolExecutor(_FOOTER_READER_THREADS) as pool:
        return sorted(pool.map(footer_digest, files), key=str)
