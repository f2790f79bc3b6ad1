// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! NCCL through our own table, because wheels contain only `libnccl.so.2`, which no other loader
//! tries.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

mod caller;
mod calls;
mod communicator;
#[cfg(test)]
pub(crate) mod fake;
mod memory;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use crate::library::table;
use crate::{Error, Kind, Places, Result};

pub use calls::carries;
pub(crate) use calls::{ARCH_FOR_FLOAT8, LEAST_FOR_FLOAT8};
pub use communicator::{Lane, NcclCommunicator};
pub use memory::NcclMemory;

/// A communicator of NCCL.
pub(crate) type Comm = *mut c_void;
type Stream = *mut c_void;

pub(crate) const SUCCESS: i32 = 0;
pub(crate) const IN_PROGRESS: i32 = 7;
const INVALID_USAGE: i32 = 5;
/// The oldest version whose configuration has all that is used: 2.18.
const LEAST: i32 = 21_800;
const MAGIC: u32 = 0xcafe_beef;
/// The value of settings that a configuration leaves to NCCL.
const UNDEFINED: i32 = i32::MIN;

/// Names a communicator on all its members: made by one, told to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` as of version 2.18; later ones take it as it is, and what they have in its last
/// four bytes as undefined.
#[repr(C)]
#[derive(Debug)]
pub struct Settings {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
    cga_cluster_size: i32,
    least_blocks: i32,
    most_blocks: i32,
    network: *const c_char,
    split_share: i32,
    rest: i32,
}

impl Settings {
    /// Calls return when they are done: those of [`caller`], which may wait.
    fn blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: LEAST.unsigned_abs(),
            blocking: 1,
            cga_cluster_size: UNDEFINED,
            least_blocks: UNDEFINED,
            most_blocks: UNDEFINED,
            network: std::ptr::null(),
            split_share: UNDEFINED,
            rest: UNDEFINED,
        }
    }
}

table! {
    /// Functions of NCCL, by its header's types.
    pub struct Table -> i32 {
        needed {
            version = "ncclGetVersion"(*mut i32);
            unique_id = "ncclGetUniqueId"(*mut UniqueId);
            init = "ncclCommInitRankConfig"(*mut Comm, i32, UniqueId, i32, *mut Settings);
            abort = "ncclCommAbort"(Comm);
            async_error = "ncclCommGetAsyncError"(Comm, *mut i32);
            group_start = "ncclGroupStart"();
            group_end = "ncclGroupEnd"();
            allreduce = "ncclAllReduce"(*const c_void, *mut c_void, usize, i32, i32, Comm, Stream);
            broadcast = "ncclBroadcast"(*const c_void, *mut c_void, usize, i32, i32, Comm, Stream);
            reduce = "ncclReduce"(*const c_void, *mut c_void, usize, i32, i32, i32, Comm, Stream);
            allgather = "ncclAllGather"(*const c_void, *mut c_void, usize, i32, Comm, Stream);
            reducescatter = "ncclReduceScatter"(*const c_void, *mut c_void, usize, i32, i32, Comm, Stream);
            send = "ncclSend"(*const c_void, usize, i32, i32, Comm, Stream);
            receive = "ncclRecv"(*mut c_void, usize, i32, i32, Comm, Stream);
            scaled_sum = "ncclRedOpCreatePreMulSum"(*mut i32, *mut c_void, i32, i32, Comm);
            scaled_sum_destroy = "ncclRedOpDestroy"(i32, Comm);
        }
        optional {
            allocate = "ncclMemAlloc"(*mut *mut c_void, usize);
            register = "ncclCommRegister"(Comm, *mut c_void, usize, *mut *mut c_void);
        }
    }
}

/// The texts of errors return no status, so they are not in the table.
type Words = unsafe extern "C" fn(i32) -> *const c_char;

/// The library.
#[derive(Clone)]
pub struct Nccl {
    table: Arc<Table>,
    words: Option<Words>,
    version: i32,
    path: String,
}

impl Nccl {
    /// Finds and loads it.
    ///
    /// # Errors
    /// `NotFound`, `Symbols`, `Version`, `Nccl`.
    pub fn load(places: &Places) -> Result<Self> {
        let library = places.load(Kind::Nccl)?;
        let path = library.file(Kind::Nccl.probe()).unwrap_or_else(|| library.name().to_owned());
        // SAFETY: the type in NCCL's header.
        let words = unsafe { library.function::<Words>(c"ncclGetErrorString") };
        Self::over(Table::of(&library)?, words, path)
    }

    /// Takes these functions for a library.
    ///
    /// # Errors
    /// `Version`, `Nccl`.
    pub(crate) fn over(table: Table, words: Option<Words>, path: String) -> Result<Self> {
        let mut nccl = Self { table: Arc::new(table), words, version: 0, path };
        let mut version = 0;
        // SAFETY: the place lives across the call.
        nccl.check("ncclGetVersion", unsafe { (nccl.table.version)(&raw mut version) })?;
        if version < LEAST {
            return Err(Error::Version {
                path: nccl.path,
                version: spelled(version),
                least: "2.18",
            });
        }
        nccl.version = version;
        Ok(nccl)
    }

    /// Such as `2.30.7`.
    pub fn version(&self) -> String {
        spelled(self.version)
    }

    /// As NCCL counts, such as 23007.
    pub fn code(&self) -> i32 {
        self.version
    }

    /// Returns the file it was loaded from.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns a name for a new communicator.
    ///
    /// # Errors
    /// `Nccl`.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the place has the bytes of the type.
        self.check("ncclGetUniqueId", unsafe { (self.table.unique_id)(&raw mut id) })?;
        Ok(id)
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    /// Nothing, also for calls in progress, or the error of a failed function.
    pub(crate) fn check(&self, function: &'static str, status: i32) -> Result<()> {
        match status {
            SUCCESS | IN_PROGRESS => Ok(()),
            status => Err(Error::Nccl { function, reason: self.say(status) }),
        }
    }

    /// Returns the description of a communicator.
    fn status(&self, comm: Comm) -> i32 {
        let mut status = SUCCESS;
        // SAFETY: the caller's communicator is alive and the place, too.
        let asked = unsafe { (self.table.async_error)(comm, &raw mut status) };
        if asked == SUCCESS { status } else { asked }
    }

    fn say(&self, status: i32) -> String {
        // SAFETY: any status may be asked about; the text is the library's own, for ever, and ends
        // with a zero.
        let text =
            self.words.map(|words| unsafe { CStr::from_ptr(words(status)) }.to_string_lossy());
        text.map_or_else(|| format!("status {status}"), |text| format!("{text} (status {status})"))
    }
}

fn spelled(code: i32) -> String {
    format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
}
