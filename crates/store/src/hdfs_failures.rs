// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Failures of HDFS: which are transient, how long a request is repeated, and errors that name the
//! service without a Java stack trace.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use hdfs_native::HdfsError;
use object_store::{Error, Result};
use tokio::time::{Instant, sleep, timeout};

use crate::http_deadlines::MIN_BYTES_PER_SECOND;
use crate::retry_pauses::{FIRST_RETRY_PAUSE, longest_retry_pause};
use crate::store_operation::note_failed_attempt;

/// Exception of a name node for a missing file, including one that was deleted while open.
const MISSING_FILE_EXCEPTION: &str = "FileNotFoundException";

/// Transient exceptions of name nodes.
const TRANSIENT_EXCEPTIONS: [&str; 4] =
    ["StandbyException", "RetriableException", "SafeModeException", "RetryCacheEntry"];
/// Exceptions of name nodes for missing permissions.
const PERMISSION_EXCEPTIONS: [&str; 2] = ["AccessControlException", "AuthorizationException"];

/// An HDFS backend that retries requests.
#[derive(Debug)]
pub(crate) struct RetryingHdfs<S> {
    pub(crate) inner: Arc<S>,
    /// Longest time for retries of transient failures.
    pub(crate) retry_timeout: Duration,
    /// Longest wait for an answer without data.
    pub(crate) answer_timeout: Duration,
}

impl<S> Clone for RetryingHdfs<S> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), ..*self }
    }
}

/// Limits how long a request is repeated: the time counts from the first failure after the last
/// progress, and not from the begin of a request that has worked for long.
#[derive(Debug)]
pub(crate) struct RetryClock {
    timeout: Duration,
    pause: Duration,
    first_failure: Option<Instant>,
    /// Progress of the attempt that came furthest. Less than that is no progress, so that attempts
    /// that all fail at the same byte end.
    furthest: u64,
}

impl RetryClock {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self { timeout, pause: FIRST_RETRY_PAUSE, first_failure: None, furthest: 0 }
    }

    /// Waits until the next attempt, after one whose progress was `reached`.
    ///
    /// # Errors
    /// The attempt's, if it is permanent or the time is over.
    pub(crate) async fn wait_before_retry(&mut self, error: Error, reached: u64) -> Result<()> {
        if !is_transient(&error) {
            return Err(translate_error(error));
        }
        let error = translate_error(error);
        note_failed_attempt(&error.to_string());
        if reached > self.furthest {
            *self = Self { furthest: reached, ..Self::new(self.timeout) };
        }
        let first_failure = *self.first_failure.get_or_insert_with(Instant::now);
        if first_failure.elapsed() > self.timeout {
            return Err(error);
        }
        // Random, so that the ranks of a job do not all return at the same moment.
        sleep(self.pause.mul_f64(rand::random_range(0.5..=1.0))).await;
        self.pause = (self.pause * 2).min(longest_retry_pause(self.timeout));
        Ok(())
    }
}

/// Returns the longest time for a request that transfers `bytes`.
pub(crate) fn transfer_timeout(answer_timeout: Duration, bytes: u64) -> Duration {
    // A large request may take as long as a slow connection needs for its bytes.
    answer_timeout + Duration::from_secs(bytes / MIN_BYTES_PER_SECOND)
}

/// Waits for an answer, at most for `limit`.
pub(crate) async fn within<T>(
    limit: Duration,
    answer: impl Future<Output = Result<T>>,
) -> Result<T> {
    timeout(limit, answer).await.unwrap_or_else(|_| {
        let text = format!("no answer within {limit:?}");
        Err(generic_error(HdfsError::IOError(std::io::Error::new(ErrorKind::TimedOut, text))))
    })
}

/// Returns the HDFS error in the chain of sources, if there is one.
fn find_hdfs_error(error: &Error) -> Option<&HdfsError> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(said) = error.downcast_ref() {
            return Some(said);
        }
        next = error.source();
    }
    None
}

/// Returns whether the same request may succeed soon.
fn is_transient(error: &Error) -> bool {
    match find_hdfs_error(error) {
        Some(HdfsError::RPCError(class, _) | HdfsError::FatalRPCError(class, _)) => {
            TRANSIENT_EXCEPTIONS.iter().any(|name| class.ends_with(name))
        }
        Some(HdfsError::IOError(error)) => matches!(
            error.kind(),
            ErrorKind::ConnectionRefused
                | ErrorKind::ConnectionReset
                | ErrorKind::ConnectionAborted
                | ErrorKind::NotConnected
                | ErrorKind::BrokenPipe
                | ErrorKind::UnexpectedEof
                | ErrorKind::TimedOut
                | ErrorKind::HostUnreachable
                | ErrorKind::NetworkUnreachable
        ),
        // Other data nodes have copies of the block.
        Some(HdfsError::DataTransferError(_) | HdfsError::ChecksumError) => true,
        _ => false,
    }
}

pub(crate) fn generic_error(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic { store: "HDFS", source: source.into() }
}

/// Converts an error to the form that other services use.
pub(crate) fn translate_error(error: Error) -> Error {
    let path = String::new();
    match find_hdfs_error(&error) {
        Some(HdfsError::RPCError(class, text) | HdfsError::FatalRPCError(class, text)) => {
            let class = class.rsplit('.').next().unwrap_or(class);
            // The lines after the first one are the stack trace of Java.
            let text = format!("{class}: {}", text.lines().next().unwrap_or_default());
            if PERMISSION_EXCEPTIONS.contains(&class) {
                Error::PermissionDenied { path, source: text.into() }
            } else if class == MISSING_FILE_EXCEPTION {
                Error::NotFound { path, source: text.into() }
            } else {
                generic_error(text)
            }
        }
        Some(HdfsError::GSSAPIError(_, _, text)) => {
            let text = format!("no Kerberos ticket that serves (kinit gets one): {}", text.trim());
            Error::Unauthenticated { path, source: text.into() }
        }
        Some(error @ (HdfsError::SASLError(_) | HdfsError::NoSASLMechanism)) => {
            Error::Unauthenticated { path, source: error.to_string().into() }
        }
        Some(HdfsError::InvalidArgument(text)) if text.contains("NameNode") => generic_error(
            "no name nodes are known by this name: HADOOP_CONF_DIR or storage options tell of them",
        ),
        _ => error,
    }
}
