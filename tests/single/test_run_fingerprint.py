# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A run continues with the data, model and parameters that it was begun with, and reports
differences.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pandas as pd
import pytest
import torch
from tests.single.training import Here, estimator, line, linear, weights, write

from farandole.spark.common import LocalStore
from farandole.spark.common.runs.digests import brief_description, value_digest
from farandole.spark.common.runs.fingerprint import INITIAL_WEIGHTS, Fingerprint, FingerprintPart
from farandole.spark.common.runs.run_fingerprint_check import RunDiffersError
from farandole.spark.lightning import LightningEstimator
from farandole.spark.torch.fingerprint_parts import model_parts
from farandole.stores.small_files import DamagedFileError

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def data(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    return tmp_path


def fit(data, model=None, **params):
    return estimator(
        data, model or linear(), **{"run_id": "r", "epochs": 1} | params
    ).fit_on_parquet()


def sgd(model, **options):
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), **options)}


def test_another_learning_rate_is_refused_with_both_values(data):
    model = linear()
    fit(data, **sgd(model, lr=0.05))
    before = (data / "runs/r/checkpoint").read_bytes()
    with pytest.raises(
        RunDiffersError, match=r"optimizer was SGD\(lr=0\.05\) and is SGD\(lr=0\.1\)"
    ) as refused:
        fit(data, **sgd(model, lr=0.1), epochs=2)
    assert isinstance(refused.value, ValueError)
    assert "Choose another run_id" in str(refused.value)
    assert 'resume="force"' in str(refused.value)
    assert (data / "runs/r/checkpoint").read_bytes() == before


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"batch_size": 16}, "batch_size was 8 and is 16"),
        ({"random_seed": 2}, "random_seed was 1 and is 2"),
        ({"loss": torch.nn.L1Loss()}, r"loss was \[MSELoss\] and is \[L1Loss\]"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"gradient_clip_norm": 1.0}, "gradient_clip_norm was None and is 1.0"),
        (
            {"model": torch.nn.Sequential(linear())},
            "model was Linear of 3 numbers and is Sequential of 3 numbers",
        ),
    ],
)
def test_a_difference_that_changes_the_result_is_refused(data, changed, told):
    fit(data)
    model = changed.get("model") or linear()
    with pytest.raises(RunDiffersError, match=told):
        fit(
            data,
            **{"optimizer": torch.optim.SGD(model.parameters(), lr=0.05)}
            | {"model": model}
            | changed,
        )


def test_other_rows_are_refused_though_their_number_is_the_same(data):
    fit(data)
    x, y = line(seed=1)
    write(data / "intermediate_train_data", x=x, y=y)
    with pytest.raises(RunDiffersError, match="training data was 96 rows of 2 columns with digest"):
        fit(data, epochs=2)


def test_rows_of_a_frame_are_distinguished_by_their_values(tmp_path):
    frame = pd.DataFrame(
        {"a": np.linspace(0, 1, 64, dtype=np.float32), "y": np.linspace(0, 1, 64, dtype=np.float32)}
    )
    columns = {"feature_cols": [["a", "a2"]], "label_cols": ["y"], "run_id": "r", "epochs": 1}
    frame["a2"] = frame["a"]
    estimator(tmp_path, linear(), **columns).fit(frame)
    estimator(tmp_path, linear(), **columns | {"epochs": 2}).fit(frame.copy())
    other = frame.assign(a=frame["a"][::-1].to_numpy())  # the same least and largest value
    with pytest.raises(RunDiffersError, match="training data"):
        estimator(tmp_path, linear(), **columns | {"epochs": 3}).fit(other)


def test_more_epochs_and_what_only_says_how_continue(data):
    fit(data)
    again = fit(
        data, epochs=3, verbose=1, partitions_per_process=2, train_reader_num_workers=1,
        metrics=[torch.nn.L1Loss()],
        early_stopping=5,
    )  # fmt: skip
    assert len(again.getHistory()) == 3


