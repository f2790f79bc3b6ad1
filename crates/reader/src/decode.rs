// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decodes column chunks into the values of a part.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::BinaryViewArray;
use arrow::datatypes::DataType;
use farandole_dataset::{DataFile, DeletedRows, PlanPart, is_partition_column};
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;

use crate::array_values::repeat_value;
use crate::column::{BatchField, SelectedColumn};
use crate::dataset::ParquetDataset;
use crate::error::{Error, Result};
use crate::fill::{null_fill_bytes, replace_nans};
use crate::footer::{FetchedRanges, FileFooter, chunk_byte_range};
use crate::pages::{
    ChunkDecodeError, ChunkRequest, DecodeScratch, LevelLayout, PageIndex, ValueStorage,
    decode_chunk, needed_ranges,
};
use crate::parquet_library::{self, ParquetLibraryChunk};
use crate::pool::as_values_mut;
use crate::schema::{element_and_list, is_promotable, page_storage, single_leaf};
use crate::time_rule::TimeRule;
use crate::value_origin::ValueOrigin;
use crate::variable_length;

/// Method that produces one column of a part.
enum ColumnDecoding {
    /// The same value in every row; no file contains it.
    Value(String),
    /// Only nulls.
    Nulls,
    /// Our page decoder, from the pages of the leaf.
    Pages {
        leaf: usize,
        stored: ValueStorage,
        levels: LevelLayout,
        page_index: Option<Arc<PageIndex>>,
        /// Rule of dates and times whose stored numbers are not the ones in batches.
        time: Option<TimeRule>,
    },
    /// The Parquet library, from the whole chunk.
    Library { leaf: usize },
}

/// Plan for decoding a part: a method for each column, and the byte ranges that it needs.
pub(crate) struct DecodePlan {
    file: String,
    footer: Arc<FileFooter>,
    decodings: Vec<ColumnDecoding>,
    /// Byte ranges for each column.
    ranges: Vec<Vec<Range<u64>>>,
    /// Rows of the row group that are the rows of the part, as ascending ranges. Between them are
    /// deleted rows.
    stored_rows: Vec<Range<u64>>,
    /// Whether each column has microseconds in batches; files may have dates.
    has_microseconds: Vec<bool>,
    /// Most decoded bytes of a page.
    max_page_bytes: usize,
}

impl DecodePlan {
    /// Plans the decoding of a part. No page may take more than `max_page_bytes` bytes decoded.
    ///
    /// # Errors
    /// Files that cannot be read, or that differ from the data set's description.
    pub(crate) fn new(
        dataset: &ParquetDataset,
        selected: &[SelectedColumn],
        part: &PlanPart,
        max_page_bytes: usize,
    ) -> Result<Self> {
        let Some(data) = dataset.manifest().files.get(part.file) else { return Err(Error::Ended) };
        let footer = dataset.file_footer(part.file)?;
        let file = dataset.store().display_path(&data.path);
        let group = unchanged_row_group(&footer, data, part, &file)?;
        let stored_rows = data.stored_row_ranges(part.group, part.rows.clone());
        let span = span_of_row_ranges(&stored_rows);
        let whole =
            span.start == 0 && span.end >= u64::try_from(group.num_rows()).unwrap_or_default();
        let unit = |column: &SelectedColumn| {
            let column = dataset.manifest().find_column(&column.field.name).ok()?;
            column.unit.as_deref()
        };
        let has_microseconds =
            selected.iter().map(|column| unit(column) == Some("microseconds")).collect();
        let mut plan = Self {
            decodings: Vec::new(),
            ranges: Vec::new(),
            footer: Arc::clone(&footer),
            file,
            max_page_bytes,
            stored_rows,
            has_microseconds,
        };
        for (index, column) in selected.iter().enumerate() {
            let field = &column.field;
            let decoding = match data.values.get(&field.name) {
                Some(value) => ColumnDecoding::Value(value.clone()),
                None if data.absent.contains(&field.name) => ColumnDecoding::Nulls,
                None if dataset
                    .manifest()
                    .find_column(&field.name)
                    .is_ok_and(is_partition_column) =>
                {
                    ColumnDecoding::Nulls
                }
                None => {
                    let name = data.names.get(&field.name).unwrap_or(&field.name);
                    plan.locate_column(name, field, index)?
                }
            };
            let (decoding, needed) = match decoding {
                ColumnDecoding::Pages { leaf, stored, levels, time, .. } if !whole => {
                    let page_index = dataset.page_index(
                        (part.file, part.group, leaf),
                        &footer,
                        levels.length as u64,
                    )?;
                    let per_row = levels.length as u64;
                    let needed =
                        needed_ranges(&page_index, &(span.start * per_row..span.end * per_row));
                    let page_index = Some(page_index);
                    (ColumnDecoding::Pages { leaf, stored, levels, page_index, time }, needed)
                }
                ColumnDecoding::Pages { leaf, .. } | ColumnDecoding::Library { leaf, .. } => {
                    let needed =
                        group.columns().get(leaf).map(chunk_byte_range).into_iter().collect();
                    (decoding, needed)
                }
                ColumnDecoding::Value(_) | ColumnDecoding::Nulls => (decoding, Vec::new()),
            };
            plan.decodings.push(decoding);
            plan.ranges.push(needed);
        }
        Ok(plan)
    }

