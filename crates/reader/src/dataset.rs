// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! An opened directory of Parquet files.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use farandole_dataset::{
    DataFile, ElementType, FileValues, LaneLayout, MANIFEST_FILE_NAME, Manifest, ManifestColumn,
    PlanPart, RowGroup, non_null_values, partition_columns, partition_values,
};
use farandole_store::{FileEntry, Store};
use parking_lot::Mutex;
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;

use crate::chunk_verification::VerifiedChunks;
use crate::column::BatchField;
use crate::error::{Error, Result};
use crate::footer::{self, FileFooter};
use crate::pages::{PageIndex, PageLookupError, find_pages};
use crate::schema::file_columns;
use crate::table_columns::{TableColumn, TableFile, TableSchema, split_deleted_rows};

/// Locks for look-ups in files: file `i` uses lock `i % LOOKUP_LOCK_STRIPES`.
const LOOKUP_LOCK_STRIPES: usize = 32;

/// Factor by which a manifest may overstate a row group: its writer knows sizes of strings only
/// roughly.
const OVERSTATEMENT_FACTOR: u64 = 16;
/// Threads that read footers of files without a manifest.
const FOOTER_THREADS: usize = 4;

/// A directory of Parquet files: their content and positions.
#[derive(Debug)]
pub struct ParquetDataset {
    store: Store,
    manifest: Manifest,
    lanes: LaneLayout,
    prepared: bool,
    unreadable: Vec<(String, String)>,
    /// Columns about which the files disagree; a request for all columns fails.
    disputed: Vec<String>,
    footers: Vec<OnceLock<Arc<FileFooter>>>,
    verified_chunks: VerifiedChunks,
    pages: Mutex<HashMap<(usize, usize, usize), Arc<PageIndex>>>,
    /// Held during a look-up in a file, so that two threads do not fetch the same bytes.
    lookup_locks: [Mutex<()>; LOOKUP_LOCK_STRIPES],
}

/// File of a directory whose preparation has not finished.
const UNFINISHED_MARKER_FILE: &str = "_preparation.json";

/// A row group that takes fewer bytes than the manifest states.
#[derive(Debug)]
pub(crate) struct OverstatedRowGroup {
    pub(crate) file: String,
    pub(crate) group: usize,
    pub(crate) claimed: u64,
    pub(crate) found: u64,
}

impl ParquetDataset {
    /// Opens a directory by its manifest, or without one by the footers of its files.
    ///
    /// # Errors
    /// No such directory, a file instead of a directory, no Parquet files, files that disagree, no
    /// rows, an unfinished preparation, or a table format whose log decides which files are
    /// current.
    pub fn open_directory(url: &str) -> Result<Self> {
        Self::open_directory_with_types(url, &BTreeMap::new())
    }

