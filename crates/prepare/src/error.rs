// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Errors of the data or of its destination.

/// Result of this room.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A preparation that cannot continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The specification is no JSON of the right form.
    #[error("not a specification: {source}")]
    Spec {
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A value of the specification that cannot be.
    #[error("{what}: {value}")]
    Value {
        /// The reason why it is invalid.
        what: &'static str,
        /// The value.
        value: String,
    },
    /// A column that the batches do not have.
    #[error("no column {column}, there are: {}", known.join(", "))]
    Column {
        /// The requested column.
        column: String,
        /// The existing columns.
        known: Vec<String>,
    },
    /// A type that cannot be trained on.
    #[error("column {column} has a type that cannot be prepared: {found}")]
    Type {
        /// The column.
        column: String,
        /// Its Arrow type.
        found: String,
    },
    /// Weights that are no numbers.
    #[error("column {column} cannot be a sample weight, because it is {found}")]
    Weight {
        /// The column.
        column: String,
        /// Its Arrow type.
        found: String,
    },
    /// Batches of one partition disagree about a column.
    #[error(
        "column {column} changed its type within partition {partition} from {before} to {after}"
    )]
    Changed {
        /// The column.
        column: String,
        /// The partition.
        partition: u64,
        /// Type in the first batch.
        before: String,
        /// Type now.
        after: String,
    },
    /// Nulls or NaN where there may be none.
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
    /// Infinities where there may be none.
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
    /// A fill that no value of the column can be.
    #[error("column {column} is {kind}, which cannot hold the value of fill: {fill}")]
    Fill {
        /// The column.
        column: String,
        /// Its type.
        kind: String,
        /// The requested value.
        fill: String,
    },
    /// A text in a validation column that says neither side.
    #[error(
        "validation column {column} has a text that is none of train, validation, test, true, \
         false, 1 and 0: {value}"
    )]
    Side {
        /// The column.
        column: String,
        /// The text.
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
    /// Partitions disagree about a column.
    #[error(
        "column {column} is {first} in partition {first_partition} and {second} in partition \
         {second_partition}"
    )]
    Disagree {
        /// The column.
        column: String,
        /// Type and shape in one.
        first: String,
        /// The number of the partition.
        first_partition: u64,
        /// Type and shape in the other.
        second: String,
        /// The number of the partition.
        second_partition: u64,
    },
    /// A vector that contradicts itself.
    #[error("column {column} has a broken sparse vector, an index past its size {size}: {index}")]
    Sparse {
        /// The column.
        column: String,
        /// Size of the vector.
        size: i64,
        /// The index.
        index: i64,
    },
    /// Nothing to train on.
    #[error("no rows of {side} data ({})", came_in(*rows, *dropped))]
    Empty {
        /// Training or validation.
        side: &'static str,
        /// Rows of all partitions.
        rows: u64,
        /// Rows that the validation column put on no side.
        dropped: u64,
    },
    /// The same partition twice.
    #[error("two attempts of one partition cannot both be committed: {partition}")]
    Twice {
        /// The partition.
        partition: u64,
    },
    /// A summary that was not written by `finish`.
    #[error("not a summary of a partition: {source}")]
    Summary {
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A file is not what its writer left.
    #[error(
        "{path} has {found} bytes where its writer left {expected}: does another process prepare \
         into this directory?"
    )]
    Altered {
        /// The file.
        path: String,
        /// Its size now; nothing when it is gone.
        found: u64,
        /// Its size then.
        expected: u64,
    },
    /// A file that does not hold the bytes that were written.
    #[error("{path} is damaged: its checksum is {found}, the manifest has {expected}")]
    Damaged {
        /// The file.
        path: String,
        /// The checksum of its bytes.
        found: String,
        /// Their checksum when they were written.
        expected: String,
    },
    /// Used after its end.
    #[error("the writer of partition {partition} already ended")]
    Ended {
        /// The partition.
        partition: u64,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] farandole_store::Error),
    /// The Parquet library.
    #[error("cannot write {path}: {source}")]
    Parquet {
        /// The file.
        path: String,
        /// Its error.
        source: parquet::errors::ParquetError,
    },
    /// The Arrow library.
    #[error("cannot convert column {column}: {source}")]
    Arrow {
        /// The column.
        column: String,
        /// Its error.
        source: arrow::error::ArrowError,
    },
    /// The manifest.
    #[error(transparent)]
    Manifest(#[from] farandole_dataset::Error),
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
            Self::Spec { .. }
            | Self::Value { .. }
            | Self::Column { .. }
            | Self::Type { .. }
            | Self::Weight { .. }
            | Self::Changed { .. }
            | Self::Missing { .. }
            | Self::Infinite { .. }
            | Self::Fill { .. }
            | Self::Side { .. }
            | Self::Ragged { .. }
            | Self::Disagree { .. }
            | Self::Sparse { .. }
            | Self::Empty { .. }
            | Self::Twice { .. }
            | Self::Summary { .. }
            | Self::Ended { .. }
            | Self::Arrow { .. }
            | Self::Manifest(_) => Fault::Usage,
            Self::Store(error) => match error.fault() {
                farandole_store::Fault::Usage => Fault::Usage,
                farandole_store::Fault::Environment => Fault::Environment,
            },
            Self::Altered { .. } | Self::Damaged { .. } | Self::Parquet { .. } => {
                Fault::Environment
            }
        }
    }
}

fn came_in(rows: u64, dropped: u64) -> String {
    match rows {
        0 => "the data is empty".to_owned(),
        _ => format!("{rows} rows came in, {dropped} of them on no side"),
    }
}
