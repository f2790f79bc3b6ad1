// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of reading.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Data that cannot be read as requested.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No Parquet files and no manifest in the directory.
    #[error("no Parquet files and no manifest in {url}")]
    NotADataset {
        /// The directory.
        url: String,
    },
    /// A file where a directory is needed.
    #[error("this is a file; a data set is the directory that contains it: {url}")]
    IsFile {
        /// The file.
        url: String,
    },
    /// Several columns with the same name.
    #[error("several columns are called {column} in {file}")]
    Ambiguous {
        /// The name.
        column: String,
        /// The file.
        file: String,
    },
    /// A directory whose preparation still runs or was killed.
    #[error(
        "data is being prepared here, or its preparation was killed and has to be run again: {url}"
    )]
    Unfinished {
        /// The directory.
        url: String,
    },
    /// A table format whose log decides which files are current.
    #[error(
        "a table of {kind}, whose log says which of its files count: {url}; open it by its log \
         (farandole.data does it for Delta), or prepare it first"
    )]
    Table {
        /// Table format.
        kind: &'static str,
        /// The directory.
        url: String,
    },
    /// A file whose content differs from the written bytes.
    #[error(
        "checksums of {file}, row group {group}, are not those of its manifest: the file is damaged"
    )]
    Damaged {
        /// The file.
        file: String,
        /// The row group.
        group: usize,
    },
    /// Files without a single row.
    #[error("no rows in {url}")]
    NoRows {
        /// The directory.
        url: String,
    },
    /// A column that no batch can contain.
    #[error("column {column} cannot be read into batches: {reason}")]
    Unreadable {
        /// The column.
        column: String,
        /// The reason.
        reason: String,
    },
    /// No column can be read.
    #[error("no column of {url} can be read into batches")]
    NoColumns {
        /// The directory.
        url: String,
    },
    /// A column that is missing in one file.
    #[error("no column {column} in {file}")]
    Missing {
        /// The column.
        column: String,
        /// The file.
        file: String,
    },
    /// A column whose type in one file differs from the others.
    #[error("column {column} is {found} in {file}, elsewhere it is {expected}")]
    ColumnChanged {
        /// The column.
        column: String,
        /// The file.
        file: String,
        /// Type in this file.
        found: String,
        /// Type in the other files.
        expected: String,
    },
    /// Nulls that are not filled.
    #[error("column {column} has {nulls} nulls in row group {group} of {file}")]
    Nulls {
        /// The column.
        column: String,
        /// Number of nulls.
        nulls: usize,
        /// The row group.
        group: usize,
        /// The file.
        file: String,
    },
    /// NaN or infinities that are not allowed.
    #[error(
        "column {column} has {count} {what} in row group {group} of {file}; {} says what to do \
         with them",
        if *what == "NaN" { "fill or allow_nan" } else { "allow_nan" }
    )]
    NotNumbers {
        /// The column.
        column: String,
        /// `NaN` or `infinite values`.
        what: &'static str,
        /// Number of such values.
        count: usize,
        /// The row group.
        group: usize,
        /// The file.
        file: String,
    },
    /// Rows of different lengths.
    #[error(
        "column {column} has rows of other lengths than {expected} in row group {group} of {file}"
    )]
    Ragged {
        /// The column.
        column: String,
        /// Required length of all rows.
        expected: u64,
        /// The row group.
        group: usize,
        /// The file.
        file: String,
    },
    /// A file of a table whose columns are found by number, and that has none.
    #[error(
        "{file} has no numbers of columns, and its table has no names for such files \
         (schema.name-mapping.default): its columns cannot be found"
    )]
    NoFieldIds {
        /// The file.
        file: String,
    },
    /// A deleted row that the file does not have.
    #[error("row {row} of {file} is deleted, and the file has {rows} rows: the table is damaged")]
    DeletedBeyondEnd {
        /// The file.
        file: String,
        /// The row.
        row: u64,
        /// Rows of the file.
        rows: u64,
    },
    /// A column that is in the directories of some files, and in other files themselves.
    #[error(
        "column {column} is in {file}, and in the names of the directories of other files: read \
         them one by one, or put all files into such directories"
    )]
    SometimesPartition {
        /// The column.
        column: String,
        /// A file with the column.
        file: String,
    },
    /// A value that the column of a batch cannot represent.
    #[error("column {column}, row {row} of row group {group} of {file}: {reason}")]
    Unrepresentable {
        /// The column.
        column: String,
        /// The file.
        file: String,
        /// The row group.
        group: usize,
        /// The row within the row group.
        row: u64,
        /// The value, and what to do.
        reason: String,
    },
    /// A column chunk that is damaged or has an unexpected form.
    #[error("cannot read {file}, row group {group}, column {column}: {source}")]
    Parquet {
        /// The file.
        file: String,
        /// The row group.
        group: usize,
        /// The column.
        column: String,
        /// The library's error.
        source: parquet::errors::ParquetError,
    },
    /// A file whose footer cannot be read.
    #[error("not a Parquet file, or truncated: {file}: {source}")]
    Footer {
        /// The file.
        file: String,
        /// The library's error.
        source: parquet::errors::ParquetError,
    },
    /// A row group whose number of rows differs from the data set's description.
    #[error(
        "{file} has {found} rows in row group {group}, {expected} were expected: was it replaced?"
    )]
    RowCountChanged {
        /// The file.
        file: String,
        /// The row group.
        group: usize,
        /// Rows in the file.
        found: u64,
        /// Rows in the data set's description.
        expected: u64,
    },
    /// Bytes at which the decoder panicked.
    #[error("the decoder gave up on {file}, row group {group}: {message}")]
    Corrupt {
        /// The file.
        file: String,
        /// The row group.
        group: usize,
        /// Message of the panic.
        message: String,
    },
    /// A conversion that Arrow rejects.
    #[error("cannot convert column {column} of {file}: {source}")]
    Arrow {
        /// The column.
        column: String,
        /// The file.
        file: String,
        /// The library's error.
        source: arrow::error::ArrowError,
    },
    /// An unsupported conversion.
    #[error("cannot cast column {column} from {from} to {to}")]
    Cast {
        /// The column.
        column: String,
        /// Type of the column.
        from: &'static str,
        /// Requested type.
        to: String,
    },
    /// The budget is too small for the blocks that one step needs.
    #[error(
        "a budget of {budget} bytes is too small for this data set, the least that works is \
         {needed}: {blocks} for rows that are shuffled at a time, {batches} for batches"
    )]
    Budget {
        /// Budget in bytes.
        budget: u64,
        /// Smallest sufficient budget in bytes.
        needed: u64,
        /// Share for blocks, including one that is being loaded.
        blocks: u64,
        /// Share for batches.
        batches: u64,
    },
    /// The budget is too small for the size of a row group in the manifest, but the file's footer
    /// states a smaller size.
    #[error(
        "the manifest says that row group {group} of {file} takes {claimed} bytes, and the file \
         says {found}: prepare the data again (a budget of {budget} bytes is too small for what \
         the manifest says)"
    )]
    Overstated {
        /// The file.
        file: String,
        /// The row group.
        group: usize,
        /// Bytes by the manifest.
        claimed: u64,
        /// Bytes by the footer.
        found: u64,
        /// Budget in bytes.
        budget: u64,
    },
    /// A row of a ragged column whose bytes are not whole values.
    #[error(
        "column {column} has a row of {bytes} bytes, which are no whole values of {width} bytes, \
         in row group {group} of {file}"
    )]
    PartialValue {
        /// The column.
        column: String,
        /// Bytes of the row.
        bytes: usize,
        /// Bytes of a value.
        width: usize,
        /// The row group.
        group: usize,
        /// The file.
        file: String,
    },
    /// The memory for padded rows cannot be allocated.
    #[error("there is no memory for the padded rows of column {column}: {bytes} bytes in a batch")]
    Memory {
        /// The column.
        column: String,
        /// Bytes of the padded rows.
        bytes: usize,
    },
    /// A batch was requested after an error or after the end.
    #[error("this epoch already ended")]
    Ended,
    /// Error of the store.
    #[error(transparent)]
    Store(#[from] farandole_store::Error),
    /// Error of the manifest or the request.
    #[error(transparent)]
    Dataset(#[from] farandole_dataset::Error),
    /// The cache file for decoded data cannot be used.
    #[error("cannot keep decoded data in {path}: {source}")]
    Cache {
        /// The file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A thread cannot be started.
    #[error("cannot start a reading thread: {source}")]
    Thread {
        /// The system's error.
        source: std::io::Error,
    },
}

/// Kind of a failure: the caller can correct the request, or the environment failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFault {
    /// The data or the request is wrong.
    Usage,
    /// The system, the network or a file failed.
    Environment,
}

impl Error {
    /// Returns the kind of the failure.
    pub fn fault(&self) -> ReadFault {
        match self {
            Self::NotADataset { .. }
            | Self::IsFile { .. }
            | Self::Ambiguous { .. }
            | Self::Table { .. }
            | Self::NoRows { .. }
            | Self::Unreadable { .. }
            | Self::NoColumns { .. }
            | Self::Missing { .. }
            | Self::ColumnChanged { .. }
            | Self::Nulls { .. }
            | Self::NotNumbers { .. }
            | Self::Ragged { .. }
            | Self::Unrepresentable { .. }
            | Self::SometimesPartition { .. }
            | Self::NoFieldIds { .. }
            | Self::DeletedBeyondEnd { .. }
            | Self::Arrow { .. }
            | Self::Cast { .. }
            | Self::Budget { .. }
            | Self::Overstated { .. }
            | Self::PartialValue { .. }
            | Self::Ended
            | Self::Dataset(_) => ReadFault::Usage,
            Self::Store(error) => match error.fault() {
                farandole_store::Fault::Usage => ReadFault::Usage,
                farandole_store::Fault::Environment => ReadFault::Environment,
            },
            Self::Parquet { .. }
            | Self::Footer { .. }
            | Self::Unfinished { .. }
            | Self::Damaged { .. }
            | Self::RowCountChanged { .. }
            | Self::Corrupt { .. }
            | Self::Memory { .. }
            | Self::Cache { .. }
            | Self::Thread { .. } => ReadFault::Environment,
        }
    }
}
