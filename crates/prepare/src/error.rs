// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of the data or of its destination.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A preparation that cannot continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The specification is not JSON of the expected form.
    #[error("not a specification: {source}")]
    Spec {
        /// The parser's error.
        source: serde_json::Error,
    },
    /// An invalid value in the specification.
    #[error("{what}: {value}")]
    InvalidValue {
        /// The reason why it is invalid.
        what: &'static str,
        /// The value.
        value: String,
    },
    /// A column that is missing in the batches.
    #[error("no column {column}, there are: {}", known.join(", "))]
    Column {
        /// The requested column.
        column: String,
        /// The existing columns.
        known: Vec<String>,
    },
    /// A type that is not supported.
    #[error("column {column} has a type that cannot be prepared: {found}")]
    Type {
        /// The column.
        column: String,
        /// Arrow type of the column.
        found: String,
    },
    /// Sample weights that are not numbers.
    #[error("column {column} cannot be a sample weight, because it is {found}")]
    Weight {
        /// The column.
        column: String,
        /// Arrow type of the column.
        found: String,
    },
    /// Batches of one partition with different types of a column.
    #[error(
        "column {column} changed its type within partition {partition} from {before} to {after}"
    )]
    TypeChanged {
        /// The column.
        column: String,
        /// The partition.
        partition: u64,
        /// Type in the first batch.
        before: String,
        /// Type in this batch.
        after: String,
    },
    /// Nulls or NaN that are not allowed.
    #[error(
        "column {column} has {what} in {missing} of {rows} rows, in partition {partition}, first \
         at its row {row} (a fill can take their place)"
    )]
    Missing {
        /// The column.
        column: String,
        /// `nulls`, `nulls inside arrays` or `NaN`.
        what: &'static str,
        /// Number of rows with missing values.
        missing: usize,
        /// Rows of the batch.
        rows: usize,
        /// The partition.
        partition: u64,
        /// The first such row within the partition.
        row: u64,
    },
    /// Infinities that are not allowed.
    #[error(
        "column {column} has infinite values in {infinite} of {rows} rows, in partition \
         {partition}, first at its row {row} (allow_nan takes them as they are)"
    )]
    Infinite {
        /// The column.
        column: String,
        /// Number of rows with infinite values.
        infinite: usize,
        /// Rows of the batch.
        rows: usize,
        /// The partition.
        partition: u64,
        /// The first such row within the partition.
        row: u64,
    },
    /// A value that no batch can represent.
    #[error("column {column}, row {row} of partition {partition}: {reason}")]
    Value {
        /// The column.
        column: String,
        /// The value, and why not.
        reason: String,
        /// The partition.
        partition: u64,
        /// The row within the partition.
        row: u64,
    },
    /// A fill value that the column's type cannot represent.
    #[error("column {column} is {kind}, which cannot hold the value of fill: {fill}")]
    Fill {
        /// The column.
        column: String,
        /// Type of the column.
        kind: String,
        /// The requested value.
        fill: String,
    },
    /// A string in a validation column that names no known split.
    #[error(
        "validation column {column} has a text that is none of train, validation, test, true, \
         false, 1 and 0: {value}"
    )]
    UnknownSplitWord {
        /// The column.
        column: String,
        /// The string.
        value: String,
    },
    /// Rows of different lengths.
    #[error(
        "column {column} has rows of {expected} and of {found} values; all must have one length \
         (partition {partition})"
    )]
    Ragged {
        /// The column.
        column: String,
        /// The length so far.
        expected: String,
        /// The other length.
        found: String,
        /// The partition.
        partition: u64,
    },
    /// Partitions with different types or shapes of a column.
    #[error(
        "column {column} is {first} in partition {first_partition} and {second} in partition \
         {second_partition}"
    )]
    ColumnMismatch {
        /// The column.
        column: String,
        /// Type and shape in one partition.
        first: String,
        /// Number of this partition.
        first_partition: u64,
        /// Type and shape in the other partition.
        second: String,
        /// Number of the other partition.
        second_partition: u64,
    },
    /// A sparse vector that contradicts itself.
    #[error("column {column} has a broken sparse vector, an index past its size {size}: {index}")]
    Sparse {
        /// The column.
        column: String,
        /// Size of the vector.
        size: i64,
        /// The index.
        index: i64,
    },
    /// No rows to train or to validate on.
    #[error("no rows of {side} data ({})", describe_row_counts(*rows, *dropped))]
    Empty {
        /// Training or validation.
        side: &'static str,
        /// Rows of all partitions.
        rows: u64,
        /// Rows that the validation column assigned to neither training nor validation.
        dropped: u64,
    },
    /// Two summaries of the same partition.
    #[error("two attempts of one partition cannot both be committed: {partition}")]
    DuplicatePartition {
        /// The partition.
        partition: u64,
    },
    /// Bytes that are not a summary of a partition.
    #[error("not a summary of a partition: {source}")]
    Summary {
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A file whose size differs from the written size.
    #[error(
        "{path} has {found} bytes where its writer left {expected}: does another process prepare \
         into this directory?"
    )]
    Altered {
        /// The file.
        path: String,
        /// Size now; 0 if the file is missing.
        found: u64,
        /// Size when it was written.
        expected: u64,
    },
    /// A file whose content differs from the written bytes.
    #[error("{path} is damaged: its checksum is {found}, the manifest has {expected}")]
    Damaged {
        /// The file.
        path: String,
        /// Checksum of the file's bytes.
        found: String,
        /// Checksum when the file was written.
        expected: String,
    },
    /// A writer was used after its end.
    #[error("the writer of partition {partition} already ended")]
    Ended {
        /// The partition.
        partition: u64,
    },
    /// Error of the store.
    #[error(transparent)]
    Store(#[from] farandole_store::Error),
    /// Error of the Parquet library.
    #[error("cannot write {path}: {source}")]
    Parquet {
        /// The file.
        path: String,
        /// The library's error.
        source: parquet::errors::ParquetError,
    },
    /// Error of the Arrow library.
    #[error("cannot convert column {column}: {source}")]
    Arrow {
        /// The column.
        column: String,
        /// The library's error.
        source: arrow::error::ArrowError,
    },
    /// Error of the manifest.
    #[error(transparent)]
    Manifest(#[from] farandole_dataset::Error),
}

/// Kind of a failure: the caller can correct the request, or the environment failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrepareFault {
    /// The data or the request is wrong.
    Usage,
    /// The system, the network or a file failed.
    Environment,
}

