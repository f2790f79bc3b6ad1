// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! From column chunks to the values of a part.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::BinaryViewArray;
use arrow::datatypes::DataType;
use farandole_dataset::{DataFile, Part};
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;

use crate::column::{Field, Selected};
use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::fill::{filled, numbers};
use crate::footer::{Fetched, Footer, chunk_range};
use crate::hive;
use crate::library::{self, Source};
use crate::origin::Origin;
use crate::pages::{Bench, Chunk, Levels, Spots, Stored, Trouble, decode, ranges};
use crate::schema::{direct, leaf_of, shape_of};
use crate::texts;

/// A way to produce one column of a part.
enum Way {
    /// The same value in every row: it is in no file.
    Value(String),
    /// Nulls alone.
    Nothing,
    /// By the pages of its leaf.
    Pages { leaf: usize, stored: Stored, levels: Levels, spots: Option<Arc<Spots>> },
    /// By the library, from all of its chunk.
    Library { leaf: usize },
}

/// The parts of the decoding of a part: the places of its columns, and the bytes that they need.
pub(crate) struct Recipe {
    file: String,
    footer: Arc<Footer>,
    ways: Vec<Way>,
    /// Bytes of each column, in the order of the columns.
    ranges: Vec<Vec<Range<u64>>>,
    /// Bytes that a page may take decoded.
    most: usize,
}

impl Recipe {
    /// Looks the columns of a part up, no page of which may take more than `most` bytes decoded.
    ///
    /// # Errors
    /// Files that cannot be read, or are not what the data set says.
    pub(crate) fn new(
        dataset: &Dataset,
        selected: &[Selected],
        part: &Part,
        most: usize,
    ) -> Result<Self> {
        let Some(data) = dataset.manifest().files.get(part.file) else { return Err(Error::Ended) };
        let footer = dataset.footer(part.file)?;
        let file = dataset.store().name_of(&data.path);
        let group = group_of(&footer, data, part, &file)?;
        let whole = part.rows.start == 0
            && part.rows.end >= u64::try_from(group.num_rows()).unwrap_or_default();
        let mut recipe =
            Self { ways: Vec::new(), ranges: Vec::new(), footer: Arc::clone(&footer), file, most };
        for column in selected {
            let field = &column.field;
            let way = match data.values.get(&field.name) {
                Some(value) => Way::Value(value.clone()),
                None if dataset.manifest().column(&field.name).is_ok_and(hive::is_one) => {
                    Way::Nothing
                }
                None => locate(&footer, field, &recipe.file)?,
            };
            let (way, needed) = match way {
                Way::Pages { leaf, stored, levels, .. } if !whole => {
                    let spots = dataset.spots(
                        (part.file, part.group, leaf),
                        &footer,
                        levels.length as u64,
                    )?;
                    let per_row = levels.length as u64;
                    let needed =
                        ranges(&spots, &(part.rows.start * per_row..part.rows.end * per_row));
                    (Way::Pages { leaf, stored, levels, spots: Some(spots) }, needed)
                }
                Way::Pages { leaf, .. } | Way::Library { leaf, .. } => {
                    let needed = group.columns().get(leaf).map(chunk_range).into_iter().collect();
                    (way, needed)
                }
                Way::Value(_) | Way::Nothing => (way, Vec::new()),
            };
            recipe.ways.push(way);
            recipe.ranges.push(needed);
        }
        Ok(recipe)
    }

    /// Bytes of all columns, as they are stored.
    pub(crate) fn size(&self) -> u64 {
        self.ranges.iter().flatten().map(|range| range.end.saturating_sub(range.start)).sum()
    }