def test_fewer_epochs_than_are_done_are_said(data):
    three = fit(data, epochs=3)
    with pytest.warns(
        UserWarning,
        match=r"run 'r' has trained 3 epochs already, more than epochs=2: nothing is trained",
    ):
        two = fit(data, epochs=2)
    assert torch.equal(weights(two), weights(three))


def test_force_continues_and_says_so_and_the_next_fit_needs_it_no_more(data, capsys):
    model = linear()
    fit(data, **sgd(model, lr=0.05))
    forced = fit(data, **sgd(model, lr=0.1), epochs=2, resume="force", verbose=1)
    assert len(forced.getHistory()) == 2
    assert (
        "run r continues although it was started with something else: optimizer was"
        in capsys.readouterr().err
    )
    assert len(fit(data, **sgd(model, lr=0.1), epochs=3).getHistory()) == 3


def test_other_initial_weights_do_not_count_and_are_said(data, capsys):
    fit(data)
    fit(data, linear(seed=5), epochs=2, verbose=1)
    assert (
        "the model of run r had other initial weights; the weights of its checkpoint are used"
        in capsys.readouterr().err
    )


def test_a_run_that_never_ended_an_epoch_may_be_begun_with_something_else(data):
    model = linear()

    def falls(_state):
        raise RuntimeError("falls")

    with pytest.raises(RuntimeError, match="falls"):
        fit(data, **sgd(model, lr=0.05), train_minibatch_fn=lambda *_: falls(None))
    assert len(fit(data, **sgd(model, lr=0.1)).getHistory()) == 1


def test_a_run_of_an_older_version_continues_and_has_a_fingerprint_then(data, capsys):
    fit(data)
    file = data / "runs/r/_fingerprint.json"
    file.unlink()
    fit(data, epochs=2, verbose=1)
    assert "run r has no record of its data and parameters" in capsys.readouterr().err
    assert {one["name"] for one in json.loads(file.read_text())["parts"]} >= {
        "model",
        "optimizer",
        "loss",
    }


def test_maps_of_parameters_have_runs_of_their_own(data):
    made = estimator(data, linear(), run_id="r", epochs=1)
    rates = []
    for rate in (0.05, 0.2):
        model = linear()
        rates.append(
            {made.model: model, made.optimizer: torch.optim.SGD(model.parameters(), lr=rate)}
        )
    first, second = (made.fit_on_parquet(each) for each in rates)
    assert not torch.equal(weights(first), weights(second))
    names = [one.getRunId() for one in (first, second)]
    assert names[0] != names[1]
    assert all(name.startswith("r-") for name in names)
    assert made.fit_on_parquet(rates[0]).getRunId() == names[0]
    assert made.fit_on_parquet().getRunId() == "r"
    longer = made.fit_on_parquet(rates[0] | {made.epochs: 2})
    assert longer.getRunId() not in names


