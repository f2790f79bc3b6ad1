// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A directory of Parquet, opened.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, OnceLock};

use farandole_dataset::{Column, DataFile, Lanes, MANIFEST, Manifest, RowGroup};
use farandole_store::{Entry, Store};
use parking_lot::Mutex;
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;

use crate::column::Field;
use crate::error::{Error, Result};
use crate::footer::{self, Footer};
use crate::hive;
use crate::intact::Intact;
use crate::pages::{Lost, Spots, find};
use crate::schema::columns_of;

/// Files that may be looked into at the same time.
const STRIPES: usize = 32;

/// A writer of manifests knows the sizes of texts only roughly: by so much it may say too much.
const OVERSTATED: u64 = 16;
/// Threads that read footers of files without a manifest.
const FOOTER_THREADS: usize = 4;

/// A directory of Parquet: what is in it, and where.
#[derive(Debug)]
pub struct Dataset {
    store: Store,
    manifest: Manifest,
    lanes: Lanes,
    prepared: bool,
    unreadable: Vec<(String, String)>,
    footers: Vec<OnceLock<Arc<Footer>>>,
    intact: Intact,
    pages: Mutex<HashMap<(usize, usize, usize), Arc<Spots>>>,
    /// Held while something about a file is looked up, so that it is fetched once.
    looking: [Mutex<()>; STRIPES],
}

/// In a directory whose preparation has not ended.
const UNFINISHED: &str = "_preparation.json";

/// A row group of which a manifest says that it takes more bytes than it does.
#[derive(Debug)]
pub(crate) struct Overstated {
    pub(crate) file: String,
    pub(crate) group: usize,
    pub(crate) claimed: u64,
    pub(crate) found: u64,
}

impl Dataset {
    /// Opens a directory: by its manifest, or by the footers of its files.
    ///
    /// # Errors
    /// No such place, no Parquet, files that disagree, no rows; a preparation that has not ended, a
    /// table whose log tells which files count.
    pub fn open(url: &str) -> Result<Self> {
        let store = Store::open(url)?;
        let found = match store.read(MANIFEST) {
            Ok(text) => Some(Manifest::parse(&text)?),
            Err(farandole_store::Error::Missing { .. }) => None,
            // Local file systems say that something below a file cannot be opened.
            Err(_) if store.size("").is_ok() => return Err(Error::IsFile { url: store.url() }),
            Err(error) => return Err(error.into()),
        };
        let dataset = match found {
            Some(manifest) => Self::prepared(store, manifest)?,
            None => Self::found(store)?,
        };
        if dataset.manifest.rows == 0 {
            return Err(Error::NoRows { url: dataset.url() });
        }
        Ok(dataset)
    }

    /// Opens some files below a directory, with the values of columns that are not in them.
    ///
    /// # Errors
    /// Like [`Dataset::open`].
    pub fn open_files(url: &str, files: Vec<(String, BTreeMap<String, String>)>) -> Result<Self> {
        let store = Store::open(url)?;
        let mut entries = Vec::with_capacity(files.len());
        let mut values = Vec::with_capacity(files.len());
        for (path, columns) in files {
            entries.push(Entry { bytes: store.size(&path)?, modified: None, path });
            values.push(columns);
        }
        let dataset = Self::plain(store, entries, values)?;
        if dataset.manifest.rows == 0 {
            Err(Error::NoRows { url: dataset.url() })
        } else {
            Ok(dataset)
        }
    }

    fn prepared(store: Store, manifest: Manifest) -> Result<Self> {
        let (linked, store) = match &manifest.base {
            Some(base) => (true, Store::open(base)?),
            None => (false, store),
        };
        let reason = |column: &Column| Some((column.name.clone(), column.unreadable.clone()?));
        let unreadable = manifest.columns.iter().filter_map(reason).collect();
        let footers = manifest.files.iter().map(|_| OnceLock::new()).collect();
        let (lanes, intact) = (Lanes::new(&manifest), Intact::default());
        Ok(Self {
            store,
            lanes,
            manifest,
            prepared: !linked,
            unreadable,
            footers,
            intact,
            pages: Mutex::default(),
            looking: Default::default(),
        })
    }

    /// All Parquet files of a directory that was not prepared.
    fn found(store: Store) -> Result<Self> {
        let hidden = |path: &str| path.split('/').any(|part| part.starts_with(['_', '.']));
        let mut entries = store.list("")?;
        let has = |name: &str| entries.iter().any(|entry| entry.path == name);
        if has(UNFINISHED) {
            return Err(Error::Unfinished { url: store.url() });
        }
        // Files that such a log has dropped still lie there.
        for (kind, log) in [("Delta", "_delta_log/"), ("Hudi", ".hoodie/")] {
            if entries.iter().any(|entry| entry.path.starts_with(log)) {
                return Err(Error::Table { kind, url: store.url() });
            }
        }
        if entries
            .iter()
            .any(|e| e.path.starts_with("metadata/") && e.path.ends_with(".metadata.json"))
        {
            return Err(Error::Table { kind: "Iceberg", url: store.url() });
        }
        entries.retain(|entry| entry.path.ends_with(".parquet") && !hidden(&entry.path));
        let values = entries.iter().map(|entry| hive::values_of(&entry.path)).collect();
        Self::plain(store, entries, values)
    }

