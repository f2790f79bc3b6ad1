# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Garbage for what is read in Python, as `fuzz` has it for what is read in Rust: the same
variables, the same words.

`FARANDOLE_FUZZ_SECONDS` is the time of a target, one second by default; `FARANDOLE_FUZZ_SEED` is
the first case. A case that fails names its seed, which repeats it.
"""

from __future__ import annotations

import copy
import os
import random
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ODD = [
    0,
    1,
    -1,
    1 << 20,
    1 << 31,
    1 << 40,
    1 << 63,
    -(1 << 63),
    10**400,
    0.5,
    float("nan"),
    float("inf"),
]
ODD += [None, True, "", "x" * 300, "..", [], {}, [[]], [1, 2, 3], {"x": 1}]


def seconds() -> float:
    """Returns the seconds for which a target runs."""
    return float(os.environ.get("FARANDOLE_FUZZ_SECONDS", "1"))


def cases(case: Callable[[random.Random], object]) -> int:
    """Runs a case with fresh numbers until the time is over; how many there were."""
    # Without a budget, the same few cases run every time.
    start = 0 if "FARANDOLE_FUZZ_SECONDS" not in os.environ else int(time.time())
    seed = first = int(os.environ.get("FARANDOLE_FUZZ_SEED", start))
    end = time.monotonic() + seconds()
    while seed == first or time.monotonic() < end:
        try:
            case(random.Random(seed))
        except BaseException:
            print(f"this was case FARANDOLE_FUZZ_SEED={seed}")
            raise
        seed += 1
    return seed - first


def mutated(draw: random.Random, sound: bytes) -> bytes:
    """Returns a damaged copy of `sound`: bits flipped, bytes replaced, cut short, prolonged, or
    repeated.
    """
    found = bytearray(sound)
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(found) + 1)
        kind = draw.randrange(6)
        if kind == 0:
            del found[at:]
        elif kind == 1:
            found += draw.randbytes(draw.randrange(40))
        elif kind == 2:
            found += found[:at]
        elif kind == 3:
            found[at : at + 1] = bytes(byte ^ 1 << draw.randrange(8) for byte in found[at : at + 1])
        elif kind == 4:
            found[at : at + 8] = b"\xff" * len(found[at : at + 8])
        else:
            found[at : at + 1] = draw.randbytes(1)
    return bytes(found)


def altered(draw: random.Random, tree: object) -> object:
    """A tree of dicts and lists in which a value or two are something else, or gone."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.randrange(1, 3)):
        places = list(_places(tree))
        if not places:
            return draw.choice(ODD)
        holder, key = draw.choice(places)
        if isinstance(holder, dict) and draw.random() < 0.2:
            del holder[key]
        elif isinstance(holder[key], int) and draw.random() < 0.5:
            holder[key] = draw.choice(
                [holder[key] + draw.randrange(-3, 4), holder[key] << draw.randrange(60)]
            )
        else:
            holder[key] = copy.deepcopy(draw.choice(ODD))
    return tree


def _places(tree: object) -> Iterator[tuple[dict | list, object]]:
    pairs = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in list(pairs):
        yield tree, key
        yield from _places(value)
