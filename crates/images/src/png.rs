// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! PNG files.

use std::io::Cursor;

use png::{ColorType, Decoder, Limits, Transformations};

use crate::decoder::affordable;
use crate::error::{Error, Result};
use crate::exif::orientation;
use crate::pixels::Pixels;

/// First bytes of a file.
pub(crate) const SIGNATURE: &[u8] = b"\x89PNG\r\n\x1a\n";

/// Bytes that the library may take beside the pixels: rows, and metadata.
const BESIDE: usize = 64 << 20;

/// Decodes a file; returns its orientation.
///
/// # Errors
/// Files that are damaged, animated, or say in a rare place how they are turned.
pub(crate) fn decode(file: &[u8], image: &mut Pixels) -> Result<u16> {
    let mut decoder = Decoder::new_with_limits(Cursor::new(file), Limits { bytes: BESIDE });
    decoder.set_ignore_iccp_chunk(true);
    // The high byte of 16 bits is taken.
    decoder.set_transformations(Transformations::normalize_to_color8());
    let header = decoder.read_header_info().map_err(Error::damaged)?;
    affordable(header.width, header.height)?;
    let mut reader = decoder.read_info().map_err(Error::damaged)?;
    if reader.info().is_animated() {
        return Err(Error::Kind { kind: "an animation" });
    }
    let (width, height) = reader.info().size();
    let channels = match reader.output_color_type().0 {
        ColorType::Grayscale | ColorType::Indexed => 1,
        ColorType::GrayscaleAlpha => 2,
        ColorType::Rgb => 3,
        ColorType::Rgba => 4,
    };
    image.resize(width, height, channels);
    reader.next_frame(&mut image.bytes).map_err(Error::damaged)?;
    reader.finish().map_err(Error::damaged)?;
    let info = reader.info();
    if let Some(exif) = &info.exif_metadata
        && let Some(turned) =
            orientation(exif).map_err(|()| Error::Kind { kind: "a PNG with odd EXIF metadata" })?
    {
        return Ok(turned);
    }
    let texts = info.uncompressed_latin1_text.iter().map(|text| &text.keyword);
    let texts = texts.chain(info.compressed_latin1_text.iter().map(|text| &text.keyword));
    let mut texts = texts.chain(info.utf8_text.iter().map(|text| &text.keyword));
    if texts.any(|keyword| keyword == "XML:com.adobe.xmp" || keyword == "Raw profile type exif") {
        return Err(Error::Kind { kind: "a PNG with XMP or EXIF metadata in a text" });
    }
    Ok(1)
}
