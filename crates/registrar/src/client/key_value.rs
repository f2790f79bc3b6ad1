// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Keys and values that all tasks of a job share.

use super::*;

impl TaskClient {
    /// Publishes `value` under `key` of this generation; the last value wins.
    ///
    /// # Errors
    /// `Refused` for an oversized key or value, `Aborted`, `Lost`.
    pub fn put_value(&self, key: &str, value: &[u8]) -> Result<()> {
        let message =
            wire::PutRequest { key: key.to_owned(), value: Bytes::copy_from_slice(value) };
        self.call_with_retries("a put", self.call_deadline(), || {
            let request = self.inner.caller.build_request(message.clone());
            let mut stub = self.inner.caller.grpc_stub();
            async move { stub.put(request).await }
        })?;
        Ok(())
    }

    /// Publishes `value` under `key` of this generation if the key has no value, and returns the
    /// key's value: `value`, unless another caller was first. Repeating the call changes nothing.
    ///
    /// # Errors
    /// `Refused` for an oversized key or value, `Aborted`, `Lost`.
    pub fn put_if_absent(&self, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        let message =
            wire::PutIfAbsentRequest { key: key.to_owned(), value: Bytes::copy_from_slice(value) };
        let reply = self.call_with_retries("a claim", self.call_deadline(), || {
            let request = self.inner.caller.build_request(message.clone());
            let mut stub = self.inner.caller.grpc_stub();
            async move { stub.put_if_absent(request).await }
        })?;
        Ok(reply.value.into())
    }

    /// Waits until `key` of this generation has a value.
    ///
    /// # Errors
    /// `Timeout` at `deadline`, `Aborted` as soon as the generation is over, `Refused`, `Lost`.
    pub fn await_value(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        let started = Instant::now();
        loop {
            let timeout_ms = self.server_wait_millis(deadline);
            let reply = self.call_with_retries("a get", deadline + MAX_SERVER_WAIT, || {
                let request = self
                    .inner
                    .caller
                    .build_request(wire::GetRequest { key: key.to_owned(), timeout_ms });
                let mut stub = self.inner.caller.grpc_stub();
                async move { stub.get(request).await }
            })?;
            if let Some(value) = reply.value {
                return Ok(value.into());
            }
            if Instant::now() >= deadline {
                return Err(Error::Timeout {
                    what: format!("key {key}"),
                    elapsed: started.elapsed(),
                });
            }
        }
    }
}
