# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Whether two DataFrames are certain to hold the same rows.

Prepared data is reused only then. A plan counts as repeatable when it is deterministic and reads nothing but what
cannot change behind it: rows made in this session, and files whose names, sizes and times are part of the print.
Everything else, and every plan of Spark Connect, which shows no plan, is prepared again.
"""

# ruff: noqa: SLF001 - the JVM's plan has no public door

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FIXED_LEAVES = {"LocalRelation", "OneRowRelation", "Range"}
_FIXED_ROOTS = {"ParallelCollectionRDD", "ReliableCheckpointRDD", "LocalCheckpointRDD", "EmptyRDD"}


def fingerprint(df: DataFrame) -> str | None:
    """A print of what the DataFrame's plan reads and computes.

    Equal prints may come from different plans (Spark's semantic hash has 32 bits): ask `sameSemantics` as well.

    Args:
        df: any DataFrame.

    Returns:
        The print, or `None` when the rows may be others next time.
    """
    frame = getattr(df, "_jdf", None)
    if frame is None:
        return None
    plan = frame.queryExecution().analyzed()
    if not plan.deterministic():
        return None
    leaves = plan.collectLeaves()
    parts = [str(df.semanticHash())]
    for position in range(leaves.size()):
        leaf = leaves.apply(position)
        if leaf.nodeName() not in _FIXED_LEAVES and not _reads_files(leaf) and not _made_here(leaf):
            return None
    files = df.inputFiles()
    if files:
        parts += _versions(df, files)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _reads_files(leaf: Any) -> bool:
    if leaf.nodeName() != "LogicalRelation" and not leaf.nodeName().startswith("Relation"):
        return False
    return leaf.relation().getClass().getSimpleName() == "HadoopFsRelation"


def _made_here(leaf: Any) -> bool:
    """Whether the rows are an RDD that goes back to rows of this session; of others nobody can tell what they read."""
    if leaf.nodeName() != "LogicalRDD":
        return False
    left, seen = [leaf.rdd()], set()
    while left:
        rdd = left.pop()
        if rdd.id() in seen:
            continue
        seen.add(rdd.id())
        dependencies = rdd.dependencies()
        if dependencies.size() == 0 and rdd.getClass().getSimpleName() not in _FIXED_ROOTS:
            return False
        left += [dependencies.apply(position).rdd() for position in range(dependencies.size())]
    return True


def _versions(df: DataFrame, files: list[str]) -> list[str]:
    session: Any = df.sparkSession  # the JVM's names are not the type checker's
    configuration = session._jsparkSession.sessionState().newHadoopConf()
    path_of = session._jvm.org.apache.hadoop.fs.Path
    versions = []
    for file in sorted(files):
        path = path_of(file)
        status = path.getFileSystem(configuration).getFileStatus(path)
        versions.append(f"{file} {status.getLen()} {status.getModificationTime()}")
    return versions
