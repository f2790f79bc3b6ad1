// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decodes JPEG files.

use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use crate::error::{Error, Result};
use crate::exif::read_orientation;
use crate::pixels::{ColorMode, PixelBuffer, check_pixel_count};

/// First bytes of a JPEG file.
pub(crate) const FILE_SIGNATURE: &[u8] = b"\xFF\xD8\xFF";

const EXIF_PREFIX: &[u8] = b"Exif\0\0";
const XMP_PREFIX: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";
const XMP_ORIENTATION_KEY: &[u8] = b"tiff:Orientation";
const ADOBE_PREFIX: &[u8] = b"Adobe";
const END_MARKER: &[u8] = b"\xFF\xD9";

/// Content of the segments before the first scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct JpegHeader {
    width: u16,
    height: u16,
    /// Number of components: 1 for gray, 3 for luma and chroma.
    components: u8,
    orientation: u16,
    /// Offset of the first scan.
    scan: usize,
}

const fn rare_jpeg_kind_error(kind: &'static str) -> Error {
    Error::RareKind { kind }
}

/// Returns the next segment from `at` on: its marker, its content, and the offset of the segment
/// after it.
fn next_segment(file: &[u8], at: usize) -> Option<(u8, &[u8], usize)> {
    let rest = file.get(at..)?;
    // Any number of 0xFF bytes may precede a marker (ITU-T T.81, B.1.1.2).
    let filled = rest.iter().take_while(|byte| **byte == 0xFF).count();
    let marker = *rest.get(filled).filter(|_| filled > 0)?;
    let start = at + filled + 1;
    let length = usize::from(u16::from_be_bytes(file.get(start..start + 2)?.try_into().ok()?));
    // The length counts its own two bytes. With a damaged one, `read_header` would not advance.
    Some((marker, file.get(start + 2..start + length.max(2))?, start + length.max(2)))
}

/// Reads the segments before the first scan.
///
/// # Errors
/// A rare kind of JPEG, or a damaged file.
fn read_header(file: &[u8]) -> Result<JpegHeader> {
    let cut = || Error::damaged_error("it ends before its first scan");
    let (mut at, mut frame, mut exif, mut xmp) = (2, None, None, false);
    loop {
        let (marker, content, next) = next_segment(file, at).ok_or_else(cut)?;
        match marker {
            // The scan begins here, so all metadata that counts has been read.
            0xDA => {
                let (width, height, components) = frame.ok_or_else(cut)?;
                let turned = match exif {
                    Some(exif) => read_orientation(exif)
                        .map_err(|()| rare_jpeg_kind_error("a JPEG with odd EXIF metadata"))?,
                    None => None,
                };
                // Pillow takes the orientation from XMP if EXIF has none; this crate does not parse
                // XMP.
                if turned.is_none() && xmp {
                    return Err(rare_jpeg_kind_error("a JPEG that XMP metadata says to turn"));
                }
                return Ok(JpegHeader {
                    width,
                    height,
                    components,
                    orientation: turned.unwrap_or(1),
                    scan: next,
                });
            }
            // Baseline, extended and progressive JPEG.
            0xC0..=0xC2 if frame.is_none() => {
                let [precision, high, low, wide, narrow, components, rest @ ..] = content else {
                    return Err(cut());
                };
                let ids: Vec<u8> =
                    rest.chunks(3).filter_map(|component| component.first().copied()).collect();
                match (precision, components, ids.as_slice()) {
                    // libjpeg, and so Pillow, takes these ids as a sign that colors are not
                    // transformed.
                    (8, 3, b"RGB") => {
                        return Err(rare_jpeg_kind_error("a JPEG that stores red, green and blue"));
                    }
                    (8, 1 | 3, _) => {}
                    (8, _, _) => return Err(rare_jpeg_kind_error("a JPEG of four colors")),
                    _ => return Err(rare_jpeg_kind_error("a JPEG of more than 8 bits")),
                }
                let size =
                    (u16::from_be_bytes([*wide, *narrow]), u16::from_be_bytes([*high, *low]));
                // A height of 0 stands in a DNL segment after the first scan.
                if size.0 == 0 || size.1 == 0 {
                    return Err(rare_jpeg_kind_error("a JPEG that does not say its size"));
                }
                frame = Some((size.0, size.1, *components));
            }
            // Tables for Huffman and arithmetic coding have markers in the range of frame markers.
            0xC4 | 0xCC => {}
            0xC0..=0xCF => {
                return Err(rare_jpeg_kind_error(
                    "a JPEG that is lossless, arithmetic or hierarchical",
                ));
            }
            0xE1 if content.starts_with(EXIF_PREFIX) => {
                let before = exif.replace(content.get(EXIF_PREFIX.len()..).unwrap_or_default());
                // Pillow joins the parts of EXIF metadata that exceeds a segment.
                if before.is_some() {
                    return Err(rare_jpeg_kind_error("a JPEG with EXIF metadata in parts"));
                }
            }
            0xE1 if content.starts_with(XMP_PREFIX) => {
                xmp |= content
                    .windows(XMP_ORIENTATION_KEY.len())
                    .any(|text| text == XMP_ORIENTATION_KEY);
            }
            // The last byte is the color transform: 1 is luma and chroma.
            0xEE if content.starts_with(ADOBE_PREFIX)
                && content.get(11).is_some_and(|how| *how != 1) =>
            {
                return Err(rare_jpeg_kind_error(
                    "a JPEG whose Adobe segment names another color space",
                ));
            }
            0xD9 => return Err(cut()),
            _ => {}
        }
        at = next;
    }
}

