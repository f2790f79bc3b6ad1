// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! NCCL through our own table, because wheels contain only `libnccl.so.2`, which no other loader
//! tries.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

mod caller;
mod calls;
mod communicator;
mod communicator_stream;
#[cfg(test)]
pub(crate) mod fake;
mod memory;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use crate::library::function_table;
use crate::{CudaLibrary, Error, LibrarySearchPath, Result};

pub use calls::is_nccl_operation;
pub(crate) use calls::{MIN_ARCH_FOR_FLOAT8, MIN_VERSION_FOR_FLOAT8};
pub use communicator::NcclCommunicator;
pub use communicator_stream::CommunicatorStream;
pub use memory::NcclMemory;

/// A communicator of NCCL.
pub(crate) type Comm = *mut c_void;
type RawStream = *mut c_void;

pub(crate) const NCCL_SUCCESS: i32 = 0;
pub(crate) const NCCL_IN_PROGRESS: i32 = 7;
const NCCL_INVALID_USAGE: i32 = 5;
/// The oldest version whose configuration has all that is used: 2.18.
const MIN_NCCL_VERSION: i32 = 21_800;
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// The value of settings that a configuration leaves to NCCL.
const CONFIG_UNDEFINED: i32 = i32::MIN;

/// The name of a communicator: one member creates it and sends it to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` as of version 2.18. Later versions accept this size and treat their additional
/// fields, in its last four bytes, as undefined.
#[repr(C)]
#[derive(Debug)]
pub struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
    cga_cluster_size: i32,
    min_ctas: i32,
    max_ctas: i32,
    network: *const c_char,
    split_share: i32,
    undefined_tail: i32,
}

impl NcclConfig {
    /// Returns a configuration whose calls block until they are done. Only [`caller`] makes calls,
    /// and its thread may wait.
    fn with_blocking_calls() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: CONFIG_MAGIC,
            version: MIN_NCCL_VERSION.unsigned_abs(),
            blocking: 1,
            cga_cluster_size: CONFIG_UNDEFINED,
            min_ctas: CONFIG_UNDEFINED,
            max_ctas: CONFIG_UNDEFINED,
            network: std::ptr::null(),
            split_share: CONFIG_UNDEFINED,
            undefined_tail: CONFIG_UNDEFINED,
        }
    }
}

function_table! {
    /// Functions of NCCL, by its header's types.
    pub struct NcclTable -> i32 {
        needed {
            version = "ncclGetVersion"(*mut i32);
            unique_id = "ncclGetUniqueId"(*mut UniqueId);
            init = "ncclCommInitRankConfig"(*mut Comm, i32, UniqueId, i32, *mut NcclConfig);
            abort = "ncclCommAbort"(Comm);
            async_error = "ncclCommGetAsyncError"(Comm, *mut i32);
            group_start = "ncclGroupStart"();
            group_end = "ncclGroupEnd"();
            allreduce = "ncclAllReduce"(*const c_void, *mut c_void, usize, i32, i32, Comm, RawStream);
            broadcast = "ncclBroadcast"(*const c_void, *mut c_void, usize, i32, i32, Comm, RawStream);
            reduce = "ncclReduce"(*const c_void, *mut c_void, usize, i32, i32, i32, Comm, RawStream);
            allgather = "ncclAllGather"(*const c_void, *mut c_void, usize, i32, Comm, RawStream);
            reducescatter = "ncclReduceScatter"(*const c_void, *mut c_void, usize, i32, i32, Comm, RawStream);
            send = "ncclSend"(*const c_void, usize, i32, i32, Comm, RawStream);
            receive = "ncclRecv"(*mut c_void, usize, i32, i32, Comm, RawStream);
            create_premul_sum = "ncclRedOpCreatePreMulSum"(*mut i32, *mut c_void, i32, i32, Comm);
            destroy_premul_sum = "ncclRedOpDestroy"(i32, Comm);
        }
        optional {
            allocate = "ncclMemAlloc"(*mut *mut c_void, usize);
            register = "ncclCommRegister"(Comm, *mut c_void, usize, *mut *mut c_void);
        }
    }
}

