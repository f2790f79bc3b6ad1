// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reads the rows of one rank, epoch by epoch.

use std::collections::HashMap;
use std::sync::Arc;

use farandole_dataset::{ElementType, EpochPlan, EpochRequest, TailPolicy};
use farandole_world::Rank;

use crate::cache::BlockCache;
use crate::column::{BatchField, SelectedColumn};
use crate::dataset::ParquetDataset;
use crate::epoch::{EpochReader, EpochSetup};
use crate::error::{Error, Result};
use crate::fill_value::{FillValue, is_representable};
use crate::padding::RowPadding;
use crate::pool::BufferPool;
use crate::values::is_castable;

/// Options of a reader.
#[derive(Clone, Debug)]
pub struct ReaderOptions {
    /// Columns, in this order; if absent, all numeric columns that a batch can contain.
    pub columns: Option<Vec<String>>,
    /// Rows in a batch of this rank.
    pub batch_size: u64,
    /// This rank.
    pub rank: Rank,
    /// Number of ranks.
    pub size: u32,
    /// Seed of the shuffle.
    pub seed: u64,
    /// Whether rows are shuffled; otherwise they come in file order.
    pub shuffle: bool,
    /// Most bytes of decoded blocks at a time.
    pub byte_budget: u64,
    /// Number of decoding threads.
    pub threads: usize,
    /// Policy for rows that fill no batch.
    pub tail: TailPolicy,
    /// Element types to convert to, by column; `"*"` is for all other float columns.
    pub cast: HashMap<String, String>,
    /// Replacements of nulls, and of NaN in floats, by column; `"*"` is for all other columns with
    /// such values. Without a replacement, they are errors.
    pub fill: HashMap<String, FillValue>,
    /// Whether NaN without a replacement and infinities are accepted.
    pub allow_nan: bool,
    /// Padding rules of ragged columns, whose rows are stored as bytes.
    pub pad: HashMap<String, RowPadding>,
    /// Directory for decoded blocks that all readers of the same columns on this host share.
    pub cache: Option<String>,
}

impl Default for ReaderOptions {
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
            tail: TailPolicy::Keep,
            cast: HashMap::new(),
            fill: HashMap::new(),
            allow_nan: true,
            pad: HashMap::new(),
            cache: None,
        }
    }
}

/// A reader of one rank's rows of a data set.
#[derive(Debug)]
pub struct Reader {
    setup: EpochSetup,
    options: ReaderOptions,
}

impl Reader {
    /// Selects columns and checks the options.
    ///
    /// # Errors
    /// Unknown or unreadable columns, unsupported casts, a rank outside of the world, a batch size
    /// of 0.
    pub fn new(dataset: Arc<ParquetDataset>, options: ReaderOptions) -> Result<Self> {
        let fields = dataset.select_fields(options.columns.as_deref())?;
        for (what, names) in [
            ("cast", column_names(&options.cast)),
            ("filled", column_names(&options.fill)),
            ("padded", column_names(&options.pad)),
        ] {
            let unknown = |name: &&String| *name != "*" && !fields.iter().any(|f| f.name == **name);
            if let Some(name) = names.into_iter().find(unknown) {
                dataset.select_fields(Some(std::slice::from_ref(name)))?;
                let reason = format!("it is {what} but not selected");
                return Err(Error::Unreadable { column: name.clone(), reason });
            }
        }
        let selected: Arc<[SelectedColumn]> = fields
            .into_iter()
            .map(|field| select_column(field, &options))
            .collect::<Result<_>>()?;
        let cache = match &options.cache {
            Some(directory) => {
                BlockCache::open_or_create(directory, &dataset, &selected)?.map(Arc::new)
            }
            None => None,
        };
        let batch_field = |column: &SelectedColumn| BatchField {
            element: column.output_element,
            ..column.field.clone()
        };
        let setup = EpochSetup {
            dataset,
            fields: selected.iter().map(batch_field).collect(),
            selected,
            pool: BufferPool::new(0),
            cache,
            budget: options.byte_budget,
            threads: options.threads.clamp(1, 64),
        };
        let reader = Self { setup, options };
        EpochPlan::new(reader.setup.dataset.lane_layout(), &reader.epoch_request(0, 0, None))?;
        Ok(reader)
    }

    fn epoch_request(&self, epoch: u64, start_row: u64, max_steps: Option<u64>) -> EpochRequest {
        let options = &self.options;
        EpochRequest {
            seed: options.seed,
            epoch,
            shuffle: options.shuffle,
            rank: options.rank,
            size: options.size,
            batch_size: options.batch_size,
            tail: options.tail,
            start_row,
            max_steps,
        }
    }

    /// Returns the fields of batches.
    pub fn fields(&self) -> Vec<BatchField> {
        self.setup.fields.to_vec()
    }

    /// Returns the number of batches of an epoch that starts after `start_row` rows; it is the same
    /// on every rank, except with [`TailPolicy::Join`].
    pub fn step_count(&self, start_row: u64) -> u64 {
        self.epoch_request(0, start_row, None).step_count(self.setup.dataset.manifest().rows)
    }

    /// Starts an epoch after `start_row` rows. With `max_steps`, it ends after so many batches, and
    /// loads nothing for later ones.
    ///
    /// # Errors
    /// A budget that is too small, or a thread that cannot be started.
    pub fn start_epoch(
        &self,
        epoch: u64,
        start_row: u64,
        max_steps: Option<u64>,
    ) -> Result<EpochReader> {
        let request = self.epoch_request(epoch, start_row, max_steps);
        EpochReader::start_threads(self.setup.clone(), &request)
    }
}

fn column_names<T>(map: &HashMap<String, T>) -> Vec<&String> {
    map.keys().collect()
}

fn select_column(field: BatchField, options: &ReaderOptions) -> Result<SelectedColumn> {
    let unreadable =
        |reason: &str| Error::Unreadable { column: field.name.clone(), reason: reason.to_owned() };
    if field.is_variable_length() && options.cache.is_some() {
        return Err(unreadable("a text column cannot be cached: the cache holds numbers only"));
    }
    let named = options.fill.get(&field.name);
    if field.is_variable_length() && named.is_some() {
        return Err(unreadable(
            "a text column cannot be filled with a number: fill it when the data is prepared",
        ));
    }
    if let Some(value) = named.filter(|value| !is_representable(field.element, **value)) {
        return Err(unreadable(&format!(
            "its {} cannot be filled with {value}",
            field.element.numpy_name()
        )));
    }
    let fill = named
        .or_else(|| options.fill.get("*").filter(|value| is_representable(field.element, **value)))
        .copied();
    let padding = options.pad.get(&field.name);
    if padding.is_some() && field.element != ElementType::Binary {
        return Err(unreadable("only lists of different lengths are padded"));
    }
    if let Some(what) = padding.and_then(RowPadding::find_defect) {
        return Err(unreadable(what));
    }
    let out = cast_target(&field, &options.cast)?;
    let padding = padding.cloned().map(Arc::new);
    Ok(SelectedColumn { output_element: out, fill, allow_nan: options.allow_nan, padding, field })
}

fn cast_target(field: &BatchField, casts: &HashMap<String, String>) -> Result<ElementType> {
    let named = casts.get(&field.name);
    let Some(to) = named.or_else(|| casts.get("*").filter(|_| field.element.is_float())) else {
        return Ok(field.element);
    };
    let out = ElementType::from_numpy_name(to).filter(|out| is_castable(field.element, *out));
    out.ok_or_else(|| Error::Cast {
        column: field.name.clone(),
        from: field.element.numpy_name(),
        to: to.clone(),
    })
}
