// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Merges the summaries of partitions into manifests.

use std::collections::HashSet;

use bytes::Bytes;
use farandole_dataset::{MANIFEST_FILE_NAME, Manifest, ManifestColumn};
use farandole_store::{Store, is_prepared_part_name};
use serde::Serialize;

use crate::convert::format_shape;
use crate::error::{Error, Result};
use crate::spec::PrepareSpec;
use crate::summary::{PartitionSummary, SplitFileSummary};
use crate::verify::check_file_size;

/// A prepared data set.
#[derive(Clone, Debug, Serialize)]
pub struct PreparedDataset {
    /// Training data.
    pub train: Manifest,
    /// Validation data, if it was requested.
    pub val: Option<Manifest>,
    /// Number of rows that are in neither.
    pub dropped: u64,
}

impl PreparedDataset {
    /// Returns the manifests as JSON.
    ///
    /// # Errors
    /// None that this type can cause.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|source| Error::Summary { source })
    }
}

/// Makes the files of `summaries` a data set: checks that they exist, writes the manifests
/// (training last), and deletes files of earlier or failed attempts.
///
/// # Errors
/// No rows, partitions that disagree, a missing file, and the store's errors.
pub fn commit_partitions(
    url: &str,
    spec: &str,
    mut summaries: Vec<PartitionSummary>,
) -> Result<PreparedDataset> {
    let (store, spec) = (Store::open(url)?, PrepareSpec::parse_json(spec)?);
    // Tasks end in any order. Sorted, the same data has the same order of rows.
    summaries.sort_by_key(|summary| summary.partition);
    // Both attempts have the same rows, so the data would contain them twice.
    if let Some(pair) = summaries.windows(2).find(|pair| pair[0].partition == pair[1].partition) {
        return Err(Error::DuplicatePartition { partition: pair[0].partition });
    }
    let rows = summaries.iter().map(|summary| summary.rows).sum();
    let dropped = summaries.iter().map(|summary| summary.dropped).sum();
    let merge = |name: &'static str, pick: fn(&PartitionSummary) -> Option<&SplitFileSummary>| {
        let sides =
            summaries.iter().filter_map(|summary| Some((summary.partition, pick(summary)?)));
        merge_split_summaries(&spec, sides)?.ok_or(Error::Empty { side: name, rows, dropped })
    };
    let train = merge("training", |summary| summary.train.as_ref())?;
    let val = if spec.has_validation() {
        Some(merge("validation", |summary| summary.val.as_ref())?)
    } else {
        None
    };
    if let Some(val) = &val {
        check_columns_agree((0, &train.columns), (0, &val.columns))?;
    }
    let train_store = store.resolve_path(&spec.train)?;
    let val_store = spec.val.as_deref().map(|path| store.resolve_path(path)).transpose()?;
    // Before the manifest names them: another process may have emptied the directory.
    train.files.iter().try_for_each(|file| check_file_size(&train_store, file))?;
    if let (Some(store), Some(val)) = (&val_store, &val) {
        val.files.iter().try_for_each(|file| check_file_size(store, file))?;
        write_manifest_and_delete_others(store, val)?;
    }
    // Training data is last: its manifest is the sign that both directories are complete.
    write_manifest_and_delete_others(&train_store, &train)?;
    Ok(PreparedDataset { train, val, dropped })
}

/// Returns the manifest of a directory; `None` if there is none.
///
/// # Errors
/// A manifest that cannot be read.
pub fn read_manifest(url: &str) -> Result<Option<Manifest>> {
    match Store::open(url)?.read(MANIFEST_FILE_NAME) {
        Ok(text) => Ok(Some(Manifest::parse_json(&text)?)),
        Err(farandole_store::Error::Missing { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn merge_split_summaries<'a>(
    spec: &PrepareSpec,
    mut sides: impl Iterator<Item = (u64, &'a SplitFileSummary)>,
) -> Result<Option<Manifest>> {
    let Some((first, side)) = sides.next() else { return Ok(None) };
    let (mut columns, mut files) = (side.columns.clone(), vec![side.file.clone()]);
    for (partition, side) in sides {
        check_columns_agree((first, &columns), (partition, &side.columns))?;
        for (all, one) in columns.iter_mut().zip(&side.columns) {
            // If one partition has no minimum or maximum, because of NaN, the whole column has
            // none.
            all.min = all.min.zip(one.min).map(|(a, b)| a.min(b));
            all.max = all.max.zip(one.max).map(|(a, b)| a.max(b));
        }
        files.push(side.file.clone());
    }
    Ok(Some(Manifest::new(spec.fingerprint.clone(), columns, files)))
}

fn check_columns_agree(
    first: (u64, &[ManifestColumn]),
    second: (u64, &[ManifestColumn]),
) -> Result<()> {
    let describe = |column: Option<&ManifestColumn>| match column {
        None => "missing".to_owned(),
        Some(column) if column.shape.is_empty() => {
            format!("{} from {}", column.element.numpy_name(), column.source)
        }
        Some(column) => {
            format!("{} values of {}", format_shape(&column.shape), column.element.numpy_name())
        }
    };
    for number in 0..first.1.len().max(second.1.len()) {
        let (one, two) = (first.1.get(number), second.1.get(number));
        // The Arrow types of the sources may differ, as long as the converted values have one type.
        let key = |column: Option<&ManifestColumn>| {
            column.map(|c| (c.name.clone(), c.element, c.shape.clone()))
        };
        if key(one) != key(two) {
            return Err(Error::ColumnMismatch {
                column: one.or(two).map(|column| column.name.clone()).unwrap_or_default(),
                first: describe(one),
                first_partition: first.0,
                second: describe(two),
                second_partition: second.0,
            });
        }
    }
    Ok(())
}

fn write_manifest_and_delete_others(store: &Store, manifest: &Manifest) -> Result<()> {
    // The old files are deleted afterwards: until then, an earlier manifest may name them.
    store.write(MANIFEST_FILE_NAME, Bytes::from(manifest.to_json()?))?;
    let named: HashSet<&str> = manifest.files.iter().map(|file| file.path.as_str()).collect();
    for entry in store.list("")? {
        // The directory may have other files than the preparation's; they stay.
        if is_prepared_part_name(&entry.path) && !named.contains(entry.path.as_str()) {
            store.delete(&entry.path)?;
        }
    }
    Ok(())
}