/// The texts of errors return no status, so they are not in the table.
type ErrorTextFunction = unsafe extern "C" fn(i32) -> *const c_char;

/// The library.
#[derive(Clone)]
pub struct NcclLibrary {
    table: Arc<NcclTable>,
    error_text: Option<ErrorTextFunction>,
    version: i32,
    path: String,
}

impl NcclLibrary {
    /// Finds and loads it.
    ///
    /// # Errors
    /// `NotFound`, `Symbols`, `Version`, `Nccl`.
    pub fn load_from(search_path: &LibrarySearchPath) -> Result<Self> {
        let library = search_path.load_library(CudaLibrary::Nccl)?;
        let path = library
            .file_of_function(CudaLibrary::Nccl.probe_symbol())
            .unwrap_or_else(|| library.opened_name().to_owned());
        // SAFETY: the type in NCCL's header.
        let error_text =
            unsafe { library.find_function::<ErrorTextFunction>(c"ncclGetErrorString") };
        Self::from_table(NcclTable::from_library(&library)?, error_text, path)
    }

    /// Takes these functions for a library.
    ///
    /// # Errors
    /// `Version`, `Nccl`.
    pub(crate) fn from_table(
        table: NcclTable,
        error_text: Option<ErrorTextFunction>,
        path: String,
    ) -> Result<Self> {
        let mut nccl = Self { table: Arc::new(table), error_text, version: 0, path };
        let mut version = 0;
        // SAFETY: the place lives across the call.
        nccl.check_status("ncclGetVersion", unsafe { (nccl.table.version)(&raw mut version) })?;
        if version < MIN_NCCL_VERSION {
            return Err(Error::Version {
                path: nccl.path,
                version: format_version(version),
                least: "2.18",
            });
        }
        nccl.version = version;
        Ok(nccl)
    }

    /// Returns the version as text, such as `2.30.7`.
    pub fn version_text(&self) -> String {
        format_version(self.version)
    }

    /// Returns the version in NCCL's encoding, such as 23007.
    pub fn version_code(&self) -> i32 {
        self.version
    }

    /// Returns the file it was loaded from.
    pub fn library_path(&self) -> &str {
        &self.path
    }

    /// Returns a name for a new communicator.
    ///
    /// # Errors
    /// `Nccl`.
    pub fn create_unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the place has the bytes of the type.
        self.check_status("ncclGetUniqueId", unsafe { (self.table.unique_id)(&raw mut id) })?;
        Ok(id)
    }

    pub(crate) fn function_table(&self) -> &NcclTable {
        &self.table
    }

    /// Returns the error of a failed function. A call in progress is no error.
    pub(crate) fn check_status(&self, function: &'static str, status: i32) -> Result<()> {
        match status {
            NCCL_SUCCESS | NCCL_IN_PROGRESS => Ok(()),
            status => Err(Error::Nccl { function, reason: self.describe_status(status) }),
        }
    }

    /// Returns the description of a communicator.
    fn async_communicator_status(&self, comm: Comm) -> i32 {
        let mut status = NCCL_SUCCESS;
        // SAFETY: the caller's communicator is alive and the place, too.
        let asked = unsafe { (self.table.async_error)(comm, &raw mut status) };
        if asked == NCCL_SUCCESS { status } else { asked }
    }

    fn describe_status(&self, status: i32) -> String {
        // SAFETY: any status may be asked about; the text is the library's own, for ever, and ends
        // with a zero.
        let text = self
            .error_text
            .map(|error_text| unsafe { CStr::from_ptr(error_text(status)) }.to_string_lossy());
        text.map_or_else(|| format!("status {status}"), |text| format!("{text} (status {status})"))
    }
}

fn format_version(code: i32) -> String {
    format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
}