    /// Returns the stored bytes of all columns.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.ranges.iter().flatten().map(|range| range.end.saturating_sub(range.start)).sum()
    }

    /// Fetches the bytes of all columns in one request.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn fetch_all_columns(
        &self,
        dataset: &ParquetDataset,
        part: &PlanPart,
    ) -> Result<FetchedRanges> {
        let Some(data) = dataset.manifest().files.get(part.file) else { return Err(Error::Ended) };
        let all: Vec<Range<u64>> = self.ranges.iter().flatten().cloned().collect();
        FetchedRanges::new(dataset.store(), &data.path, &all, data.bytes)
    }

    /// Decodes column number `index` into `out`. If `fetched` is `None`, its bytes are fetched now.
    ///
    /// # Errors
    /// Bytes that cannot be fetched or decoded; nulls, NaN or infinities that are not allowed.
    pub(crate) fn decode_column(
        &self,
        dataset: &ParquetDataset,
        (selected, index): (&SelectedColumn, usize),
        part: &PlanPart,
        fetched: Option<&FetchedRanges>,
        (bench, out): (&mut DecodeScratch, &mut [u8]),
    ) -> Result<()> {
        let Some(data) = dataset.manifest().files.get(part.file) else { return Err(Error::Ended) };
        let field = &selected.field;
        let origin = self.value_origin(part, selected);
        let rows = usize::try_from(part.rows.end - part.rows.start).unwrap_or(usize::MAX);
        let Some(decoding) = self.decodings.get(index) else { return Err(Error::Ended) };
        let get = |ranges: &[Range<u64>]| match fetched {
            Some(fetched) => Ok(fetched.clone()),
            None => FetchedRanges::new(dataset.store(), &data.path, ranges, data.bytes),
        };
        let group = unchanged_row_group(&self.footer, data, part, &self.file)?;
        let own = self.ranges.get(index).map_or(&[][..], Vec::as_slice);
        let span = span_of_row_ranges(&self.stored_rows);
        let mut nulls = 0;
        let leaf = match decoding {
            ColumnDecoding::Value(value) => {
                let values = repeat_value(value, field.element, rows).ok_or_else(|| {
                    Error::ColumnChanged {
                        column: field.name.clone(),
                        file: self.file.clone(),
                        found: value.clone(),
                        expected: field.element.numpy_name().to_owned(),
                    }
                })?;
                copy_all_bytes(&values, out, &origin)?;
                None
            }
            // A fill replaces numbers, not whole lists.
            ColumnDecoding::Nulls if !field.shape.is_empty() => {
                return Err(origin.nulls_error(rows));
            }
            ColumnDecoding::Nulls => {
                nulls = rows;
                let fill = null_fill_bytes(selected, field.row_width());
                copy_all_bytes(&fill.repeat(rows), out, &origin)?;
                None
            }
            ColumnDecoding::Pages { leaf, stored, levels, page_index, time } => {
                let bytes = get(own)?;
                let Some(meta) = group.columns().get(*leaf) else { return Err(Error::Ended) };
                // Checksums are of whole chunks; with an index, only some pages are fetched.
                if page_index.is_none() {
                    verify_chunk(dataset, data, &self.file, part, (*leaf, own, &bytes))?;
                }
                let per_row = levels.length;
                let count =
                    |rows: u64| usize::try_from(rows).unwrap_or(usize::MAX).saturating_mul(per_row);
                let fill = null_fill_bytes(selected, stored.value_width());
                let chunk = ChunkRequest {
                    compression: meta.compression(),
                    bytes: chunk_byte_range(meta),
                    total: usize::try_from(meta.num_values()).unwrap_or_default(),
                    wanted: count(span.start)..count(span.end),
                    stored: *stored,
                    levels: *levels,
                    page_index: page_index.as_deref(),
                    fill: &fill,
                    max_page_bytes: self.max_page_bytes,
                };
                let fetch =
                    |at| bytes.slice_from(at, None).map_err(|source| origin.parquet_error(source));
                let width = per_row.saturating_mul(stored.value_width());
                let expected = rows.saturating_mul(width);
                if out.len() != expected {
                    return Err(origin.length_error(expected, out.len()));
                }
                let has_gaps = self.stored_rows.len() > 1;
                let decoded = if has_gaps {
                    let mut all =
                        vec![0; rows_as_usize(span.end - span.start).saturating_mul(width)];
                    decode_chunk(&chunk, fetch, bench, &mut all).and_then(|found| {
                        copy_row_ranges(&all, &self.stored_rows, width, out).map(|()| found)
                    })
                } else {
                    decode_chunk(&chunk, fetch, bench, &mut *out)
                };
                match decoded {
                    // Fills are numbers of batches already, and nulls may be in deleted rows, so
                    // values are converted one by one.
                    Ok(found)
                        if found > 0
                            && (time.is_some() || (has_gaps && selected.fill.is_none())) =>
                    {
                        Some(*leaf)
                    }
                    Ok(found) => {
                        nulls = found;
                        if let Some(rule) = time {
                            convert_times(*rule, out, per_row, &origin)?;
                        }
                        None
                    }
                    Err(ChunkDecodeError::Unsupported) => Some(*leaf),
                    Err(ChunkDecodeError::Broken(what)) => {
                        return Err(origin.parquet_error(ParquetError::General(what)));
                    }
                    Err(ChunkDecodeError::Ragged) => {
                        return Err(origin.ragged_error(field.elements_per_row() as u64));
                    }
                    Err(ChunkDecodeError::Fetch(error)) => return Err(error),
                }
            }
            ColumnDecoding::Library { leaf, .. } => Some(*leaf),
        };
        if let Some(leaf) = leaf {
            let chunk: Vec<Range<u64>> =
                group.columns().get(leaf).map(chunk_byte_range).into_iter().collect();
            let bytes = if chunk == own {
                get(own)?
            } else {
                FetchedRanges::new(dataset.store(), &data.path, &chunk, data.bytes)?
            };
            verify_chunk(dataset, data, &self.file, part, (leaf, &chunk, &bytes))?;
            let source = self.parquet_library_chunk(bytes, (leaf, index), part, &origin);
            let values = parquet_library::read_column(source, selected)?;
            copy_all_bytes(&values, out, &origin)?;
        }
        if nulls > 0 && selected.fill.is_none() {
            return Err(origin.nulls_error(nulls));
        }
        if (selected.fill.is_some() || !selected.allow_nan) && field.element.is_float() {
            replace_nans(out, selected).map_err(|odd| origin.non_finite_error(odd))?;
        }
        Ok(())
    }
}

