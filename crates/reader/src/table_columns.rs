// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Facts about files that only the schema of their table, or the user, states.

use std::collections::BTreeMap;

use farandole_dataset::ElementType;

use crate::error::{Error, Result};
use crate::footer::FileFooter;

/// Facts that the schema of a table states about its files.
#[derive(Clone, Debug, Default)]
pub struct TableRules {
    /// Types of columns whose values are not in files, but in the names of directories or in the
    /// log of a table.
    pub types: BTreeMap<String, ElementType>,
    /// Number of each column in Iceberg; a file in which a column of this name has another number
    /// contains another column.
    pub field_ids: BTreeMap<String, i32>,
}

impl TableRules {
    /// Checks that the columns of a file are those of the table.
    ///
    /// # Errors
    /// A column whose name belonged to another column when the file was written.
    pub(crate) fn check_field_ids(&self, footer: &FileFooter, file: &str) -> Result<()> {
        for field in footer.parquet_schema().root_schema().get_fields() {
            let stored = field.get_basic_info();
            let Some(expected) = self.field_ids.get(stored.name()) else { continue };
            if stored.has_id() && stored.id() != *expected {
                return Err(Error::OtherColumn {
                    column: stored.name().to_owned(),
                    file: file.to_owned(),
                    found: stored.id(),
                    expected: *expected,
                });
            }
        }
        Ok(())
    }
}
