// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Types of the columns in files that were not prepared.

use arrow::datatypes::{DataType, Schema};
use farandole_dataset::{ColumnRole, ElementType, ManifestColumn, batch_unit};
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::basic::Type as Physical;

use crate::column::BatchField;
use crate::footer::FileFooter;
use crate::pages::{LevelLayout, ValueStorage};

/// Returns the element type of an Arrow scalar; `None` if the scalar is not supported.
pub(crate) fn element_type(kind: &DataType) -> Option<ElementType> {
    Some(match kind {
        DataType::Boolean => ElementType::Bool,
        DataType::Int8 => ElementType::Int8,
        DataType::Int16 => ElementType::Int16,
        DataType::Int32 => ElementType::Int32,
        DataType::Int64
        | DataType::Date32
        | DataType::Date64
        | DataType::Timestamp(..)
        | DataType::Time32(_)
        | DataType::Time64(_)
        | DataType::Duration(_) => ElementType::Int64,
        DataType::UInt8 => ElementType::UInt8,
        DataType::UInt16 => ElementType::UInt16,
        DataType::UInt32 => ElementType::UInt32,
        DataType::UInt64 => ElementType::UInt64,
        DataType::Float16 | DataType::Float32 => ElementType::Float32,
        DataType::Float64
        | DataType::Decimal32(..)
        | DataType::Decimal64(..)
        | DataType::Decimal128(..)
        | DataType::Decimal256(..) => ElementType::Float64,
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => ElementType::Utf8,
        DataType::Binary
        | DataType::LargeBinary
        | DataType::BinaryView
        | DataType::FixedSizeBinary(_) => ElementType::Binary,
        _ => return None,
    })
}

/// Returns whether a table may have changed a column from one element type to another, so that
/// older files keep the first. Each value has an equal one in the other type, or the nearest float
/// of a decimal.
pub(crate) fn is_promotable(from: ElementType, to: ElementType) -> bool {
    use ElementType::{Float32, Float64, Int8, Int16, Int32, Int64};
    matches!(
        (from, to),
        (Int8, Int16 | Int32 | Int64 | Float64)
            | (Int16, Int32 | Int64 | Float64)
            | (Int32, Int64 | Float64)
            | (Int64 | Float32, Float64)
    )
}

/// Returns the stored form of a column, if its pages are decoded here.
pub(crate) fn page_storage(
    file: &ArrowReaderMetadata,
    kind: &DataType,
    leaf: usize,
    field: &BatchField,
) -> Option<(ValueStorage, LevelLayout)> {
    let descriptor = file.parquet_schema().column(leaf);
    let (list, kind) = match kind {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            (true, item.data_type())
        }
        kind => (false, kind),
    };
    let stored = match (descriptor.physical_type(), kind) {
        (Physical::BOOLEAN, DataType::Boolean) => ValueStorage::Bits,
        (Physical::INT32, DataType::Int8 | DataType::UInt8) => ValueStorage::Narrow(1),
        (Physical::INT32, DataType::Int16 | DataType::UInt16) => ValueStorage::Narrow(2),
        (Physical::INT32, DataType::Int32 | DataType::UInt32)
        | (Physical::FLOAT, DataType::Float32) => ValueStorage::Verbatim(4),
        (Physical::INT32, DataType::Date32 | DataType::Time32(_)) => ValueStorage::Widen,
        (
            Physical::INT64,
            DataType::Int64
            | DataType::UInt64
            | DataType::Timestamp(..)
            | DataType::Time64(_)
            | DataType::Duration(_),
        )
        | (Physical::DOUBLE, DataType::Float64) => ValueStorage::Verbatim(8),
        (Physical::FIXED_LEN_BYTE_ARRAY, DataType::FixedSizeBinary(_))
            if !list && field.row_width() > 0 =>
        {
            ValueStorage::Verbatim(field.row_width())
        }
        _ => return None,
    };
    let defined = u32::try_from(descriptor.max_def_level()).ok()?;
    let repeated = u32::try_from(descriptor.max_rep_level()).ok()?;
    let optional = u32::from(descriptor.self_type().is_optional());
    let levels = match (list, repeated) {
        (false, 0) if defined <= 1 => LevelLayout { defined, present: 0, repeated, length: 1 },
        (true, 1) => LevelLayout {
            defined,
            present: defined.checked_sub(optional)?,
            repeated,
            length: field.elements_per_row(),
        },
        _ => return None,
    };
    Some((stored, levels))
}