impl DecodePlan {
    fn parquet_library_chunk<'a>(
        &'a self,
        fetched: FetchedRanges,
        (leaf, index): (usize, usize),
        part: &'a PlanPart,
        origin: &'a ValueOrigin<'a>,
    ) -> ParquetLibraryChunk<'a> {
        ParquetLibraryChunk {
            footer: &self.footer,
            fetched,
            leaf,
            part,
            max_page_bytes: self.max_page_bytes,
            origin,
            time: self.time_rule(leaf, index),
        }
    }

    /// Decodes column number `index`, whose values have no fixed size; otherwise like
    /// [`DecodePlan::decode_column`].
    ///
    /// # Errors
    /// Like [`DecodePlan::decode_column`].
    pub(crate) fn decode_variable_length(
        &self,
        dataset: &ParquetDataset,
        (selected, index): (&SelectedColumn, usize),
        part: &PlanPart,
        fetched: Option<&FetchedRanges>,
    ) -> Result<variable_length::VariableLengthValues> {
        let Some(data) = dataset.manifest().files.get(part.file) else { return Err(Error::Ended) };
        let origin = self.value_origin(part, selected);
        let own = self.ranges.get(index).map_or(&[][..], Vec::as_slice);
        let stored = match self.decodings.get(index) {
            Some(ColumnDecoding::Value(value)) => {
                let rows = usize::try_from(part.rows.end - part.rows.start).unwrap_or(usize::MAX);
                let values = BinaryViewArray::from_iter_values(std::iter::repeat_n(value, rows));
                variable_length::VariableLengthValues::new(values, 0)
            }
            Some(ColumnDecoding::Library { leaf }) => {
                let bytes = match fetched {
                    Some(fetched) => fetched.clone(),
                    None => FetchedRanges::new(dataset.store(), &data.path, own, data.bytes)?,
                };
                verify_chunk(dataset, data, &self.file, part, (*leaf, own, &bytes))?;
                parquet_library::read_variable_length(self.parquet_library_chunk(
                    bytes,
                    (*leaf, index),
                    part,
                    &origin,
                ))?
            }
            Some(ColumnDecoding::Nulls) => {
                let rows = part.rows.end - part.rows.start;
                return Err(origin.nulls_error(usize::try_from(rows).unwrap_or(usize::MAX)));
            }
            Some(ColumnDecoding::Pages { .. }) | None => return Err(Error::Ended),
        };
        let torn = selected
            .padding
            .as_ref()
            .and_then(|padding| padding.find_partial_value(stored.values.lengths()));
        torn.map_or(Ok(stored), |(bytes, width)| Err(origin.partial_value_error(bytes, width)))
    }
}

