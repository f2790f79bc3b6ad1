// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Origin of values for error messages: file, row group and column.

use std::ops::Range;

use parquet::errors::ParquetError;

use crate::error::Error;
use crate::fill::NonFiniteValues;

/// Origin of values, for error messages.
#[derive(Clone)]
pub(crate) struct ValueOrigin<'a> {
    pub(crate) file: &'a str,
    pub(crate) group: usize,
    pub(crate) column: &'a str,
    /// The rows of the row group that were read, as ascending ranges.
    pub(crate) stored_rows: &'a [Range<u64>],
}

impl ValueOrigin<'_> {
    pub(crate) fn nulls_error(&self, nulls: usize) -> Error {
        let (column, file) = (self.column.to_owned(), self.file.to_owned());
        Error::Nulls { column, nulls, group: self.group, file }
    }

    pub(crate) fn non_finite_error(
        &self,
        NonFiniteValues { what, count }: NonFiniteValues,
    ) -> Error {
        let (column, file) = (self.column.to_owned(), self.file.to_owned());
        Error::NotNumbers { column, what, count, group: self.group, file }
    }

    pub(crate) fn ragged_error(&self, expected: u64) -> Error {
        let (column, file) = (self.column.to_owned(), self.file.to_owned());
        Error::Ragged { column, expected, group: self.group, file }
    }

    pub(crate) fn partial_value_error(&self, bytes: usize, width: usize) -> Error {
        let (column, file) = (self.column.to_owned(), self.file.to_owned());
        Error::PartialValue { column, bytes, width, group: self.group, file }
    }

    /// Returns the error of row number `index` of the rows that were read.
    pub(crate) fn unrepresentable_error(&self, index: usize, reason: String) -> Error {
        let index = index as u64;
        let mut before = 0;
        let row = self.stored_rows.iter().find_map(|rows| {
            let row = rows.start + (index - before);
            before += rows.end - rows.start;
            (index < before).then_some(row)
        });
        let row = row.unwrap_or(index);
        let (column, file) = (self.column.to_owned(), self.file.to_owned());
        Error::Unrepresentable { column, file, group: self.group, row, reason }
    }

    pub(crate) fn length_error(&self, found: usize, expected: usize) -> Error {
        self.parquet_error(ParquetError::General(format!(
            "the decoder made {found} bytes where {expected} belong"
        )))
    }

    pub(crate) fn parquet_error(&self, source: ParquetError) -> Error {
        let (column, file) = (self.column.to_owned(), self.file.to_owned());
        Error::Parquet { file, group: self.group, column, source }
    }
}