    fn plain(
        store: Store,
        entries: Vec<Entry>,
        values: Vec<BTreeMap<String, String>>,
    ) -> Result<Self> {
        if entries.is_empty() {
            let url = store.url();
            return Err(if store.size("").is_ok() {
                Error::IsFile { url }
            } else {
                Error::NotADataset { url }
            });
        }
        let footers = load_all(&store, &entries)?;
        let mut columns: Vec<(Column, Option<String>)> = Vec::new();
        for (entry, footer) in entries.iter().zip(&footers) {
            let rows = footer.metadata().file_metadata().num_rows();
            let here = columns_of(footer);
            distinct(&here, &store.name_of(&entry.path))?;
            if columns.is_empty() {
                columns = here;
            } else {
                merge(&mut columns, here, &store.name_of(&entry.path), rows > 0)?;
            }
        }
        let mut files: Vec<DataFile> = entries
            .into_iter()
            .zip(&footers)
            .map(|(entry, footer)| data_file(entry, footer, &columns))
            .collect();
        for (file, mut values) in files.iter_mut().zip(values) {
            values.retain(|name, _| columns.iter().all(|(column, _)| column.name != *name));
            file.values = values;
        }
        columns.extend(hive::columns_of(&files).into_iter().map(|mut column| {
            let reason = column.unreadable.take();
            (column, reason)
        }));
        let unreadable = columns
            .iter()
            .filter_map(|(column, reason)| Some((column.name.clone(), reason.clone()?)))
            .collect();
        let manifest =
            Manifest::derived(columns.into_iter().map(|(column, _)| column).collect(), files)?;
        let footers = footers
            .into_iter()
            .map(|footer| OnceLock::from(Arc::new(Footer::new(footer))))
            .collect();
        let (lanes, intact) = (Lanes::new(&manifest), Intact::default());
        Ok(Self {
            store,
            lanes,
            manifest,
            prepared: false,
            unreadable,
            footers,
            intact,
            pages: Mutex::default(),
            looking: Default::default(),
        })
    }

    /// Writes a manifest to the directory `at` by which this data set, which stays where it is,
    /// opens without another look at its files.
    ///
    /// # Errors
    /// The store's.
    pub fn link(&self, at: &str) -> Result<()> {
        let mut manifest = self.manifest.clone();
        manifest.base = Some(self.store.url());
        for column in &mut manifest.columns {
            let reason = self.unreadable.iter().find(|(name, _)| *name == column.name);
            column.unreadable = reason.map(|(_, reason)| reason.clone());
        }
        Store::open(at)?.write(MANIFEST, manifest.to_json()?.into())?;
        Ok(())
    }

