// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The origin of values: the file, row group and column of an error.

use parquet::errors::ParquetError;

use crate::error::Error;
use crate::fill::Odd;

/// The origin of values, for messages.
#[derive(Clone)]
pub(crate) struct Origin<'a> {
    pub(crate) file: &'a str,
    pub(crate) group: usize,
    pub(crate) column: &'a str,
}

impl Origin<'_> {
    pub(crate) fn nulls(&self, nulls: usize) -> Error {
        let (column, file) = (self.column.to_owned(), self.file.to_owned());
        Error::Nulls { column, nulls, group: self.group, file }
    }

    pub(crate) fn odd(&self, Odd { what, count }: Odd) -> Error {
        let (column, file) = (self.column.to_owned(), self.file.to_owned());
        Error::NotNumbers { column, what, count, group: self.group, file }
    }

    pub(crate) fn ragged(&self, expected: u64) -> Error {
        let (column, file) = (self.column.to_owned(), self.file.to_owned());
        Error::Ragged { column, expected, group: self.group, file }
    }

    pub(crate) fn torn(&self, bytes: usize, width: usize) -> Error {
        let (column, file) = (self.column.to_owned(), self.file.to_owned());
        Error::Torn { column, bytes, width, group: self.group, file }
    }

    pub(crate) fn parquet(&self, source: ParquetError) -> Error {
        let (column, file) = (self.column.to_owned(), self.file.to_owned());
        Error::Parquet { file, group: self.group, column, source }
    }
}
