# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Workers of tf.data's service.

    farandole run -np 4 python -m farandole.tensorflow.data.compute_worker --open-to-the-network service.json

First read the warning in `compute_service`.

Rank 0 writes the file through which trainers find the service, and removes it at the end. All
processes end when a trainer calls `TfDataServiceConfig.compute_client().shutdown()`.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib

import farandole.tensorflow as hvd
from farandole.tensorflow.data.compute_service import (
    DISPATCHER_SIDES,
    compute_worker_fn,
    require_consent,
    serving,
)


def main(
    dispatchers: int,
    dispatcher_side: str,
    configfile: str,
    timeout: float,
    *,
    open_to_the_network: bool = False,
) -> None:
    """Runs the work of every rank.

    Args:
        dispatchers: Number of dispatchers, which must divide the number of ranks.
        dispatcher_side: Side of the dispatchers, `"compute"` or `"training"`.
        configfile: File in which trainers look for the service.
        timeout: Seconds that waits for each other last at most.
        open_to_the_network: Consent to ports that run the graphs of everyone who reaches them; see
            `compute_service`.

    Raises:
        PermissionError: The user has not consented to open ports.
        ValueError: When ranks cannot be dealt out evenly.
    """
    require_consent(open_to_the_network)
    hvd.init()
    with contextlib.ExitStack() as stack:
        config = None
        if hvd.rank() == 0:
            config = stack.enter_context(
                serving(
                    hvd.size(),
                    dispatchers,
                    dispatcher_side,
                    timeout,
                    open_to_the_network=open_to_the_network,
                )
            )
        config = hvd.broadcast_object(config, name="farandole.tensorflow.data")
        if hvd.rank() == 0:
            config.write(configfile)
            stack.callback(config.remove_written_file, configfile)
        compute_worker_fn(config)
        # The service outlives the others' last question.
        hvd.allgather_object(None, name="farandole.tensorflow.data.end")


def create_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("configfile", help="file to write, which trainers read")
    arguments.add_argument("--dispatchers", type=int, default=1, help="number of dispatchers")
    arguments.add_argument(
        "--dispatcher-side", choices=DISPATCHER_SIDES, default="compute", help="who holds them"
    )
    arguments.add_argument(
        "--timeout", type=float, default=60, help="seconds that waits last at most"
    )
    arguments.add_argument(
        "--open-to-the-network",
        action="store_true",
        help=(
            "consent to ports on all addresses of these hosts, which run the graphs of everyone "
            "who reaches them"
        ),
    )
    return arguments


if __name__ == "__main__":
    options = create_parser().parse_args()
    main(
        options.dispatchers,
        options.dispatcher_side,
        options.configfile,
        options.timeout,
        open_to_the_network=options.open_to_the_network,
    )
