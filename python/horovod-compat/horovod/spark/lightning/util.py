# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The same as `horovod.spark.torch.util`."""

from horovod.spark.torch.util import (
    deserialize_fn,
    is_module_available,
    is_module_available_fn,
    save_into_bio,
    save_into_bio_fn,
    serialize_fn,
)

__all__ = [
    "deserialize_fn",
    "is_module_available",
    "is_module_available_fn",
    "save_into_bio",
    "save_into_bio_fn",
    "serialize_fn",
]