    /// Like [`ParquetDataset::open_directory`], with types of the values in names of directories.
    ///
    /// # Errors
    /// Like [`ParquetDataset::open_directory`]; values that are not of their type.
    pub fn open_directory_with_types(
        url: &str,
        types: &BTreeMap<String, ElementType>,
    ) -> Result<Self> {
        let store = Store::open(url)?;
        let found = match store.read(MANIFEST_FILE_NAME) {
            Ok(text) => Some(Manifest::parse_json(&text)?),
            Err(farandole_store::Error::Missing { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        let dataset = match found {
            Some(manifest) => Self::from_manifest(store, manifest)?,
            None => Self::from_unprepared_directory(store, types)?,
        };
        if dataset.manifest.rows == 0 {
            return Err(Error::NoRows { url: dataset.url() });
        }
        Ok(dataset)
    }

    /// Opens some files below a directory. Each file comes with the values of columns that its
    /// directory decides. `types` has types of such columns.
    ///
    /// # Errors
    /// Like [`ParquetDataset::open_directory`]; values or files that contradict the schema.
    pub fn open_files(
        url: &str,
        files: Vec<(String, FileValues)>,
        types: &BTreeMap<String, ElementType>,
    ) -> Result<Self> {
        let store = Store::open(url)?;
        let mut entries = Vec::with_capacity(files.len());
        let mut values = Vec::with_capacity(files.len());
        for (path, columns) in files {
            entries.push(FileEntry { bytes: store.size(&path)?, modified: None, path });
            values.push(columns);
        }
        let dataset = Self::from_entries(store, entries, values, types)?;
        if dataset.manifest.rows == 0 {
            Err(Error::NoRows { url: dataset.url() })
        } else {
            Ok(dataset)
        }
    }

    fn from_manifest(store: Store, manifest: Manifest) -> Result<Self> {
        let (linked, store) = match &manifest.base {
            Some(base) => (true, Store::open(base)?),
            None => (false, store),
        };
        let reason =
            |column: &ManifestColumn| Some((column.name.clone(), column.unreadable.clone()?));
        let unreadable = manifest.columns.iter().filter_map(reason).collect();
        let footers = manifest.files.iter().map(|_| OnceLock::new()).collect();
        let (lanes, intact) = (LaneLayout::new(&manifest), VerifiedChunks::default());
        Ok(Self {
            store,
            lanes,
            manifest,
            prepared: !linked,
            unreadable,
            disputed: Vec::new(),
            footers,
            verified_chunks: intact,
            pages: Mutex::default(),
            lookup_locks: Default::default(),
        })
    }

    /// Opens all Parquet files of a directory that was not prepared.
    fn from_unprepared_directory(
        store: Store,
        types: &BTreeMap<String, ElementType>,
    ) -> Result<Self> {
        // `_a=1` is a partition of a column whose name begins so.
        let is_hidden =
            |part: &str| part.starts_with('.') || (part.starts_with('_') && !part.contains('='));
        let hidden = |path: &str| path.split('/').any(is_hidden);
        let mut entries = store.list("")?;
        let has = |name: &str| entries.iter().any(|entry| entry.path == name);
        if has(UNFINISHED_MARKER_FILE) {
            return Err(Error::Unfinished { url: store.url() });
        }
        // Files that such a log has removed are still in the directory.
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
        let values = entries.iter().map(|entry| partition_values(&entry.path)).collect();
        Self::from_entries(store, entries, values, types)
    }

    fn from_entries(
        store: Store,
        entries: Vec<FileEntry>,
        values: Vec<FileValues>,
        types: &BTreeMap<String, ElementType>,
    ) -> Result<Self> {
        if entries.is_empty() {
            let url = store.url();
            return Err(match store.size("") {
                Ok(_) => Error::IsFile { url },
                Err(farandole_store::Error::Missing { .. }) => Error::NotADataset { url },
                Err(error) => error.into(),
            });
        }
        let footers = load_footers(&store, &entries)?;
        let partitions: BTreeSet<&str> =
            values.iter().flat_map(BTreeMap::keys).map(String::as_str).collect();
        if let Some(name) = types.keys().find(|name| !partitions.contains(name.as_str())) {
            let reason = "only columns of names of directories can get a type".to_owned();
            return Err(Error::Unreadable { column: name.clone(), reason });
        }
        let mut columns: Vec<(ManifestColumn, Option<String>)> = Vec::new();
        let mut disputed = Vec::new();
        for ((entry, footer), values) in entries.iter().zip(&footers).zip(&values) {
            let rows = footer.metadata().file_metadata().num_rows();
            let mut here = file_columns(footer);
            let path = store.display_path(&entry.path);
            check_unique_names(&here, &path)?;
            // The names of directories decide, as in Spark and DuckDB.
            here.retain(|(column, _)| !partitions.contains(column.name.as_str()));
            let lacks = |name: &&&str| !values.contains_key(**name);
            if let Some(name) = partitions.iter().find(lacks)
                && footer.schema().column_with_name(name).is_some()
            {
                return Err(Error::SometimesPartition { column: (*name).to_owned(), file: path });
            }
            if columns.is_empty() {
                columns = here;
            } else {
                disputed.extend(merge_columns(&mut columns, &here, &path, rows > 0));
            }
        }
        let mut files: Vec<DataFile> = entries
            .into_iter()
            .zip(&footers)
            .map(|(entry, footer)| describe_data_file(entry, footer, &columns))
            .collect();
        for (file, values) in files.iter_mut().zip(&values) {
            file.values = non_null_values(values);
        }
        let partitions = partition_columns(&files, &partitions, types).map_err(|wrong| {
            Error::ColumnChanged {
                column: wrong.column,
                file: store.display_path(&wrong.file),
                found: wrong.found,
                expected: wrong.expected.numpy_name().to_owned(),
            }
        })?;
        columns.extend(partitions.into_iter().map(|column| (column, None)));
        Self::from_columns_and_footers(store, columns, disputed, files, footers)
    }

    /// Opens files of a Delta or Iceberg table below a directory, with the columns of the table.
    ///
    /// # Errors
    /// Files that cannot be read or that contradict the table; no living rows.
    pub fn open_table(url: &str, files: &[TableFile], columns: Vec<TableColumn>) -> Result<Self> {
        let store = Store::open(url)?;
        let entry = |file: &TableFile| {
            let bytes = store.size(&file.path)?;
            Ok(FileEntry { bytes, modified: None, path: file.path.clone() })
        };
        let entries = files.iter().map(entry).collect::<Result<Vec<_>>>()?;
        if entries.is_empty() {
            return Err(Error::NoRows { url: store.url() });
        }
        let footers = load_footers(&store, &entries)?;
        let mut schema = TableSchema::new(columns);
        let mut described = Vec::with_capacity(files.len());
        for ((file, entry), footer) in files.iter().zip(entries).zip(&footers) {
            let path = store.display_path(&file.path);
            check_unique_names(&file_columns(footer), &path)?;
            let data = describe_data_file(entry, footer, &[]);
            let (living, deleted) = split_deleted_rows(data.groups, &file.deleted, &path)?;
            let mut data = DataFile { deleted, ..DataFile::new(data.path, data.bytes, living) };
            schema.add_file(file, footer, &mut data, &path)?;
            described.push(data);
        }
        let disputed = std::mem::take(&mut schema.disputed);
        let columns = schema.into_columns();
        let fixed = fixed_row_bytes(columns.iter().map(|(column, _)| column));
        for group in described.iter_mut().flat_map(|data| &mut data.groups) {
            group.bytes = group.bytes.max(group.rows.saturating_mul(fixed));
        }
        let dataset = Self::from_columns_and_footers(store, columns, disputed, described, footers)?;
        if dataset.manifest.rows == 0 {
            return Err(Error::NoRows { url: dataset.url() });
        }
        Ok(dataset)
    }

    fn from_columns_and_footers(
        store: Store,
        columns: Vec<(ManifestColumn, Option<String>)>,
        disputed: Vec<String>,
        files: Vec<DataFile>,
        footers: Vec<FileFooter>,
    ) -> Result<Self> {
        let unreadable = columns
            .iter()
            .filter_map(|(column, reason)| Some((column.name.clone(), reason.clone()?)))
            .collect();
        let manifest =
            Manifest::from_footers(columns.into_iter().map(|(column, _)| column).collect(), files)?;
        let footers = footers.into_iter().map(|footer| OnceLock::from(Arc::new(footer))).collect();
        let (lanes, intact) = (LaneLayout::new(&manifest), VerifiedChunks::default());
        Ok(Self {
            store,
            lanes,
            manifest,
            prepared: false,
            unreadable,
            disputed,
            footers,
            verified_chunks: intact,
            pages: Mutex::default(),
            lookup_locks: Default::default(),
        })
    }

    /// Returns the rows of a part's row group that are the rows of the part, as ascending ranges.
    pub(crate) fn stored_row_ranges(&self, part: &PlanPart) -> Vec<Range<u64>> {
        let file = self.manifest.files.get(part.file);
        file.map_or_else(Vec::new, |file| file.stored_row_ranges(part.group, part.rows.clone()))
    }

    /// Returns the number of rows from the first to the last row of a part in its row group.
    pub(crate) fn stored_row_span(&self, part: &PlanPart) -> u64 {
        let ranges = self.stored_row_ranges(part);
        let ends = ranges.first().zip(ranges.last());
        ends.map_or(0, |(first, last)| last.end - first.start)
    }

    /// Writes a manifest to the directory `at`. This data set stays where it is; with the manifest,
    /// it opens without reading footers.
    ///
    /// # Errors
    /// The store's.
    pub fn write_linked_manifest(&self, at: &str) -> Result<()> {
        let mut manifest = self.manifest.clone();
        manifest.base = Some(self.store.url());
        for column in &mut manifest.columns {
            let reason = self.unreadable.iter().find(|(name, _)| *name == column.name);
            column.unreadable = reason.map(|(_, reason)| reason.clone());
        }
        Store::open(at)?.write(MANIFEST_FILE_NAME, manifest.to_json()?.into())?;
        Ok(())
    }

    /// Returns the URL of the directory.
    pub fn url(&self) -> String {
        self.store.url()
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns whether the directory has a manifest with its own files.
    pub fn is_prepared(&self) -> bool {
        self.prepared
    }

    /// Returns the columns.
    pub fn fields(&self) -> Vec<BatchField> {
        self.manifest.columns.iter().map(BatchField::from_column).collect()
    }

    /// Returns the positions of the pages of a leaf in a row group of a file. They are looked up
    /// once.
    pub(crate) fn page_index(
        &self,
        (file, group, leaf): (usize, usize, usize),
        footer: &ArrowReaderMetadata,
        per_row: u64,
    ) -> Result<Arc<PageIndex>> {
        if let Some(known) = self.pages.lock().get(&(file, group, leaf)) {
            return Ok(Arc::clone(known));
        }
        let _alone = self.lookup_locks.get(file % LOOKUP_LOCK_STRIPES).map(Mutex::lock);
        // Another thread may have found it while this one waited.
        if let Some(known) = self.pages.lock().get(&(file, group, leaf)) {
            return Ok(Arc::clone(known));
        }
        let chunk =
            footer.metadata().row_groups().get(group).and_then(|group| group.columns().get(leaf));
        let (Some(chunk), Some(data)) = (chunk, self.manifest.files.get(file)) else {
            return Err(Error::Ended);
        };
        let found =
            find_pages(&self.store, &data.path, chunk, per_row).map_err(|lost| match lost {
                PageLookupError::Store(error) => Error::Store(error),
                PageLookupError::Broken(what) => Error::Parquet {
                    file: self.store.display_path(&data.path),
                    group,
                    column: chunk.column_path().string(),
                    source: ParquetError::General(what),
                },
            })?;
        Ok(Arc::clone(self.pages.lock().entry((file, group, leaf)).or_insert(Arc::new(found))))
    }

    pub(crate) fn verified_chunks(&self) -> &VerifiedChunks {
        &self.verified_chunks
    }

    pub(crate) fn lane_layout(&self) -> &LaneLayout {
        &self.lanes
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the columns with these names, or all numeric columns that a batch can contain.
    pub(crate) fn select_fields(&self, names: Option<&[String]>) -> Result<Vec<BatchField>> {
        let reason = |name: &str| {
            self.unreadable.iter().find(|(column, _)| column == name).map(|(_, reason)| reason)
        };
        let Some(names) = names else {
            if let Some(column) = self.disputed.first() {
                let reason = reason(column).cloned().unwrap_or_default();
                return Err(Error::Unreadable { column: column.clone(), reason });
            }
            let columns =
                self.manifest.columns.iter().filter(|column| reason(&column.name).is_none());
            let all: Vec<BatchField> = columns
                .map(BatchField::from_column)
                .filter(|field| !field.is_variable_length())
                .collect();
            return if all.is_empty() {
                Err(Error::NoColumns { url: self.url() })
            } else {
                Ok(all)
            };
        };
        let one = |name: &String| match (self.manifest.find_column(name)?, reason(name)) {
            (_, Some(reason)) => {
                Err(Error::Unreadable { column: name.clone(), reason: reason.clone() })
            }
            (column, None) => Ok(BatchField::from_column(column)),
        };
        names.iter().map(one).collect()
    }

    /// Returns the row group with the largest stated size, if its file's footer states only a small
    /// part of that size.
    pub(crate) fn find_overstated_group(&self) -> Result<Option<OverstatedRowGroup>> {
        let files = self.manifest.files.iter().enumerate();
        let groups = files.flat_map(|(file, data)| {
            data.groups.iter().enumerate().map(move |(group, said)| (said.bytes, file, group))
        });
        let Some((claimed, file, group)) = groups.max().filter(|_| self.prepared) else {
            return Ok(None);
        };
        let footer = self.file_footer(file)?;
        let Some(known) = footer.metadata().row_groups().get(group) else { return Ok(None) };
        let found = describe_row_group(known, fixed_row_bytes(self.manifest.columns.iter())).bytes;
        let path = self.manifest.files.get(file).map_or("", |data| &data.path);
        let overstated =
            OverstatedRowGroup { file: self.store.display_path(path), group, claimed, found };
        Ok((found < claimed / OVERSTATEMENT_FACTOR).then_some(overstated))
    }

    pub(crate) fn file_footer(&self, file: usize) -> Result<Arc<FileFooter>> {
        let (Some(cell), Some(data)) = (self.footers.get(file), self.manifest.files.get(file))
        else {
            return Err(Error::Ended);
        };
        if let Some(footer) = cell.get() {
            return Ok(Arc::clone(footer));
        }
        let _alone = self.lookup_locks.get(file % LOOKUP_LOCK_STRIPES).map(Mutex::lock);
        // Another thread may have loaded it while this one waited.
        if let Some(footer) = cell.get() {
            return Ok(Arc::clone(footer));
        }
        let footer = Arc::new(footer::load_footer(&self.store, &data.path, data.bytes)?);
        Ok(Arc::clone(cell.get_or_init(|| footer)))
    }
}

fn load_footers(store: &Store, entries: &[FileEntry]) -> Result<Vec<FileFooter>> {
    let share = entries.len().div_ceil(FOOTER_THREADS).max(1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = entries
            .chunks(share)
            .map(|chunk| {
                let load = move || {
                    chunk
                        .iter()
                        .map(|entry| footer::load_footer(store, &entry.path, entry.bytes))
                        .collect()
                };
                scope.spawn(load)
            })
            .collect();
        let mut footers = Vec::with_capacity(entries.len());
        for thread in threads {
            let loaded: Result<Vec<FileFooter>> =
                thread.join().unwrap_or_else(|_| Err(Error::Ended));
            footers.extend(loaded?);
        }
        Ok(footers)
    })
}

/// Rejects files in which two columns have the same name.
fn check_unique_names(columns: &[(ManifestColumn, Option<String>)], file: &str) -> Result<()> {
    let mut seen = HashSet::new();
    match columns.iter().find(|(column, _)| !seen.insert(column.name.as_str())) {
        Some((column, _)) => {
            Err(Error::Ambiguous { column: column.name.clone(), file: file.to_owned() })
        }
        None => Ok(()),
    }
}

/// Merges the columns of another file into `columns`; `full` is true if that file has rows. Returns
/// the columns that the file lacks or has in another type. They become unreadable, because a
/// request for other columns needs no agreement about them.
fn merge_columns(
    columns: &mut [(ManifestColumn, Option<String>)],
    here: &[(ManifestColumn, Option<String>)],
    file: &str,
    full: bool,
) -> Vec<String> {
    let mut disputed = Vec::new();
    for (column, reason) in columns {
        let (name, file) = (&column.name, file.to_owned());
        let conflict = match here.iter().find(|(other, _)| other.name == *name) {
            None => Some(Error::Missing { column: name.clone(), file }),
            Some((other, _)) if other.source != column.source => Some(Error::ColumnChanged {
                column: name.clone(),
                file,
                found: other.source.clone(),
                expected: column.source.clone(),
            }),
            Some((other, other_reason)) => {
                column.nulls = column.nulls.zip(other.nulls).map(|(a, b)| a.saturating_add(b));
                if full
                    && reason.as_deref() == Some("its rows are empty lists")
                    && column.shape.is_empty()
                {
                    (column.shape, *reason) = (other.shape.clone(), other_reason.clone());
                } else if full && reason.is_none() && other.shape != column.shape {
                    *reason = Some("its rows have different lengths".to_owned());
                }
                None
            }
        };
        if let Some(conflict) = conflict {
            disputed.push(name.clone());
            *reason = Some(conflict.to_string());
        }
    }
    disputed
}

fn describe_data_file(
    entry: FileEntry,
    footer: &ArrowReaderMetadata,
    columns: &[(ManifestColumn, Option<String>)],
) -> DataFile {
    let fixed = fixed_row_bytes(columns.iter().map(|(column, _)| column));
    let groups = footer
        .metadata()
        .row_groups()
        .iter()
        .map(|group| describe_row_group(group, fixed))
        .collect();
    DataFile::new(entry.path, entry.bytes, groups)
}

/// Returns the bytes of a row in the columns with a fixed width.
fn fixed_row_bytes<'a>(columns: impl Iterator<Item = &'a ManifestColumn>) -> u64 {
    columns.filter_map(ManifestColumn::row_width).fold(0, u64::saturating_add)
}

/// Describes a row group by its file's footer.
fn describe_row_group(group: &RowGroupMetaData, fixed: u64) -> RowGroup {
    let count = |number: i64| u64::try_from(number).unwrap_or_default();
    let rows = count(group.num_rows());
    let stored = group.columns().iter().map(|chunk| count(chunk.uncompressed_size()));
    let stored = stored.fold(0, u64::saturating_add);
    RowGroup { rows, bytes: stored.max(rows.saturating_mul(fixed)) }
}
