// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Facts about columns that are not in Parquet's types, but in the schema of Arrow that some
//! writers add to the footer.

use arrow::datatypes::{DataType, Field, TimeUnit};
use parquet::arrow::parquet_to_arrow_schema;
use parquet::file::metadata::FileMetaData;

/// Entry of a footer with the schema of Arrow.
const ARROW_SCHEMA_KEY: &str = "ARROW:schema";
const EXTENSION_NAME_KEY: &str = "ARROW:extension:name";
const EXTENSION_METADATA_KEY: &str = "ARROW:extension:metadata";
const TENSOR_EXTENSION: &str = "arrow.fixed_shape_tensor";

/// Facts about one root column.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArrowSchemaHint {
    /// Unit of durations, which are plain integers in Parquet.
    pub(crate) duration: Option<TimeUnit>,
    /// Shape of tensors, which are lists in Parquet.
    pub(crate) tensor: Option<TensorLayout>,
}

/// The layout of the values in a row of a tensor column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorLayout {
    pub(crate) shape: Vec<u64>,
    /// Whether the axes are stored in another order than they have in the tensor.
    pub(crate) is_permuted: bool,
}

/// Returns the hints of all root columns; none if the file has no schema of Arrow, or one that
/// contradicts Parquet's types.
pub(crate) fn arrow_schema_hints(file: &FileMetaData) -> Vec<ArrowSchemaHint> {
    let entries = file.key_value_metadata();
    if !entries.is_some_and(|all| all.iter().any(|entry| entry.key == ARROW_SCHEMA_KEY)) {
        return Vec::new();
    }
    let Ok(schema) = parquet_to_arrow_schema(file.schema_descr(), entries) else {
        return Vec::new();
    };
    if schema.fields().len() != file.schema_descr().root_schema().get_fields().len() {
        return Vec::new();
    }
    schema.fields().iter().map(|field| arrow_schema_hint(field)).collect()
}

fn arrow_schema_hint(field: &Field) -> ArrowSchemaHint {
    let duration = match field.data_type() {
        DataType::Duration(unit) => Some(*unit),
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            match item.data_type() {
                DataType::Duration(unit) => Some(*unit),
                _ => None,
            }
        }
        _ => None,
    };
    let metadata = field.metadata();
    let tensor = metadata
        .get(EXTENSION_NAME_KEY)
        .filter(|name| *name == TENSOR_EXTENSION)
        .and_then(|_| parse_tensor_layout(metadata.get(EXTENSION_METADATA_KEY)?));
    ArrowSchemaHint { duration, tensor }
}

fn parse_tensor_layout(text: &str) -> Option<TensorLayout> {
    let layout: serde_json::Value = serde_json::from_str(text).ok()?;
    let numbers = |key: &str| -> Option<Vec<u64>> {
        layout.get(key)?.as_array()?.iter().map(serde_json::Value::as_u64).collect()
    };
    let order = numbers("permutation").unwrap_or_default();
    let is_permuted = order.iter().enumerate().any(|(axis, from)| axis as u64 != *from);
    Some(TensorLayout { shape: numbers("shape")?, is_permuted })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_have_a_shape_and_perhaps_another_order_of_axes() {
        let plain = TensorLayout { shape: vec![2, 3], is_permuted: false };
        assert_eq!(parse_tensor_layout(r#"{"shape":[2,3]}"#), Some(plain.clone()));
        assert_eq!(parse_tensor_layout(r#"{"shape":[2,3],"permutation":[0,1]}"#), Some(plain));
        let permuted = parse_tensor_layout(r#"{"shape":[2,3],"permutation":[1,0]}"#).unwrap();
        assert!(permuted.is_permuted);
        assert_eq!(parse_tensor_layout("no"), None);
    }
}
