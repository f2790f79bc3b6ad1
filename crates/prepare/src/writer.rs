// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Writes one partition.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::{cast, filter_record_batch, max, min};
use arrow::datatypes::{DataType, Field, Float64Type, Schema, SchemaRef};
use farandole_dataset::{ColumnRole, ElementType, ManifestColumn, batch_unit};
use farandole_store::Store;

use crate::convert::{ConversionContext, ConvertedColumn, convert_column, is_vector};
use crate::error::{Error, Result};
use crate::spec::{PrepareSpec, ValidationRule};
use crate::split::{
    SplitMasks, hash_rows, split_by_column, split_by_fraction, split_by_hash_bound,
};
use crate::split_file_writer::{SplitFileSpec, SplitFileWriter};
use crate::summary::PartitionSummary;

/// Schema and files, decided by the first batch with rows.
struct PartitionLayout {
    schema: SchemaRef,
    columns: Vec<ManifestColumn>,
    train: SplitFileWriter,
    val: Option<SplitFileWriter>,
}

/// Writer of one attempt of one partition. Dropping it leaves no file.
pub struct PartitionWriter {
    store: Store,
    spec: PrepareSpec,
    partition: u64,
    attempt: String,
    layout: Option<PartitionLayout>,
    rows: u64,
    dropped: u64,
    /// Smallest and largest hash of a row.
    hashes: Option<(u64, u64)>,
    /// Sums of the row hashes: training, validation.
    content_hashes: (u64, u64),
}

impl PartitionWriter {
    /// Creates a writer. The files appear when it finishes.
    ///
    /// # Errors
    /// An invalid specification or attempt. An attempt consists of letters, digits, `-` and `_`.
    pub fn new(url: &str, spec: &str, partition: u64, attempt: &str) -> Result<Self> {
        // The attempt is part of a file name: `/` or `..` would place the file elsewhere.
        let named = !attempt.is_empty()
            && attempt.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
        if !named {
            return Err(Error::InvalidValue {
                what: "an attempt is letters, digits, - and _",
                value: attempt.to_owned(),
            });
        }
        let (store, spec) = (Store::open(url)?, PrepareSpec::parse_json(spec)?);
        Ok(Self {
            store,
            spec,
            partition,
            attempt: attempt.to_owned(),
            layout: None,
            rows: 0,
            dropped: 0,
            hashes: None,
            content_hashes: (0, 0),
        })
    }

    /// Appends rows.
    ///
    /// # Errors
    /// A missing column, nulls, ragged rows, an unsupported type, and the store's errors.
    pub fn write_batch(&mut self, batch: &RecordBatch) -> Result<()> {
        // The first batch decides the shapes, and lists without rows have none.
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let names = self.kept_columns(batch)?;
        let mut converted = Vec::with_capacity(names.len());
        for (number, name) in names.iter().enumerate() {
            let (fill, allow_nan) = (self.spec.fill_for_column(name), self.spec.allow_nan);
            let origin = ConversionContext {
                column: name,
                partition: self.partition,
                row: self.rows,
                fill,
                allow_nan,
            };
            let before = self.layout.as_ref().and_then(|layout| layout.columns.get(number));
            let array = find_column(batch, name)?;
            if let Some(before) = before
                && before.source != array.data_type().to_string()
            {
                return Err(Error::TypeChanged {
                    column: name.clone(),
                    partition: self.partition,
                    before: before.source.clone(),
                    after: array.data_type().to_string(),
                });
            }
            converted.push(convert_column(
                origin,
                array,
                before.map(|column| column.shape.as_slice()),
            )?);
        }
        if self.layout.is_none() {
            self.layout = Some(self.create_layout(batch, &names, &converted)?);
        }
        let arrays: Vec<ArrayRef> = converted.into_iter().map(|column| column.array).collect();
        let hashes = hash_rows(&arrays, batch.num_rows(), self.spec.seed);
        let sides = match &self.spec.validation {
            None => None,
            Some(ValidationRule::Fraction(fraction)) => Some(split_by_fraction(&hashes, *fraction)),
            Some(ValidationRule::Below(bound)) => Some(split_by_hash_bound(&hashes, *bound)),
            Some(ValidationRule::Column(name)) => {
                Some(split_by_column(name, find_column(batch, name)?)?)
            }
        };
        self.rows += batch.num_rows() as u64;
        self.add_row_hashes(&hashes, sides.as_ref());
        self.split_and_push_rows(arrays, sides)
    }

    /// Adds row hashes to the extremes and to the sums of both sides.
    fn add_row_hashes(&mut self, hashes: &[u64], sides: Option<&SplitMasks>) {
        for (row, hash) in hashes.iter().enumerate() {
            let (least, largest) = self.hashes.unwrap_or((*hash, *hash));
            self.hashes = Some((least.min(*hash), largest.max(*hash)));
            if sides.is_none_or(|sides| sides.train.value(row)) {
                // A sum, because it does not depend on the order of rows or on their partitions.
                self.content_hashes.0 = self.content_hashes.0.wrapping_add(*hash);
            } else if sides.is_some_and(|sides| sides.val.value(row)) {
                self.content_hashes.1 = self.content_hashes.1.wrapping_add(*hash);
            }
        }
    }

