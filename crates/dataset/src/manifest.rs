// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The manifest: the description of a directory of Parquet files.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::deleted_rows::DeletedRows;
use crate::element::ElementType;
use crate::error::{Error, Result};

/// File name of the manifest in its directory.
pub const MANIFEST_FILE_NAME: &str = "_manifest.json";

/// Newest format that this version writes and reads. Format 2 has files of tables: columns that are
/// called otherwise in a file, or that it lacks, and deleted rows. A manifest without them is of
/// format 1, which earlier versions read, too.
pub const MANIFEST_FORMAT_VERSION: u32 = 2;

/// Returns the checksum of a column chunk: the low 32 bits of its xxh3.
pub fn chunk_checksum(chunk: &[u8]) -> u32 {
    let [a, b, c, d, ..] = xxh3_64(chunk).to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// The role of a column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ColumnRole {
    /// Input of the model.
    #[default]
    Feature,
    /// Expected output.
    Label,
    /// Weight of the sample.
    Weight,
}

/// One column.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ManifestColumn {
    /// Name.
    pub name: String,
    /// Role.
    #[serde(default)]
    pub role: ColumnRole,
    /// Type of one element.
    pub element: ElementType,
    /// Shape of one row; empty for a scalar.
    pub shape: Vec<u64>,
    /// Arrow type of the source.
    pub source: String,
    /// Unit of dates and times: `days` or `microseconds`. Earlier versions did not record it, and
    /// kept the unit of the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Number of nulls; `None` if they were not counted and there may be some.
    pub nulls: Option<u64>,
    /// Smallest value of a scalar number.
    #[serde(default)]
    pub min: Option<f64>,
    /// Largest value of a scalar number.
    #[serde(default)]
    pub max: Option<f64>,
    /// Reason why no batch can contain the column, if none can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreadable: Option<String>,
}

/// Returns the unit that the values of a column have in batches, by the Arrow type of its source;
/// `None` for other values than dates and times.
pub fn batch_unit(source: &str) -> Option<String> {
    // The text of a list type contains the type of its elements.
    let has = |names: &[&str]| names.iter().any(|name| source.contains(name));
    if has(&["Date32", "Date64"]) {
        Some("days".to_owned())
    } else if has(&["Timestamp(", "Time32(", "Time64(", "Duration("]) {
        Some("microseconds".to_owned())
    } else {
        None
    }
}

/// Returns whether the source of a column has times in another unit than batches have.
fn has_non_batch_unit(source: &str) -> bool {
    let units = ["(s", "(ms", "(ns"];
    batch_unit(source).as_deref() == Some("microseconds")
        // The unit ends the parenthesis, or a time zone follows it: `Timestamp(ms, "UTC")`.
        && units.iter().any(|unit| {
            source.contains(&format!("{unit})")) || source.contains(&format!("{unit},"))
        })
}

impl ManifestColumn {
    /// Returns the number of elements of one row.
    pub fn elements_per_row(&self) -> u64 {
        // Shapes from the footers of other writers have not been checked.
        self.shape.iter().fold(1, |product, side| product.saturating_mul(*side))
    }

    /// Returns the bytes of one row, if its size is fixed.
    pub fn row_width(&self) -> Option<u64> {
        self.element
            .byte_width()
            .map(|width| (width as u64).saturating_mul(self.elements_per_row()))
    }
}

/// One row group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowGroup {
    /// Number of rows.
    pub rows: u64,
    /// Decoded bytes.
    pub bytes: u64,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFile {
    /// Path relative to the directory.
    pub path: String,
    /// Number of rows.
    pub rows: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// xxh3 of the file's bytes, as 16 hexadecimal digits; `None` if it was not computed.
    #[serde(default)]
    pub checksum: Option<String>,
    /// Sum of the hashes of the rows, as 16 hexadecimal digits. It does not depend on the order of
    /// rows or their distribution over files. `None` if it was not computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Row groups, in order.
    pub groups: Vec<RowGroup>,
    /// For each row group, the low 32 bits of the xxh3 of each leaf column's chunk, including its
    /// dictionary; empty if they were not computed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chunks: Vec<Vec<u32>>,
    /// Columns that the file does not contain because all rows have the same value, such as columns
    /// of Hive's directories.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub values: BTreeMap<String, String>,
    /// Names in the file of columns that are called otherwise there.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub names: BTreeMap<String, String>,
    /// Columns that the file lacks, and that are null in all its rows.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub absent: BTreeSet<String>,
    /// Deleted rows of each row group; empty if the file has none. They are not among the rows of
    /// `groups`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deleted: Vec<DeletedRows>,
}

impl DataFile {
    /// Describes a file by its size and row groups.
    pub fn new(path: String, bytes: u64, groups: Vec<RowGroup>) -> Self {
        let rows = groups.iter().map(|group| group.rows).sum();
        Self {
            path,
            rows,
            bytes,
            checksum: None,
            content: None,
            groups,
            chunks: Vec::new(),
            values: BTreeMap::new(),
            names: BTreeMap::new(),
            absent: BTreeSet::new(),
            deleted: Vec::new(),
        }
    }

