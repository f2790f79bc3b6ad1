// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Columns of a Delta or Iceberg table, found in its files by number or by the name that they have
//! there.

use arrow::datatypes::Schema;
use farandole_dataset::{
    ColumnRole, DataFile, DeletedRows, ElementType, FileValues, ManifestColumn, RowGroup,
};

use crate::array_values::repeat_value;
use crate::error::{Error, Result};
use crate::footer::FileFooter;
use crate::schema::{describe_column, is_promotable};

/// A column of the schema of a table.
#[derive(Clone, Debug)]
pub struct TableColumn {
    /// Name in the table.
    pub name: String,
    /// Number of the column. In a file whose columns have numbers, only the number counts.
    pub field_id: Option<i32>,
    /// Names in a file whose columns have no numbers.
    pub stored_names: Vec<String>,
    /// Type of an element, or the reason why no batch can contain the column.
    pub element: Result<ElementType, String>,
    /// Whether the values are lists.
    pub is_list: bool,
    /// Unit of dates and times: `days` or `microseconds`.
    pub unit: Option<String>,
    /// Type in the table, for messages.
    pub source: String,
}

/// A file of a table.
#[derive(Clone, Debug)]
pub struct TableFile {
    /// Path relative to the directory of the data set.
    pub path: String,
    /// Values of columns that the file lacks; other columns that it lacks are null.
    pub defaults: FileValues,
    /// Ascending positions of deleted rows.
    pub deleted: Vec<u64>,
}

/// The columns of a table, merged over its files.
pub(crate) struct TableSchema {
    columns: Vec<ColumnAcrossFiles>,
    /// Columns that some files have in a type that is not the table's.
    pub(crate) disputed: Vec<String>,
}

struct ColumnAcrossFiles {
    column: TableColumn,
    element: ElementType,
    nulls: Option<u64>,
    /// Shape of a row in the files so far; `None` before the first one.
    shape: Option<Vec<u64>>,
    reason: Option<String>,
}

impl TableSchema {
    pub(crate) fn new(columns: Vec<TableColumn>) -> Self {
        let merged = |column: TableColumn| {
            let (element, reason) = match &column.element {
                Ok(element) if column.is_list && element.byte_width().is_none() => {
                    (*element, Some(format!("it is {}", column.source)))
                }
                Ok(element) => (*element, None),
                Err(reason) => (ElementType::Binary, Some(reason.clone())),
            };
            let shape = (!column.is_list).then(Vec::new);
            ColumnAcrossFiles { element, nulls: Some(0), shape, reason, column }
        };
        Self { columns: columns.into_iter().map(merged).collect(), disputed: Vec::new() }
    }

    /// Adds a file: finds the columns in it, and completes its description. `display_path` is for
    /// messages.
    ///
    /// # Errors
    /// A file without numbers of columns, although the table has no names for such files; values
    /// that are not of their type.
    pub(crate) fn add_file(
        &mut self,
        file: &TableFile,
        footer: &FileFooter,
        data: &mut DataFile,
        display_path: &str,
    ) -> Result<()> {
        let has_ids = root_field_ids(footer).iter().any(Option::is_some);
        let needs_ids = |one: &ColumnAcrossFiles| {
            one.column.field_id.is_some() && one.column.stored_names.is_empty()
        };
        if !has_ids && !self.columns.is_empty() && self.columns.iter().all(needs_ids) {
            return Err(Error::NoFieldIds { file: display_path.to_owned() });
        }
        for merged in &mut self.columns {
            let name = merged.column.name.clone();
            match find_root_column(footer, &merged.column, has_ids) {
                Some(root) => {
                    let stored = footer.schema().field(root).name();
                    if *stored != name {
                        data.names.insert(name.clone(), stored.clone());
                    }
                    if data.rows > 0
                        && let Err(conflict) =
                            merged.add_stored_column(footer, root, data, display_path)
                    {
                        self.disputed.push(name);
                        merged.reason = Some(conflict.to_string());
                    }
                }
                None => match file.defaults.get(&name) {
                    Some(Some(value)) => {
                        let fits = merged.shape.as_ref().is_some_and(Vec::is_empty)
                            && (merged.element.byte_width().is_none()
                                || repeat_value(value, merged.element, 1).is_some());
                        if !fits && merged.reason.is_none() {
                            return Err(Error::ColumnChanged {
                                column: name.clone(),
                                file: display_path.to_owned(),
                                found: format!("{value:?} in the table's metadata"),
                                expected: merged.column.source.clone(),
                            });
                        }
                        data.values.insert(name, value.clone());
                    }
                    _ => {
                        data.absent.insert(name);
                        merged.nulls = merged.nulls.map(|nulls| nulls.saturating_add(data.rows));
                    }
                },
            }
        }
        Ok(())
    }

