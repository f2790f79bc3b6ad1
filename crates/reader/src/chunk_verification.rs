// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Compares fetched chunks with the checksums of a manifest.

use std::collections::HashMap;

use bytes::Bytes;
use farandole_dataset::{DataFile, chunk_checksum};
use parking_lot::Mutex;

use crate::error::{Error, Result};

/// Chunks that were checked. Each chunk is hashed when it is first read, not in every epoch.
#[derive(Debug, Default)]
pub(crate) struct VerifiedChunks(Mutex<HashMap<(usize, usize), u64>>);

impl VerifiedChunks {
    /// Checks chunks, given with their leaf columns, of row group `group` of file number `number`.
    ///
    /// # Errors
    /// [`Error::Damaged`].
    pub(crate) fn verify_chunks<'a>(
        &self,
        (number, data, file): (usize, &DataFile, &str),
        group: usize,
        chunks: impl Iterator<Item = (usize, &'a Bytes)>,
    ) -> Result<()> {
        let Some(sums) = data.chunks.get(group) else { return Ok(()) };
        // Columns past the 64th have no bit: their chunks are hashed at every read.
        let bit = |leaf: usize| {
            u32::try_from(leaf).ok().and_then(|leaf| 1_u64.checked_shl(leaf)).unwrap_or(0)
        };
        let seen = self.0.lock().get(&(number, group)).copied().unwrap_or(0);
        let mut now = seen;
        for (leaf, chunk) in chunks.filter(|(leaf, _)| seen & bit(*leaf) == 0) {
            let Some(expected) = sums.get(leaf) else { continue };
            if chunk_checksum(chunk) != *expected {
                return Err(Error::Damaged { file: file.to_owned(), group });
            }
            now |= bit(leaf);
        }
        if now != seen {
            *self.0.lock().entry((number, group)).or_default() |= now;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use farandole_dataset::RowGroup;

    use super::*;

    #[test]
    fn a_chunk_is_hashed_once_and_a_flipped_bit_is_found() {
        let (good, bad) = (Bytes::from_static(b"chunk"), Bytes::from_static(b"chunj"));
        let sums = vec![vec![chunk_checksum(&good); 70]];
        let groups = vec![RowGroup { rows: 1, bytes: 1 }];
        let data = DataFile { chunks: sums, ..DataFile::new("f".into(), 5, groups) };
        let intact = VerifiedChunks::default();
        let check =
            |leaf, bytes| intact.verify_chunks((0, &data, "f"), 0, std::iter::once((leaf, bytes)));
        assert!(check(3, &bad).unwrap_err().to_string().contains("f, row group 0"));
        check(3, &good).unwrap();
        check(3, &bad).unwrap();
        assert!(check(4, &bad).is_err());
        check(69, &good).unwrap();
        assert!(check(69, &bad).is_err(), "not noted, so looked at again");
        let unknown = DataFile { chunks: Vec::new(), ..data.clone() };
        intact.verify_chunks((1, &unknown, "f"), 0, std::iter::once((0, &bad))).unwrap();
    }
}