    /// Returns the stored rows that are some living rows of a row group, as ascending ranges.
    pub fn stored_row_ranges(&self, group: usize, living: Range<u64>) -> Vec<Range<u64>> {
        match self.deleted.get(group) {
            Some(deleted) => deleted.stored_row_ranges(living),
            None => vec![living],
        }
    }

    fn is_of_table(&self) -> bool {
        !(self.names.is_empty() && self.absent.is_empty() && self.deleted.is_empty())
    }
}

/// The content of a directory of Parquet files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format.
    pub format: u32,
    /// Hash that identifies the source data.
    pub fingerprint: String,
    /// URL of the directory of the files, if the manifest is in another directory: files of other
    /// writers stay in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Rows of all files.
    pub rows: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// Columns, in order.
    pub columns: Vec<ManifestColumn>,
    /// Files, in the order of rows.
    pub files: Vec<DataFile>,
}

impl Manifest {
    /// Builds a manifest, and adds up rows and bytes.
    pub fn new(fingerprint: String, columns: Vec<ManifestColumn>, files: Vec<DataFile>) -> Self {
        let rows = files.iter().map(|file| file.rows).sum();
        let bytes = files.iter().map(|file| file.bytes).sum();
        let format = if files.iter().any(DataFile::is_of_table) { 2 } else { 1 };
        Self { format, fingerprint, base: None, rows, bytes, columns, files }
    }

    /// Builds the manifest of files that were not prepared. Its fingerprint is a hash of the data
    /// in their footers.
    ///
    /// # Errors
    /// `Syntax` if serialization fails, which these types do not cause.
    pub fn from_footers(columns: Vec<ManifestColumn>, files: Vec<DataFile>) -> Result<Self> {
        let mut manifest = Self::new(String::new(), columns, files);
        // The fingerprint is still empty here, so the hash depends on the footers alone.
        manifest.fingerprint = format!("{:016x}", xxh3_64(manifest.to_json()?.as_bytes()));
        Ok(manifest)
    }

    /// Parses and checks a manifest.
    ///
    /// # Errors
    /// Invalid JSON, a newer format, sums that do not add up, or paths outside of the directory.
    pub fn parse_json(text: &[u8]) -> Result<Self> {
        let manifest: Self =
            serde_json::from_slice(text).map_err(|source| Error::Syntax { source })?;
        manifest.check_consistency()?;
        Ok(manifest)
    }

    /// Returns the manifest as JSON.
    ///
    /// # Errors
    /// `Syntax` if serialization fails, which this type does not cause.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|source| Error::Syntax { source })
    }

    /// Returns the column with this name.
    ///
    /// # Errors
    /// The column does not exist; the error lists the existing ones.
    pub fn find_column(&self, name: &str) -> Result<&ManifestColumn> {
        self.columns.iter().find(|column| column.name == name).ok_or_else(|| Error::Column {
            name: name.to_owned(),
            known: self.columns.iter().map(|column| column.name.clone()).collect(),
        })
    }

    fn check_consistency(&self) -> Result<()> {
        // Comes first, because a newer format may have other rules than those below.
        if self.format > MANIFEST_FORMAT_VERSION {
            return Err(Error::Format { found: self.format, known: MANIFEST_FORMAT_VERSION });
        }
        let wrong = |what: String| Err(Error::Inconsistent { what });
        for file in &self.files {
            // The paths of a manifest are opened and deleted, so they must not leave the directory.
            if file.path.starts_with('/')
                || file.path.split('/').any(|part| matches!(part, "" | "." | ".."))
            {
                return wrong(format!("a file outside of its directory: {}", file.path));
            }
            // A sum that wraps around could match by chance, and buffers would be sized by it.
            if checked_sum(file.groups.iter().map(|group| group.rows)) != Some(file.rows) {
                return wrong(format!(
                    "row groups do not add up to {} rows: {}",
                    file.rows, file.path
                ));
            }
            if !file.chunks.is_empty() && file.chunks.len() != file.groups.len() {
                return wrong(format!(
                    "checksums of other row groups than there are: {}",
                    file.path
                ));
            }
            if !file.deleted.is_empty() && file.deleted.len() != file.groups.len() {
                return wrong(format!(
                    "deleted rows of other row groups than there are: {}",
                    file.path
                ));
            }
            if file.deleted.iter().any(|deleted| deleted.count().is_none()) {
                return wrong(format!("more than 2^64 deleted rows: {}", file.path));
            }
            // Permutations of the rows of a block have 32-bit numbers.
            if file.groups.iter().any(|group| group.rows > u64::from(u32::MAX)) {
                return wrong(format!("a row group of more than 2^32 rows: {}", file.path));
            }
        }
        if checked_sum(self.files.iter().map(|file| file.rows)) != Some(self.rows) {
            return wrong(format!("files do not add up to {} rows", self.rows));
        }
        for column in &self.columns {
            // Batches have microseconds, so the numbers of earlier versions would silently mean
            // other times.
            if column.unit.is_none() && has_non_batch_unit(&column.source) {
                return wrong(format!(
                    "column {} is {}, and an earlier version prepared it in that unit: prepare \
                     the data again",
                    column.name, column.source
                ));
            }
            // `elements_per_row` saturates: buffers would have a wrong size.
            if column
                .shape
                .iter()
                .try_fold(1_u64, |product, side| product.checked_mul(*side))
                .is_none()
            {
                return wrong(format!(
                    "the shape of column {} has more than 2^64 elements",
                    column.name
                ));
            }
        }
        Ok(())
    }
}

