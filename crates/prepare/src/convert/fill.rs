// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Replacement of missing values: nulls and NaN.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BooleanArray, PrimitiveArray, Scalar, StringArray};
use arrow::compute::cast;
use arrow::compute::kernels::zip::zip;
use arrow::datatypes::{ArrowPrimitiveType, DataType};

use super::context::ConversionContext;
use super::times_and_decimals;
use crate::error::{Error, Result};

impl ConversionContext<'_> {
    /// Returns the array with its nulls filled. `source` is its type before the conversion.
    pub(super) fn fill_nulls(
        &self,
        array: &ArrayRef,
        source: &DataType,
        what: &'static str,
        per_row: usize,
    ) -> Result<ArrayRef> {
        let Some(nulls) = array.logical_nulls().filter(|nulls| nulls.null_count() > 0) else {
            return Ok(Arc::clone(array));
        };
        let Some(value) = self.fill_value(array.data_type(), source)? else {
            self.check_no_nulls(array, what, per_row)?;
            return Ok(Arc::clone(array));
        };
        let valid = BooleanArray::new(nulls.into_inner(), None);
        zip(&valid, array, &Scalar::new(value)).map_err(|source| self.arrow_error(source))
    }

    /// Returns the replacement as one value of a type, which holds the values of the type `source`.
    /// Returns `None` if there is no replacement, or if the replacement for all columns does not
    /// fit this type.
    fn fill_value(&self, kind: &DataType, source: &DataType) -> Result<Option<ArrayRef>> {
        let Some((text, named)) = self.fill else { return Ok(None) };
        let texts: ArrayRef = Arc::new(StringArray::from(vec![text]));
        let is_text = matches!(kind, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View);
        let value = if source.is_temporal() {
            times_and_decimals::parse_time_replacement(&texts, source)
        } else {
            // Every text fits a text column, so a number for all columns would be written there as
            // digits.
            cast(&texts, kind).ok().filter(|value| value.null_count() == 0 && (named || !is_text))
        };
        match value {
            None if named => Err(Error::Fill {
                column: self.column.to_owned(),
                kind: source.to_string(),
                fill: text.to_owned(),
            }),
            value => Ok(value),
        }
    }

    /// Returns the floats with their NaN replaced; `None` if nothing was replaced.
    pub(super) fn fill_nans<T>(
        &self,
        array: &PrimitiveArray<T>,
        per_row: usize,
    ) -> Result<Option<ArrayRef>>
    where
        T: ArrowPrimitiveType,
        T::Native: Into<f64> + std::str::FromStr,
    {
        let is_nan = |value: T::Native| value.into().is_nan();
        // No early exit within a piece, so that the compiler can vectorize the loop.
        let odd = |value: T::Native| !value.into().is_finite();
        let any =
            |piece: &[T::Native]| piece.iter().fold(false, |found, value| found | odd(*value));
        if !array.values().chunks(1024).any(any) {
            return Ok(None);
        }
        let places = |wanted: fn(f64) -> bool| {
            let values = array.values().iter().enumerate();
            values.filter(move |(_, value)| wanted((**value).into())).map(|(at, _)| at)
        };
        // Comes before the fill, which replaces NaN only.
        if !self.allow_nan && places(f64::is_infinite).next().is_some() {
            let (column, partition) = (self.column.to_owned(), self.partition);
            let (infinite, row) = self.affected_rows(per_row, places(f64::is_infinite));
            return Err(Error::Infinite {
                column,
                infinite,
                rows: array.len() / per_row.max(1),
                partition,
                row,
            });
        }
        match self.fill.and_then(|(text, _)| text.trim().parse::<T::Native>().ok()) {
            Some(fill) => {
                let whole = array.unary::<_, T>(|value| if is_nan(value) { fill } else { value });
                Ok(Some(Arc::new(whole)))
            }
            None if self.allow_nan => Ok(None),
            None => Err(self.missing_value_error("NaN", array.len(), per_row, places(f64::is_nan))),
        }
    }
}
