// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Chooses the backend of a location and the way to wait for it.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use farandole_config::Config;
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;

use crate::backend_wait::BackendWaiter;
use crate::credentials::OpenedBackend;
use crate::error::Result;
use crate::fork_reset_value::ForkResetValue;
use crate::location::{StorageService, StoreLocation};
use crate::options::{self, BackendOptions};
use crate::remote;
use crate::store_operation::StoreOperation;

/// The memory stores of this process, by name.
static MEMORY_STORES: LazyLock<Mutex<HashMap<String, Arc<InMemory>>>> =
    LazyLock::new(Mutex::default);

/// Identity of a remote backend: stores with the same identity share connections.
type BackendKey = (String, BackendOptions, Duration);

/// The remote backends of this process. A forked child cannot use its parent's connections.
static REMOTE_BACKENDS: ForkResetValue<HashMap<BackendKey, OpenedBackend>> = ForkResetValue::new();

/// The backend that a store reads from and writes to.
#[derive(Clone, Debug)]
pub(crate) enum StoreBackend {
    /// A backend that is ready at once.
    InProcess(Arc<dyn ObjectStore>),
    /// A backend over the network; its connections are looked up at every use.
    Remote {
        /// The service.
        service: StorageService,
        /// Scheme with bucket, container or name node.
        root: String,
        /// The user's options.
        options: BackendOptions,
        /// Longest time for repetitions of a request.
        timeout: Duration,
    },
}

impl StoreBackend {
    /// Returns the backend of a location without accessing it.
    ///
    /// # Errors
    /// Options that the backend does not know.
    pub(crate) fn for_location(location: &StoreLocation) -> Result<Self> {
        Ok(match location {
            StoreLocation::Local(_) => Self::InProcess(Arc::new(LocalFileSystem::new())),
            StoreLocation::Memory { name, .. } => {
                // A panic of another thread leaves the map whole, so a poisoned lock is not an
                // error.
                let mut stores = MEMORY_STORES.lock().unwrap_or_else(PoisonError::into_inner);
                Self::InProcess(stores.entry(name.clone()).or_default().clone())
            }
            StoreLocation::Remote { service, root, .. } => {
                let backend = Self::Remote {
                    service: *service,
                    root: root.clone(),
                    options: options::options_for_url(&location.url()),
                    timeout: Config::store_timeout_from_env()?,
                };
                // Wrong options must fail here, not at the first read in another process. HDFS
                // contacts its name node when it is opened, so only readers and writers open it.
                if *service != StorageService::Hdfs
                    && let Some(credentials) = backend.open_remote()?.credentials
                {
                    credentials.notice_environment_change();
                }
                backend
            }
        })
    }

    /// Returns the object store for requests.
    ///
    /// # Errors
    /// Like [`StoreBackend::for_location`].
    pub(crate) fn object_store(&self) -> Result<Arc<dyn ObjectStore>> {
        match self {
            Self::InProcess(backend) => Ok(Arc::clone(backend)),
            Self::Remote { .. } => Ok(self.open_remote()?.backend),
        }
    }

    /// Returns the backend of a store over the network, which is opened once.
    fn open_remote(&self) -> Result<OpenedBackend> {
        match self {
            Self::InProcess(backend) => {
                Ok(OpenedBackend { backend: Arc::clone(backend), credentials: None })
            }
            Self::Remote { service, root, options, timeout } => {
                // A client has its options and its timeout built in, so other ones need another
                // client.
                let key = (root.clone(), options.clone(), *timeout);
                if let Some(backend) = REMOTE_BACKENDS.with(|backends| backends.get(&key).cloned())
                {
                    return Ok(backend);
                }
                // The lock is free here: opening reads the environment, which may wait for a thread
                // that waits for this lock. The first of two equal backends stays.
                let backend = remote::open_backend(*service, root, options, *timeout)?;
                Ok(REMOTE_BACKENDS.with(|backends| backends.entry(key).or_insert(backend).clone()))
            }
        }
    }

    /// Returns the way to wait for this backend.
    pub(crate) fn backend_waiter(&self) -> BackendWaiter {
        match self {
            Self::InProcess(_) => BackendWaiter::CallingThread,
            Self::Remote { .. } => BackendWaiter::Runtime,
        }
    }

    /// Begins an operation over a network; `None` for other backends.
    pub(crate) fn begin_operation(
        &self,
        action: &'static str,
        path: String,
    ) -> Option<Arc<StoreOperation>> {
        match self {
            Self::InProcess(_) => None,
            Self::Remote { root, timeout, .. } => {
                Some(StoreOperation::new(root, action, path, *timeout))
            }
        }
    }
}