    /// Fetches all bytes at once.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn fetch(&self, dataset: &Dataset, part: &Part) -> Result<Fetched> {
        let Some(data) = dataset.manifest().files.get(part.file) else { return Err(Error::Ended) };
        let all: Vec<Range<u64>> = self.ranges.iter().flatten().cloned().collect();
        Fetched::new(dataset.store(), &data.path, &all, data.bytes)
    }

    /// Decodes column number `index` into `out`; its bytes are fetched now when they are not in
    /// `fetched`.
    ///
    /// # Errors
    /// Bytes that cannot be had or decoded, nulls, NaN and infinities that are not allowed.
    pub(crate) fn column(
        &self,
        dataset: &Dataset,
        (selected, index): (&Selected, usize),
        part: &Part,
        fetched: Option<&Fetched>,
        (bench, out): (&mut Bench, &mut [u8]),
    ) -> Result<()> {
        let Some(data) = dataset.manifest().files.get(part.file) else { return Err(Error::Ended) };
        let field = &selected.field;
        let origin = Origin { file: &self.file, group: part.group, column: &field.name };
        let rows = usize::try_from(part.rows.end - part.rows.start).unwrap_or(usize::MAX);
        let Some(way) = self.ways.get(index) else { return Err(Error::Ended) };
        let get = |ranges: &[Range<u64>]| match fetched {
            Some(fetched) => Ok(fetched.clone()),
            None => Fetched::new(dataset.store(), &data.path, ranges, data.bytes),
        };
        let group = group_of(&self.footer, data, part, &self.file)?;
        let own = self.ranges.get(index).map_or(&[][..], Vec::as_slice);
        let mut nulls = 0;
        let leaf = match way {
            Way::Value(value) => {
                let values =
                    hive::repeated(value, field.element, rows).ok_or_else(|| Error::Changed {
                        column: field.name.clone(),
                        file: self.file.clone(),
                        found: value.clone(),
                        expected: field.element.name().to_owned(),
                    })?;
                copy(&values, out);
                None
            }
            Way::Nothing => {
                nulls = rows;
                let fill = filled(selected, field.width());
                out.chunks_exact_mut(fill.len().max(1))
                    .for_each(|slot| slot.copy_from_slice(&fill));
                None
            }
            Way::Pages { leaf, stored, levels, spots } => {
                let bytes = get(own)?;
                let Some(meta) = group.columns().get(*leaf) else { return Err(Error::Ended) };
                if spots.is_none() {
                    check(dataset, data, &self.file, part, (*leaf, own, &bytes))?;
                }
                let per_row = levels.length;
                let count =
                    |rows: u64| usize::try_from(rows).unwrap_or(usize::MAX).saturating_mul(per_row);
                let fill = filled(selected, stored.width());
                let chunk = Chunk {
                    compression: meta.compression(),
                    bytes: chunk_range(meta),
                    total: usize::try_from(meta.num_values()).unwrap_or_default(),
                    wanted: count(part.rows.start)..count(part.rows.end),
                    stored: *stored,
                    levels: *levels,
                    spots: spots.as_deref(),
                    fill: &fill,
                    most: self.most,
                };
                let fetch = |at| bytes.slice(at, None).map_err(|source| origin.parquet(source));
                match decode(&chunk, fetch, bench, out) {
                    Ok(found) => {
                        nulls = found;
                        None
                    }
                    Err(Trouble::Unsupported) => Some(*leaf),
                    Err(Trouble::Broken(what)) => {
                        return Err(origin.parquet(ParquetError::General(what)));
                    }
                    Err(Trouble::Ragged) => return Err(origin.ragged(field.elements() as u64)),
                    Err(Trouble::Fetch(error)) => return Err(error),
                }
            }
            Way::Library { leaf, .. } => Some(*leaf),
        };
        if let Some(leaf) = leaf {
            let chunk: Vec<Range<u64>> =
                group.columns().get(leaf).map(chunk_range).into_iter().collect();
            let bytes = if chunk == own {
                get(own)?
            } else {
                Fetched::new(dataset.store(), &data.path, &chunk, data.bytes)?
            };
            check(dataset, data, &self.file, part, (leaf, &chunk, &bytes))?;
            let source = self.source(bytes, leaf, part, &origin);
            let values = library::read(source, selected)?;
            copy(&values, out);
        }
        if nulls > 0 && selected.fill.is_none() {
            return Err(origin.nulls(nulls));
        }
        if (selected.fill.is_some() || !selected.allow_nan) && field.element.is_float() {
            numbers(out, selected).map_err(|odd| origin.odd(odd))?;
        }
        Ok(())
    }
}

