// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reads the orientation from EXIF metadata.

/// Tag of the orientation.
const ORIENTATION_TAG: u16 = 0x0112;
/// Type of 16-bit numbers.
const SHORT_TYPE: u16 = 3;
/// Bytes of a directory entry.
const ENTRY_BYTES: usize = 12;

/// Reads the orientation of a TIFF structure; `None` if it contains none.
///
/// # Errors
/// A structure that cannot be read.
pub(crate) fn read_orientation(tiff: &[u8]) -> Result<Option<u16>, ()> {
    let big = match tiff.get(..4) {
        Some(b"II*\0") => false,
        Some(b"MM\0*") => true,
        _ => return Err(()),
    };
    let short = |bytes: &[u8]| {
        let two = <[u8; 2]>::try_from(bytes).ok()?;
        Some(if big { u16::from_be_bytes(two) } else { u16::from_le_bytes(two) })
    };
    let long = |bytes: &[u8]| {
        let four = <[u8; 4]>::try_from(bytes).ok()?;
        Some(if big { u32::from_be_bytes(four) } else { u32::from_le_bytes(four) })
    };
    let directory = tiff
        .get(4..8)
        .and_then(long)
        .and_then(|at| tiff.get(usize::try_from(at).ok()?..))
        .ok_or(())?;
    let count = directory.get(..2).and_then(short).ok_or(())?;
    let entries = directory.get(2..2 + usize::from(count) * ENTRY_BYTES).ok_or(())?;
    for entry in entries.chunks_exact(ENTRY_BYTES) {
        let field = |from: usize| entry.get(from..from + 2).and_then(short);
        if field(0) == Some(ORIENTATION_TAG) {
            // The standard allows one 16-bit number only, and decoders disagree about other values.
            let single = field(2) == Some(SHORT_TYPE) && entry.get(4..8).and_then(long) == Some(1);
            return if single { field(8).map(Some).ok_or(()) } else { Err(()) };
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiff(entries: &[[u8; ENTRY_BYTES]]) -> Vec<u8> {
        let mut bytes = b"II*\0\x08\0\0\0".to_vec();
        bytes.extend([u8::try_from(entries.len()).unwrap(), 0]);
        entries.iter().for_each(|entry| bytes.extend(entry));
        bytes
    }

    #[test]
    fn the_orientation_is_found_in_either_byte_order() {
        let other = [0x0F, 1, 2, 0, 4, 0, 0, 0, 1, 2, 3, 4];
        let turned = [0x12, 1, 3, 0, 1, 0, 0, 0, 6, 0, 0, 0];
        assert_eq!(read_orientation(&tiff(&[other, turned])), Ok(Some(6)));
        assert_eq!(read_orientation(&tiff(&[other])), Ok(None));
        assert_eq!(
            read_orientation(b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x08\0\0"),
            Ok(Some(8))
        );
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        let long = [0x12, 1, 4, 0, 1, 0, 0, 0, 6, 0, 0, 0];
        let two = [0x12, 1, 3, 0, 2, 0, 0, 0, 6, 0, 0, 0];
        for bytes in [
            &b""[..],
            b"II*\0",
            b"XX*\0\x08\0\0\0\0\0",
            b"II*\0\xFF\xFF\xFF\xFF\0\0",
            b"II*\0\x08\0\0\0\x05\0",
        ] {
            assert_eq!(read_orientation(bytes), Err(()), "{bytes:?}");
        }
        assert_eq!(read_orientation(&tiff(&[long])), Err(()));
        assert_eq!(read_orientation(&tiff(&[two])), Err(()));
    }
}
