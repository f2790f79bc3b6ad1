# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Functions with `jit_compile=True`, split around collectives that XLA cannot contain.

TensorFlow decides at the end of a trace whether a function must be compiled as a whole. So if the
trace comes to a collective, that attribute is removed, and the other ops are marked for
compilation. TensorFlow then compiles the code between collectives, and runs the collectives as ops.

The needed parts are in no public module of TensorFlow. If they are missing, functions are not
split.
"""

# ruff: noqa: SLF001 - all of it is about TensorFlow's own

import importlib
import itertools
import sys
import weakref
from typing import Any, cast

import tensorflow as tf

try:
    AttrValue: Any = importlib.import_module("tensorflow.core.framework.attr_value_pb2").AttrValue
    _functions_package = "tensorflow.python.eager.polymorphic_function"
    Function: Any = importlib.import_module(f"{_functions_package}.polymorphic_function").Function
    _attributes: Any = importlib.import_module(f"{_functions_package}.attributes")
    NO_INLINE, XLA_COMPILE = _attributes.NO_INLINE, _attributes.XLA_COMPILE
except (ImportError, AttributeError):
    AttrValue = Function = NO_INLINE = XLA_COMPILE = cast("Any", None)

_split_functions: weakref.WeakSet[Any] = weakref.WeakSet()
"""Functions that are split: they stay so when they are traced again."""
_scope_numbers = itertools.count()
"""Distinguish the functions that are compiled together."""


def is_split_possible() -> bool:
    """Returns whether this TensorFlow has the necessary functions."""
    return Function is not None and all(
        hasattr(holder, name)
        for holder, name in (
            (tf.Graph, "_attr_scope"),
            (tf.Operation, "_set_attr"),
            (Function, "_generate_tracing_options"),
        )
    )


def split_traced_function() -> bool:
    """Splits the function that is being traced on this thread; returns whether that was
    possible.
    """
    if not is_split_possible():
        return False
    functions, graphs = _find_traced_functions()
    for function in functions:
        _split_functions.add(function)
        function._jit_compile = False
        for options in (function._variable_creation_config, function._no_variable_creation_config):
            if options is not None:
                options.attributes[XLA_COMPILE] = False
                options.attributes.pop(NO_INLINE, None)
    for graph in graphs:
        _mark_for_compilation(graph)
    return bool(functions)


def _find_traced_functions() -> tuple[list[Any], list[Any]]:
    """Returns the functions whose traces for compilation this thread is in, and the graphs of
    these traces.
    """
    functions, graphs, inside = [], [], 0
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if name == "func_graph_from_py_func":
            graphs.append(frame.f_locals.get("func_graph"))
        elif name in _TRACE_ENTRY_METHODS:
            function: Any = frame.f_locals.get("self")
            if isinstance(function, Function) and (
                function._jit_compile or function in _split_functions
            ):
                inside = len(graphs)
                if function not in functions:
                    functions.append(function)
        frame = frame.f_back
    return functions, graphs[:inside]


_TRACE_ENTRY_METHODS = (
    "_call",
    "get_concrete_function",
    "_get_concrete_function_garbage_collected",
)
"""Methods of functions in which traces begin."""


def _mark_for_compilation(graph: Any) -> None:
    """Marks a graph's present and later ops for compilation if XLA supports them."""
    if hasattr(graph, "_farandole_split"):
        return
    scope = f"farandole_split_{next(_scope_numbers)}"
    attributes = {"_XlaCompile": AttrValue(b=True), "_XlaScope": AttrValue(s=scope.encode())}
    graph._farandole_split = scope
    for op in graph.get_operations():
        for name, value in attributes.items():
            op._set_attr(name, value)
    graph._attr_scope_map.update(attributes)
