// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The writer of one partition.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::{cast, filter_record_batch, max, min};
use arrow::datatypes::{DataType, Field, Float64Type, Schema, SchemaRef};
use farandole_dataset::{Column, Element, Role};
use farandole_store::Store;

use crate::convert::{Converted, Origin, convert, is_vector};
use crate::error::{Error, Result};
use crate::side::{Shape, Side};
use crate::spec::{Spec, Validation};
use crate::split::{Sides, by_bound, by_column, by_fraction, hashes};
use crate::summary::Summary;

/// The decisions from the first batch with rows.
struct Layout {
    schema: SchemaRef,
    columns: Vec<Column>,
    train: Side,
    val: Option<Side>,
}

/// Writes one attempt of one partition. Dropping it leaves no file behind.
pub struct PartitionWriter {
    store: Store,
    spec: Spec,
    partition: u64,
    attempt: String,
    layout: Option<Layout>,
    rows: u64,
    dropped: u64,
    /// The least and the largest hash of a row.
    hashes: Option<(u64, u64)>,
    /// Sums of the hashes of rows: training, validation.
    content: (u64, u64),
}

impl PartitionWriter {
    /// Starts; files appear at the end.
    ///
    /// # Errors
    /// A specification or an attempt that cannot be. Attempts are letters, digits, `-` and `_`.
    pub fn new(url: &str, spec: &str, partition: u64, attempt: &str) -> Result<Self> {
        let named = !attempt.is_empty()
            && attempt.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
        if !named {
            return Err(Error::Value {
                what: "an attempt is letters, digits, - and _",
                value: attempt.to_owned(),
            });
        }
        let (store, spec) = (Store::open(url)?, Spec::parse(spec)?);
        Ok(Self {
            store,
            spec,
            partition,
            attempt: attempt.to_owned(),
            layout: None,
            rows: 0,
            dropped: 0,
            hashes: None,
            content: (0, 0),
        })
    }

    /// Returns the number of the partition.
    pub fn partition(&self) -> u64 {
        self.partition
    }

    /// Appends rows.
    ///
    /// # Errors
    /// A missing column, nulls, ragged rows, a type that cannot be, and the store's.
    pub fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let names = self.names(batch)?;
        let mut converted = Vec::with_capacity(names.len());
        for (number, name) in names.iter().enumerate() {
            let (fill, allow_nan) = (self.spec.fill(name), self.spec.allow_nan);
            let origin =
                Origin { column: name, partition: self.partition, row: self.rows, fill, allow_nan };
            let before = self.layout.as_ref().and_then(|layout| layout.columns.get(number));
            let array = column(batch, name)?;
            if let Some(before) = before
                && before.source != array.data_type().to_string()
            {
                return Err(Error::Changed {
                    column: name.clone(),
                    partition: self.partition,
                    before: before.source.clone(),
                    after: array.data_type().to_string(),
                });
            }
            converted.push(convert(origin, array, before.map(|column| column.shape.as_slice()))?);
        }
        if self.layout.is_none() {
            self.layout = Some(self.lay_out(batch, &names, &converted)?);
        }
        let arrays: Vec<ArrayRef> = converted.into_iter().map(|column| column.array).collect();
        let hashes = hashes(&arrays, batch.num_rows(), self.spec.seed);
        let sides = match &self.spec.validation {
            None => None,
            Some(Validation::Fraction(fraction)) => Some(by_fraction(&hashes, *fraction)),
            Some(Validation::Below(bound)) => Some(by_bound(&hashes, *bound)),
            Some(Validation::Column(name)) => Some(by_column(name, column(batch, name)?)?),
        };
        self.rows += batch.num_rows() as u64;
        self.note(&hashes, sides.as_ref());
        self.push(arrays, sides)
    }

    /// Notes what the hashes of rows say of both sides.
    fn note(&mut self, hashes: &[u64], sides: Option<&Sides>) {
        for (row, hash) in hashes.iter().enumerate() {
            let (least, largest) = self.hashes.unwrap_or((*hash, *hash));
            self.hashes = Some((least.min(*hash), largest.max(*hash)));
            if sides.is_none_or(|sides| sides.train.value(row)) {
                self.content.0 = self.content.0.wrapping_add(*hash);
            } else if sides.is_some_and(|sides| sides.val.value(row)) {
                self.content.1 = self.content.1.wrapping_add(*hash);
            }
        }
    }

    fn push(&mut self, arrays: Vec<ArrayRef>, sides: Option<Sides>) -> Result<()> {
        let Some(layout) = &mut self.layout else { return Ok(()) };
        let arrow = |source| Error::Arrow { column: "(all)".to_owned(), source };
        let whole = RecordBatch::try_new(Arc::clone(&layout.schema), arrays).map_err(arrow)?;
        let Some(Sides { train, val }) = sides else {
            return append(&mut layout.train, whole);
        };
        self.dropped += (whole.num_rows() - train.true_count() - val.true_count()) as u64;
        if let Some(side) = &mut layout.val
            && val.true_count() > 0
        {
            append(side, filter_record_batch(&whole, &val).map_err(arrow)?)?;
        }
        let train = if train.true_count() == whole.num_rows() {
            whole
        } else {
            filter_record_batch(&whole, &train).map_err(arrow)?
        };
        append(&mut layout.train, train)
    }

    /// Columns that are kept.
    fn names(&self, batch: &RecordBatch) -> Result<Vec<String>> {
        if let Some(columns) = &self.spec.columns {
            return Ok(columns.clone());
        }
        let all = batch.schema_ref().fields().iter().map(|field| field.name().clone());
        let split = match &self.spec.validation {
            Some(Validation::Column(name)) => Some(name),
            _ => None,
        };
        Ok(all.filter(|name| Some(name) != split).collect())
    }

    fn lay_out(
        &self,
        batch: &RecordBatch,
        names: &[String],
        converted: &[Converted],
    ) -> Result<Layout> {
        let mut columns = Vec::new();
        let mut fields = Vec::new();
        for (name, made) in names.iter().zip(converted) {
            let role = self.spec.role(name);
            if role == Role::Weight && (made.element.width().is_none() || !made.shape.is_empty()) {
                let found = column(batch, name)?.data_type().to_string();
                return Err(Error::Weight { column: name.clone(), found });
            }
            let mut field = Field::new(name, made.array.data_type().clone(), false);
            if !made.shape.is_empty() {
                let shape = made.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
                field.set_metadata(HashMap::from([
                    ("farandole.element".to_owned(), made.element.name().to_owned()),
                    ("farandole.shape".to_owned(), shape),
                ]));
            }
            fields.push(field);
            columns.push(Column {
                name: name.clone(),
                role,
                element: made.element,
                shape: made.shape.clone(),
                source: column(batch, name)?.data_type().to_string(),
                nulls: Some(0),
                min: None,
                max: None,
                unreadable: None,
            });
        }
        let schema = Arc::new(Schema::new(fields));
        let packed: Vec<String> = if self.spec.compress_sparse {
            let source = batch.schema_ref();
            let vector = |name: &&String| {
                source.field_with_name(name).is_ok_and(|f| is_vector(f.data_type()))
            };
            names.iter().filter(vector).cloned().collect()
        } else {
            Vec::new()
        };
        let side = |path: &str| -> Result<Side> {
            Ok(Side::new(Shape {
                store: self.store.resolve(path)?,
                file: format!("part-{:05}-{}.parquet", self.partition, self.attempt),
                schema: Arc::clone(&schema),
                columns: columns.clone(),
                compression: self.spec.compression,
                packed: packed.clone(),
                row_group_rows: self.spec.row_group_rows,
            }))
        };
        let train = side(&self.spec.train)?;
        let val = self.spec.val.as_deref().map(side).transpose()?;
        Ok(Layout { schema, columns, train, val })
    }

    /// Completes the files.
    ///
    /// # Errors
    /// The store's; then the partition has to be written again.
    pub fn finish(self) -> Result<Summary> {
        let (mut train, mut val) = match self.layout {
            None => (None, None),
            Some(layout) => {
                (layout.train.finish()?, layout.val.map(Side::finish).transpose()?.flatten())
            }
        };
        for (side, sum) in [(&mut train, self.content.0), (&mut val, self.content.1)] {
            if let Some(side) = side {
                side.file.content = Some(format!("{sum:016x}"));
            }
        }
        let Self { partition, rows, dropped, hashes, .. } = self;
        Ok(Summary { partition, rows, dropped, hashes, train, val })
    }
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef> {
    batch.column_by_name(name).ok_or_else(|| Error::Column {
        column: name.to_owned(),
        known: batch.schema_ref().fields().iter().map(|field| field.name().clone()).collect(),
    })
}