def test_a_lightning_module_counts_by_its_own_steps_and_numbers(data):
    import lightning.pytorch as lightning

    class Line(lightning.LightningModule):
        def __init__(self, rate):
            super().__init__()
            self.rate = rate
            self.layer = linear()

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, _index):
            return torch.nn.functional.mse_loss(self(batch["x"]).squeeze(1), batch["y"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.rate)

    def train(module, epochs):
        known = {
            "feature_cols": ["x"],
            "label_cols": ["y"],
            "batch_size": 8,
            "verbose": 0,
            "random_seed": 1,
        }
        store = LocalStore(str(data))
        made = LightningEstimator(
            model=module, run_id="r", epochs=epochs, store=store, backend=Here(), **known
        )
        return made.fit_on_parquet()

    train(Line(0.05), 1)
    assert len(train(Line(0.05), 2).getHistory()) == 2
    with pytest.raises(RunDiffersError, match="model is another Line of 3 numbers"):
        train(Line(0.1), 3)


SCRIPT = """
import functools, numpy as np, torch
from farandole.spark.common.runs.digests import value_digest
SCALE = 3
TABLE = {"b": [1, 2], "a": {"x", "y"}}
def helper(x): return x * SCALE
class Base(torch.nn.Module):
    kinds = {"p", "q", helper, len, frozenset({"r", "s", "t"})}
    table = {("a", 1): helper, frozenset({"r", "s", "t"}): 2}
    def forward(self, x): return helper(x) + TABLE["b"][0]
class Net(Base):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x):
        class Inner: y = 2
        return super().forward(self.layer(x))
def loss(output, label, weight=0.5):  # a comment
    return ((output - helper(label)) ** 2).mean() * weight
torch.manual_seed(0)
print(value_digest([loss, functools.partial(loss, weight=2), lambda x: {"a", "b", x},
    {"a": np.arange(3), "b": (1, None)},
    torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(0.5)), {"x", "y", "z"}, Net(),
    Base]))
"""


def test_a_digest_is_the_same_in_another_process():
    texts = (
        SCRIPT,
        SCRIPT,
        SCRIPT.replace("# a comment", "\n\n"),
        SCRIPT.replace("SCALE = 3", "SCALE = 4"),
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=120,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed, text in enumerate(texts)
    ]  # fmt: skip
    assert len(told[0]) == 17
    assert told[0] == told[1] == told[2] != told[3]


def test_closures_of_functions_are_in_the_digest():
    def scaled(by):
        return lambda value: value * by

    assert value_digest(scaled(2)) == value_digest(scaled(2)) != value_digest(scaled(3))
    assert value_digest(functools.partial(max, 1)) != value_digest(functools.partial(max, 2))
    assert value_digest(torch.nn.CrossEntropyLoss()) != value_digest(
        torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    )
    assert brief_description(scaled(2)) == "<lambda>"
    assert brief_description([torch.nn.MSELoss(), max, 1]) == "[MSELoss, max, 1]"


def test_an_architecture_counts_by_what_its_parts_say():
    class Scaled(torch.nn.Linear):
        def __init__(self, by):
            super().__init__(2, 1)
            self.by = by

    one, same, other = (Fingerprint(tuple(model_parts(Scaled(by), None))) for by in (1.0, 1.0, 2.0))
    assert not one.differences_to(same)
    assert [part.name for part in one.differences_to(other)] == ["model"]


BODY = """
import torch
SIZES = {sizes}
class Base(torch.nn.Module):
    SCALE = {scale}
    def scaled(self, x):
        return x * self.SCALE
class Net(Base):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x):{comment}
        return {expression}
class Loss:
    def __init__(self, weights=(1, 2)):
        self.weights = list(weights)
    def __call__(self, output, label):
        return self.error(output, label) * len(SIZES)
    @staticmethod
    def error(output, label):
        return {error}
"""


def made(**changed):
    """The model and the loss of a module of the user's, whose text differs in some places."""
    usual = {
        "sizes": "[1, 2]", "scale": 2, "comment": "", "expression": "self.scaled(self.layer(x))",
        "error": "((output - label) ** 2).mean()",
    }  # fmt: skip
    known = {"__name__": changed.pop("module", "users")}
    text = BODY.format(**usual | changed)
    exec(compile(text, changed.get("comment") or "file.py", "exec"), known)
    torch.manual_seed(0)
    return known["Net"](), known["Loss"]()


@pytest.mark.parametrize(
    ("changed", "of"),
    [
        ({"expression": "torch.relu(self.scaled(self.layer(x)))"}, {"model"}),
        ({"scale": 3}, {"model"}),
        ({"error": "(output - label).abs().mean()"}, {"loss"}),
        ({"sizes": "[1, 2, 3]"}, {"loss"}),
        ({"comment": "  # a comment\n\n        'a docstring'\n"}, set()),
        ({"module": "elsewhere"}, set()),
    ],
)
def test_the_code_of_classes_counts_and_their_place_does_not(changed, of):
    def fingerprint(model, loss):
        return Fingerprint((*model_parts(model, None), FingerprintPart.from_value("loss", loss)))

    before, now = fingerprint(*made()), fingerprint(*made(**changed))
    assert not before.differences_to(fingerprint(*made()))
    assert {one.name for one in before.differences_to(now)} == of


def test_a_changed_forward_is_refused_with_the_same_run(data):
    def named(expression):
        model, _ = made(expression=expression)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05)}

    fit(data, **named("self.layer(x)"))
    assert len(fit(data, **named("self.layer(x)"), epochs=2).getHistory()) == 2
    with pytest.raises(RunDiffersError, match="model is another Net of 3 numbers"):
        fit(data, **named("self.layer(x) * 2"), epochs=3)


