# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Workers of tf.data's service on Spark.

    spark-submit .../farandole/spark/tensorflow/compute_worker.py --open-to-the-network service.json

First read the warning in `farandole.tensorflow.data.compute_service`. The driver writes the file
through which trainers find the service. They must be able to read it and to reach the driver.
"""

from __future__ import annotations

from farandole.spark import run
from farandole.tensorflow.data.compute_service import compute_worker_fn, require_consent, serving
from farandole.tensorflow.data.compute_worker import create_parser


def main(
    output_filename: str,
    dispatchers: int = 1,
    dispatcher_side: str = "compute",
    timeout: float = 60,
    num_proc: int | None = None,
    *,
    open_to_the_network: bool = False,
) -> None:
    """Runs the work of the driver.

    Args:
        output_filename: File in which trainers look for the service.
        dispatchers: Number of dispatchers, which must divide the number of workers.
        dispatcher_side: Side of the dispatchers, `"compute"` or `"training"`.
        timeout: Seconds that waits for each other last at most.
        num_proc: Number of workers, by default all that Spark has room for.
        open_to_the_network: Consent to ports that run the graphs of everyone who reaches them; see
            `compute_service`.

    Raises:
        PermissionError: The user has not consented to open ports.
        ValueError: When workers cannot be dealt out evenly.
    """
    require_consent(open_to_the_network)
    from pyspark.sql import SparkSession  # noqa: PLC0415 - optional

    session = SparkSession.builder.getOrCreate()  # pyright: ignore[reportAttributeAccessIssue]
    num_proc = num_proc or session.sparkContext.defaultParallelism
    with serving(
        num_proc, dispatchers, dispatcher_side, timeout, open_to_the_network=open_to_the_network
    ) as config:
        config.write(output_filename)
        try:
            run(compute_worker_fn, args=(config,), num_proc=num_proc)
        finally:
            config.remove_written_file(output_filename)


if __name__ == "__main__":
    options = create_parser().parse_args()
    main(
        options.configfile,
        options.dispatchers,
        options.dispatcher_side,
        options.timeout,
        open_to_the_network=options.open_to_the_network,
    )
