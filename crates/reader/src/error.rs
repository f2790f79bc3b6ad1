// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors between files and batches.

/// Result of this room.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Data that cannot be read as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No Parquet here.
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
    /// Several columns of one name.
    #[error("several columns are called {column} in {file}")]
    Ambiguous {
        /// The name.
        column: String,
        /// The file.
        file: String,
    },
    /// A directory whose preparation was killed, or continues.
    #[error(
        "data is being prepared here, or its preparation was killed and has to be run again: {url}"
    )]
    Unfinished {
        /// The directory.
        url: String,
    },
    /// A table of which only its log says which files count.
    #[error(
        "a table of {kind}, whose log says which of its files count: {url}; open it by its log \
         (farandole.data does it for Delta), or prepare it first"
    )]
    Table {
        /// Kind of the type.
        kind: &'static str,
        /// The directory.
        url: String,
    },
    /// A file that does not hold the bytes that were written.
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
    /// A column that no batch can hold.
    #[error("column {column} cannot be read into batches: {reason}")]
    Unreadable {
        /// The column.
        column: String,
        /// The reason.
        reason: String,
    },
    /// Nothing to read.
    #[error("no column of {url} can be read into batches")]
    NoColumns {
        /// The directory.
        url: String,
    },
    /// A column that one file lacks.
    #[error("no column {column} in {file}")]
    Missing {
        /// The column.
        column: String,
        /// The file.
        file: String,
    },
    /// A column that one file has in another type.
    #[error("column {column} is {found} in {file}, elsewhere it is {expected}")]
    Changed {
        /// The column.
        column: String,
        /// The file.
        file: String,
        /// Type in this file.
        found: String,
        /// Type in the others.
        expected: String,
    },
    /// Nulls.
    #[error("column {column} has {nulls} nulls in row group {group} of {file}")]
    Nulls {
        /// The column.
        column: String,
        /// Their number.
        nulls: usize,
        /// The row group.
        group: usize,
        /// The file.
        file: String,
    },
    /// NaN, or infinities.
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
        /// Their number.
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
        /// The length that all should have.
        expected: u64,
        /// The row group.
        group: usize,
        /// The file.
        file: String,
    },
    /// A file that is not what it should be.
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
    /// A file that contradicts the plan.
    #[error(
        "{file} has {found} rows in row group {group}, {expected} were expected: was it replaced?"
    )]
    Rows {
        /// The file.
        file: String,
        /// The row group.
        group: usize,
        /// Rows in it.
        found: u64,
        /// Rows that were announced.
        expected: u64,
    },
    /// Bytes that the decoder stumbled over.
    #[error("the decoder gave up on {file}, row group {group}: {message}")]
    Corrupt {
        /// The file.
        file: String,
        /// The row group.
        group: usize,
        /// Its last words.
        message: String,
    },
    /// A conversion that Arrow refuses.
    #[error("cannot convert column {column} of {file}: {source}")]
    Arrow {
        /// The column.
        column: String,
        /// The file.
        file: String,
        /// Its error.
        source: arrow::error::ArrowError,
    },
    /// A conversion that we do not have.
    #[error("cannot cast column {column} from {from} to {to}")]
    Cast {
        /// The column.
        column: String,
        /// Its type.
        from: &'static str,
        /// The type asked for.
        to: String,
    },
    /// The budget is too small for the blocks that one step needs.
    #[error(
        "a budget of {budget} bytes is too small for this data set, the least that works is \
         {needed}: {blocks} for rows that are shuffled at a time, {batches} for batches"
    )]
    Budget {
        /// The allowed amount.
        budget: u64,
        /// The needed amount.
        needed: u64,
        /// Share of blocks, and of one that is being loaded.
        blocks: u64,
        /// Share of batches.
        batches: u64,
    },
    /// The budget is too small for what the manifest says of a row group, and its file says
    /// something else.
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
        /// The allowed amount.
        budget: u64,
    },
    /// A row of a ragged column that is no list.
    #[error(
        "column {column} has a row of {bytes} bytes, which are no whole values of {width} bytes, \
         in row group {group} of {file}"
    )]
    Torn {
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
    /// Memory for padded rows that cannot be had.
    #[error("there is no memory for the padded rows of column {column}: {bytes} bytes in a batch")]
    Memory {
        /// The column.
        column: String,
        /// Their number.
        bytes: usize,
    },
    /// Next after an error or the end.
    #[error("this epoch already ended")]
    Ended,
    /// The store.
    #[error(transparent)]
    Store(#[from] farandole_store::Error),
    /// The manifest or the request.
    #[error(transparent)]
    Dataset(#[from] farandole_dataset::Error),
    /// Memory for decoded data that cannot be had.
    #[error("cannot keep decoded data in {path}: {source}")]
    Cache {
        /// The file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// No thread to be had.
    #[error("cannot start a reading thread: {source}")]
    Thread {
        /// The system's error.
        source: std::io::Error,
    },
}

/// The reactions that are open to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The data or the request.
    Usage,
    /// The world outside.
    Environment,
}

impl Error {
    /// Returns the party at fault.
    pub fn fault(&self) -> Fault {
        match self {
            Self::NotADataset { .. }
            | Self::IsFile { .. }
            | Self::Ambiguous { .. }
            | Self::Table { .. }
            | Self::NoRows { .. }
            | Self::Unreadable { .. }
            | Self::NoColumns { .. }
            | Self::Missing { .. }
            | Self::Changed { .. }
            | Self::Nulls { .. }
            | Self::NotNumbers { .. }
            | Self::Ragged { .. }
            | Self::Arrow { .. }
            | Self::Cast { .. }
            | Self::Budget { .. }
            | Self::Overstated { .. }
            | Self::Torn { .. }
            | Self::Ended
            | Self::Dataset(_) => Fault::Usage,
            Self::Store(error) => match error.fault() {
                farandole_store::Fault::Usage => Fault::Usage,
                farandole_store::Fault::Environment => Fault::Environment,
            },
            Self::Parquet { .. }
            | Self::Footer { .. }
            | Self::Unfinished { .. }
            | Self::Damaged { .. }
            | Self::Rows { .. }
            | Self::Corrupt { .. }
            | Self::Memory { .. }
            | Self::Cache { .. }
            | Self::Thread { .. } => Fault::Environment,
        }
    }
}
