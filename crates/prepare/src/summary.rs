// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Summary of a finished partition for the driver.

use farandole_dataset::{DataFile, ManifestColumn};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// One file and the statistics of its rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SplitFileSummary {
    /// The file.
    pub file: DataFile,
    /// Columns with statistics.
    pub columns: Vec<ManifestColumn>,
}

/// A finished partition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PartitionSummary {
    /// Number of the partition.
    pub partition: u64,
    /// Number of input rows.
    pub rows: u64,
    /// Number of rows in neither training nor validation.
    pub dropped: u64,
    /// Smallest and largest hash of a row.
    #[serde(default)]
    pub hashes: Option<(u64, u64)>,
    /// Training data, unless it has no rows.
    pub train: Option<SplitFileSummary>,
    /// Validation data, unless it has no rows.
    pub val: Option<SplitFileSummary>,
}

impl PartitionSummary {
    /// Encodes the summary for the driver.
    ///
    /// # Errors
    /// None that this type can cause.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|source| Error::Summary { source })
    }

    /// Decodes a summary from a task.
    ///
    /// # Errors
    /// Bytes that are not a summary.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes).map_err(|source| Error::Summary { source })
    }
}
