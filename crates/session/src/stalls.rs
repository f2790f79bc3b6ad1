// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Says which ranks are waited for, and has this process's interpreter asked what it does when it
//! is one of them.

use std::io::{self, PipeReader, PipeWriter, Write, pipe};
use std::sync::Arc;
use std::time::Duration;

use farandole_config::Config;
use farandole_engine::{Answer, Observer, StallReport};
use parking_lot::Mutex;

/// Asks the listener for the stacks.
const ASK: u8 = 1;
/// Sends the listener home.
const END: u8 = 0;

/// Makes events of stalls, which the interpreter logs.
#[derive(Debug)]
pub(crate) struct Events(pub(crate) Arc<Stacks>);

impl Observer for Events {
    fn stalled(&self, report: &StallReport) {
        match report.is_fatal() {
            true => tracing::error!("{report}\nGiving up."),
            false => tracing::warn!("{report}"),
        }
    }

    fn note(&self, text: &str) {
        tracing::warn!("{text}");
    }

    fn describe(&self, answer: Answer) {
        self.0.ask(answer);
    }
}

/// A desk at which a thread of the interpreter waits for requests of the other threads' stacks. It
/// sleeps in `read` and costs nothing; no thread of the engine ever waits for it, nor for the
/// interpreter's lock.
#[derive(Debug, Default)]
pub struct Stacks(Mutex<Desk>);

#[derive(Debug, Default)]
struct Desk {
    bell: Option<PipeWriter>,
    waiting: Vec<Answer>,
}

impl Stacks {
    /// A pipe whose reader gets a byte for every question: `1` asks for [`Stacks::answer`], `0` or
    /// the end says that no more questions come. An earlier listener is dismissed.
    ///
    /// # Errors
    /// When there is no pipe to be had.
    pub fn listen(&self) -> io::Result<PipeReader> {
        let (reader, writer) = pipe()?;
        self.close();
        self.0.lock().bell = Some(writer);
        Ok(reader)
    }

    /// Answers all questions.
    pub fn answer(&self, text: &str) {
        let waiting = std::mem::take(&mut self.0.lock().waiting);
        waiting.into_iter().for_each(|answer| answer.give(text.to_owned()));
    }

    fn ask(&self, answer: Answer) {
        let mut desk = self.0.lock();
        let first = desk.waiting.is_empty();
        let Some(bell) = &mut desk.bell else { return };
        // One byte at a time is in the pipe: writing it cannot block.
        if !first || bell.write_all(&[ASK]).is_ok() {
            desk.waiting.push(answer);
        }
    }

    pub(crate) fn close(&self) {
        let mut desk = self.0.lock();
        desk.waiting.clear();
        if let Some(mut bell) = desk.bell.take() {
            // A forked child may hold the other end open, so the end of the pipe is not enough.
            drop(bell.write_all(&[END]));
        }
    }
}

/// The contradiction between the chosen times, if any.
pub(crate) fn contradiction(config: &Config) -> Option<String> {
    let (check, shutdown) = (config.stall_check_time, config.stall_shutdown_time);
    let off = config.stall_check_disable || check.is_zero();
    let ignored = shutdown > Duration::ZERO && (shutdown < check || off);
    ignored.then(|| match off {
        true => format!(
            "the stall check is off, so the stall shutdown time is ignored: \
                         {shutdown:?}"
        ),
        false => {
            format!(
                "the stall shutdown time is below the check time of {check:?} and ignored: \
                     {shutdown:?}"
            )
        }
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use super::*;

    fn config(check: &str, shutdown: &str) -> Config {
        let of = |name: &str| match name {
            "FARANDOLE_STALL_CHECK_TIME_SECONDS" => Some(check.to_owned()),
            "FARANDOLE_STALL_SHUTDOWN_TIME_SECONDS" => Some(shutdown.to_owned()),
            _ => None,
        };
        Config::read(of, &BTreeMap::new()).unwrap()
    }

    #[test]
    fn a_shutdown_before_the_first_warning_is_ignored_and_said() {
        let text = contradiction(&config("60", "10")).unwrap();
        assert!(text.ends_with("below the check time of 60s and ignored: 10s"), "{text}");
        assert_eq!(contradiction(&config("60", "0")), None);
        assert_eq!(contradiction(&config("60", "60")), None);
        let off = Config { stall_check_disable: true, ..config("60", "90") };
        assert!(contradiction(&off).unwrap().contains("is off"));
        assert!(contradiction(&config("0", "90")).unwrap().contains("is off"));
    }

    #[test]
    fn a_listener_is_sent_home_by_the_next_one_and_by_the_end() {
        let stacks = Stacks::default();
        let (mut first, mut byte) = (stacks.listen().unwrap(), Vec::new());
        let mut second = stacks.listen().unwrap();
        stacks.close();
        for reader in [&mut first, &mut second] {
            byte.clear();
            reader.read_to_end(&mut byte).unwrap();
            assert_eq!(byte, [END]);
        }
    }
}
