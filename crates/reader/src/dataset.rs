// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A directory of Parquet, opened.

use std::sync::{Arc, OnceLock};

use farandole_dataset::{Column, DataFile, Element, Lanes, MANIFEST, Manifest, RowGroup};
use farandole_store::{Entry, Store};
use parquet::arrow::arrow_reader::ArrowReaderMetadata;

use crate::error::{Error, Result};
use crate::footer;
use crate::schema::columns_of;

/// Threads that read footers of files without a manifest.
const FOOTER_THREADS: usize = 4;

/// A column as batches see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name.
    pub name: String,
    /// Type of one element.
    pub element: Element,
    /// Shape of one row.
    pub shape: Vec<u64>,
    /// Whether there may be nulls.
    pub nullable: bool,
}

impl Field {
    pub(crate) fn of(column: &Column) -> Self {
        Self {
            name: column.name.clone(),
            element: column.element,
            shape: column.shape.clone(),
            nullable: column.nulls != Some(0),
        }
    }

    /// Elements of one row.
    pub fn elements(&self) -> usize {
        self.shape.iter().map(|side| usize::try_from(*side).unwrap_or(usize::MAX)).product()
    }

    /// Bytes of one row; 0 for texts.
    pub fn width(&self) -> usize {
        self.element.width().unwrap_or(0) * self.elements()
    }
}

/// A directory of Parquet: what is in it, and where.
#[derive(Debug)]
pub struct Dataset {
    store: Store,
    manifest: Manifest,
    lanes: Lanes,
    prepared: bool,
    unreadable: Vec<(String, String)>,
    footers: Vec<OnceLock<Arc<ArrowReaderMetadata>>>,
}

