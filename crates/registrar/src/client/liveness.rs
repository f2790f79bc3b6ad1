// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A caller's question whether the registrar answers.

use std::time::{Duration, Instant};

use super::TaskClient;
use super::heartbeat::{RECONNECT_INTERVAL, is_connection_refused};
use crate::error::{Error, Result};
use crate::generated as wire;

impl TaskClient {
    /// Returns whether the registrar answers before `deadline`. Returns false early if no process
    /// listens at its address.
    ///
    /// # Errors
    /// `Forked`.
    pub fn is_registrar_answering(&self, deadline: Instant) -> Result<bool> {
        self.check_own_process()?;
        let call = || {
            // A read changes nothing, and any answer, also a refusal, shows that the registrar
            // lives.
            let message = wire::GetRequest { key: String::new(), timeout_ms: 0 };
            let request = self.inner.caller.build_request(message);
            let mut stub = self.inner.caller.grpc_stub();
            async move { stub.get(request).await }
        };
        // A call would repeat until the deadline; a closed port proves the end of the process
        // earlier.
        let refused = async {
            while !is_connection_refused(&self.inner.address).await {
                tokio::time::sleep(RECONNECT_INTERVAL).await;
            }
        };
        let answered = async {
            tokio::select! {
                answer = self.retry_while_disconnected("a get", call) => match answer {
                    // A refusal is an answer, too.
                    Ok(_) | Err(Error::Refused { .. } | Error::Aborted { .. }) => true,
                    Err(_) => false,
                },
                () = refused => false,
            }
        };
        let late = || Error::Timeout { what: "an answer".to_owned(), elapsed: Duration::ZERO };
        Ok(self.block_on("a get", deadline, answered, late).unwrap_or(false))
    }
}
