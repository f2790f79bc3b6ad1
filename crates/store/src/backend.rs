// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The backend of a location, and waits for it.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;

use crate::error::Result;
use crate::location::{Location, Service};
use crate::options::{self, Options};
use crate::remote;
use crate::wait::Waiter;

/// The memory stores of this process, by name.
static MEMORY: LazyLock<Mutex<HashMap<String, Arc<InMemory>>>> = LazyLock::new(Mutex::default);

/// The identity of a remote backend: two stores with the same one share connections. The process is
/// part of it, since a forked child can use none of its parent's connections.
type Recipe = (u32, String, Options);

/// The remote backends of this process.
static REMOTE: LazyLock<Mutex<HashMap<Recipe, Arc<dyn ObjectStore>>>> =
    LazyLock::new(Mutex::default);

/// The backend that a store reads from and writes to.
#[derive(Clone, Debug)]
pub(crate) enum Backend {
    /// Ready at once.
    Here(Arc<dyn ObjectStore>),
    /// Over the network; the connections are looked up at every use.
    Remote(Service, String, Options),
}

impl Backend {
    /// Returns the backend of a location; nothing is touched yet.
    ///
    /// # Errors
    /// Options that the backend does not have.
    pub(crate) fn of(location: &Location) -> Result<Self> {
        Ok(match location {
            Location::Local(_) => Self::Here(Arc::new(LocalFileSystem::new())),
            Location::Memory { name, .. } => {
                let mut stores = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
                Self::Here(stores.entry(name.clone()).or_default().clone())
            }
            Location::Remote { service, root, .. } => {
                let backend = Self::Remote(*service, root.clone(), options::of(&location.url()));
                // Wrong options are said here, not at the first read somewhere else. HDFS looks for
                // its name node when it opens, so only readers and writers open it.
                if *service != Service::Hdfs {
                    backend.get()?;
                }
                backend
            }
        })
    }

    /// Returns the backend of requests.
    ///
    /// # Errors
    /// Like [`Backend::of`].
    pub(crate) fn get(&self) -> Result<Arc<dyn ObjectStore>> {
        match self {
            Self::Here(backend) => Ok(Arc::clone(backend)),
            Self::Remote(service, root, options) => {
                let recipe = (std::process::id(), root.clone(), options.clone());
                let mut opened = REMOTE.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(backend) = opened.get(&recipe) {
                    return Ok(Arc::clone(backend));
                }
                let backend = remote::open(*service, root, options)?;
                opened.insert(recipe, Arc::clone(&backend));
                Ok(backend)
            }
        }
    }

    /// Returns its way of waiting.
    pub(crate) fn waiter(&self) -> Waiter {
        match self {
            Self::Here(_) => Waiter::Here,
            Self::Remote(..) => Waiter::Runtime,
        }
    }
}
