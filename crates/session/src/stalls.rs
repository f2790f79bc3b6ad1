// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Logs the ranks that others wait for, and asks this process's interpreter for its stacks if this
//! rank is one of them.

use std::io::{self, PipeReader, PipeWriter, Write, pipe};
use std::sync::Arc;
use std::time::Duration;

use farandole_config::Config;
use farandole_engine::{EngineObserver, StackAnswer, StallReport};
use parking_lot::Mutex;

/// Requests the stacks from the listener.
const STACKS_REQUEST_BYTE: u8 = 1;
/// Ends the listener.
const LISTENER_STOP_BYTE: u8 = 0;

/// Logs stalls as events, which the interpreter's logging receives.
#[derive(Debug)]
pub(crate) struct StallLogger(pub(crate) Arc<StackRequests>);

impl EngineObserver for StallLogger {
    fn on_stall(&self, report: &StallReport) {
        match report.is_fatal() {
            true => tracing::error!("{report}\nGiving up."),
            false => tracing::warn!("{report}"),
        }
    }

    fn on_notice(&self, text: &str) {
        tracing::warn!("{text}");
    }

    fn request_thread_stacks(&self, answer: StackAnswer) {
        self.0.enqueue_question(answer);
    }
}

/// Requests for the stacks of the interpreter's threads. One thread of the interpreter waits for
/// them. It sleeps in `read` and uses no processor time; no thread of the engine ever waits for
/// this thread or for the interpreter's lock.
#[derive(Debug, Default)]
pub struct StackRequests(Mutex<PendingStackQuestions>);

#[derive(Debug, Default)]
struct PendingStackQuestions {
    listener_pipe: Option<PipeWriter>,
    waiting: Vec<StackAnswer>,
}

impl StackRequests {
    /// Returns a pipe whose reader gets a byte for every request: `1` asks for a call of
    /// [`StackRequests::answer_pending_questions`]; `0` or the end says that no more requests come.
    /// An earlier listener is ended.
    ///
    /// # Errors
    /// The system has no pipe left.
    pub fn open_request_pipe(&self) -> io::Result<PipeReader> {
        let (reader, writer) = pipe()?;
        self.close();
        self.0.lock().listener_pipe = Some(writer);
        Ok(reader)
    }

    /// Answers all requests.
    pub fn answer_pending_questions(&self, text: &str) {
        let waiting = std::mem::take(&mut self.0.lock().waiting);
        waiting.into_iter().for_each(|answer| answer.send_stacks(text.to_owned()));
    }

    fn enqueue_question(&self, answer: StackAnswer) {
        let mut requests = self.0.lock();
        // One byte is enough for all requests, because the listener answers all at once.
        let first = requests.waiting.is_empty();
        let Some(bell) = &mut requests.listener_pipe else { return };
        // The pipe holds one byte at a time, so writing it cannot block.
        if !first || bell.write_all(&[STACKS_REQUEST_BYTE]).is_ok() {
            requests.waiting.push(answer);
        }
    }

    pub(crate) fn close(&self) {
        let mut requests = self.0.lock();
        requests.waiting.clear();
        if let Some(mut bell) = requests.listener_pipe.take() {
            // A forked child may hold the write end open, so closing it here may not end the pipe.
            drop(bell.write_all(&[LISTENER_STOP_BYTE]));
        }
    }
}

/// Returns a warning if the chosen times contradict each other.
pub(crate) fn stall_time_warning(config: &Config) -> Option<String> {
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
        let text = stall_time_warning(&config("60", "10")).unwrap();
        assert!(text.ends_with("below the check time of 60s and ignored: 10s"), "{text}");
        assert_eq!(stall_time_warning(&config("60", "0")), None);
        assert_eq!(stall_time_warning(&config("60", "60")), None);
        let off = Config { stall_check_disable: true, ..config("60", "90") };
        assert!(stall_time_warning(&off).unwrap().contains("is off"));
        assert!(stall_time_warning(&config("0", "90")).unwrap().contains("is off"));
    }

    #[test]
    fn a_listener_is_sent_home_by_the_next_one_and_by_the_end() {
        let stacks = StackRequests::default();
        let (mut first, mut byte) = (stacks.open_request_pipe().unwrap(), Vec::new());
        let mut second = stacks.open_request_pipe().unwrap();
        stacks.close();
        for reader in [&mut first, &mut second] {
            byte.clear();
            reader.read_to_end(&mut byte).unwrap();
            assert_eq!(byte, [LISTENER_STOP_BYTE]);
        }
    }
}
