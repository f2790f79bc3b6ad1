// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Numbers and texts in control frames: integers as LEB128 varints, texts and lists after their
//! length.

/// Appends values to a frame.
#[derive(Debug)]
pub(crate) struct Writer<'a>(pub(crate) &'a mut Vec<u8>);

impl Writer<'_> {
    pub(crate) fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    #[expect(clippy::cast_possible_truncation, reason = "the low seven bits are what is meant")]
    pub(crate) fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub(crate) fn fixed(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn text(&mut self, value: &str) {
        self.number(value.len() as u64);
        self.0.extend_from_slice(value.as_bytes());
    }

    pub(crate) fn numbers(&mut self, values: impl ExactSizeIterator<Item = u64>) {
        self.number(values.len() as u64);
        values.for_each(|value| self.number(value));
    }
}

/// The error of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Malformed {
    #[error("it ends early")]
    Short,
    #[error("a number has more than 64 bits")]
    Overlong,
    #[error("a text is not UTF-8")]
    Text,
    #[error("an unknown tag: {0}")]
    Tag(u8),
    #[error("a member out of range: {0}")]
    Member(u64),
    #[error("an unknown cache entry: {0}")]
    Cache(u64),
    #[error("a source announced a tensor twice")]
    Twice,
    #[error("a list out of order: {0}")]
    Order(u64),
    #[error("rows of {0} members are given for another number of them")]
    Rows(usize),
}

pub(crate) type Read<T> = Result<T, Malformed>;

/// Takes values off a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> Read<u8> {
        let (first, rest) = self.0.split_first().ok_or(Malformed::Short)?;
        self.0 = rest;
        Ok(*first)
    }

    pub(crate) fn number(&mut self) -> Read<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            if shift == 63 && byte > 1 {
                return Err(Malformed::Overlong);
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Malformed::Overlong)
    }

    pub(crate) fn small(&mut self) -> Read<u32> {
        u32::try_from(self.number()?).map_err(|_| Malformed::Overlong)
    }

    /// A count of things that take at least one byte each, so that no frame makes us allocate more
    /// than it is long.
    pub(crate) fn count(&mut self) -> Read<usize> {
        let count = usize::try_from(self.number()?).map_err(|_| Malformed::Overlong)?;
        if count > self.0.len() { Err(Malformed::Short) } else { Ok(count) }
    }

    pub(crate) fn fixed(&mut self) -> Read<u64> {
        let (first, rest) = self.0.split_first_chunk::<8>().ok_or(Malformed::Short)?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*first))
    }

    pub(crate) fn text(&mut self) -> Read<&'a str> {
        let length = self.count()?;
        let (text, rest) = self.0.split_at(length);
        self.0 = rest;
        std::str::from_utf8(text).map_err(|_| Malformed::Text)
    }

    pub(crate) fn numbers(&mut self) -> Read<Vec<u64>> {
        (0..self.count()?).map(|_| self.number()).collect()
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
            let mut writer = Writer(&mut frame);
            writer.numbers(numbers.iter().copied());
            writer.text(&text);
            writer.fixed(fixed);
            let mut reader = Reader(&frame);
            prop_assert_eq!(reader.numbers(), Ok(numbers));
            prop_assert_eq!(reader.text(), Ok(text.as_str()));
            prop_assert_eq!(reader.fixed(), Ok(fixed));
            prop_assert!(reader.is_empty());
        }

        #[test]
        fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let mut reader = Reader(&bytes);
            while reader.numbers().is_ok() && reader.text().is_ok() && !reader.is_empty() {}
        }
    }

    #[test]
    fn a_count_beyond_the_frame_is_refused_before_anything_is_allocated() {
        let mut frame = Vec::new();
        Writer(&mut frame).number(u64::MAX);
        assert_eq!(Reader(&frame).numbers(), Err(Malformed::Short));
    }
}