    fn split_and_push_rows(
        &mut self,
        arrays: Vec<ArrayRef>,
        sides: Option<SplitMasks>,
    ) -> Result<()> {
        let Some(layout) = &mut self.layout else { return Ok(()) };
        let arrow = |source| Error::Arrow { column: "(all)".to_owned(), source };
        let whole = RecordBatch::try_new(Arc::clone(&layout.schema), arrays).map_err(arrow)?;
        let Some(SplitMasks { train, val }) = sides else {
            return append_rows_with_statistics(&mut layout.train, whole);
        };
        self.dropped += (whole.num_rows() - train.true_count() - val.true_count()) as u64;
        if let Some(side) = &mut layout.val
            && val.true_count() > 0
        {
            append_rows_with_statistics(side, filter_record_batch(&whole, &val).map_err(arrow)?)?;
        }
        // A filter copies all columns; most batches without validation rows need none.
        let train = if train.true_count() == whole.num_rows() {
            whole
        } else {
            filter_record_batch(&whole, &train).map_err(arrow)?
        };
        append_rows_with_statistics(&mut layout.train, train)
    }

    /// Returns the names of the columns to keep.
    fn kept_columns(&self, batch: &RecordBatch) -> Result<Vec<String>> {
        if let Some(columns) = &self.spec.columns {
            return Ok(columns.clone());
        }
        let all = batch.schema_ref().fields().iter().map(|field| field.name().clone());
        let split = match &self.spec.validation {
            Some(ValidationRule::Column(name)) => Some(name),
            _ => None,
        };
        Ok(all.filter(|name| Some(name) != split).collect())
    }

    fn create_layout(
        &self,
        batch: &RecordBatch,
        names: &[String],
        converted: &[ConvertedColumn],
    ) -> Result<PartitionLayout> {
        let mut columns = Vec::new();
        let mut fields = Vec::new();
        for (name, made) in names.iter().zip(converted) {
            let role = self.spec.column_role(name);
            // A loss multiplies each row by one number.
            if role == ColumnRole::Weight
                && (made.element.byte_width().is_none() || !made.shape.is_empty())
            {
                let found = find_column(batch, name)?.data_type().to_string();
                return Err(Error::Weight { column: name.clone(), found });
            }
            // No nulls (`PR-4`), so pages have no definition levels that a reader must decode.
            let mut field = Field::new(name, made.array.data_type().clone(), false);
            if !made.shape.is_empty() {
                let shape = made.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
                field.set_metadata(HashMap::from([
                    ("farandole.element".to_owned(), made.element.numpy_name().to_owned()),
                    ("farandole.shape".to_owned(), shape),
                ]));
            }
            fields.push(field);
            let source = find_column(batch, name)?.data_type().to_string();
            columns.push(ManifestColumn {
                name: name.clone(),
                role,
                element: made.element,
                shape: made.shape.clone(),
                unit: batch_unit(&source),
                source,
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
        let side = |path: &str| -> Result<SplitFileWriter> {
            Ok(SplitFileWriter::new(SplitFileSpec {
                store: self.store.resolve_path(path)?,
                // With the attempt, speculative tasks of Spark do not replace each other's files.
                file: format!("part-{:05}-{}.parquet", self.partition, self.attempt),
                schema: Arc::clone(&schema),
                columns: columns.clone(),
                compression: self.spec.compression,
                compressed_columns: packed.clone(),
                row_group_rows: self.spec.row_group_rows,
            }))
        };
        let train = side(&self.spec.train)?;
        let val = self.spec.val.as_deref().map(side).transpose()?;
        Ok(PartitionLayout { schema, columns, train, val })
    }

    /// Completes the files.
    ///
    /// # Errors
    /// The store's; the partition must then be written again.
    pub fn finish_partition(self) -> Result<PartitionSummary> {
        let (mut train, mut val) = match self.layout {
            None => (None, None),
            Some(layout) => (
                layout.train.finish_file()?,
                layout.val.map(SplitFileWriter::finish_file).transpose()?.flatten(),
            ),
        };
        for (side, sum) in [(&mut train, self.content_hashes.0), (&mut val, self.content_hashes.1)]
        {
            if let Some(side) = side {
                side.file.content = Some(format!("{sum:016x}"));
            }
        }
        let Self { partition, rows, dropped, hashes, .. } = self;
        Ok(PartitionSummary { partition, rows, dropped, hashes, train, val })
    }
}

fn find_column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef> {
    batch.column_by_name(name).ok_or_else(|| Error::Column {
        column: name.to_owned(),
        known: batch.schema_ref().fields().iter().map(|field| field.name().clone()).collect(),
    })
}

/// Updates the statistics and writes the rows.
fn append_rows_with_statistics(side: &mut SplitFileWriter, batch: RecordBatch) -> Result<()> {
    for (column, array) in side.columns_mut().iter_mut().zip(batch.columns()) {
        if !column.shape.is_empty()
            || matches!(column.element, ElementType::Utf8 | ElementType::Binary)
        {
            continue;
        }
        if let Some((low, high)) = value_range(array) {
            column.min = Some(column.min.map_or(low, |before| before.min(low)));
            column.max = Some(column.max.map_or(high, |before| before.max(high)));
        }
    }
    side.push(batch)
}

/// Returns the smallest and the largest value; -infinity and infinity if there is a NaN; `None`
/// without rows.
fn value_range(array: &ArrayRef) -> Option<(f64, f64)> {
    let typed = |array: &dyn Array, which: bool| -> Option<f64> {
        macro_rules! typed_extreme {
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
        typed_extreme!(
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
    // In Arrow's order, NaN is last, or first if its sign bit is set.
    Some(if low.is_nan() || high.is_nan() {
        (f64::NEG_INFINITY, f64::INFINITY)
    } else {
        (low, high)
    })
}
