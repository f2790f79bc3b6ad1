// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reads files over a network by ranges: several at once, each with its own deadline.

use std::ops::Range;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetRange, GetResult, OBJECT_STORE_COALESCE_DEFAULT, ObjectMeta, ObjectStore,
    Result, coalesce_ranges,
};

/// Bytes of a part: a part is transferred by one request, and repeated as a whole.
// At the slowest accepted speed, a part takes 128 s, less than the default timeout of 3 minutes.
pub(crate) const PART_BYTES: usize = 8 << 20;
/// Largest transfer by a single request.
pub(crate) const MAX_SINGLE_REQUEST_BYTES: usize = 2 * PART_BYTES;
/// Most parts of one file in flight.
// Parts in flight take memory besides the content: 32 MiB.
pub(crate) const MAX_PARTS_IN_FLIGHT: usize = 4;

/// Returns the version of a file, to find out that it was replaced while it was being read.
fn file_version(meta: &ObjectMeta) -> (u64, i64, Option<&str>) {
    // HDFS has no `e_tag`, so size and time must show a new version.
    (meta.size, meta.last_modified.timestamp_millis(), meta.e_tag.as_deref())
}

/// A file was replaced by another one while it was being read.
fn replaced_file_error(location: &Path) -> Error {
    let source = "it was replaced while it was being read".into();
    Error::Precondition { path: location.to_string(), source }
}

/// Copies a stream of bytes to the whole `buffer`.
async fn copy_stream(answer: GetResult, buffer: &mut [u8]) -> Result<()> {
    let mut stream = answer.into_stream();
    let mut filled = 0;
    while filled < buffer.len() {
        let Some(bytes) = stream.try_next().await? else {
            let (found, expected) = (filled, buffer.len());
            let source = format!("the answer ends after {found} of {expected} bytes").into();
            return Err(Error::Generic { store: "store", source });
        };
        // The first answer may be the whole file; requests of their own read the other parts.
        let take = bytes.len().min(buffer.len() - filled);
        buffer[filled..filled + take].copy_from_slice(&bytes[..take]);
        filled += take;
    }
    Ok(())
}

/// Fills `buffer` with the content of a file from byte `start` on.
///
/// # Errors
/// The backend's; [`Error::Precondition`] if the file is not the one of `meta` any more.
pub(crate) async fn fill_buffer(
    backend: &dyn ObjectStore,
    meta: &ObjectMeta,
    start: u64,
    buffer: &mut [u8],
    first: Option<GetResult>,
) -> Result<()> {
    let mut first = first;
    let parts = buffer.chunks_mut(PART_BYTES).zip(0_u64..).map(|(part, number)| {
        let begun = first.take();
        let begin = start + number * PART_BYTES as u64;
        async move {
            if let Some(answer) = begun {
                return copy_stream(answer, part).await;
            }
            let options = GetOptions {
                range: Some(GetRange::Bounded(begin..begin + part.len() as u64)),
                if_match: meta.e_tag.clone(),
                ..GetOptions::default()
            };
            let answer = backend.get_opts(&meta.location, options).await?;
            // Some services ignore `If-Match` and answer with the new file.
            if file_version(&answer.meta) != file_version(meta) {
                return Err(replaced_file_error(&meta.location));
            }
            copy_stream(answer, part).await
        }
    });
    let parts: Vec<_> = parts.collect();
    // Each part has its place in the buffer, so their order does not count.
    stream::iter(parts).buffer_unordered(MAX_PARTS_IN_FLIGHT).try_collect::<()>().await
}

/// Returns the bytes of each range; neighbouring ranges are fetched together.
///
/// # Errors
/// The backend's, and a range past the end.
pub(crate) async fn read_ranges(
    backend: &dyn ObjectStore,
    location: &Path,
    ranges: &[Range<u64>],
) -> Result<Vec<Bytes>> {
    let fetch = |range: Range<u64>| fetch_range(backend, location, range);
    coalesce_ranges(ranges, fetch, OBJECT_STORE_COALESCE_DEFAULT).await
}

async fn fetch_range(
    backend: &dyn ObjectStore,
    location: &Path,
    range: Range<u64>,
) -> Result<Bytes> {
    let wanted = range.end.saturating_sub(range.start);
    let single = MAX_SINGLE_REQUEST_BYTES as u64;
    // The first answer shows the size of the file, before memory for the whole range is taken.
    let end = range.end.min(range.start + single);
    let options =
        GetOptions { range: Some(GetRange::Bounded(range.start..end)), ..GetOptions::default() };
    let answer = backend.get_opts(location, options).await?;
    if wanted <= single {
        return answer.bytes().await;
    }
    let meta = answer.meta.clone();
    // The length may come from a damaged footer, so check it before it is allocated.
    let length = match usize::try_from(wanted) {
        Ok(length) if range.end <= meta.size => length,
        Ok(_) | Err(_) => {
            let source =
                format!("the file ends at {}, before the end of the range: {range:?}", meta.size);
            return Err(Error::Generic { store: "store", source: source.into() });
        }
    };
    let mut buffer = vec![0; length];
    fill_buffer(backend, &meta, range.start, &mut buffer, Some(answer)).await?;
    Ok(buffer.into())
}
