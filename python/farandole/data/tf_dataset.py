# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A loader as `tf.data.Dataset`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.data.loaders.global_batches import GlobalBatchLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.data.loader import ParquetLoader
    from farandole.data.ragged import Jagged


def tf_dataset(loader: ParquetLoader) -> Any:
    """Whole batches, as dicts of tensors; of ragged tensors for nested columns. Batches of a
    `GlobalBatchLoader` come in pairs with their loss factors, float32 scalars, because TensorFlow
    reads ahead of the loader's own `loss_factor`.

    Args:
        loader: Loader to read; batches of torch tensors are refused.

    Raises:
        ImportError: TensorFlow is not installed.
        ValueError: The loader makes torch tensors.
    """
    try:
        import tensorflow as tf  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError(
            "as_tf_dataset needs TensorFlow: pip install 'farandole[tensorflow]'"
        ) from error
    if loader.framework != "numpy":
        raise ValueError(f'as_tf_dataset needs a loader with framework="numpy": {loader.framework}')
    signature, lists = loader.signature(), loader._nested_columns()  # noqa: SLF001 - internal to this package
    global_loader = loader if isinstance(loader, GlobalBatchLoader) else None
    rows = loader.batch_size if loader.tail in ("pad", "drop_last", "drop") else None

    def iterate_batches() -> Iterator[Any]:
        for batch in loader:
            tensors = {
                name: to_ragged_tensor(values) if name in lists else values
                for name, values in batch.items()
            }
            yield tensors if global_loader is None else (tensors, global_loader.loss_factor)

    def to_ragged_tensor(rows: Jagged) -> Any:
        made: Any = tf.RaggedTensor  # whose stubs lack its constructors
        return made.from_row_splits(rows.values, rows.offsets, validate=False)

    def to_tf_dtype(dtype: str) -> Any:
        return tf.string if dtype == "object" else tf.dtypes.as_dtype(dtype)

    specs = {
        name: tf.RaggedTensorSpec((rows, *shape), to_tf_dtype(dtype), row_splits_dtype=tf.int64)
        if name in lists
        else tf.TensorSpec((rows, *shape), to_tf_dtype(dtype))
        for name, (dtype, shape) in signature.items()
    }
    pair = (specs, tf.TensorSpec((), tf.float32))
    return tf.data.Dataset.from_generator(
        iterate_batches, output_signature=specs if global_loader is None else pair
    ).prefetch(1)