/// Notes statistics and hands the rows on.
fn append(side: &mut Side, batch: RecordBatch) -> Result<()> {
    for (column, array) in side.columns().iter_mut().zip(batch.columns()) {
        if !column.shape.is_empty() || matches!(column.element, Element::Utf8 | Element::Binary) {
            continue;
        }
        if let Some((low, high)) = extremes(array) {
            column.min = Some(column.min.map_or(low, |before| before.min(low)));
            column.max = Some(column.max.map_or(high, |before| before.max(high)));
        }
    }
    side.push(batch)
}

/// Smallest and largest value, as far as any number says: infinite with infinities, or with NaN;
/// `None` without rows.
fn extremes(array: &ArrayRef) -> Option<(f64, f64)> {
    let typed = |array: &dyn Array, which: bool| -> Option<f64> {
        macro_rules! of {
            ($($kind:ident => $type:ident),+ $(,)?) => {
                match array.data_type() {
                    $(DataType::$kind => {
                        let array = array.as_primitive::<arrow::datatypes::$type>();
                        let value = if which { max(array) } else { min(array) };
                        value.map(|value| value as f64)
                    })+
                    _ => None,
                }
            };
        }
        of!(
            Int8 => Int8Type, Int16 => Int16Type, Int32 => Int32Type, Int64 => Int64Type, UInt8 => UInt8Type,
            UInt16 => UInt16Type, UInt32 => UInt32Type, UInt64 => UInt64Type, Float32 => Float32Type, Float64 => Float64Type,
        )
    };
    if *array.data_type() == DataType::Boolean {
        let bytes = cast(array, &DataType::Float64).ok()?;
        let bytes = bytes.as_primitive::<Float64Type>();
        return min(bytes).zip(max(bytes));
    }
    let (low, high) = typed(array, false).zip(typed(array, true))?;
    // In Arrow's order NaN comes last, or first where its sign is set.
    Some(if low.is_nan() || high.is_nan() {
        (f64::NEG_INFINITY, f64::INFINITY)
    } else {
        (low, high)
    })
}
