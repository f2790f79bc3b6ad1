// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Lines of a byte stream, and its last lines.

use std::collections::VecDeque;

/// Longest line; a longer one is cut into pieces.
const MAX_LINE_BYTES: usize = 64 << 10;
/// Longest line kept in an [`OutputTail`].
const MAX_TAIL_LINE_BYTES: usize = 4 << 10;

/// The way in which a line ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LineEnding {
    /// A line feed, the end of the stream, or the maximal length.
    Line,
    /// A carriage return: on a terminal, the next line overwrites this one, as in progress bars.
    CarriageReturn,
}

/// Splits a stream at `\n`, `\r\n` and `\r`, and never inside a character. Bytes that are not UTF-8
/// become U+FFFD.
#[derive(Default)]
pub(crate) struct LineSplitter {
    pending: Vec<u8>,
    after_return: bool,
}

impl LineSplitter {
    /// Adds bytes, and emits the lines that they complete.
    pub(crate) fn push_bytes(&mut self, bytes: &[u8], mut emit: impl FnMut(String, LineEnding)) {
        for &byte in bytes {
            let completes_pair = std::mem::replace(&mut self.after_return, false) && byte == b'\n';
            match byte {
                // The return has ended the line already; `\r\n` is one line end, also across two
                // reads.
                b'\n' if completes_pair => {}
                b'\n' => emit(self.take_pending(), LineEnding::Line),
                b'\r' => {
                    self.after_return = true;
                    if !self.pending.is_empty() {
                        emit(self.take_pending(), LineEnding::CarriageReturn);
                    }
                }
                _ => {
                    // Not before a continuation byte of UTF-8, so that a character is never cut.
                    if self.pending.len() >= MAX_LINE_BYTES && byte & 0b1100_0000 != 0b1000_0000 {
                        emit(self.take_pending(), LineEnding::Line);
                    }
                    self.pending.push(byte);
                }
            }
        }
    }

    /// Emits the rest of the stream as a line.
    pub(crate) fn finish_stream(&mut self, mut emit: impl FnMut(String, LineEnding)) {
        if !self.pending.is_empty() {
            emit(self.take_pending(), LineEnding::Line);
        }
    }

    fn take_pending(&mut self) -> String {
        let bytes = std::mem::take(&mut self.pending);
        String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}

/// The last lines of a stream, as a terminal would show them.
pub(crate) struct OutputTail {
    lines: VecDeque<String>,
    capacity: usize,
    overwrite: bool,
}

impl OutputTail {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { lines: VecDeque::with_capacity(capacity), capacity, overwrite: false }
    }

    pub(crate) fn push(&mut self, line: &str, ending: LineEnding) {
        if self.overwrite || self.lines.len() == self.capacity {
            if self.overwrite {
                self.lines.pop_back();
            } else {
                self.lines.pop_front();
            }
        }
        self.overwrite = ending == LineEnding::CarriageReturn;
        self.lines.push_back(line[..line.floor_char_boundary(MAX_TAIL_LINE_BYTES)].to_owned());
    }

    /// Returns the lines, oldest first.
    pub(crate) fn last_lines(&self) -> impl Iterator<Item = &str> {
        self.lines.iter().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(chunks: &[&[u8]]) -> Vec<(String, LineEnding)> {
        let mut splitter = LineSplitter::default();
        let mut lines = Vec::new();
        for chunk in chunks {
            splitter.push_bytes(chunk, |line, ending| lines.push((line, ending)));
        }
        splitter.finish_stream(|line, ending| lines.push((line, ending)));
        lines
    }

    fn texts(chunks: &[&[u8]]) -> Vec<String> {
        split(chunks).into_iter().map(|(line, _)| line).collect()
    }

    #[test]
    fn line_feeds_returns_and_pairs_end_lines() {
        assert_eq!(texts(&[b"a\nb\r\nc\rd", b"\n\n"]), ["a", "b", "c", "d", ""]);
        assert_eq!(texts(&[b"a\r", b"\nb"]), ["a", "b"]);
    }

    #[test]
    fn a_character_may_arrive_in_pieces_and_bad_bytes_are_replaced() {
        let euro = "\u{20ac}".as_bytes();
        assert_eq!(texts(&[&euro[..1], &euro[1..], b"\n\xff!"]), ["\u{20ac}", "\u{fffd}!"]);
    }

    #[test]
    fn an_endless_line_comes_in_pieces_of_whole_characters() {
        let text = "\u{20ac}".repeat(MAX_LINE_BYTES);
        let pieces = texts(&[text.as_bytes()]);
        assert!(
            pieces
                .iter()
                .all(|piece| piece.len() <= MAX_LINE_BYTES + 3 && !piece.contains('\u{fffd}'))
        );
        assert_eq!(pieces.concat(), text);
    }

    #[test]
    fn a_progress_bar_takes_one_line_of_the_tail() {
        let mut tail = OutputTail::new(2);
        for (line, ending) in split(&[b"start\n10%\r50%\r100%\nend"]) {
            tail.push(&line, ending);
        }
        assert_eq!(tail.last_lines().collect::<Vec<_>>(), ["100%", "end"]);
    }
}