    /// Returns its URL.
    pub fn url(&self) -> String {
        self.store.url()
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns whether there was a manifest.
    pub fn is_prepared(&self) -> bool {
        self.prepared
    }

    /// Its columns.
    pub fn fields(&self) -> Vec<Field> {
        self.manifest.columns.iter().map(Field::of).collect()
    }

    /// Returns the places of the pages of a leaf of a row group of a file, looked up once.
    pub(crate) fn spots(
        &self,
        (file, group, leaf): (usize, usize, usize),
        footer: &ArrowReaderMetadata,
        per_row: u64,
    ) -> Result<Arc<Spots>> {
        if let Some(known) = self.pages.lock().get(&(file, group, leaf)) {
            return Ok(Arc::clone(known));
        }
        let _alone = self.looking.get(file % STRIPES).map(Mutex::lock);
        if let Some(known) = self.pages.lock().get(&(file, group, leaf)) {
            return Ok(Arc::clone(known));
        }
        let chunk =
            footer.metadata().row_groups().get(group).and_then(|group| group.columns().get(leaf));
        let (Some(chunk), Some(data)) = (chunk, self.manifest.files.get(file)) else {
            return Err(Error::Ended);
        };
        let found = find(&self.store, &data.path, chunk, per_row).map_err(|lost| match lost {
            Lost::Store(error) => Error::Store(error),
            Lost::Broken(what) => Error::Parquet {
                file: self.store.name_of(&data.path),
                group,
                column: chunk.column_path().string(),
                source: ParquetError::General(what),
            },
        })?;
        Ok(Arc::clone(self.pages.lock().entry((file, group, leaf)).or_insert(Arc::new(found))))
    }

    pub(crate) fn intact(&self) -> &Intact {
        &self.intact
    }

    pub(crate) fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// The columns of these names, or all of numbers that a batch can hold.
    pub(crate) fn select(&self, names: Option<&[String]>) -> Result<Vec<Field>> {
        let reason = |name: &str| {
            self.unreadable.iter().find(|(column, _)| column == name).map(|(_, reason)| reason)
        };
        let Some(names) = names else {
            let columns =
                self.manifest.columns.iter().filter(|column| reason(&column.name).is_none());
            let all: Vec<Field> = columns.map(Field::of).filter(|field| !field.is_text()).collect();
            return if all.is_empty() {
                Err(Error::NoColumns { url: self.url() })
            } else {
                Ok(all)
            };
        };
        let one = |name: &String| match (self.manifest.column(name)?, reason(name)) {
            (_, Some(reason)) => {
                Err(Error::Unreadable { column: name.clone(), reason: reason.clone() })
            }
            (column, None) => Ok(Field::of(column)),
        };
        names.iter().map(one).collect()
    }

    /// The row group that the manifest says takes most, if its file says that it takes a small part
    /// of that.
    pub(crate) fn overstated(&self) -> Result<Option<Overstated>> {
        let files = self.manifest.files.iter().enumerate();
        let groups = files.flat_map(|(file, data)| {
            data.groups.iter().enumerate().map(move |(group, said)| (said.bytes, file, group))
        });
        let Some((claimed, file, group)) = groups.max().filter(|_| self.prepared) else {
            return Ok(None);
        };
        let footer = self.footer(file)?;
        let Some(known) = footer.metadata().row_groups().get(group) else { return Ok(None) };
        let found = decoded(known, fixed(self.manifest.columns.iter())).bytes;
        let path = self.manifest.files.get(file).map_or("", |data| &data.path);
        let overstated = Overstated { file: self.store.name_of(path), group, claimed, found };
        Ok((found < claimed / OVERSTATED).then_some(overstated))
    }

    pub(crate) fn footer(&self, file: usize) -> Result<Arc<Footer>> {
        let (Some(cell), Some(data)) = (self.footers.get(file), self.manifest.files.get(file))
        else {
            return Err(Error::Ended);
        };
        if let Some(footer) = cell.get() {
            return Ok(Arc::clone(footer));
        }
        let _alone = self.looking.get(file % STRIPES).map(Mutex::lock);
        if let Some(footer) = cell.get() {
            return Ok(Arc::clone(footer));
        }
        let footer = Arc::new(Footer::new(footer::load(&self.store, &data.path, data.bytes)?));
        Ok(Arc::clone(cell.get_or_init(|| footer)))
    }
}

fn load_all(store: &Store, entries: &[Entry]) -> Result<Vec<ArrowReaderMetadata>> {
    let share = entries.len().div_ceil(FOOTER_THREADS).max(1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = entries
            .chunks(share)
            .map(|chunk| {
                let load = move || {
                    chunk
                        .iter()
                        .map(|entry| footer::load(store, &entry.path, entry.bytes))
                        .collect()
                };
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

/// Refuses columns whose names cannot be written.
fn distinct(columns: &[(Column, Option<String>)], file: &str) -> Result<()> {
    let mut seen = HashSet::new();
    match columns.iter().find(|(column, _)| !seen.insert(column.name.as_str())) {
        Some((column, _)) => {
            Err(Error::Ambiguous { column: column.name.clone(), file: file.to_owned() })
        }
        None => Ok(()),
    }
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
        column.nulls = column.nulls.zip(other.nulls).map(|(a, b)| a.saturating_add(b));
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

fn data_file(
    entry: Entry,
    footer: &ArrowReaderMetadata,
    columns: &[(Column, Option<String>)],
) -> DataFile {
    let fixed = fixed(columns.iter().map(|(column, _)| column));
    let groups = footer.metadata().row_groups().iter().map(|group| decoded(group, fixed)).collect();
    DataFile::new(entry.path, entry.bytes, groups)
}

/// Bytes of a row in columns whose values have a fixed size.
fn fixed<'a>(columns: impl Iterator<Item = &'a Column>) -> u64 {
    columns.filter_map(Column::width).fold(0, u64::saturating_add)
}

/// A row group as its file's footer describes it.
fn decoded(group: &RowGroupMetaData, fixed: u64) -> RowGroup {
    let count = |number: i64| u64::try_from(number).unwrap_or_default();
    let rows = count(group.num_rows());
    let stored = group.columns().iter().map(|chunk| count(chunk.uncompressed_size()));
    let stored = stored.fold(0, u64::saturating_add);
    RowGroup { rows, bytes: stored.max(rows.saturating_mul(fixed)) }
}
