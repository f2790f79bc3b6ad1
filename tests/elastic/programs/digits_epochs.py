# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The digits, and the epochs of trainings that wait for a fault in the middle."""

import json
import os
import sys
import time

import numpy as np
from sklearn.datasets import load_digits

EPOCHS, BATCH, DISTURBED = 12, 16, sys.argv[1] == "disturbed"
images, digits = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")
order = np.random.default_rng(0).permutation(len(images))
images, digits = images[order], digits[order]
train_x, train_y, test_x, test_y = images[:1440], digits[:1440], images[1440:], digits[1440:]
sizes = []


def print_epoch(epoch, hvd):
    sizes.append(hvd.size())
    print(f"epoch {epoch} rank {hvd.rank()} size {hvd.size()} pid {os.getpid()}", flush=True)


def goes_on(epoch, hvd, everywhere):
    # In the middle it waits for the fault, and for the replacements of lost workers.
    grown = not DISTURBED or epoch < EPOCHS // 2 or everywhere(float(os.path.exists("whole")))
    if not grown:
        time.sleep(0.5)  # leaves the cores to those who import their frameworks; the file ends it
    return epoch < EPOCHS or not grown


def end(accuracy):
    print("result " + json.dumps([accuracy, sizes]), flush=True)
