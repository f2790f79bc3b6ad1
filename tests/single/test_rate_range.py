# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`lr_range_test`: losses of rising learning rates, and the rate that they suggest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.single.training import estimator, fit, line, linear, write
from tests.text_checkpoints import make_reviews, write_checkpoint

from farandole.spark.common import LocalBackend
from farandole.spark.torch.rate_range import LearningRateCurve, curve_of_history, rising_rates
from farandole.spark.transformers import TextClassifier

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def data(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    return tmp_path


def losses_by_hand(model, rates, x, y):
    """Returns the losses of SGD on all rows with rising rates."""
    found = []
    for rate in rates:
        loss = torch.nn.functional.mse_loss(model(x), y)
        found.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(rate * gradient)
    return found


def test_losses_are_the_losses_of_steps_with_rising_rates(data):
    model = linear()
    before = [parameter.clone() for parameter in model.parameters()]
    given = estimator(data, model, batch_size=96, callbacks=[print], epochs=3)
    curve = given.lr_range_test(min_lr=1e-3, max_lr=0.5, steps=20)
    assert np.array(curve.rates) == pytest.approx(np.geomspace(1e-3, 0.5, 20))
    x, y = line()
    wanted = losses_by_hand(linear(), curve.rates, torch.tensor(x), torch.tensor(y)[:, None])
    assert curve.losses == pytest.approx(wanted, rel=1e-4)
    assert (given.getEpochs(), given.getLrScheduler(), given.getMaxSteps()) == (3, None, None)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_suggested_rate_trains_and_the_curve_ends_where_losses_diverge(data):
    given = estimator(data, linear(), batch_size=16)
    curve = given.lr_range_test(min_lr=1e-5, max_lr=100.0, steps=80)
    assert len(curve.losses) < 80
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=curve.suggestion)
    fitted = fit(data, model, optimizer=optimizer, batch_size=16, epochs=20)
    assert fitted.getHistory()[-1]["train"]["loss"] < 0.1 * curve.losses[0]
    lines = str(curve).splitlines()
    (marked,) = [line for line in lines if line.endswith("<- suggestion")]
    assert float(marked.split()[0]) == pytest.approx(curve.suggestion, rel=0.2)


def test_the_suggestion_is_a_tenth_of_the_rate_with_the_smallest_loss():
    rates = rising_rates(1e-4, 1.0, 41)
    exponents = np.log10(rates)
    losses = 1.0 + (exponents + 1) ** 2
    curve = LearningRateCurve(tuple(rates), tuple(losses))
    assert curve.suggestion == pytest.approx(0.01)
    assert LearningRateCurve(curve.rates, tuple(np.arange(41.0))).suggestion is None


def test_ratios_of_groups_stay(data):
    model = linear()
    groups = [
        {"params": [model.weight], "lr": 0.01},
        {"params": [model.bias], "lr": 0.1},
    ]
    optimizer = torch.optim.SGD(groups)
    curve = estimator(data, model, optimizer=optimizer, batch_size=96).lr_range_test(
        min_lr=1e-3, max_lr=1e-2, steps=10
    )
    fast = estimator(data, linear(), batch_size=96).lr_range_test(
        min_lr=1e-3, max_lr=1e-2, steps=10
    )
    assert curve.losses[0] == fast.losses[0]
    assert curve.losses[-1] > fast.losses[-1]


def test_an_estimator_on_a_checkpoint_is_tested(tmp_path):
    classifier = TextClassifier(
        checkpoint=write_checkpoint(tmp_path / "checkpoint"), text_col="review", label_col="mood",
        store=str(tmp_path / "store"), verbose=0, random_seed=1, batch_size=8, lora=2,
        backend=LocalBackend(1, verbose=0),
    )  # fmt: skip
    curve = classifier.lr_range_test(make_reviews(32), min_lr=1e-5, max_lr=0.1, steps=12)
    assert curve.losses[0] == pytest.approx(np.log(2), rel=0.3)
    assert len(curve.rates) == len(curve.losses) <= 12


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_lr": 0.0}, r"min_lr=0.0 must be above 0 and below max_lr=1.0"),
        ({"min_lr": 2.0}, r"min_lr=2.0 must be above 0 and below max_lr=1.0"),
        ({"steps": 3}, "steps=3 must be at least 10"),
        ({"min_lr": 50.0, "max_lr": 60.0, "steps": 10}, "the loss diverges after 1 steps"),
    ],
)
def test_ranges_that_do_not_fit_are_errors(data, params, message):
    with pytest.raises(ValueError, match=message):
        estimator(data, linear()).lr_range_test(**params)


def test_losses_that_are_not_finite_end_the_curve():
    history = [{"range_losses": [2.0, 1.9, 1.8]}, {"range_losses": [1.7, 1.6, float("nan"), 1.0]}]
    curve = curve_of_history(history, rising_rates(0.1, 1.0, 10))
    assert curve.losses == (2.0, 1.9, 1.8, 1.7, 1.6)
