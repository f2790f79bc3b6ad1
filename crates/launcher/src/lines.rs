// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Lines of a byte stream, and the last few of them.

use std::collections::VecDeque;

/// Longest line; a longer one is cut into pieces.
const MAX_LINE: usize = 64 << 10;
/// Longest line kept in a tail.
const MAX_TAIL_LINE: usize = 4 << 10;

/// The end of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// By a line feed, the end of the stream, or its length.
    Line,
    /// By a carriage return: on a terminal the next line overwrites it, as progress bars want.
    Return,
}

/// Splits at `\n`, `\r\n` and `\r`; bytes that are not UTF-8 become U+FFFD. A character is never
/// cut in two.
#[derive(Default)]
pub(crate) struct Splitter {
    pending: Vec<u8>,
    after_return: bool,
}

impl Splitter {
    /// Takes bytes in, and hands out the lines they complete.
    pub(crate) fn feed(&mut self, bytes: &[u8], mut emit: impl FnMut(String, Ending)) {
        for &byte in bytes {
            let completes_pair = std::mem::replace(&mut self.after_return, false) && byte == b'\n';
            match byte {
                b'\n' if completes_pair => {}
                b'\n' => emit(self.take(), Ending::Line),
                b'\r' => {
                    self.after_return = true;
                    if !self.pending.is_empty() {
                        emit(self.take(), Ending::Return);
                    }
                }
                _ => {
                    if self.pending.len() >= MAX_LINE && byte & 0b1100_0000 != 0b1000_0000 {
                        emit(self.take(), Ending::Line);
                    }
                    self.pending.push(byte);
                }
            }
        }
    }

    /// Hands out what the stream ended with.
    pub(crate) fn finish(&mut self, mut emit: impl FnMut(String, Ending)) {
        if !self.pending.is_empty() {
            emit(self.take(), Ending::Line);
        }
    }

    fn take(&mut self) -> String {
        let bytes = std::mem::take(&mut self.pending);
        String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}

/// The last lines of a stream, as a terminal would show them.
pub(crate) struct Tail {
    lines: VecDeque<String>,
    capacity: usize,
    overwrite: bool,
}

impl Tail {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { lines: VecDeque::with_capacity(capacity), capacity, overwrite: false }
    }

    pub(crate) fn push(&mut self, line: &str, ending: Ending) {
        if self.overwrite || self.lines.len() == self.capacity {
            if self.overwrite {
                self.lines.pop_back();
            } else {
                self.lines.pop_front();
            }
        }
        self.overwrite = ending == Ending::Return;
        self.lines.push_back(line[..line.floor_char_boundary(MAX_TAIL_LINE)].to_owned());
    }

    /// Returns the lines, oldest first.
    pub(crate) fn lines(&self) -> impl Iterator<Item = &str> {
        self.lines.iter().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(chunks: &[&[u8]]) -> Vec<(String, Ending)> {
        let mut splitter = Splitter::default();
        let mut lines = Vec::new();
        for chunk in chunks {
            splitter.feed(chunk, |line, ending| lines.push((line, ending)));
        }
        splitter.finish(|line, ending| lines.push((line, ending)));
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
        let text = "\u{20ac}".repeat(MAX_LINE);
        let pieces = texts(&[text.as_bytes()]);
        assert!(
            pieces.iter().all(|piece| piece.len() <= MAX_LINE + 3 && !piece.contains('\u{fffd}'))
        );
        assert_eq!(pieces.concat(), text);
    }

    #[test]
    fn a_progress_bar_takes_one_line_of_the_tail() {
        let mut tail = Tail::new(2);
        for (line, ending) in split(&[b"start\n10%\r50%\r100%\nend"]) {
            tail.push(&line, ending);
        }
        assert_eq!(tail.lines().collect::<Vec<_>>(), ["100%", "end"]);
    }
}
