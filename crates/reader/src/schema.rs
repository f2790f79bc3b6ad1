// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Columns of files that were not prepared.

use arrow::datatypes::{DataType, Schema};
use farandole_dataset::{Column, Element, Role};
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::basic::Type as Physical;

use crate::column::Field;
use crate::pages::{Levels, Stored};

/// The element that an Arrow scalar is read as; `None` when there is none.
pub(crate) fn element_of(kind: &DataType) -> Option<Element> {
    Some(match kind {
        DataType::Boolean => Element::Bool,
        DataType::Int8 => Element::Int8,
        DataType::Int16 => Element::Int16,
        DataType::Int32 => Element::Int32,
        DataType::Int64
        | DataType::Date32
        | DataType::Date64
        | DataType::Timestamp(..)
        | DataType::Time32(_)
        | DataType::Time64(_)
        | DataType::Duration(_) => Element::Int64,
        DataType::UInt8 => Element::UInt8,
        DataType::UInt16 => Element::UInt16,
        DataType::UInt32 => Element::UInt32,
        DataType::UInt64 => Element::UInt64,
        DataType::Float16 | DataType::Float32 => Element::Float32,
        DataType::Float64
        | DataType::Decimal32(..)
        | DataType::Decimal64(..)
        | DataType::Decimal128(..)
        | DataType::Decimal256(..) => Element::Float64,
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Element::Utf8,
        DataType::Binary
        | DataType::LargeBinary
        | DataType::BinaryView
        | DataType::FixedSizeBinary(_) => Element::Binary,
        _ => return None,
    })
}

/// Returns the storage of a column's pages, if it is of a kind that we decode ourselves.
pub(crate) fn direct(
    file: &ArrowReaderMetadata,
    kind: &DataType,
    leaf: usize,
    field: &Field,
) -> Option<(Stored, Levels)> {
    let descriptor = file.parquet_schema().column(leaf);
    let (list, kind) = match kind {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            (true, item.data_type())
        }
        kind => (false, kind),
    };
    let stored = match (descriptor.physical_type(), kind) {
        (Physical::BOOLEAN, DataType::Boolean) => Stored::Bits,
        (Physical::INT32, DataType::Int8 | DataType::UInt8) => Stored::Narrow(1),
        (Physical::INT32, DataType::Int16 | DataType::UInt16) => Stored::Narrow(2),
        (Physical::INT32, DataType::Int32 | DataType::UInt32)
        | (Physical::FLOAT, DataType::Float32) => Stored::Same(4),
        (Physical::INT32, DataType::Date32 | DataType::Time32(_)) => Stored::Widen,
        (
            Physical::INT64,
            DataType::Int64
            | DataType::UInt64
            | DataType::Timestamp(..)
            | DataType::Time64(_)
            | DataType::Duration(_),
        )
        | (Physical::DOUBLE, DataType::Float64) => Stored::Same(8),
        (Physical::FIXED_LEN_BYTE_ARRAY, DataType::FixedSizeBinary(_))
            if !list && field.width() > 0 =>
        {
            Stored::Same(field.width())
        }
        _ => return None,
    };
    let defined = u32::try_from(descriptor.max_def_level()).ok()?;
    let repeated = u32::try_from(descriptor.max_rep_level()).ok()?;
    let optional = u32::from(descriptor.self_type().is_optional());
    let levels = match (list, repeated) {
        (false, 0) if defined <= 1 => Levels { defined, present: 0, repeated, length: 1 },
        (true, 1) => Levels {
            defined,
            present: defined.checked_sub(optional)?,
            repeated,
            length: field.elements(),
        },
        _ => return None,
    };
    Some((stored, levels))
}

/// Element and whether there is one list around it.
pub(crate) fn shape_of(kind: &DataType) -> Option<(Element, bool)> {
    match kind {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            Some((element_of(item.data_type())?, true))
        }
        other => Some((element_of(other)?, false)),
    }
}

/// The columns of a file, and for those that no batch can hold the reason.
pub(crate) fn columns_of(file: &ArrowReaderMetadata) -> Vec<(Column, Option<String>)> {
    let schema: &Schema = file.schema();
    schema.fields().iter().enumerate().map(|(root, field)| describe(file, root, field)).collect()
}

fn describe(
    file: &ArrowReaderMetadata,
    root: usize,
    field: &arrow::datatypes::Field,
) -> (Column, Option<String>) {
    let kind = field.data_type();
    let found = shape_of(kind);
    let mut column = Column {
        name: field.name().clone(),
        role: Role::Feature,
        element: found.map_or(Element::Binary, |(element, _)| element),
        shape: Vec::new(),
        source: kind.to_string(),
        nulls: if field.is_nullable() { nulls(file, root) } else { Some(0) },
        min: None,
        max: None,
        unreadable: None,
    };
    let reason = match found {
        None => Some(format!("it is {kind}")),
        Some((_, false)) => None,
        Some((element, true)) if element.width().is_none() => {
            Some(format!("it is a list of {}", element.name()))
        }
        Some((_, true)) => match list_length(file, root) {
            Some(length) if length > 0 => {
                column.shape = vec![length];
                None
            }
            Some(_) => Some("its rows are empty lists".to_owned()),
            None => Some("its rows have different lengths".to_owned()),
        },
    };
    (column, reason)
}

/// The only leaf of a root column, when there is one.
pub(crate) fn leaf_of(file: &ArrowReaderMetadata, root: usize) -> Option<usize> {
    let schema = file.parquet_schema();
    let mut leaves =
        (0..schema.num_columns()).filter(|leaf| schema.get_column_root_idx(*leaf) == root);
    leaves.next().filter(|_| leaves.next().is_none())
}

/// The one length of all lists: values by rows, in every row group alike.
fn list_length(file: &ArrowReaderMetadata, root: usize) -> Option<u64> {
    let leaf = leaf_of(file, root)?;
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

/// Nulls as the statistics count them.
fn nulls(file: &ArrowReaderMetadata, root: usize) -> Option<u64> {
    let leaf = leaf_of(file, root)?;
    let counts = file.metadata().row_groups().iter();
    counts.map(|group| group.columns().get(leaf)?.statistics()?.null_count_opt()).sum()
}