impl Dataset {
    /// Opens a directory: by its manifest, or by the footers of its files.
    ///
    /// # Errors
    /// No such place, no Parquet, files that disagree, no rows.
    pub fn open(url: &str) -> Result<Self> {
        let store = Store::open(url)?;
        let found = match store.read(MANIFEST) {
            Ok(text) => Some(Manifest::parse(&text)?),
            Err(farandole_store::Error::Missing { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        let dataset = match found {
            Some(manifest) => Self::prepared(store, manifest),
            None => Self::plain(store)?,
        };
        if dataset.manifest.rows == 0 {
            return Err(Error::NoRows { url: dataset.url() });
        }
        Ok(dataset)
    }

    fn prepared(store: Store, manifest: Manifest) -> Self {
        let texts = manifest.columns.iter().filter(|column| column.element.width().is_none());
        let unreadable =
            texts.map(|c| (c.name.clone(), format!("{} has no fixed size", c.element.name()))).collect();
        let footers = manifest.files.iter().map(|_| OnceLock::new()).collect();
        Self { store, lanes: Lanes::new(&manifest), manifest, prepared: true, unreadable, footers }
    }

    fn plain(store: Store) -> Result<Self> {
        let hidden = |path: &str| path.split('/').any(|part| part.starts_with(['_', '.']));
        let mut entries = store.list("")?;
        entries.retain(|entry| entry.path.ends_with(".parquet") && !hidden(&entry.path));
        if entries.is_empty() {
            return Err(Error::NotADataset { url: store.url() });
        }
        let footers = load_all(&store, &entries)?;
        let mut columns: Vec<(Column, Option<String>)> = Vec::new();
        for (entry, footer) in entries.iter().zip(&footers) {
            let rows = footer.metadata().file_metadata().num_rows();
            let here = columns_of(footer);
            if columns.is_empty() {
                columns = here;
            } else {
                merge(&mut columns, here, &store.name_of(&entry.path), rows > 0)?;
            }
        }
        let files = entries
            .into_iter()
            .zip(&footers)
            .map(|(entry, footer)| data_file(entry, footer, &columns))
            .collect();
        let unreadable = columns
            .iter()
            .filter_map(|(column, reason)| Some((column.name.clone(), reason.clone()?)))
            .collect();
        let manifest = Manifest::derived(columns.into_iter().map(|(column, _)| column).collect(), files)?;
        let footers = footers.into_iter().map(|footer| OnceLock::from(Arc::new(footer))).collect();
        Ok(Self { store, lanes: Lanes::new(&manifest), manifest, prepared: false, unreadable, footers })
    }

    /// Where it is.
    pub fn url(&self) -> String {
        self.store.url()
    }

    /// What is in it.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Whether there was a manifest.
    pub fn is_prepared(&self) -> bool {
        self.prepared
    }

    /// Its columns.
    pub fn fields(&self) -> Vec<Field> {
        self.manifest.columns.iter().map(Field::of).collect()
    }

    pub(crate) fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// The columns of these names, or all that a batch can hold.
    pub(crate) fn select(&self, names: Option<&[String]>) -> Result<Vec<Field>> {
        let reason =
            |name: &str| self.unreadable.iter().find(|(column, _)| column == name).map(|(_, reason)| reason);
        let Some(names) = names else {
            let all: Vec<Field> =
                self.manifest.columns.iter().filter(|c| reason(&c.name).is_none()).map(Field::of).collect();
            return if all.is_empty() { Err(Error::NoColumns { url: self.url() }) } else { Ok(all) };
        };
        let one = |name: &String| match (self.manifest.column(name)?, reason(name)) {
            (_, Some(reason)) => Err(Error::Unreadable { column: name.clone(), reason: reason.clone() }),
            (column, None) => Ok(Field::of(column)),
        };
        names.iter().map(one).collect()
    }

    pub(crate) fn footer(&self, file: usize) -> Result<Arc<ArrowReaderMetadata>> {
        let (Some(cell), Some(data)) = (self.footers.get(file), self.manifest.files.get(file)) else {
            return Err(Error::Ended);
        };
        if let Some(footer) = cell.get() {
            return Ok(Arc::clone(footer));
        }
        let footer = Arc::new(footer::load(&self.store, &data.path, data.bytes)?);
        Ok(Arc::clone(cell.get_or_init(|| footer)))
    }
}

fn load_all(store: &Store, entries: &[Entry]) -> Result<Vec<ArrowReaderMetadata>> {
    let share = entries.len().div_ceil(FOOTER_THREADS).max(1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = entries
            .chunks(share)
            .map(|chunk| {
                let load =
                    move || chunk.iter().map(|entry| footer::load(store, &entry.path, entry.bytes)).collect();
                scope.spawn(load)
            })
            .collect();
        let mut footers = Vec::with_capacity(entries.len());
        for thread in threads {
            let loaded: Result<Vec<ArrowReaderMetadata>> =
                thread.join().unwrap_or_else(|_| Err(Error::Ended));
            footers.extend(loaded?);
        }
        Ok(footers)
    })
}

/// Takes over what another file says about the columns; `full` when it has rows.
fn merge(
    columns: &mut [(Column, Option<String>)],
    here: Vec<(Column, Option<String>)>,
    file: &str,
    full: bool,
) -> Result<()> {
    for (column, reason) in columns {
        let missing = || Error::Missing { column: column.name.clone(), file: file.to_owned() };
        let (other, other_reason) =
            here.iter().find(|(other, _)| other.name == column.name).ok_or_else(missing)?;
        if other.source != column.source {
            return Err(Error::Changed {
                column: column.name.clone(),
                file: file.to_owned(),
                found: other.source.clone(),
                expected: column.source.clone(),
            });
        }
        column.nulls = column.nulls.zip(other.nulls).map(|(a, b)| a + b);
        if !full {
            continue;
        }
        if reason.as_deref() == Some("its rows are empty lists") && column.shape.is_empty() {
            (column.shape, *reason) = (other.shape.clone(), other_reason.clone());
        } else if reason.is_none() && other.shape != column.shape {
            *reason = Some("its rows have different lengths".to_owned());
        }
    }
    Ok(())
}

fn data_file(entry: Entry, footer: &ArrowReaderMetadata, columns: &[(Column, Option<String>)]) -> DataFile {
    let fixed: u64 = columns.iter().filter_map(|(column, _)| column.width()).sum();
    let count = |number: i64| u64::try_from(number).unwrap_or_default();
    let groups: Vec<RowGroup> = footer
        .metadata()
        .row_groups()
        .iter()
        .map(|group| {
            let rows = count(group.num_rows());
            RowGroup { rows, bytes: count(group.total_byte_size()).max(rows * fixed) }
        })
        .collect();
    let rows = groups.iter().map(|group| group.rows).sum();
    DataFile { path: entry.path, rows, bytes: entry.bytes, checksum: None, groups }
}
