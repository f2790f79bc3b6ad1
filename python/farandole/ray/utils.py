# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Small helpers around Ray's calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def map_blocking(fn: Callable[[Any], Any], collection: Iterable[Any]) -> list[Any]:
    """Calls `fn` with each item, which starts a remote call, and waits for all of them.

    Args:
        fn: Returns a reference to a result.
        collection: The items.

    Returns:
        The results, in the order of the items.
    """
    import ray  # noqa: PLC0415 - the package imports without Ray

    return ray.get([fn(item) for item in collection])


def import_ray() -> Any:
    """Returns the module of Ray.

    Raises:
        ImportError: Ray is not installed; the message names the extra to install.
    """
    try:
        import ray  # noqa: PLC0415 - as above
    except ImportError as error:
        raise ImportError('farandole.ray needs Ray: pip install "farandole[ray]"') from error
    return ray


def is_ray_client() -> bool:
    """Returns whether this process reaches its cluster by Ray Client."""
    from ray.util.client import ray as client  # noqa: PLC0415 - as above

    return client.is_connected()
