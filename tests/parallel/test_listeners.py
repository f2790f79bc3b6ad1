# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ports on which ranks listen."""

import cloudpickle
from tests import sockets

# Workers import no test.
cloudpickle.register_pickle_by_value(sockets)


def test_ranks_of_one_host_listen_on_the_loopback_alone(pair):
    for listening in pair.run(sockets.listening):
        # 127.0.0.1, as the kernel writes it.
        assert {address for address, _ in listening} == {"0100007F"}
