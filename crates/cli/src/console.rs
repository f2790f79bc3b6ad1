// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Lines of the workers on this process's own streams.

use std::io::{self, Write as _};

use farandole::telemetry::{Record, Sink, Stream};

/// Writes `[rank]<stream>:line` to this process's own streams, line by line.
pub(crate) struct Prefixed;

impl Sink for Prefixed {
    fn accept(&self, record: Record) {
        let Record::Log(line) = record else { return };
        let rank = line.rank.map_or_else(|| "?".to_owned(), |rank| rank.to_string());
        let text = format!("[{rank}]<{}>:{}\n", line.stream, line.text);
        // A reader that went away (`| head`) does not end the job.
        drop(match line.stream {
            Stream::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(text.as_bytes()).and_then(|()| out.flush())
            }
            Stream::Stderr => io::stderr().lock().write_all(text.as_bytes()),
        });
    }
}