/// Compares a whole chunk with its checksum in the manifest.
fn verify_chunk(
    dataset: &ParquetDataset,
    data: &DataFile,
    file: &str,
    part: &PlanPart,
    (leaf, ranges, bytes): (usize, &[Range<u64>], &FetchedRanges),
) -> Result<()> {
    let [range] = ranges else { return Ok(()) };
    let length = usize::try_from(range.end - range.start).ok();
    let Ok(chunk) = bytes.slice_from(range.start, length) else { return Ok(()) };
    dataset.verified_chunks().verify_chunks(
        (part.file, data, file),
        part.group,
        std::iter::once((leaf, &chunk)),
    )
}

/// Copies the values of all rows. A buffer of another length holds values of another type or of
/// other rows.
fn copy_all_bytes(values: &[u8], out: &mut [u8], origin: &ValueOrigin<'_>) -> Result<()> {
    if values.len() != out.len() {
        return Err(origin.length_error(values.len(), out.len()));
    }
    out.copy_from_slice(values);
    Ok(())
}

/// Returns the range from the first row to the last one.
pub(crate) fn span_of_row_ranges(ranges: &[Range<u64>]) -> Range<u64> {
    let ends = ranges.first().zip(ranges.last());
    ends.map_or(0..0, |(first, last)| first.start..last.end)
}

fn rows_as_usize(rows: u64) -> usize {
    usize::try_from(rows).unwrap_or(usize::MAX)
}

/// Copies the rows of `ranges` from `all`, which has the rows of their span.
fn copy_row_ranges(
    all: &[u8],
    ranges: &[Range<u64>],
    width: usize,
    out: &mut [u8],
) -> std::result::Result<(), ChunkDecodeError> {
    let first = span_of_row_ranges(ranges).start;
    let mut done = 0;
    for range in ranges {
        let [start, end] = [range.start, range.end].map(|row| rows_as_usize(row - first) * width);
        let slots = out.get_mut(done..done + (end - start));
        let (Some(rows), Some(slots)) = (all.get(start..end), slots) else {
            return Err(ChunkDecodeError::Broken("rows that are not in the chunk".to_owned()));
        };
        slots.copy_from_slice(rows);
        done += end - start;
    }
    Ok(())
}

/// Converts stored dates or times in place; every row has `per_row` values.
fn convert_times(
    rule: TimeRule,
    out: &mut [u8],
    per_row: usize,
    origin: &ValueOrigin<'_>,
) -> Result<()> {
    for (at, value) in as_values_mut::<i64>(out).iter_mut().enumerate() {
        *value = rule
            .convert(*value)
            .map_err(|reason| origin.unrepresentable_error(at / per_row.max(1), reason))?;
    }
    Ok(())
}

