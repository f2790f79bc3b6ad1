// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! From summaries to manifests.

use std::collections::HashSet;

use bytes::Bytes;
use farandole_dataset::{Column, MANIFEST, Manifest};
use farandole_store::Store;
use serde::Serialize;

use crate::convert::side;
use crate::error::{Error, Result};
use crate::spec::Spec;
use crate::summary::{SideSummary, Summary};
use crate::verify::size;

/// A prepared data set.
#[derive(Clone, Debug, Serialize)]
pub struct Committed {
    /// Training data.
    pub train: Manifest,
    /// Validation data, when asked for.
    pub val: Option<Manifest>,
    /// Rows on no side.
    pub dropped: u64,
}

impl Committed {
    /// As JSON.
    ///
    /// # Errors
    /// None that this type can cause.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|source| Error::Summary { source })
    }
}

/// Makes the files of `summaries` a data set: checks that they are there, writes the manifests
/// (training last) and deletes what earlier or failed attempts left.
///
/// # Errors
/// No rows, partitions that disagree, a file that is gone, and the store's.
pub fn commit(url: &str, spec: &str, mut summaries: Vec<Summary>) -> Result<Committed> {
    let (store, spec) = (Store::open(url)?, Spec::parse(spec)?);
    summaries.sort_by_key(|summary| summary.partition);
    if let Some(pair) = summaries.windows(2).find(|pair| pair[0].partition == pair[1].partition) {
        return Err(Error::Twice { partition: pair[0].partition });
    }
    let rows = summaries.iter().map(|summary| summary.rows).sum();
    let dropped = summaries.iter().map(|summary| summary.dropped).sum();
    let merge = |name: &'static str, pick: fn(&Summary) -> Option<&SideSummary>| {
        let sides =
            summaries.iter().filter_map(|summary| Some((summary.partition, pick(summary)?)));
        merged(&spec, sides)?.ok_or(Error::Empty { side: name, rows, dropped })
    };
    let train = merge("training", |summary| summary.train.as_ref())?;
    let val = if spec.validates() {
        Some(merge("validation", |summary| summary.val.as_ref())?)
    } else {
        None
    };
    if let Some(val) = &val {
        agree((0, &train.columns), (0, &val.columns))?;
    }
    let train_store = store.resolve(&spec.train)?;
    let val_store = spec.val.as_deref().map(|path| store.resolve(path)).transpose()?;
    train.files.iter().try_for_each(|file| size(&train_store, file))?;
    if let (Some(store), Some(val)) = (&val_store, &val) {
        val.files.iter().try_for_each(|file| size(store, file))?;
        publish(store, val)?;
    }
    publish(&train_store, &train)?;
    Ok(Committed { train, val, dropped })
}

/// Returns the manifest of a directory; `None` if it was not prepared.
///
/// # Errors
/// A manifest that cannot be read.
pub fn read_manifest(url: &str) -> Result<Option<Manifest>> {
    match Store::open(url)?.read(MANIFEST) {
        Ok(text) => Ok(Some(Manifest::parse(&text)?)),
        Err(farandole_store::Error::Missing { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn merged<'a>(
    spec: &Spec,
    mut sides: impl Iterator<Item = (u64, &'a SideSummary)>,
) -> Result<Option<Manifest>> {
    let Some((first, side)) = sides.next() else { return Ok(None) };
    let (mut columns, mut files) = (side.columns.clone(), vec![side.file.clone()]);
    for (partition, side) in sides {
        agree((first, &columns), (partition, &side.columns))?;
        for (all, one) in columns.iter_mut().zip(&side.columns) {
            // NaN in one partition leaves no extremes at all.
            all.min = all.min.zip(one.min).map(|(a, b)| a.min(b));
            all.max = all.max.zip(one.max).map(|(a, b)| a.max(b));
        }
        files.push(side.file.clone());
    }
    Ok(Some(Manifest::new(spec.fingerprint.clone(), columns, files)))
}

fn agree(first: (u64, &[Column]), second: (u64, &[Column])) -> Result<()> {
    let describe = |column: Option<&Column>| match column {
        None => "missing".to_owned(),
        Some(column) if column.shape.is_empty() => {
            format!("{} from {}", column.element.name(), column.source)
        }
        Some(column) => format!("{} values of {}", side(&column.shape), column.element.name()),
    };
    for number in 0..first.1.len().max(second.1.len()) {
        let (one, two) = (first.1.get(number), second.1.get(number));
        let key =
            |column: Option<&Column>| column.map(|c| (c.name.clone(), c.element, c.shape.clone()));
        if key(one) != key(two) {
            return Err(Error::Disagree {
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

fn publish(store: &Store, manifest: &Manifest) -> Result<()> {
    store.write(MANIFEST, Bytes::from(manifest.to_json()?))?;
    let named: HashSet<&str> = manifest.files.iter().map(|file| file.path.as_str()).collect();
    for entry in store.list("")? {
        let ours = entry.path.starts_with("part-") && entry.path.ends_with(".parquet");
        if ours && !named.contains(entry.path.as_str()) {
            store.delete(&entry.path)?;
        }
    }
    Ok(())
}
