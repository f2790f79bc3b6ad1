// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Copies a file within a store.

use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _};
use tokio::time::{Instant, sleep};

use super::{Store, local_file_path, reread_if_replaced};
use crate::error::Result;
use crate::local_files;
use crate::location::{StorageService, StoreLocation};
use crate::store_operation::{StoreOperation, current_operation};

/// Largest object that S3 copies by one request.
const MAX_S3_COPY_BYTES: u64 = 5 << 30;

/// Interval at which an unfinished copy of the service is looked at.
const COPY_POLL_INTERVAL: Duration = Duration::from_millis(500);

impl Store {
    /// Copies a file of this store, which is then visible completely or not at all. Object stores
    /// copy it themselves; the copy is complete when this function returns.
    ///
    /// # Errors
    /// Like [`Store::write`], and [`crate::Error::Missing`].
    pub fn copy(&self, from: &str, to: &str) -> Result<()> {
        let (source, target) = (self.object_path(from)?, self.object_path(to)?);
        match &self.location {
            StoreLocation::Local(base) => {
                return local_files::copy_file(
                    &local_file_path(base, from),
                    &local_file_path(base, to),
                )
                .map_err(|source| self.local_error("copy", from, source));
            }
            StoreLocation::Remote { service: StorageService::S3, .. }
                if self.size(from)? > MAX_S3_COPY_BYTES =>
            {
                return reread_if_replaced(|| self.copy_through_process(from, to));
            }
            StoreLocation::Memory { .. } | StoreLocation::Remote { .. } => {}
        }
        let operation = self.backend.begin_operation("copy", self.display_path(from));
        self.ask_within_operation("copy", from, operation.as_ref(), async |backend| {
            backend.copy(&source, &target).await?;
            match current_operation() {
                Some(operation) => wait_for_copy(&operation, backend.as_ref(), &target).await,
                None => Ok(()),
            }
        })
    }

    /// Copies a file through this process, with a few parts of it in memory.
    fn copy_through_process(&self, from: &str, to: &str) -> Result<()> {
        let file = self.open_file(from)?;
        let mut upload = self.start_upload(to)?;
        file.read_parts(|part| upload.write_piece(part))?;
        upload.finish().map(drop)
    }
}

/// Waits until the service has made a copy, as long as it makes progress. Azure may answer before
/// that, and the copy would then have later writes to its source, or fail.
async fn wait_for_copy(
    operation: &StoreOperation,
    backend: &dyn ObjectStore,
    target: &Path,
) -> object_store::Result<()> {
    let failed =
        |text: String| object_store::Error::Generic { store: "Azure", source: text.into() };
    let mut progress = None;
    let mut deadline = Instant::now();
    while let Some(copy) = operation.take_copy_state() {
        match copy.status.as_str() {
            "success" => return Ok(()),
            "pending" => {}
            other => return Err(failed(format!("the service says that the copy has {other}"))),
        }
        if progress != Some(copy.progress.clone()) {
            progress = Some(copy.progress);
            deadline = Instant::now() + operation.timeout();
        }
        if Instant::now() > deadline {
            let timeout = operation.timeout();
            return Err(failed(format!("the service's copy made no progress within {timeout:?}")));
        }
        sleep(COPY_POLL_INTERVAL).await;
        // The answer states how far the copy is, which the client of the service records.
        backend.head(target).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::backend::StoreBackend;
    use crate::options::BackendOptions;

    /// Answers requests like Azure; the statuses of the copy come one after another, the last one
    /// again and again. Returns the address and the methods of the requests.
    fn azure_with(statuses: &'static [&'static str]) -> (String, Arc<Mutex<Vec<String>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}/account", listener.local_addr().unwrap());
        let methods = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&methods);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                drop(answer_request(stream.unwrap(), statuses, &seen));
            }
        });
        (address, methods)
    }

    fn answer_request(
        mut stream: TcpStream,
        statuses: &[&str],
        seen: &Mutex<Vec<String>>,
    ) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
        let method = first.split(' ').next().unwrap_or_default().to_owned();
        for line in lines {
            if line?.is_empty() {
                break;
            }
        }
        let index = seen.lock().unwrap().len();
        let status = statuses[index.min(statuses.len() - 1)];
        let code = if method == "PUT" { "202 Accepted" } else { "200 OK" };
        seen.lock().unwrap().push(method);
        write!(
            stream,
            "HTTP/1.1 {code}\r\ncontent-length: 0\r\netag: \"1\"\r\nconnection: close\r\n\
             last-modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n{status}\r\n"
        )
    }

    fn copy_on(address: &str, timeout: Duration) -> Result<()> {
        let given = [
            ("account_name", "account"),
            ("account_key", "c2VjcmV0"),
            ("azure_storage_endpoint", address),
        ];
        let options = given.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let backend = StoreBackend::Remote {
            service: StorageService::Azure,
            root: "az://container".to_owned(),
            options: BackendOptions(BTreeMap::from(options)),
            timeout,
        };
        let location = StoreLocation::parse("az://container/runs")?;
        Store { backend, location, prefix: Path::from("runs") }.copy("checkpoint", "previous")
    }

    #[test]
    fn a_copy_ends_when_the_service_has_made_it() {
        let minute = Duration::from_secs(60);
        let (address, methods) = azure_with(&[
            "x-ms-copy-status: pending\r\n",
            "x-ms-copy-status: pending\r\nx-ms-copy-progress: 1/2\r\n",
            "x-ms-copy-status: success\r\nx-ms-copy-progress: 2/2\r\n",
        ]);
        copy_on(&address, minute).unwrap();
        assert_eq!(*methods.lock().unwrap(), ["PUT", "HEAD", "HEAD"]);
        let (address, methods) = azure_with(&["x-ms-copy-status: success\r\n"]);
        copy_on(&address, minute).unwrap();
        assert_eq!(*methods.lock().unwrap(), ["PUT"]);
    }

    #[test]
    fn a_copy_that_fails_or_stands_still_is_an_error() {
        let (address, _) =
            azure_with(&["x-ms-copy-status: pending\r\n", "x-ms-copy-status: failed\r\n"]);
        let error = copy_on(&address, Duration::from_secs(60)).unwrap_err();
        assert!(format!("{error:?}").contains("the copy has failed"), "{error:?}");
        assert!(error.to_string().contains("checkpoint"), "{error}");
        let (address, methods) =
            azure_with(&["x-ms-copy-status: pending\r\nx-ms-copy-progress: 1/2\r\n"]);
        let error = copy_on(&address, Duration::from_millis(1200)).unwrap_err();
        assert!(format!("{error:?}").contains("no progress within 1.2s"), "{error:?}");
        assert!(methods.lock().unwrap().len() > 2);
    }
}