/// Returns the row group of a part, if the file still has the stated number of rows.
fn unchanged_row_group<'a>(
    footer: &'a ArrowReaderMetadata,
    data: &DataFile,
    part: &PlanPart,
    file: &str,
) -> Result<&'a RowGroupMetaData> {
    let group = footer.metadata().row_groups().get(part.group);
    let found = group.map_or(0, |group| u64::try_from(group.num_rows()).unwrap_or_default());
    let deleted = data.deleted.get(part.group).map_or(Some(0), DeletedRows::count);
    let living = data.groups.get(part.group).map_or(0, |group| group.rows);
    let expected = living.saturating_add(deleted.unwrap_or(u64::MAX));
    match group {
        Some(group) if found == expected => Ok(group),
        _ => Err(Error::RowCountChanged {
            file: file.to_owned(),
            group: part.group,
            found,
            expected,
        }),
    }
}

impl DecodePlan {
    fn value_origin<'a>(&'a self, part: &PlanPart, column: &'a SelectedColumn) -> ValueOrigin<'a> {
        ValueOrigin {
            file: &self.file,
            group: part.group,
            column: &column.field.name,
            stored_rows: &self.stored_rows,
        }
    }

    /// Returns the rule of dates and times of a leaf, for column number `index`.
    fn time_rule(&self, leaf: usize, index: usize) -> Option<TimeRule> {
        let rule = self.footer.time_rule(leaf)?;
        let to_microseconds = self.has_microseconds.get(index).copied().unwrap_or_default();
        Some(if to_microseconds { rule.into_microseconds() } else { rule })
    }

    /// Finds column number `index` in the file, where it is called `name`, and checks that its type
    /// matches the data set's description.
    fn locate_column(
        &self,
        name: &str,
        field: &BatchField,
        index: usize,
    ) -> Result<ColumnDecoding> {
        let (footer, file) = (&*self.footer, &self.file);
        let missing = || Error::Missing { column: field.name.clone(), file: file.clone() };
        let (root, found) = footer.schema().column_with_name(name).ok_or_else(missing)?;
        let kind = found.data_type();
        let changed = || Error::ColumnChanged {
            column: field.name.clone(),
            file: file.clone(),
            found: kind.to_string(),
            expected: format!("{} of shape {:?}", field.element.numpy_name(), field.shape),
        };
        let leaf = single_leaf(footer, root).ok_or_else(changed)?;
        let packed = matches!(kind, DataType::FixedSizeBinary(width)
            if !field.shape.is_empty() && usize::try_from(*width) == Ok(field.row_width()));
        let time = self.time_rule(leaf, index);
        let (same, is_promoted) = match (element_and_list(kind), kind) {
            (_, DataType::FixedSizeBinary(_)) if !field.shape.is_empty() => (packed, false),
            (Some((element, list)), _) => {
                let is_promoted = is_promotable(element, field.element) && time.is_none();
                let same = element == field.element || is_promoted;
                (same && list != field.shape.is_empty(), is_promoted)
            }
            (None, _) => (false, false),
        };
        if !same {
            return Err(changed());
        }
        Ok(match page_storage(footer, kind, leaf, field).filter(|_| !is_promoted) {
            Some((stored, levels)) => ColumnDecoding::Pages {
                leaf,
                stored,
                levels,
                page_index: None,
                time: time.filter(|rule| !rule.needs_no_time_conversion()),
            },
            None => ColumnDecoding::Library { leaf },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_of_another_length_is_an_error() {
        let origin = ValueOrigin { file: "a.parquet", group: 3, column: "c", stored_rows: &[] };
        let mut out = [0; 8];
        copy_all_bytes(&[7; 8], &mut out, &origin).unwrap();
        assert_eq!(out, [7; 8]);
        for length in [0, 1, 7, 9] {
            let error = copy_all_bytes(&vec![1; length], &mut out, &origin).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("a.parquet, row group 3, column c"), "{text}");
            assert!(text.contains(&format!("{length} bytes where 8 belong")), "{text}");
        }
        assert_eq!(out, [7; 8], "nothing is written");
    }
}