def test_lists_and_arrays_of_a_loss_are_in_the_digest():
    _, loss = made()
    loss_class = type(loss)
    assert (
        value_digest(loss_class((1, 2))) == value_digest(loss) != value_digest(loss_class((1, 3)))
    )
    for of in (np.array, torch.tensor):
        one, same, other = loss_class(), loss_class(), loss_class()
        one.table, same.table, other.table = of([1.0]), of([1.0]), of([2.0])
        assert value_digest(one) == value_digest(same) != value_digest(other)


def test_frozen_parameters_count():
    free, frozen = linear(), linear()
    frozen.bias.requires_grad_(False)
    told = [Fingerprint(tuple(model_parts(one, None))) for one in (free, frozen)]
    assert [one.name for one in told[0].differences_to(told[1])] == ["model"]


def test_the_record_of_another_version_counts_like_none(data, capsys):
    fit(data)
    file = data / "runs/r/_fingerprint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 1}))
    fit(data, batch_size=16, epochs=2, verbose=1)
    assert "run r has no record of its data and parameters" in capsys.readouterr().err
    assert json.loads(file.read_text())["version"] > 1


def test_fingerprints_read_back_and_damaged_ones_do_not():
    mine = Fingerprint(
        (
            FingerprintPart.from_value("loss", "mse"),
            FingerprintPart("x", "00", "words"),
            FingerprintPart(INITIAL_WEIGHTS, "11", "11"),
        )
    )
    assert Fingerprint.from_json(mine.to_json()) == mine
    odd = json.dumps(json.loads(mine.to_json()) | {"parts": [3]}).encode()
    for damaged in (b"{", b'{"parts": [3]}', b"[" * 10**5, b"[]", odd):
        with pytest.raises(DamagedFileError, match="damaged: here"):
            Fingerprint.from_json(damaged, "here")
    less = Fingerprint(mine.parts[1:])
    assert [str(one) for one in mine.differences_to(less)] == ["loss was 'mse' and is None"]
    assert [str(one) for one in less.differences_to(mine)] == ["loss was None and is 'mse'"]


def test_a_function_whose_closure_holds_a_module_of_python_has_a_digest():
    def loss(module):
        return lambda output, label: module.abs(output - label)

    assert value_digest(loss(torch)) == value_digest(loss(torch)) != value_digest(loss(np))


HELPED = """
import enum, functools, torch
class Focal:
    def __init__(self, gamma):
        self.gamma = gamma
    def __call__(self, x):
        return x ** self.gamma
class Weighted(torch.nn.Module):
    def __init__(self, by):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.register_buffer("by", torch.tensor([by]))
class Outer:
    kept = Focal({number})
    def __init__(self, inner):
        self.inner, self.again = inner, [inner, self]
class Pair(dict):
    pass
Mode = enum.Enum("Mode", ["M2", "M3"])
def power(x, by):
    return x ** by
def decorated(function):
    @functools.wraps(function)
    def wrapper(x):
        return function(x)
    return wrapper
helper = {helper}
def loss(output, label):
    return helper(output - label)
"""


def helped(helper, number):
    known = {"__name__": "users"}
    exec(HELPED.format(helper=helper.replace("N", str(number)), number=7), known)
    return known["loss"]


