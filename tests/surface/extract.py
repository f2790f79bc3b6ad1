# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Makes `facts.json`, and with `--hooks` `hooks.json`, from an unpacked source archive of Horovod.

    pip download horovod==0.28.1 --no-deps --no-binary :all:
    tar xzf horovod-0.28.1.tar.gz
    python tests/surface/extract.py horovod-0.28.1 > tests/surface/facts.json
    python tests/surface/extract.py horovod-0.28.1 --hooks > tests/surface/hooks.json

The table has names, argument names, their order and kinds, and defaults: facts that a script
depends on, and no code. The sources are parsed, not imported. `hooks.json` has the methods of the
classes that programs subclass, with the ones whose names begin with `_`.
"""

import ast
import json
import sys
from pathlib import Path


def is_public(name):
    """Returns whether scripts may use a name: it is public, or a constructor."""
    return not name.startswith("_") or name in {"__init__", "__call__"}


def arguments(function, *, bound):
    """The arguments as text, without the first one of a method."""
    told = function.args
    positional = [*told.posonlyargs, *told.args]
    defaults = [None] * (len(positional) - len(told.defaults)) + list(told.defaults)
    parts = [
        argument_text(argument, default)
        for argument, default in zip(positional, defaults, strict=True)
    ]
    parts = parts[1 if bound else 0 :]
    if told.vararg:
        parts.append(f"*{told.vararg.arg}")
    elif told.kwonlyargs:
        parts.append("*")
    parts += [
        argument_text(argument, default)
        for argument, default in zip(told.kwonlyargs, told.kw_defaults, strict=True)
    ]
    if told.kwarg:
        parts.append(f"**{told.kwarg.arg}")
    return parts


def argument_text(argument, default):
    """One argument with its default."""
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


def statements(body):
    """The statements of a body and of the conditions and attempts in it."""
    for statement in body:
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            continue  # nothing that an import sees
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from statements(statement.body)
            yield from statements(getattr(statement, "orelse", []))
            for handler in getattr(statement, "handlers", []):
                yield from statements(handler.body)


def assigned(statement):
    """Names that a statement gives a value."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    for target in targets:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(part, ast.Name):
                yield part.id


def decorators(function):
    """Names of the decorators of a function."""
    return {
        ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in function.decorator_list
    }


def of_class(node):
    """Methods with their arguments, and other attributes, of a class."""
    found = {}
    for statement in statements(node.body):
        if isinstance(statement, ast.FunctionDef) and is_public(statement.name):
            told = decorators(statement)
            if told & {"property", "setter"}:
                found[statement.name] = None
            else:
                asked = arguments(statement, bound="staticmethod" not in told)
                # pyspark's decorator refuses positional arguments.
                found[statement.name] = ["*", *asked] if "keyword_only" in told else asked
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            found.update((name, None) for name in assigned(statement) if is_public(name))
    return found


def of_module(tree, package, exports):
    """Public names: a list of arguments for a function, a table for a class, null for another
    value.

    What a module imports is its own business, unless it is a package that offers the names of its
    parts.
    """
    found = {}
    for statement in statements(tree.body):
        if isinstance(statement, ast.FunctionDef):
            entry = {statement.name: arguments(statement, bound=False)}
        elif isinstance(statement, ast.ClassDef):
            entry = {statement.name: of_class(statement)}
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            entry = dict.fromkeys(assigned(statement))
        elif (
            exports
            and isinstance(statement, ast.ImportFrom)
            and (statement.module or package).startswith(package)
        ):
            entry = {
                alias.asname or alias.name: None for alias in statement.names if alias.name != "*"
            }
        else:
            continue
        for name, told in entry.items():
            if is_public(name) and (told is not None or name not in found):
                found[name] = told
    return found


def printed(facts):
    """The table as JSON, with one line for every function, method or value."""

    def lines(table, depth):
        rows = []
        for name, told in sorted(table.items()):
            text = lines(told, depth + 1) if isinstance(told, dict) and told else json.dumps(told)
            rows.append(f"{' ' * depth}{json.dumps(name)}: {text}")
        return "{\n" + ",\n".join(rows) + "\n" + " " * (depth - 1) + "}"

    return lines(facts, 1)


HOOK_MODULES = {
    "horovod.spark.common.estimator": ("HorovodEstimator", "HorovodModel"),
    "horovod.spark.common.params": ("EstimatorParams", "ModelParams"),
    "horovod.spark.torch.estimator": ("TorchEstimator", "TorchModel"),
    "horovod.spark.keras.estimator": ("KerasEstimator", "KerasModel"),
    "horovod.spark.lightning.estimator": ("TorchEstimator", "TorchModel"),
    "horovod.spark.common.backend": ("Backend", "SparkBackend"),
    "horovod.spark.common.store": (
        "Store", "AbstractFilesystemStore", "FilesystemStore", "DBFSLocalStore", "HDFSStore",
    ),
    "horovod.common.elastic": ("State", "ObjectState"),
    "horovod.torch.elastic.state": (
        "TorchState", "StateHandler", "ModelStateHandler", "OptimizerStateHandler",
        "SamplerStateHandler",
    ),
    "horovod.tensorflow.elastic": ("TensorFlowKerasState", "TensorFlowState"),
    "horovod._keras.callbacks": (
        "BroadcastGlobalVariablesCallbackImpl", "MetricAverageCallbackImpl",
        "LearningRateScheduleCallbackImpl", "LearningRateWarmupCallbackImpl",
    ),
    "horovod._keras.elastic": (
        "CommitStateCallbackImpl", "UpdateBatchStateCallbackImpl", "UpdateEpochStateCallbackImpl",
    ),
}  # fmt: skip
"""Classes that programs subclass, by module."""


def hooks_of(root):
    """Returns the methods that a subclass may override, with their arguments: all but constructors,
    static methods, and setters and getters of parameters, which only the user calls.
    """
    found = {}
    for module, classes in HOOK_MODULES.items():
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        for kind in ast.parse(path.read_text()).body:
            if not isinstance(kind, ast.ClassDef) or kind.name not in classes:
                continue
            found[f"{module}: {kind.name}"] = {
                method.name: arguments(method, bound=True)
                for method in kind.body
                if isinstance(method, ast.FunctionDef)
                and not method.name.startswith("__")
                and not decorators(method) & {"staticmethod", "classmethod", "property"}
                and not is_parameter_accessor(method)
            }
    return found


def is_parameter_accessor(method):
    """Returns whether a method only sets or gets one parameter."""
    name = method.name
    return name.startswith(("set", "get")) and name[3:4].isupper() and name != "getOptimizer"


def main(root):
    """Prints the table of all modules below a folder."""
    facts = {}
    for path in sorted(root.glob("horovod/**/*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not any(part.startswith("_") for part in name.split(".")):
            facts[name] = of_module(
                ast.parse(path.read_text()), "horovod", path.name == "__init__.py"
            )
    print(printed(facts))


if __name__ == "__main__":
    if "--hooks" in sys.argv:
        print(printed(hooks_of(Path(sys.argv[1]))))
    else:
        main(Path(sys.argv[1]))
