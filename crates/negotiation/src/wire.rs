// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Encoding of control frames: integers are LEB128 varints; texts and lists are prefixed with their
//! length.

/// Appends values to a frame.
#[derive(Debug)]
pub struct FrameWriter<'a>(
    /// The frame.
    pub &'a mut Vec<u8>,
);

impl FrameWriter<'_> {
    /// Writes a byte.
    pub fn write_byte(&mut self, value: u8) {
        self.0.push(value);
    }

    /// Writes a number in as few bytes as it needs.
    #[expect(clippy::cast_possible_truncation, reason = "the low seven bits are what is meant")]
    pub fn write_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// Writes a number in eight bytes.
    pub fn write_u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Writes a text after its length.
    pub fn write_text(&mut self, value: &str) {
        self.write_varint(value.len() as u64);
        self.0.extend_from_slice(value.as_bytes());
    }

    /// Writes numbers after their count.
    pub fn write_varints(&mut self, values: impl ExactSizeIterator<Item = u64>) {
        self.write_varint(values.len() as u64);
        values.for_each(|value| self.write_varint(value));
    }
}

/// The error of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedFrame {
    /// The frame ends early.
    #[error("it ends early")]
    Truncated,
    /// A number has more than 64 bits, or more than its field.
    #[error("a number has more than 64 bits")]
    Overlong,
    /// A text is not UTF-8.
    #[error("a text is not UTF-8")]
    Text,
    /// No such tag.
    #[error("an unknown tag: {0}")]
    Tag(u8),
    /// No such member below the sender.
    #[error("a member out of range: {0}")]
    Member(u64),
    /// No such cache entry.
    #[error("an unknown cache entry: {0}")]
    Cache(u64),
    /// A source announced a tensor twice.
    #[error("a source announced a tensor twice")]
    DuplicateAnnouncement,
    /// A response list has another number than expected.
    #[error("a list out of order: {0}")]
    ListOutOfOrder(u64),
    /// The row counts do not fit the members.
    #[error("rows of {0} members are given for another number of them")]
    Rows(usize),
}

/// Result of reading a value.
pub type FrameResult<T> = Result<T, MalformedFrame>;

/// Reads values from a frame.
#[derive(Clone, Copy, Debug)]
pub struct FrameReader<'a>(
    /// The bytes that are not read yet.
    pub &'a [u8],
);

impl<'a> FrameReader<'a> {
    /// Returns whether all bytes are read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads a byte.
    ///
    /// # Errors
    /// The frame is malformed; the same holds for all other methods.
    pub fn read_byte(&mut self) -> FrameResult<u8> {
        let (first, rest) = self.0.split_first().ok_or(MalformedFrame::Truncated)?;
        self.0 = rest;
        Ok(*first)
    }

    /// Reads a number that `write_varint` has written.
    pub fn read_varint(&mut self) -> FrameResult<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.read_byte()?;
            // The tenth byte has room for bit 63 only. Other bits would be lost in the shift.
            if shift == 63 && byte > 1 {
                return Err(MalformedFrame::Overlong);
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(MalformedFrame::Overlong)
    }

    /// Reads a number of at most 32 bits.
    pub fn read_u32(&mut self) -> FrameResult<u32> {
        u32::try_from(self.read_varint()?).map_err(|_| MalformedFrame::Overlong)
    }

    /// Reads a count of items that take at least one byte each. The count is limited by the bytes
    /// left, so that a frame cannot cause a larger allocation.
    pub fn read_count(&mut self) -> FrameResult<usize> {
        let count = usize::try_from(self.read_varint()?).map_err(|_| MalformedFrame::Overlong)?;
        // Checked before any allocation: a count of 2^60 in a short frame must not take memory
        // (NE-2).
        if count > self.0.len() { Err(MalformedFrame::Truncated) } else { Ok(count) }
    }

    /// Reads a number of eight bytes.
    pub fn read_u64(&mut self) -> FrameResult<u64> {
        let (first, rest) = self.0.split_first_chunk::<8>().ok_or(MalformedFrame::Truncated)?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*first))
    }

    /// Reads a text after its length.
    pub fn read_text(&mut self) -> FrameResult<&'a str> {
        let length = self.read_count()?;
        let (text, rest) = self.0.split_at(length);
        self.0 = rest;
        std::str::from_utf8(text).map_err(|_| MalformedFrame::Text)
    }

    /// Reads numbers after their count.
    pub fn read_varints(&mut self) -> FrameResult<Vec<u64>> {
        (0..self.read_count()?).map(|_| self.read_varint()).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn written_values_are_read(numbers in prop::collection::vec(any::<u64>(), 0..20), text: String, fixed: u64) {
            let mut frame = Vec::new();
            let mut writer = FrameWriter(&mut frame);
            writer.write_varints(numbers.iter().copied());
            writer.write_text(&text);
            writer.write_u64(fixed);
            let mut reader = FrameReader(&frame);
            prop_assert_eq!(reader.read_varints(), Ok(numbers));
            prop_assert_eq!(reader.read_text(), Ok(text.as_str()));
            prop_assert_eq!(reader.read_u64(), Ok(fixed));
            prop_assert!(reader.is_empty());
        }

        #[test]
        fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let mut reader = FrameReader(&bytes);
            while reader.read_varints().is_ok() && reader.read_text().is_ok() && !reader.is_empty() {}
        }
    }

    #[test]
    fn a_count_beyond_the_frame_is_refused_before_anything_is_allocated() {
        let mut frame = Vec::new();
        FrameWriter(&mut frame).write_varint(u64::MAX);
        assert_eq!(FrameReader(&frame).read_varints(), Err(MalformedFrame::Truncated));
    }
}
