# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints where a data service of TensorFlow listens."""

import threading

from tests.sockets import listening

import farandole.tensorflow as hvd
from farandole.tensorflow.data import compute_service

hvd.init()
before = listening()
with compute_service.serving(
    1, dispatcher_side="training", timeout=60, open_to_the_network=True
) as config:
    meeting = listening() - before
    assert len(meeting) == 1, meeting
    worker = threading.Thread(target=compute_service.compute_worker_fn, args=(config,))
    worker.start()
    with compute_service.tf_data_service(config, 0):
        print("listens", sorted(listening() - before - meeting), flush=True)
    config.compute_client().shutdown()
    worker.join(60)
    assert not worker.is_alive()
