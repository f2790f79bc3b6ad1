# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Functions that travel keep the file that they were written in."""

import inspect
import pickle
import traceback

from farandole.common import pickling


def travelled():
    def outer():
        def inner():
            raise KeyError("no such column")

        return inner

    return pickle.loads(pickling.pickle_by_value(outer))()


def test_a_traceback_of_a_function_that_travelled_has_its_source_lines():
    try:
        travelled()()
    except KeyError:
        told = traceback.format_exc()
    assert __file__ in told
    assert 'raise KeyError("no such column")' in told


def test_the_source_of_a_function_that_travelled_can_be_read():
    # TensorFlow compiles Python's loops from it.
    assert 'raise KeyError("no such column")' in inspect.getsource(travelled())
