# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Whether two DataFrames are certain to hold the same rows.

Prepared data is reused only then. A plan is repeatable if it is deterministic (seeded draws such as
`rand(1)` are allowed) and reads only data that cannot change unnoticed: rows that this session
created, and files whose names, sizes and times are part of the print. Everything else is prepared
again, also all data of Spark Connect, which shows no plan.

Plans of another session can be compared only by their text. So another session finds data again
only if the plan reads files, selects, filters and computes with Spark's own expressions, and
nothing else.
"""

# ruff: noqa: PLC0415, SLF001 - processes without Spark load this; the JVM's plan has no public API

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SESSION_DEPENDENT_EXPRESSIONS = (
    "current_date(",
    "current_timestamp(",
    "localtimestamp(",
    "current_time(",
    "now(",
    "current_user(",
)
"""Expressions that Spark takes for deterministic, though another day or user gives other rows."""
_PORTABLE_PLAN_NODES = {"Project", "Filter", "SubqueryAlias", "View", "LogicalRelation", "Range"}
_CATALYST_PREFIX = "org.apache.spark.sql.catalyst.expressions."
_RANDOM_EXPRESSIONS = {
    "Rand",
    "Randn",
    "Uuid",
    "Shuffle",
    "MonotonicallyIncreasingID",
    "SparkPartitionID",
}
"""Expressions that Spark calls nondeterministic because each partition draws other values. Any
draw is good enough.
"""
_PLAN_SETTINGS = ("spark.sql.session.timeZone", "spark.sql.ansi.enabled", "spark.sql.caseSensitive")
_MAX_PLAN_NODES = 2000
_FIXED_LEAF_NODES = {"LocalRelation", "OneRowRelation", "Range"}
_FIXED_ROOT_RDDS = {
    "ParallelCollectionRDD",
    "ReliableCheckpointRDD",
    "LocalCheckpointRDD",
    "EmptyRDD",
}


def plan_fingerprint(df: DataFrame) -> str | None:
    """Returns a fingerprint of the sources and the computation of a DataFrame's plan.

    Different plans may have equal fingerprints (Spark's semantic hash has 32 bits): call
    `sameSemantics` as well.

    Args:
        df: any DataFrame.

    Returns:
        The fingerprint; `None` if the plan may give other rows the next time.
    """
    frame = getattr(df, "_jdf", None)
    if frame is None:
        return None
    plan = frame.queryExecution().analyzed()
    if any(moment in plan.toString().lower() for moment in _SESSION_DEPENDENT_EXPRESSIONS):
        return None
    if not plan.deterministic() and not _is_deterministic_but_for_seeds(plan):
        return None
    leaves = plan.collectLeaves()
    parts = [str(df.semanticHash())]
    for position in range(leaves.size()):
        leaf = leaves.apply(position)
        if (
            leaf.nodeName() not in _FIXED_LEAF_NODES
            and not _reads_files(leaf)
            and not _is_rdd_of_this_session(leaf)
        ):
            return None
    files = df.inputFiles()
    if files:
        parts += _file_versions(df, files)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def portable_plan_text(df: DataFrame) -> str | None:
    """Returns a text for a DataFrame's plan and the versions of its sources, with the same meaning
    in any session.

    Args:
        df: any DataFrame.

    Returns:
        The text; `None` if the plan contains operations that the text cannot express.
    """
    from py4j.protocol import Py4JError

    frame = getattr(df, "_jdf", None)
    if frame is None:
        return None
    try:
        return _plan_text(df, frame)
    except Py4JError:  # a plan that another version of Spark has made differently: prepared again
        return None


def _plan_text(df: DataFrame, frame: Any) -> str | None:
    session: Any = df.sparkSession
    parts = [session.version, *(f"{name}={session.conf.get(name)}" for name in _PLAN_SETTINGS)]
    pending = [frame.queryExecution().analyzed()]
    if not pending[0].deterministic():
        return None
    while pending:
        node = pending.pop()
        kind = node.getClass().getSimpleName()
        if kind not in _PORTABLE_PLAN_NODES or len(parts) > _MAX_PLAN_NODES:
            return None
        parts.append(kind)
        if kind in ("Project", "Filter"):
            expressions = _scala_items(node.expressions())
            if not all(_is_builtin_expression(expression) for expression in expressions):
                return None
            parts += [expression.sql() for expression in expressions]
        elif kind == "Range":
            parts += [
                str(part)
                for part in (node.start(), node.end(), node.step(), node.numSlices().toString())
            ]
        elif kind == "LogicalRelation":
            if not _reads_files(node):
                return None
            relation = node.relation()
            parts += [relation.fileFormat().getClass().getName(), relation.dataSchema().json()]
            parts += [
                relation.partitionSchema().json(),
                *sorted(str(one) for one in _scala_items(relation.options().toSeq())),
            ]
        pending += _scala_items(node.children())
    files = df.inputFiles()
    return "\n".join(parts + (_file_versions(df, files) if files else []))


def partition_sources(df: DataFrame) -> list[str] | None:
    """Returns the source of each partition of a DataFrame, by number; `None` if it is unknown.

    Args:
        df: a DataFrame for which `portable_plan_text` has a text, coalesced or not.
    """
    from py4j.protocol import Py4JError

    try:
        return _partition_sources(df)
    except Py4JError:
        return None


def _partition_sources(df: DataFrame) -> list[str] | None:
    sources: list[str] = []
    remaining_nodes = _MAX_PLAN_NODES
    for partition in cast("Any", df)._jdf.queryExecution().toRdd().partitions():
        coalesced = partition.getClass().getSimpleName() == "CoalescedRDDPartition"
        parts = []
        for parent in _scala_items(partition.parents()) if coalesced else [partition]:
            kind = parent.getClass().getSimpleName()
            files = (
                [str(file.toString()) for file in parent.files()] if kind == "FilePartition" else []
            )
            parts += [f"{kind} {parent.index()}", *files]
            remaining_nodes -= 1 + len(files)
            if remaining_nodes < 0:
                return None
        sources.append("\n".join(parts))
    return sources


def _scala_items(sequence: Any) -> list[Any]:
    return [sequence.apply(position) for position in range(sequence.size())]


def _is_builtin_expression(expression: Any) -> bool:
    """Returns whether a plan consists only of Spark's own expressions, whose text is complete."""
    pending, seen = [expression], 0
    while pending:
        node = pending.pop()
        seen += 1
        name = node.getClass().getName()
        own = name.startswith(_CATALYST_PREFIX) and "." not in name.removeprefix(_CATALYST_PREFIX)
        if not own or "UDF" in name or "Subquery" in name or seen > _MAX_PLAN_NODES:
            return False
        pending += _scala_items(node.children())
    return not any(moment in expression.sql().lower() for moment in _SESSION_DEPENDENT_EXPRESSIONS)


def _is_deterministic_but_for_seeds(plan: Any) -> bool:
    """Returns whether a plan is deterministic except for values drawn with a seed."""
    nodes, pending, seen = [plan], [], 0
    while nodes:
        node = nodes.pop()
        seen += 1
        nodes += _scala_items(node.children())
        pending += _scala_items(node.expressions())
        if seen > _MAX_PLAN_NODES:
            return False
    while pending:
        expression = pending.pop()
        seen += 1
        if expression.deterministic():
            continue
        name = expression.getClass().getName()
        wild = [child for child in _scala_items(expression.children()) if not child.deterministic()]
        own = name.startswith(_CATALYST_PREFIX) and "UDF" not in name and "Reflection" not in name
        if seen > _MAX_PLAN_NODES or (
            not (wild and own) and name.removeprefix(_CATALYST_PREFIX) not in _RANDOM_EXPRESSIONS
        ):
            return False
        pending += wild
    return True


def _reads_files(leaf: Any) -> bool:
    if leaf.nodeName() != "LogicalRelation" and not leaf.nodeName().startswith("Relation"):
        return False
    return leaf.relation().getClass().getSimpleName() == "HadoopFsRelation"


def _is_rdd_of_this_session(leaf: Any) -> bool:
    """Returns whether an RDD comes from rows of this session. The sources of other RDDs are
    unknown.
    """
    if leaf.nodeName() != "LogicalRDD":
        return False
    pending, seen = [leaf.rdd()], set()
    while pending:
        rdd = pending.pop()
        if rdd.id() in seen:
            continue
        seen.add(rdd.id())
        dependencies = rdd.dependencies()
        if dependencies.size() == 0 and rdd.getClass().getSimpleName() not in _FIXED_ROOT_RDDS:
            return False
        pending += [dependencies.apply(position).rdd() for position in range(dependencies.size())]
    return True


def _file_versions(df: DataFrame, files: list[str]) -> list[str]:
    session: Any = df.sparkSession  # the JVM's names are not the type checker's
    configuration = session._jsparkSession.sessionState().newHadoopConf()
    path_of = session._jvm.org.apache.hadoop.fs.Path
    versions = []
    for file in sorted(files):
        path = path_of(file)
        status = path.getFileSystem(configuration).getFileStatus(path)
        versions.append(f"{file} {status.getLen()} {status.getModificationTime()}")
    return versions
