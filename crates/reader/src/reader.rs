// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! What a rank reads, epoch by epoch.

use std::collections::HashMap;
use std::sync::Arc;

use farandole_dataset::{Element, Plan, Request, Tail};
use farandole_world::Rank;

use crate::dataset::{Dataset, Field};
use crate::epoch::Epoch;
use crate::error::{Error, Result};
use crate::values::castable;

/// How to read.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which columns, in this order; every one that a batch can hold when absent.
    pub columns: Option<Vec<String>>,
    /// Rows of a batch of this rank.
    pub batch_size: u64,
    /// This rank.
    pub rank: Rank,
    /// Ranks of the world.
    pub size: u32,
    /// Seed of the shuffle.
    pub seed: u64,
    /// File order when false.
    pub shuffle: bool,
    /// Bytes of decoded blocks held at once.
    pub byte_budget: u64,
    /// Reading threads.
    pub threads: usize,
    /// What to do with the rows that fill no batch.
    pub tail: Tail,
    /// Element types to convert to, by column; `"*"` stands for all other columns of floats.
    pub cast: HashMap<String, String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            columns: None,
            batch_size: 1,
            rank: Rank(0),
            size: 1,
            seed: 0,
            shuffle: true,
            byte_budget: 512 << 20,
            threads: 2,
            tail: Tail::Keep,
            cast: HashMap::new(),
        }
    }
}

/// A column: as it is stored, and as batches hold it.
#[derive(Clone, Debug)]
pub(crate) struct Selected {
    pub(crate) field: Field,
    pub(crate) out: Element,
}

impl Selected {
    pub(crate) fn out_width(&self) -> usize {
        self.out.width().unwrap_or(0) * self.field.elements()
    }
}

/// A rank's part of a data set.
#[derive(Debug)]
pub struct Reader {
    dataset: Arc<Dataset>,
    selected: Arc<[Selected]>,
    options: Options,
}

impl Reader {
    /// Chooses columns and checks the request.
    ///
    /// # Errors
    /// Unknown or unreadable columns, casts that cannot be, a rank past the size, no batch size.
    pub fn new(dataset: Arc<Dataset>, options: Options) -> Result<Self> {
        let fields = dataset.select(options.columns.as_deref())?;
        if let Some(name) =
            options.cast.keys().find(|name| *name != "*" && !fields.iter().any(|f| f.name == **name))
        {
            dataset.select(Some(std::slice::from_ref(name)))?;
            return Err(Error::Unreadable {
                column: name.clone(),
                reason: "it is cast but not selected".to_owned(),
            });
        }
        let selected: Result<Arc<[Selected]>> =
            fields.into_iter().map(|field| cast(field, &options.cast)).collect();
        let reader = Self { dataset, selected: selected?, options };
        Plan::new(reader.dataset.lanes(), &reader.request(0, 0))?;
        Ok(reader)
    }

    fn request(&self, epoch: u64, start_row: u64) -> Request {
        let options = &self.options;
        Request {
            seed: options.seed,
            epoch,
            shuffle: options.shuffle,
            rank: options.rank,
            size: options.size,
            batch_size: options.batch_size,
            tail: options.tail,
            start_row,
        }
    }

    /// What batches hold.
    pub fn fields(&self) -> Vec<Field> {
        self.selected.iter().map(|column| Field { element: column.out, ..column.field.clone() }).collect()
    }

    /// Batches of an epoch that starts after `start_row` rows, the same on every rank.
    pub fn steps(&self, start_row: u64) -> u64 {
        self.request(0, start_row).steps(self.dataset.manifest().rows)
    }

    /// Starts an epoch.
    ///
    /// # Errors
    /// A budget that is too small, no threads.
    pub fn epoch(&self, epoch: u64, start_row: u64) -> Result<Epoch> {
        let plan = Plan::new(self.dataset.lanes(), &self.request(epoch, start_row))?;
        let (budget, threads) = (self.options.byte_budget, self.options.threads.clamp(1, 64));
        Epoch::start(Arc::clone(&self.dataset), Arc::clone(&self.selected), plan, budget, threads)
    }
}

fn cast(field: Field, casts: &HashMap<String, String>) -> Result<Selected> {
    let named = casts.get(&field.name);
    let Some(to) = named.or_else(|| casts.get("*").filter(|_| field.element.is_float())) else {
        return Ok(Selected { out: field.element, field });
    };
    match Element::named(to).filter(|out| castable(field.element, *out)) {
        Some(out) => Ok(Selected { out, field }),
        None => Err(Error::Cast { column: field.name, from: field.element.name(), to: to.clone() }),
    }
}
