// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Images that are damaged, or say that they are huge, where memory is short: pixels or an error,
//! and never the end of the process.
#![expect(clippy::unwrap_used, reason = "tests")]

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use farandole_fuzz::{Limit, Random, apart, cases, confine};
use farandole_images::{
    ChannelScale, ColorMode, Error, ImageDecoder, ImageOutput, ImageTransform, ResizeMode,
};

/// Addresses that a decoder may take: what the largest image has that is not refused, as it is
/// stored and turned, and what PNG may take beside.
const ROOM: u64 = 768 << 20;
/// No case may take longer: the files have a few hundred bytes.
const LONGEST: std::time::Duration = std::time::Duration::from_secs(20);

/// 16 x 12 pixels of luma and chroma, which Pillow wrote: in one scan, and in several.
const JPEGS: [&str; 2] = [
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk1x\
     eXBkeFxlZ2P/2wBDARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/wAAR\
     CAAMABADASIAAhEBAxEB/8QAFgABAQEAAAAAAAAAAAAAAAAABQIE/8QAIBAAAQMEAgMAAAAAAAAAAAAAAQACAwQSE0EFEQYhIv/EABQBAQAA\
     AAAAAAAAAAAAAAAAAAT/xAAdEQACAgEFAAAAAAAAAAAAAAACAwABEQQhMUFh/9oADAMBAAIRAxEAPwBOG2gie0nu4LBS8gKGV7oxfcdKeTe7\
     A73pG+LHLLLk+ujtDJtsRdnuVdwKtQLQJtDjHHk//9k=",
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk1x\
     eXBkeFxlZ2P/2wBDARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/wgAR\
     CAAMABADASIAAhEBAxEB/8QAFgABAQEAAAAAAAAAAAAAAAAABAED/8QAFAEBAAAAAAAAAAAAAAAAAAAAA//aAAwDAQACEAMQAAABThDCH//E\
     ABsQAAIBBQAAAAAAAAAAAAAAAAEDAgQSISIx/9oACAEBAAEFAhoIssLOUuT/AP/EABgRAAIDAAAAAAAAAAAAAAAAAAECAAMR/9oACAEDAQE/\
     AVsDAtk//8QAGREAAQUAAAAAAAAAAAAAAAAAAgABEiEx/9oACAECAQE/AXKQXq//xAAYEAACAwAAAAAAAAAAAAAAAAAAARARIf/aAAgBAQAG\
     PwIyHZ//xAAYEAADAQEAAAAAAAAAAAAAAAAAARFRIf/aAAgBAQABPyGXLS0+qO7NAf/aAAwDAQACAAMAAAAQg//EABgRAAIDAAAAAAAAAAAA\
     AAAAAAARATFh/9oACAEDAQE/EImoqw//xAAXEQEAAwAAAAAAAAAAAAAAAAABACFB/9oACAECAQE/EFVuNn//xAAaEAACAgMAAAAAAAAAAAAA\
     AAAAARFBITFR/9oACAEBAAE/EJOcwEJmajeqH5x2f//Z",
];

/// Files of every way to store pixels.
fn files() -> Vec<Vec<u8>> {
    let mut files: Vec<Vec<u8>> =
        JPEGS.iter().map(|text| BASE64_STANDARD.decode(text).unwrap()).collect();
    for (color, depth, bytes) in [
        (png::ColorType::Grayscale, png::BitDepth::One, 2),
        (png::ColorType::Grayscale, png::BitDepth::Sixteen, 32),
        (png::ColorType::GrayscaleAlpha, png::BitDepth::Eight, 32),
        (png::ColorType::Indexed, png::BitDepth::Four, 8),
        (png::ColorType::Rgb, png::BitDepth::Eight, 48),
        (png::ColorType::Rgba, png::BitDepth::Sixteen, 128),
    ] {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, 16, 12);
        encoder.set_color(color);
        encoder.set_depth(depth);
        if color == png::ColorType::Indexed {
            encoder.set_palette((0..48).collect::<Vec<u8>>());
            encoder.set_trns(vec![0, 128]);
        }
        let rows: Vec<u8> = (0..bytes * 12).map(|at: usize| at.to_le_bytes()[0]).collect();
        encoder.write_header().unwrap().write_image_data(&rows).unwrap();
        files.push(file);
    }
    files
}

/// A file with other bytes; half of the time with the checksums of a PNG that they should have.
fn hostile(sound: &[u8], random: &mut Random) -> Vec<u8> {
    let mut file = random.mutated(sound);
    if !file.starts_with(b"\x89PNG") || random.below(2) == 0 {
        return file;
    }
    if random.below(2) == 0 && file.len() > 24 {
        let side = random.below(8) + 16;
        file[side] = random.byte();
    }
    let mut at = 8;
    while let Some(length) = file.get(at..at + 4) {
        let length = u32::from_be_bytes(length.try_into().unwrap()) as usize;
        let Some(chunk) = file.get(at + 4..(at + 8).saturating_add(length)) else { break };
        let sum = crc32fast::hash(chunk).to_be_bytes();
        let Some(place) = file.get_mut(at + 8 + length..at + 12 + length) else { break };
        place.copy_from_slice(&sum);
        at += 12 + length;
    }
    file
}

fn steps(random: &mut Random) -> ImageTransform {
    ImageTransform {
        height: 1 + u32::from(random.byte()) % 40,
        width: 1 + u32::from(random.byte()) % 40,
        mode: if random.below(2) == 0 { ColorMode::Rgb } else { ColorMode::Gray },
        fit: [ResizeMode::Stretch, ResizeMode::Crop, ResizeMode::Pad][random.below(3)],
        channels_last: random.below(2) == 0,
        scales: vec![ChannelScale { factor: 1.0 / 255.0, shift: 0.5 }],
    }
}

fn decode(file: &[u8], steps: ImageTransform) -> Result<(), Error> {
    let limit = Limit::of(LONGEST);
    let mut out = vec![0.0; steps.value_count()];
    let done = ImageDecoder::new(steps).decode_file(file, ImageOutput::Floats(&mut out));
    limit.check();
    done
}

/// In a process of its own: its memory is limited, and it is the one that would be aborted.
#[test]
#[ignore = "started by the next test"]
fn child() {
    // Panics of libraries are errors here, and their words are of no interest.
    std::panic::set_hook(Box::new(|info| {
        if !info.location().is_some_and(|at| at.file().contains("registry")) {
            eprintln!("{info}");
        }
    }));
    let files = files();
    for file in &files {
        let whole = ImageTransform { height: 12, width: 16, ..steps(&mut Random::new(0)) };
        decode(file, whole).unwrap();
    }
    confine(ROOM).unwrap();
    cases(|random| {
        println!("\ncase {random:?}");
        let file = hostile(&files[random.below(files.len())], random);
        // Whatever comes of it: pixels, or an error.
        drop(decode(&file, steps(random)));
    });
}

#[test]
fn damaged_images_are_pixels_or_errors_and_never_end_the_process() {
    let begun = apart("images::child").unwrap();
    assert!(begun > 20, "few cases: {begun}");
}