/// Returns the element type, and whether it is inside of one list.
pub(crate) fn element_and_list(kind: &DataType) -> Option<(ElementType, bool)> {
    match kind {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            Some((element_type(item.data_type())?, true))
        }
        other => Some((element_type(other)?, false)),
    }
}

/// Returns the columns of a file, each with the reason if no batch can contain it.
pub(crate) fn file_columns(file: &FileFooter) -> Vec<(ManifestColumn, Option<String>)> {
    let schema: &Schema = file.schema();
    schema
        .fields()
        .iter()
        .enumerate()
        .map(|(root, field)| describe_column(file, root, field))
        .collect()
}

/// Returns a root column of a file, with the reason if no batch can contain it.
pub(crate) fn describe_column(
    file: &FileFooter,
    root: usize,
    field: &arrow::datatypes::Field,
) -> (ManifestColumn, Option<String>) {
    let kind = field.data_type();
    let found = element_and_list(kind);
    let source = source_type(file, root, kind);
    let mut column = ManifestColumn {
        name: field.name().clone(),
        role: ColumnRole::Feature,
        element: found.map_or(ElementType::Binary, |(element, _)| element),
        shape: Vec::new(),
        unit: batch_unit(&source),
        source,
        nulls: if field.is_nullable() { count_nulls(file, root) } else { Some(0) },
        min: None,
        max: None,
        unreadable: None,
    };
    let reason = match found {
        None => Some(format!("it is {kind}")),
        Some((_, false)) => None,
        Some((element, true)) if element.byte_width().is_none() => {
            Some(format!("it is a list of {}", element.numpy_name()))
        }
        Some((_, true)) => match list_length(file, root) {
            Some(length) if length > 0 => {
                let layout = file.hint(root).and_then(|hint| hint.tensor.as_ref());
                let layout = layout.filter(|l| l.shape.iter().product::<u64>() == length);
                column.shape = layout.map_or_else(|| vec![length], |layout| layout.shape.clone());
                layout
                    .filter(|layout| layout.is_permuted)
                    .map(|_| "it has tensors whose axes are stored in another order".to_owned())
            }
            Some(_) => Some("its rows are empty lists".to_owned()),
            None => Some("its rows have different lengths".to_owned()),
        },
    };
    (column, reason)
}

/// Returns the type of a column, in messages and in comparisons of files.
fn source_type(file: &FileFooter, root: usize, kind: &DataType) -> String {
    let unit = file.hint(root).and_then(|hint| hint.duration);
    match (unit, kind) {
        (Some(unit), DataType::Int64) => DataType::Duration(unit).to_string(),
        (Some(unit), _) => format!("List({})", DataType::Duration(unit)),
        (None, kind) => kind.to_string(),
    }
}

/// Returns the leaf of a root column, if it has only one.
pub(crate) fn single_leaf(file: &ArrowReaderMetadata, root: usize) -> Option<usize> {
    let schema = file.parquet_schema();
    let mut leaves =
        (0..schema.num_columns()).filter(|leaf| schema.get_column_root_idx(*leaf) == root);
    leaves.next().filter(|_| leaves.next().is_none())
}

/// Returns the length of all lists, if it is the same in every row group: values divided by rows.
/// The levels are checked when the rows are read.
fn list_length(file: &ArrowReaderMetadata, root: usize) -> Option<u64> {
    let leaf = single_leaf(file, root)?;
    let mut length = None;
    for group in file.metadata().row_groups() {
        let rows = u64::try_from(group.num_rows()).ok()?;
        let values = u64::try_from(group.columns().get(leaf)?.num_values()).ok()?;
        if rows == 0 {
            continue;
        }
        if values % rows != 0 || length.is_some_and(|length| length != values / rows) {
            return None;
        }
        length = Some(values / rows);
    }
    Some(length.unwrap_or(0))
}

/// Returns the number of nulls by the statistics of all row groups.
fn count_nulls(file: &ArrowReaderMetadata, root: usize) -> Option<u64> {
    let leaf = single_leaf(file, root)?;
    let counts = file.metadata().row_groups().iter();
    counts.map(|group| group.columns().get(leaf)?.statistics()?.null_count_opt()).sum()
}