@pytest.mark.parametrize(
    "helper",
    [
        "functools.partial(power, by=N)",
        "functools.partial(torch.mul, N)",
        "functools.lru_cache(lambda x: x * N)",
        "functools.lru_cache(functools.partial(power, by=N))",
        "torch.no_grad()(lambda x: x * N)",
        "torch.no_grad()(functools.lru_cache(lambda x: x * N))",
        "torch.autocast('cpu')(decorated(lambda x: x * N))",
        "Focal(N)",
        "Focal(N).__call__",
        "Outer(Focal(N))",
        "Outer(functools.lru_cache(lambda x: x * N))",
        "Weighted(N)",
        "Outer(Weighted(N))",
        "torch.nn.HuberLoss(delta=N)",
        "Mode.MN",
        "Pair(a=N)",
    ],
)
def test_helpers_that_a_loss_names_count(helper):
    before, again, now = (value_digest(helped(helper, number)) for number in (2, 2, 3))
    assert before == again, "new weights of a module that is only named make no other run"
    assert before != now


def test_objects_of_classes_count():
    one, same, other = ({"__name__": "users"} for _ in range(3))
    for known, number in ((one, 2), (same, 2), (other, 3)):
        exec(HELPED.format(helper="Outer(0)", number=number), known)
    assert value_digest(one["Outer"]) == value_digest(same["Outer"]) != value_digest(other["Outer"])


DECORATOR = """
import functools
def decorator(function, flag=True):
    @functools.wraps(function)
    def wrapper(*args):
        {line}
        return function(*args) if flag else None
    return wrapper
"""


def test_the_code_of_a_frameworks_decorator_does_not_count():
    def decorator(line, module="torch.utils._contextlib"):
        known = {"__name__": module}
        exec(DECORATOR.format(line=line), known)
        return known["decorator"]

    def double(x):
        return x * 2

    def triple(x):
        return x * 3

    before, updated = decorator("pass"), decorator("print(args)")
    assert before(double).__module__ == __name__
    assert value_digest(before(double)) == value_digest(updated(double))
    assert (
        len(
            {
                value_digest(one)
                for one in (double, before(double), before(triple), before(double, flag=False))
            }
        )
        == 4
    )
    mine = [value_digest(decorator(line, "users")(double)) for line in ("pass", "print(args)")]
    assert mine[0] != mine[1]


def test_ten_thousand_elements_of_a_collection_count_and_its_length():
    many = list(range(10_010))
    assert value_digest(many) == value_digest(list(many)) != value_digest(many[:-1])
    assert value_digest(many) != value_digest([-1, *many[1:]])
    assert value_digest(many) == value_digest([*many[:-1], -1])
    assert value_digest(dict.fromkeys(many, 1)) == value_digest(dict.fromkeys(reversed(many), 1))
    assert (
        value_digest(dict.fromkeys(many, 1))
        != value_digest(dict.fromkeys(many, 2))
        != value_digest(dict.fromkeys(many[:-1], 2))
    )
    assert (
        value_digest(set(many))
        == value_digest({*many[5000:], *many[:5000]})
        != value_digest(set(many[:-1]))
    )


@pytest.mark.parametrize("of", [np.zeros, torch.zeros])
def test_a_large_array_is_not_copied(of):
    table = of(1 << 20)
    tracemalloc.start()
    try:
        value_digest(lambda x: table[x])
        assert tracemalloc.get_traced_memory()[1] < table.nbytes / 8
    finally:
        tracemalloc.stop()


def test_arrays_of_any_type_and_order_count_by_their_values():
    given = (
        np.array(3), np.array("2026-01-01", "datetime64[D]"), np.array(["a", "b"]),
        np.empty((0, 3)), np.array([{}, 1]),
        np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3).T, np.arange(6)[::2],
        np.array([True]),
        np.array(["", ""]), torch.tensor(2.0), torch.ones(2, 3, dtype=torch.bfloat16).T,
        torch.empty(0),
    )  # fmt: skip
    told = [value_digest(one) for one in given]
    assert told == [
        value_digest(one.copy() if isinstance(one, np.ndarray) else one.clone()) for one in given
    ]
    assert len(set(told)) == len(given)
