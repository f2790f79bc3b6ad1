// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decodes PNG files.

use std::io::Cursor;

use png::{ColorType, Decoder, Limits, Transformations};

use crate::error::{Error, Result};
use crate::exif::read_orientation;
use crate::pixels::{PixelBuffer, check_pixel_count};

/// First bytes of a PNG file.
pub(crate) const FILE_SIGNATURE: &[u8] = b"\x89PNG\r\n\x1a\n";

/// Bytes that the library may use in addition to the pixels, for rows and metadata.
// Compressed metadata of a small file may unpack to any size.
const MAX_EXTRA_BYTES: usize = 64 << 20;

/// Decodes a file; returns its orientation.
///
/// # Errors
/// Files that are damaged or animated, or that store their orientation in a rare place.
pub(crate) fn decode_image(file: &[u8], image: &mut PixelBuffer) -> Result<u16> {
    let mut decoder =
        Decoder::new_with_limits(Cursor::new(file), Limits { bytes: MAX_EXTRA_BYTES });
    // Pillow does not apply color profiles either.
    decoder.set_ignore_iccp_chunk(true);
    // Of 16-bit values, the high byte is kept.
    decoder.set_transformations(Transformations::normalize_to_color8());
    let header = decoder.read_header_info().map_err(Error::damaged_error)?;
    // `read_info` allocates memory for the size in the header (`IM-1`).
    check_pixel_count(header.width, header.height)?;
    let mut reader = decoder.read_info().map_err(Error::damaged_error)?;
    if reader.info().is_animated() {
        return Err(Error::RareKind { kind: "an animation" });
    }
    let (width, height) = reader.info().size();
    let channels = match reader.output_color_type().0 {
        ColorType::Grayscale | ColorType::Indexed => 1,
        ColorType::GrayscaleAlpha => 2,
        ColorType::Rgb => 3,
        ColorType::Rgba => 4,
    };
    image.resize_buffer(width, height, channels);
    reader.next_frame(&mut image.bytes).map_err(Error::damaged_error)?;
    // Metadata may follow the pixels, and a file without its end is truncated (`IM-2`).
    reader.finish().map_err(Error::damaged_error)?;
    let info = reader.info();
    if let Some(exif) = &info.exif_metadata
        && let Some(turned) = read_orientation(exif)
            .map_err(|()| Error::RareKind { kind: "a PNG with odd EXIF metadata" })?
    {
        return Ok(turned);
    }
    // Pillow finds an orientation in these texts, too.
    let texts = info.uncompressed_latin1_text.iter().map(|text| &text.keyword);
    let texts = texts.chain(info.compressed_latin1_text.iter().map(|text| &text.keyword));
    let mut texts = texts.chain(info.utf8_text.iter().map(|text| &text.keyword));
    if texts.any(|keyword| keyword == "XML:com.adobe.xmp" || keyword == "Raw profile type exif") {
        return Err(Error::RareKind { kind: "a PNG with XMP or EXIF metadata in a text" });
    }
    Ok(1)
}
