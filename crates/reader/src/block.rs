// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decoded rows of one part of the plan.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::BinaryViewArray;
use farandole_dataset::{Element, Part, permutation};

use crate::batch::padded;
use crate::cache::Cache;
use crate::column::Selected;
use crate::dataset::Dataset;
use crate::decode::Recipe;
use crate::error::{Error, Result};
use crate::footer::Fetched;
use crate::pages::Bench;
use crate::pool::{Pool, Slab};
use crate::texts::Stored;
use crate::values::{Rows, Source, shuffle};

/// Rows up to this many bytes are shuffled when they are decoded.
const NARROW: usize = 64;

/// Bytes of all columns up to which they are fetched together: opening a file costs more than they
/// do.
const TOGETHER: u64 = 1 << 20;

/// One column of a block.
#[derive(Debug)]
struct BlockColumn {
    /// Its bytes in the slab.
    bytes: Range<usize>,
    element: Element,
    elements: usize,
    /// Whether the rows are still in file order.
    lazy: bool,
    /// Its values, where they have no fixed size.
    texts: Option<Stored>,
}

/// Decoded rows. Row `i` is the part's row `order[i]`.
#[derive(Debug)]
pub(crate) struct Block {
    slab: Slab,
    columns: Vec<BlockColumn>,
    order: Option<Vec<u32>>,
}

/// The parts that make blocks.
pub(crate) struct Maker<'a> {
    pub(crate) dataset: &'a Dataset,
    pub(crate) selected: &'a [Selected],
    pub(crate) pool: &'a Arc<Pool>,
    pub(crate) cache: Option<&'a Cache>,
}

impl Maker<'_> {
    /// Decodes a part, or takes it from the cache; shuffles what is narrow. Bytes that were not
    /// fetched before are fetched one column after the other.
    ///
    /// # Errors
    /// Bytes that cannot be had or decoded.
    pub(crate) fn block(
        &self,
        part: &Part,
        fetched: Option<(Recipe, Fetched)>,
        bench: &mut Bench,
    ) -> Result<Block> {
        let rows = usize::try_from(part.rows.end - part.rows.start).unwrap_or(usize::MAX);
        let order =
            part.shuffle.map(|seed| permutation(seed, u32::try_from(rows).unwrap_or(u32::MAX)));
        let (recipe, bytes) = fetched.unzip();
        let cached = self.cache.filter(|cache| recipe.is_none() && cache.has(part));
        let recipe = match (recipe, cached) {
            (None, None) => {
                Some(Recipe::new(self.dataset, self.selected, part, self.pool.limit())?)
            }
            (recipe, _) => recipe,
        };
        let bytes = match (bytes, &recipe) {
            (None, Some(recipe)) if recipe.size() <= TOGETHER => {
                Some(recipe.fetch(self.dataset, part)?)
            }
            (bytes, _) => bytes,
        };
        let mut columns = columns(self.selected, rows, order.is_some());
        let narrow = |(column, place): (&Selected, &BlockColumn)| {
            if place.lazy { 0 } else { column.field.width() }
        };
        let widest = self.selected.iter().zip(&columns).map(narrow).max().unwrap_or(0);
        let mut raw = self.pool.take(rows.saturating_mul(widest));
        let mut slab = self.pool.take(columns.last().map_or(0, |column| column.bytes.end));
        for ((index, column), place) in self.selected.iter().enumerate().zip(&mut columns) {
            if column.field.is_text() {
                let recipe = recipe.as_ref().ok_or(Error::Ended)?;
                place.texts =
                    Some(recipe.texts(self.dataset, (column, index), part, bytes.as_ref())?);
                continue;
            }
            let out = slab.bytes_mut().get_mut(place.bytes.clone()).unwrap_or_default();
            let stored = rows.saturating_mul(column.field.width());
            let data = if place.lazy {
                &mut *out
            } else {
                raw.bytes_mut().get_mut(..stored).unwrap_or_default()
            };
            match (&recipe, cached) {
                (Some(recipe), _) => {
                    recipe.column(
                        self.dataset,
                        (column, index),
                        part,
                        bytes.as_ref(),
                        (bench, &mut *data),
                    )?;
                    if let Some(cache) = self.cache {
                        cache.put(part, index, data);
                    }
                }
                (None, Some(cache)) => cache.get(part, index, data)?,
                (None, None) => return Err(Error::Ended),
            }
            if let (Some(order), false) = (&order, place.lazy) {
                let (element, elements) = (column.field.element, column.field.elements());
                let data = raw.bytes().get(..stored).unwrap_or_default();
                shuffle(Source { data, element, elements }, order, out, column.out);
            }
        }
        if let (Some(cache), Some(_)) = (self.cache, &recipe) {
            cache.done(part);
        }
        Ok(Block { slab, columns, order })
    }
}

/// Returns the places of columns in a block of so many rows, which is `shuffled` or stays in file
/// order.
fn columns(selected: &[Selected], rows: usize, shuffled: bool) -> Vec<BlockColumn> {
    let mut end = 0_usize;
    let place = |column: &Selected| {
        let lazy = !shuffled || column.field.width() > NARROW;
        let element = if lazy { column.field.element } else { column.out };
        let width = if lazy { column.field.width() } else { column.out_width() };
        let bytes = end..end.saturating_add(rows.saturating_mul(width));
        end = padded(bytes.end);
        BlockColumn { bytes, element, elements: column.field.elements(), lazy, texts: None }
    };
    selected.iter().map(place).collect()
}

impl Block {
    /// Bytes of values that have no fixed size.
    pub(crate) fn text_bytes(&self) -> u64 {
        let texts = self.columns.iter().filter_map(|column| column.texts.as_ref());
        texts.map(|texts| texts.held).fold(0, u64::saturating_add)
    }

    /// Rows of column `index`, whose values have no fixed size.
    pub(crate) fn texts<'a>(
        &'a self,
        index: usize,
        rows: Rows<'a>,
    ) -> Option<(&'a BinaryViewArray, Rows<'a>)> {
        let texts = self.columns.get(index)?.texts.as_ref()?;
        Some((&texts.values, Rows { order: self.order.as_deref(), ..rows }))
    }

    /// Bytes that a block of this part will take, but for values that have no fixed size.
    pub(crate) fn bytes(part: &Part, selected: &[Selected]) -> u64 {
        let widths = selected.iter().map(|column| column.field.width().max(column.out_width()));
        let row = widths.fold(4, usize::saturating_add);
        (part.rows.end - part.rows.start).saturating_mul(row as u64)
    }

    /// Rows of column `index`.
    pub(crate) fn strand<'a>(
        &'a self,
        index: usize,
        rows: Rows<'a>,
    ) -> Option<(Source<'a>, Rows<'a>)> {
        let column = self.columns.get(index)?;
        let order = if column.lazy { self.order.as_deref() } else { None };
        let data = self.slab.bytes().get(column.bytes.clone())?;
        let source = Source { data, element: column.element, elements: column.elements };
        Some((source, Rows { order, ..rows }))
    }
}
