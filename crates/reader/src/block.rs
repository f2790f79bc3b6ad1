// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decoded rows of one part of the plan.

use arrow::buffer::{Buffer, MutableBuffer};
use farandole_dataset::{Element, Part, permutation};

use crate::reader::Selected;
use crate::values::{Rows, Source, gather, shuffle};

/// Rows up to this many bytes are shuffled when they are decoded.
const NARROW: usize = 64;

/// One column of a block.
#[derive(Debug)]
pub(crate) struct BlockColumn {
    data: Buffer,
    element: Element,
    elements: usize,
    /// Whether the rows are still in file order.
    lazy: bool,
}

/// Decoded rows. Row `i` is the part's row `order[i]`.
#[derive(Debug)]
pub(crate) struct Block {
    columns: Vec<BlockColumn>,
    order: Option<Vec<u32>>,
}

impl Block {
    /// Shuffles what is narrow.
    pub(crate) fn new(part: &Part, selected: &[Selected], decoded: Vec<Buffer>) -> Self {
        let rows = usize::try_from(part.rows.end - part.rows.start).unwrap_or(usize::MAX);
        let order = part.shuffle.map(|seed| permutation(seed, u32::try_from(rows).unwrap_or(u32::MAX)));
        let arrange = |(column, data): (&Selected, Buffer)| {
            let (element, elements) = (column.field.element, column.field.elements());
            match &order {
                Some(order) if column.field.width() <= NARROW => {
                    let source = Source { data: &data, element, elements };
                    BlockColumn {
                        data: shuffle(source, order, column.out),
                        element: column.out,
                        elements,
                        lazy: false,
                    }
                }
                _ => BlockColumn { data, element, elements, lazy: true },
            }
        };
        let columns = selected.iter().zip(decoded).map(arrange).collect();
        Self { columns, order }
    }

    /// Bytes that a block of this part will take.
    pub(crate) fn bytes(part: &Part, selected: &[Selected]) -> u64 {
        let row: usize = selected.iter().map(|column| column.field.width().max(column.out_width())).sum();
        (part.rows.end - part.rows.start) * (row as u64 + 4)
    }

    /// Copies rows of column `index` to `out` from element `at` on.
    pub(crate) fn copy(&self, index: usize, rows: Rows<'_>, out: &mut MutableBuffer, to: Element, at: usize) {
        let Some(column) = self.columns.get(index) else { return };
        let order = if column.lazy { self.order.as_deref() } else { None };
        let source = Source { data: &column.data, element: column.element, elements: column.elements };
        gather(source, Rows { order, ..rows }, out, to, at);
    }
}