impl Recipe {
    fn source<'a>(
        &'a self,
        fetched: Fetched,
        leaf: usize,
        part: &'a Part,
        origin: &'a Origin<'a>,
    ) -> Source<'a> {
        Source { footer: &self.footer, fetched, leaf, part, most: self.most, origin }
    }

    /// Decodes column number `index`, whose values have no fixed size, as [`Recipe::column`] does
    /// others.
    ///
    /// # Errors
    /// Like [`Recipe::column`].
    pub(crate) fn texts(
        &self,
        dataset: &Dataset,
        (selected, index): (&Selected, usize),
        part: &Part,
        fetched: Option<&Fetched>,
    ) -> Result<texts::Stored> {
        let Some(data) = dataset.manifest().files.get(part.file) else { return Err(Error::Ended) };
        let origin = Origin { file: &self.file, group: part.group, column: &selected.field.name };
        let own = self.ranges.get(index).map_or(&[][..], Vec::as_slice);
        let stored = match self.ways.get(index) {
            Some(Way::Value(value)) => {
                let rows = usize::try_from(part.rows.end - part.rows.start).unwrap_or(usize::MAX);
                let values = BinaryViewArray::from_iter_values(std::iter::repeat_n(value, rows));
                texts::Stored::new(values, 0)
            }
            Some(Way::Library { leaf }) => {
                let bytes = match fetched {
                    Some(fetched) => fetched.clone(),
                    None => Fetched::new(dataset.store(), &data.path, own, data.bytes)?,
                };
                check(dataset, data, &self.file, part, (*leaf, own, &bytes))?;
                library::read_texts(self.source(bytes, *leaf, part, &origin))?
            }
            Some(Way::Nothing) => {
                let rows = part.rows.end - part.rows.start;
                return Err(origin.nulls(usize::try_from(rows).unwrap_or(usize::MAX)));
            }
            Some(Way::Pages { .. }) | None => return Err(Error::Ended),
        };
        let torn =
            selected.padding.as_ref().and_then(|padding| padding.torn(stored.values.lengths()));
        torn.map_or(Ok(stored), |(bytes, width)| Err(origin.torn(bytes, width)))
    }
}

/// Compares a whole chunk with what the manifest says of it.
fn check(
    dataset: &Dataset,
    data: &DataFile,
    file: &str,
    part: &Part,
    (leaf, ranges, bytes): (usize, &[Range<u64>], &Fetched),
) -> Result<()> {
    let [range] = ranges else { return Ok(()) };
    let length = usize::try_from(range.end - range.start).ok();
    let Ok(chunk) = bytes.slice(range.start, length) else { return Ok(()) };
    dataset.intact().check((part.file, data, file), part.group, std::iter::once((leaf, &chunk)))
}

fn copy(values: &[u8], out: &mut [u8]) {
    if let Some(slots) = out.get_mut(..values.len()) {
        slots.copy_from_slice(values);
    }
}

/// The row group of a part, when the file still has as many rows as the data set says.
fn group_of<'a>(
    footer: &'a ArrowReaderMetadata,
    data: &DataFile,
    part: &Part,
    file: &str,
) -> Result<&'a RowGroupMetaData> {
    let group = footer.metadata().row_groups().get(part.group);
    let found = group.map_or(0, |group| u64::try_from(group.num_rows()).unwrap_or_default());
    let expected = data.groups.get(part.group).map_or(0, |group| group.rows);
    match group {
        Some(group) if found == expected => Ok(group),
        _ => Err(Error::Rows { file: file.to_owned(), group: part.group, found, expected }),
    }
}

/// Finds a column in a file and checks that it is what the data set says.
fn locate(footer: &ArrowReaderMetadata, field: &Field, file: &str) -> Result<Way> {
    let missing = || Error::Missing { column: field.name.clone(), file: file.to_owned() };
    let (root, found) = footer.schema().column_with_name(&field.name).ok_or_else(missing)?;
    let kind = found.data_type();
    let changed = || Error::Changed {
        column: field.name.clone(),
        file: file.to_owned(),
        found: kind.to_string(),
        expected: format!("{} of shape {:?}", field.element.name(), field.shape),
    };
    let leaf = leaf_of(footer, root).ok_or_else(changed)?;
    let packed = matches!(kind, DataType::FixedSizeBinary(width)
        if !field.shape.is_empty() && usize::try_from(*width) == Ok(field.width()));
    let same = match (shape_of(kind), kind) {
        (_, DataType::FixedSizeBinary(_)) if !field.shape.is_empty() => packed,
        (Some((element, list)), _) => element == field.element && list == (field.shape.len() == 1),
        (None, _) => false,
    };
    if !same {
        return Err(changed());
    }
    Ok(match direct(footer, kind, leaf, field) {
        Some((stored, levels)) => Way::Pages { leaf, stored, levels, spots: None },
        None => Way::Library { leaf },
    })
}
