// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The reader of one rank, epoch by epoch.

use std::collections::HashMap;
use std::sync::Arc;

use farandole_dataset::{Element, Plan, Request, Tail};
use farandole_world::Rank;

use crate::cache::Cache;
use crate::column::{Field, Selected};
use crate::dataset::Dataset;
use crate::epoch::{Epoch, Setup};
use crate::error::{Error, Result};
use crate::fill::fits;
use crate::padding::Padding;
use crate::pool::Pool;
use crate::values::castable;

/// Options of reading.
#[derive(Clone, Debug)]
pub struct Options {
    /// Columns, in this order; all columns of numbers that a batch can hold if absent.
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
    /// Treatment of the rows that fill no batch.
    pub tail: Tail,
    /// Element types to convert to, by column; `"*"` stands for all other columns of floats.
    pub cast: HashMap<String, String>,
    /// Replacements of nulls, and of NaN among floats, by column; `"*"` stands for all other
    /// columns with such values. They are errors else.
    pub fill: HashMap<String, f64>,
    /// Takes NaN that is not filled, and infinities, as values like any others.
    pub allow_nan: bool,
    /// The padding of ragged columns, whose rows are stored as bytes, to one length.
    pub pad: HashMap<String, Padding>,
    /// A directory where decoded blocks are kept for all readers of this host that read the same
    /// columns.
    pub cache: Option<String>,
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
            fill: HashMap::new(),
            allow_nan: true,
            pad: HashMap::new(),
            cache: None,
        }
    }
}

/// A rank's part of a data set.
#[derive(Debug)]
pub struct Reader {
    dataset: Arc<Dataset>,
    selected: Arc<[Selected]>,
    options: Options,
    pool: Arc<Pool>,
    cache: Option<Arc<Cache>>,
}

impl Reader {
    /// Chooses columns and checks the request.
    ///
    /// # Errors
    /// Unknown or unreadable columns, casts that cannot be, a rank past the size, no batch size.
    pub fn new(dataset: Arc<Dataset>, options: Options) -> Result<Self> {
        let fields = dataset.select(options.columns.as_deref())?;
        for (what, names) in [
            ("cast", names(&options.cast)),
            ("filled", names(&options.fill)),
            ("padded", names(&options.pad)),
        ] {
            let unknown = |name: &&String| *name != "*" && !fields.iter().any(|f| f.name == **name);
            if let Some(name) = names.into_iter().find(unknown) {
                dataset.select(Some(std::slice::from_ref(name)))?;
                let reason = format!("it is {what} but not selected");
                return Err(Error::Unreadable { column: name.clone(), reason });
            }
        }
        let selected: Arc<[Selected]> =
            fields.into_iter().map(|field| select(field, &options)).collect::<Result<_>>()?;
        let cache = match &options.cache {
            Some(directory) => Some(Arc::new(Cache::open(directory, &dataset, &selected)?)),
            None => None,
        };
        let reader = Self { dataset, selected, options, pool: Pool::new(0), cache };
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

    /// Returns the fields of batches.
    pub fn fields(&self) -> Vec<Field> {
        self.selected
            .iter()
            .map(|column| Field { element: column.out, ..column.field.clone() })
            .collect()
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
        Epoch::start(Setup {
            dataset: Arc::clone(&self.dataset),
            selected: Arc::clone(&self.selected),
            pool: Arc::clone(&self.pool),
            cache: self.cache.clone(),
            plan,
            budget: self.options.byte_budget,
            threads: self.options.threads.clamp(1, 64),
        })
    }
}

fn names<T>(map: &HashMap<String, T>) -> Vec<&String> {
    map.keys().collect()
}

fn select(field: Field, options: &Options) -> Result<Selected> {
    let unreadable =
        |reason: &str| Error::Unreadable { column: field.name.clone(), reason: reason.to_owned() };
    if field.is_text() && options.cache.is_some() {
        return Err(unreadable("it has texts, and only numbers are kept in memory"));
    }
    let named = options.fill.get(&field.name);
    if field.is_text() && named.is_some() {
        return Err(unreadable(
            "it has texts, which a number cannot fill: fill them when the data is prepared",
        ));
    }
    if let Some(value) = named.filter(|value| !fits(field.element, **value)) {
        return Err(unreadable(&format!(
            "its {} cannot be filled with {value}",
            field.element.name()
        )));
    }
    let fill = named
        .or_else(|| options.fill.get("*").filter(|value| fits(field.element, **value)))
        .copied();
    let padding = options.pad.get(&field.name);
    if padding.is_some() && field.element != Element::Binary {
        return Err(unreadable("only lists of different lengths are padded"));
    }
    if let Some(what) = padding.and_then(Padding::wrong) {
        return Err(unreadable(what));
    }
    let out = cast(&field, &options.cast)?;
    let padding = padding.cloned().map(Arc::new);
    Ok(Selected { out, fill, allow_nan: options.allow_nan, padding, field })
}

fn cast(field: &Field, casts: &HashMap<String, String>) -> Result<Element> {
    let named = casts.get(&field.name);
    let Some(to) = named.or_else(|| casts.get("*").filter(|_| field.element.is_float())) else {
        return Ok(field.element);
    };
    let out = Element::named(to).filter(|out| castable(field.element, *out));
    out.ok_or_else(|| Error::Cast {
        column: field.name.clone(),
        from: field.element.name(),
        to: to.clone(),
    })
}