/// Decodes a file for a color mode; returns its orientation. A file that is at least `small` pixels
/// high and wide is rejected, because other decoders can decode it at a reduced size.
///
/// # Errors
/// Files that are damaged, large, or of a rare kind.
pub(crate) fn decode_image(
    file: &[u8],
    mode: ColorMode,
    small: u32,
    image: &mut PixelBuffer,
) -> Result<u16> {
    let header = read_header(file)?;
    let (width, height) = (u32::from(header.width), u32::from(header.height));
    check_pixel_count(width, height)?;
    if width.min(height) >= small {
        return Err(rare_jpeg_kind_error("a JPEG that is decoded faster at a part of its size"));
    }
    // Without an end marker, the last rows may be missing.
    if !file.get(header.scan..).is_some_and(|rest| {
        // Cameras append data after the end marker, such as a second image.
        rest.ends_with(END_MARKER) || rest.windows(2).any(|two| two == END_MARKER)
    }) {
        return Err(Error::damaged_error("it is truncated"));
    }
    // A gray result needs only the luma of the file: no color conversion.
    let gray = header.components == 1 || mode == ColorMode::Gray;
    let (colors, channels) = if gray { (ColorSpace::Luma, 1) } else { (ColorSpace::RGB, 3) };
    // Without strict mode, the library makes up missing parts of an image (`IM-2`).
    let options = DecoderOptions::default().set_strict_mode(true).jpeg_set_out_colorspace(colors);
    let options =
        // `check_pixel_count` is the limit; the limit of the library refuses wide panoramas.
        options.set_max_width(usize::from(u16::MAX)).set_max_height(usize::from(u16::MAX));
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(file), options);
    decoder.decode_headers().map_err(Error::damaged_error)?;
    image.resize_buffer(width, height, channels);
    if decoder.output_buffer_size() != Some(image.bytes.len()) {
        return Err(rare_jpeg_kind_error("a JPEG whose parts disagree about its size"));
    }
    decoder.decode_into(&mut image.bytes).map_err(Error::damaged_error)?;
    Ok(header.orientation)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Markers and contents.
    type Segments<'a> = &'a [(u8, &'a [u8])];

    /// Segments of a file up to its first scan.
    fn file(segments: Segments<'_>) -> Vec<u8> {
        let mut bytes = b"\xFF\xD8".to_vec();
        for (marker, content) in segments {
            bytes.extend([0xFF, *marker]);
            bytes.extend(u16::try_from(content.len() + 2).unwrap().to_be_bytes());
            bytes.extend(*content);
        }
        bytes
    }

    const COLORS: &[u8] = b"\x08\x01\x00\x02\x00\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01";
    const TURN: &[u8] = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0";

    #[test]
    fn size_components_and_orientation_are_read() {
        let bytes =
            file(&[(0xE0, b"JFIF\0"), (0xE1, TURN), (0xC4, b""), (0xC2, COLORS), (0xDA, b"\x01")]);
        let wanted = JpegHeader {
            width: 512,
            height: 256,
            components: 3,
            orientation: 6,
            scan: bytes.len(),
        };
        assert_eq!(read_header(&bytes).unwrap(), wanted);
        let plain = file(&[(0xC0, b"\x08\x00\x01\x00\x02\x01\x01\x11\x00"), (0xDA, b"")]);
        let found = read_header(&plain).unwrap();
        assert_eq!((found.width, found.height, found.components, found.orientation), (2, 1, 1, 1));
    }

    #[test]
    fn what_is_rare_or_cut_is_left_to_others() {
        let xmp = b"http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation=\"6\"/>";
        let cases: [(Segments<'_>, &str); 14] = [
            (&[(0xC0, b"\x08\x01\x00\x02\x00\x04\x01\x11\x00")], "four colors"),
            (&[(0xC1, b"\x0c\x01\x00\x02\x00\x03\x01\x11\x00")], "more than 8 bits"),
            (
                &[(0xC0, b"\x08\x01\x00\x02\x00\x03R\x11\x00G\x11\x00B\x11\x00")],
                "red, green and blue",
            ),
            (&[(0xC0, b"\x08\x00\x00\x02\x00\x01\x01\x11\x00")], "does not say its size"),
            (&[(0xC9, COLORS)], "arithmetic"),
            (&[(0xC3, COLORS)], "lossless"),
            (&[(0xEE, b"Adobe\0\x64\0\0\0\0\0")], "Adobe"),
            (&[(0xE1, TURN), (0xE1, TURN)], "in parts"),
            (&[(0xE1, b"Exif\0\0XX"), (0xC0, COLORS), (0xDA, b"")], "odd EXIF"),
            (&[(0xE1, xmp), (0xC0, COLORS), (0xDA, b"")], "XMP"),
            (&[(0xC0, COLORS)], "ends before"),
            (&[(0xDA, b"")], "ends before"),
            (&[(0xD9, b"")], "ends before"),
            (&[], "ends before"),
        ];
        for (segments, expected) in cases {
            let error = read_header(&file(segments)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error} instead of {expected}");
        }
        assert!(
            read_header(&file(&[(0xE1, xmp), (0xE1, TURN), (0xC0, COLORS), (0xDA, b"")])).is_ok(),
            "EXIF comes first"
        );
        assert!(
            read_header(&file(&[(0xEE, b"Adobe\0\x64\0\0\0\0\x01"), (0xC0, COLORS), (0xDA, b"")]))
                .is_ok()
        );
    }
}
