// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Columns, as files store them and as batches hold them.

use std::sync::Arc;

use farandole_dataset::{Column, Element};

use crate::padding::Padding;

/// A column as batches see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name.
    pub name: String,
    /// Type of one element.
    pub element: Element,
    /// Shape of one row.
    pub shape: Vec<u64>,
    /// Whether there may be nulls.
    pub nullable: bool,
}

impl Field {
    pub(crate) fn of(column: &Column) -> Self {
        Self {
            name: column.name.clone(),
            element: column.element,
            shape: column.shape.clone(),
            nullable: column.nulls != Some(0),
        }
    }

    /// Elements of one row.
    pub fn elements(&self) -> usize {
        let sides = self.shape.iter().map(|side| usize::try_from(*side).unwrap_or(usize::MAX));
        sides.fold(1, usize::saturating_mul)
    }

    /// Returns whether its values are texts or bytes of any length.
    pub fn is_text(&self) -> bool {
        self.element.width().is_none()
    }

    /// Bytes of one row; 0 for texts.
    pub fn width(&self) -> usize {
        self.element.width().unwrap_or(0).saturating_mul(self.elements())
    }
}

/// A column: as it is stored, and as batches hold it.
#[derive(Clone, Debug)]
pub(crate) struct Selected {
    pub(crate) field: Field,
    pub(crate) out: Element,
    /// Replacement of nulls and NaN.
    pub(crate) fill: Option<f64>,
    pub(crate) allow_nan: bool,
    /// The padding of its rows, which are the bytes of lists.
    pub(crate) padding: Option<Arc<Padding>>,
}

impl Selected {
    pub(crate) fn out_width(&self) -> usize {
        self.out.width().unwrap_or(0).saturating_mul(self.field.elements())
    }
}
