// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Columns as files store them and as batches contain them.

use std::sync::Arc;

use farandole_dataset::{ElementType, ManifestColumn};

use crate::fill_value::FillValue;
use crate::padding::RowPadding;

/// A column of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchField {
    /// Name.
    pub name: String,
    /// Type of one element.
    pub element: ElementType,
    /// Shape of one row.
    pub shape: Vec<u64>,
    /// Whether there may be nulls.
    pub nullable: bool,
}

impl BatchField {
    pub(crate) fn from_column(column: &ManifestColumn) -> Self {
        Self {
            name: column.name.clone(),
            element: column.element,
            shape: column.shape.clone(),
            nullable: column.nulls != Some(0),
        }
    }

    /// Returns the number of elements of one row.
    pub fn elements_per_row(&self) -> usize {
        let sides = self.shape.iter().map(|side| usize::try_from(*side).unwrap_or(usize::MAX));
        sides.fold(1, usize::saturating_mul)
    }

    /// Returns whether the values are strings or bytes of any length.
    pub fn is_variable_length(&self) -> bool {
        self.element.byte_width().is_none()
    }

    /// Returns the bytes of one row; 0 for strings and bytes of any length.
    pub fn row_width(&self) -> usize {
        self.element.byte_width().unwrap_or(0).saturating_mul(self.elements_per_row())
    }
}

/// A selected column: its stored form, and its element type in batches.
#[derive(Clone, Debug)]
pub(crate) struct SelectedColumn {
    pub(crate) field: BatchField,
    pub(crate) output_element: ElementType,
    /// Replacement of nulls and NaN.
    pub(crate) fill: Option<FillValue>,
    pub(crate) allow_nan: bool,
    /// Rule that pads the rows of a ragged column, whose values are the bytes of lists.
    pub(crate) padding: Option<Arc<RowPadding>>,
}

impl SelectedColumn {
    pub(crate) fn output_row_width(&self) -> usize {
        self.output_element.byte_width().unwrap_or(0).saturating_mul(self.field.elements_per_row())
    }
}
