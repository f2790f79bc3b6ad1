// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The summary of a finished partition for the driver.

use farandole_dataset::{Column, DataFile};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// One file and the statistics of its rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SideSummary {
    /// The file.
    pub file: DataFile,
    /// Its columns.
    pub columns: Vec<Column>,
}

/// A finished partition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Its number.
    pub partition: u64,
    /// Rows that came in.
    pub rows: u64,
    /// Rows on no side.
    pub dropped: u64,
    /// The least and the largest hash of a row.
    #[serde(default)]
    pub hashes: Option<(u64, u64)>,
    /// Training, unless there were no rows.
    pub train: Option<SideSummary>,
    /// Validation, unless there were no rows.
    pub val: Option<SideSummary>,
}

impl Summary {
    /// As bytes for the driver.
    ///
    /// # Errors
    /// None that this type can cause.
    pub fn encode(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|source| Error::Summary { source })
    }

    /// From a task's bytes.
    ///
    /// # Errors
    /// Bytes that are none.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes).map_err(|source| Error::Summary { source })
    }
}