fn checked_sum(mut numbers: impl Iterator<Item = u64>) -> Option<u64> {
    numbers.try_fold(0_u64, u64::checked_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let column = ManifestColumn {
            name: "x".into(),
            role: ColumnRole::Label,
            element: ElementType::Float32,
            shape: vec![3],
            source: "List(Float32)".into(),
            unit: None,
            nulls: Some(0),
            min: None,
            max: None,
            unreadable: None,
        };
        let groups = vec![RowGroup { rows: 2, bytes: 24 }, RowGroup { rows: 1, bytes: 12 }];
        let file = DataFile {
            chunks: vec![vec![7], vec![8]],
            ..DataFile::new("a/p.parquet".into(), 99, groups)
        };
        Manifest::new("f".into(), vec![column], vec![file])
    }

    #[test]
    fn a_manifest_reads_back_as_it_was() {
        let written = manifest();
        assert_eq!(Manifest::parse_json(written.to_json().unwrap().as_bytes()).unwrap(), written);
        assert_eq!(written.find_column("x").unwrap().row_width(), Some(12));
    }

    #[test]
    fn files_of_tables_need_a_newer_reader() {
        let plain = manifest();
        assert_eq!(plain.format, 1);
        let mut file = plain.files[0].clone();
        file.deleted = vec![DeletedRows::from_positions([0, 3]), DeletedRows::default()];
        file.names = BTreeMap::from([("x".into(), "col-1".into())]);
        let made = Manifest::new("f".into(), plain.columns, vec![file]);
        assert_eq!(made.format, 2);
        assert_eq!(Manifest::parse_json(made.to_json().unwrap().as_bytes()).unwrap(), made);
        assert_eq!(made.files[0].stored_row_ranges(0, 0..2), vec![1..3; 1]);
        assert_eq!(made.files[0].stored_row_ranges(1, 0..1), vec![0..1; 1]);
        let other = made.to_json().unwrap();
        assert!(
            !plain.files[0].is_of_table() && other.contains("\"deleted\":[[0,1,2,1],[]]"),
            "{other}"
        );
    }

    #[test]
    fn times_have_a_recorded_unit() {
        let mut old = manifest();
        for (source, unit, is_other) in [
            ("Timestamp(ms)", Some("microseconds"), true),
            ("Timestamp(ns, \"UTC\")", Some("microseconds"), true),
            ("List(Duration(s))", Some("microseconds"), true),
            ("Timestamp(µs)", Some("microseconds"), false),
            ("Date32", Some("days"), false),
            ("Int64", None, false),
        ] {
            assert_eq!(batch_unit(source).as_deref(), unit, "{source}");
            old.columns[0].source = source.into();
            old.columns[0].unit = None;
            let read = Manifest::parse_json(old.to_json().unwrap().as_bytes());
            assert_eq!(read.is_err(), is_other, "{source}");
            old.columns[0].unit = batch_unit(source);
            assert!(Manifest::parse_json(old.to_json().unwrap().as_bytes()).is_ok(), "{source}");
        }
    }

    #[test]
    fn a_manifest_that_lies_is_refused() {
        let broken = |change: fn(&mut Manifest)| {
            let mut manifest = manifest();
            change(&mut manifest);
            Manifest::parse_json(manifest.to_json().unwrap().as_bytes()).unwrap_err().to_string()
        };
        assert!(broken(|m| m.rows = 4).contains("add up to 4 rows"));
        assert!(
            broken(|m| m.files[0].path = "../p".into()).contains("outside of its directory: ../p")
        );
        assert!(broken(|m| m.format = 9).contains("format 9"));
        assert!(
            broken(|m| drop(m.files[0].chunks.pop())).contains("checksums of other row groups")
        );
        assert!(
            broken(|m| m.files[0].deleted = vec![DeletedRows::from_positions([1])])
                .contains("deleted rows of other row groups")
        );
        assert!(
            broken(|m| m.columns[0].shape = vec![u64::MAX, 2])
                .contains("column x has more than 2^64")
        );
        assert!(Manifest::parse_json(b"{}").is_err());
    }

    #[test]
    fn a_missing_column_names_the_known_ones() {
        assert_eq!(
            manifest().find_column("y").unwrap_err().to_string(),
            "no column y, there are: x"
        );
    }
}
