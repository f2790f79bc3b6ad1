// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The origin of a column, and the errors that name it.

use arrow::array::{Array, ArrayRef};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use arrow::error::ArrowError;

use crate::error::{Error, Result};

/// Origin of a column, for error messages, and its treatment of missing values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConversionContext<'a> {
    pub(crate) column: &'a str,
    pub(crate) partition: u64,
    pub(crate) row: u64,
    /// Replacement of nulls and NaN, and whether it was given for this column by name.
    pub(crate) fill: Option<(&'a str, bool)>,
    /// Whether NaN without a replacement and infinities are accepted.
    pub(crate) allow_nan: bool,
}

impl ConversionContext<'_> {
    pub(super) fn value_error(&self, row: usize, reason: String) -> Error {
        let (column, partition) = (self.column.to_owned(), self.partition);
        Error::Value { column, reason, partition, row: self.row + row as u64 }
    }

    pub(super) fn ragged_error(&self, expected: impl ToString, found: impl ToString) -> Error {
        let (column, partition) = (self.column.to_owned(), self.partition);
        Error::Ragged {
            column,
            expected: expected.to_string(),
            found: found.to_string(),
            partition,
        }
    }

    pub(super) fn unsupported_type_error(&self, found: &DataType) -> Error {
        Error::Type { column: self.column.to_owned(), found: found.to_string() }
    }

    pub(super) fn arrow_error(&self, source: ArrowError) -> Error {
        Error::Arrow { column: self.column.to_owned(), source }
    }

    pub(super) fn cast_array(&self, array: &ArrayRef, to: &DataType) -> Result<ArrayRef> {
        cast(array, to).map_err(|source| self.arrow_error(source))
    }

    /// Returns the number of rows that contain the values at the positions `at`, and the first such
    /// row. Every row has `per_row` values.
    pub(super) fn affected_rows(
        &self,
        per_row: usize,
        at: impl Iterator<Item = usize>,
    ) -> (usize, u64) {
        let mut rows: Vec<usize> = at.map(|value| value / per_row.max(1)).collect();
        // The positions ascend, so the values of a row are adjacent.
        rows.dedup();
        (rows.len(), self.row + rows.first().copied().unwrap_or_default() as u64)
    }

    /// Returns the error for missing values. There are `values` values, `per_row` of them in each
    /// row.
    pub(super) fn missing_value_error(
        &self,
        what: &'static str,
        values: usize,
        per_row: usize,
        at: impl Iterator<Item = usize>,
    ) -> Error {
        let (column, partition) = (self.column.to_owned(), self.partition);
        let (missing, row) = self.affected_rows(per_row, at);
        Error::Missing { column, what, missing, rows: values / per_row.max(1), partition, row }
    }

    /// Returns an error if the array has nulls; for arrays that cannot be filled.
    pub(super) fn check_no_nulls(
        &self,
        array: &dyn Array,
        what: &'static str,
        per_row: usize,
    ) -> Result<()> {
        // `nulls()` does not see the nulls among the values of a dictionary.
        match array.logical_nulls().filter(|nulls| nulls.null_count() > 0) {
            None => Ok(()),
            Some(nulls) => {
                let at = nulls.iter().enumerate().filter(|(_, valid)| !valid).map(|(at, _)| at);
                Err(self.missing_value_error(what, array.len(), per_row, at))
            }
        }
    }
}