impl Error {
    /// Returns the kind of the failure.
    pub fn fault(&self) -> PrepareFault {
        match self {
            Self::Spec { .. }
            | Self::InvalidValue { .. }
            | Self::Column { .. }
            | Self::Type { .. }
            | Self::Weight { .. }
            | Self::TypeChanged { .. }
            | Self::Missing { .. }
            | Self::Infinite { .. }
            | Self::Value { .. }
            | Self::Fill { .. }
            | Self::UnknownSplitWord { .. }
            | Self::Ragged { .. }
            | Self::ColumnMismatch { .. }
            | Self::Sparse { .. }
            | Self::Empty { .. }
            | Self::DuplicatePartition { .. }
            | Self::Summary { .. }
            | Self::Ended { .. }
            | Self::Arrow { .. }
            | Self::Manifest(_) => PrepareFault::Usage,
            Self::Store(error) => match error.fault() {
                farandole_store::Fault::Usage => PrepareFault::Usage,
                farandole_store::Fault::Environment => PrepareFault::Environment,
            },
            Self::Altered { .. } | Self::Damaged { .. } | Self::Parquet { .. } => {
                PrepareFault::Environment
            }
        }
    }
}

fn describe_row_counts(rows: u64, dropped: u64) -> String {
    match rows {
        0 => "the data is empty".to_owned(),
        _ => format!("{rows} rows came in, {dropped} of them on no side"),
    }
}