    /// Returns the columns, each with the reason if no batch can contain it.
    pub(crate) fn into_columns(self) -> Vec<(ManifestColumn, Option<String>)> {
        let column = |merged: ColumnAcrossFiles| {
            let ColumnAcrossFiles { column, element, nulls, shape, reason } = merged;
            let reason = reason
                .or_else(|| shape.is_none().then(|| "none of the files has rows of it".to_owned()));
            let described = ManifestColumn {
                name: column.name,
                role: ColumnRole::Feature,
                element,
                shape: shape.unwrap_or_default(),
                unit: column.unit,
                source: column.source,
                nulls,
                min: None,
                max: None,
                unreadable: None,
            };
            (described, reason)
        };
        self.columns.into_iter().map(column).collect()
    }
}

impl ColumnAcrossFiles {
    /// Adds the column of a file with rows.
    fn add_stored_column(
        &mut self,
        footer: &FileFooter,
        root: usize,
        data: &DataFile,
        display_path: &str,
    ) -> Result<()> {
        let (found, found_reason) = describe_column(footer, root, footer.schema().field(root));
        // Nulls may be among the deleted rows.
        let nulls = found.nulls.filter(|nulls| *nulls == 0 || data.deleted.is_empty());
        self.nulls = self.nulls.zip(nulls).map(|(a, b)| a.saturating_add(b));
        if self.reason.is_some() {
            return Ok(());
        }
        let is_list = !found.shape.is_empty() || found_reason.is_some();
        let days = found.unit.as_deref() == Some("days");
        let same_unit = found.unit == self.column.unit
            || (days && self.column.unit.as_deref() == Some("microseconds"));
        let same_element =
            found.element == self.element || is_promotable(found.element, self.element);
        if is_list != self.column.is_list || !same_unit || !same_element {
            return Err(Error::ColumnChanged {
                column: self.column.name.clone(),
                file: display_path.to_owned(),
                found: found.source,
                expected: self.column.source.clone(),
            });
        }
        match &self.shape {
            _ if found_reason.is_some() => self.reason = found_reason,
            Some(shape) if *shape != found.shape => {
                self.reason = Some("its rows have different lengths".to_owned());
            }
            Some(_) => {}
            None => self.shape = Some(found.shape),
        }
        Ok(())
    }
}

/// Returns the numbers of the root columns.
fn root_field_ids(footer: &FileFooter) -> Vec<Option<i32>> {
    let fields = footer.parquet_schema().root_schema().get_fields();
    fields.iter().map(|field| field.get_basic_info()).map(|i| i.has_id().then(|| i.id())).collect()
}

fn find_root_column(footer: &FileFooter, column: &TableColumn, has_ids: bool) -> Option<usize> {
    if let (Some(id), true) = (column.field_id, has_ids) {
        return root_field_ids(footer).iter().position(|found| *found == Some(id));
    }
    let schema: &Schema = footer.schema();
    column.stored_names.iter().find_map(|name| Some(schema.column_with_name(name)?.0))
}

/// Returns the living row groups of a file, and their deleted rows.
///
/// # Errors
/// A deleted row that the file does not have.
pub(crate) fn split_deleted_rows(
    groups: Vec<RowGroup>,
    deleted: &[u64],
    display_path: &str,
) -> Result<(Vec<RowGroup>, Vec<DeletedRows>)> {
    let mut left = deleted;
    let (mut living, mut masks, mut start) = (Vec::new(), Vec::new(), 0_u64);
    for group in groups {
        let end = start.saturating_add(group.rows);
        let (inside, after) = left.split_at(left.partition_point(|position| *position < end));
        masks.push(DeletedRows::from_positions(inside.iter().map(|position| position - start)));
        living.push(RowGroup { rows: group.rows - inside.len() as u64, ..group });
        (left, start) = (after, end);
    }
    match left.first() {
        Some(row) => {
            let (file, rows) = (display_path.to_owned(), start);
            Err(Error::DeletedBeyondEnd { file, row: *row, rows })
        }
        None if deleted.is_empty() => Ok((living, Vec::new())),
        None => Ok((living, masks)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deleted_rows_belong_to_their_row_groups() {
        let groups = || [3, 0, 4].map(|rows| RowGroup { rows, bytes: 100 }).to_vec();
        let (living, masks) = split_deleted_rows(groups(), &[0, 2, 3, 6], "f").unwrap();
        assert_eq!(living.iter().map(|group| group.rows).collect::<Vec<_>>(), [1, 0, 2]);
        let expected = [&[0, 2][..], &[], &[0, 3]];
        assert_eq!(masks, expected.map(|rows| DeletedRows::from_positions(rows.iter().copied())));
        assert_eq!(split_deleted_rows(groups(), &[], "f").unwrap().1, []);
        let error = split_deleted_rows(groups(), &[7], "f").unwrap_err().to_string();
        assert_eq!(error, "row 7 of f is deleted, and the file has 7 rows: the table is damaged");
    }
}
