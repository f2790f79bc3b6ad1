// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The driver's functions: the table, and a call for each, whose error names the function and the
//! reason.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use crate::library::function_table;
use crate::{CudaLibrary, Error, LibrarySearchPath, Result};

/// A CUDA stream, `CUstream`.
pub type RawStream = *mut c_void;
/// A CUDA event, `CUevent`.
pub type RawEvent = *mut c_void;
/// A kernel of a loaded module, `CUfunction`.
pub type RawFunction = *mut c_void;

/// Memory in the order of streams.
pub type MemoryPool = *mut c_void;

/// `CUmemPoolProps`: fields without a name here are 0, which is the default.
#[derive(Debug)]
#[repr(C)]
pub struct MemoryPoolProperties {
    /// 1: it stays where it is.
    kind: i32,
    handles: i32,
    /// 1: on a device.
    location_kind: i32,
    device: i32,
    security: *mut c_void,
    reserved: [u64; 8],
}

const NOT_READY: i32 = 600;
const NO_DEVICE: i32 = 100;
const COMPUTE_CAPABILITY_MAJOR: i32 = 75;
const COMPUTE_CAPABILITY_MINOR: i32 = 76;
/// Memory in the order of streams.
const MEMORY_POOLS_SUPPORTED: i32 = 115;
pub(crate) const NOT_SUPPORTED: i32 = 801;
/// Bytes of freed memory that a pool keeps when a stream is awaited: other pools, such as the
/// framework's, cannot use that memory.
const POOL_RELEASE_THRESHOLD_BYTES: u64 = 256 << 20;
const RELEASE_THRESHOLD_ATTRIBUTE: i32 = 4;
/// A stream that does not wait for the default one.
const STREAM_NON_BLOCKING: c_uint = 1;
/// An event that takes no time.
const EVENT_DISABLE_TIMING: c_uint = 2;
/// Host memory that is page-locked for every context.
const HOST_REGISTER_PORTABLE: c_uint = 1;
/// Calls do not end a capture of a graph that is in progress on another thread.
const CAPTURE_MODE_RELAXED: i32 = 2;

function_table! {
    /// Functions of the driver, by its header's types; contexts, streams, events and modules are
    /// pointers to what only the driver knows, addresses on the device are numbers.
    pub struct DriverTable -> i32 {
        needed {
            init = "cuInit"(c_uint);
            version = "cuDriverGetVersion"(*mut i32);
            count = "cuDeviceGetCount"(*mut i32);
            device = "cuDeviceGet"(*mut i32, i32);
            attribute = "cuDeviceGetAttribute"(*mut i32, i32, i32);
            name = "cuDeviceGetName"(*mut c_char, i32, i32);
            uuid = "cuDeviceGetUuid_v2"(*mut [u8; 16], i32);
            memory = "cuDeviceTotalMem_v2"(*mut usize, i32);
            retain = "cuDevicePrimaryCtxRetain"(*mut *mut c_void, i32);
            release = "cuDevicePrimaryCtxRelease_v2"(i32);
            push = "cuCtxPushCurrent_v2"(*mut c_void);
            pop = "cuCtxPopCurrent_v2"(*mut *mut c_void);
            priorities = "cuCtxGetStreamPriorityRange"(*mut i32, *mut i32);
            stream_create = "cuStreamCreateWithPriority"(*mut RawStream, c_uint, i32);
            stream_destroy = "cuStreamDestroy_v2"(RawStream);
            stream_wait = "cuStreamWaitEvent"(RawStream, RawEvent, c_uint);
            stream_synchronize = "cuStreamSynchronize"(RawStream);
            capturing = "cuStreamIsCapturing"(RawStream, *mut i32);
            capture_mode = "cuThreadExchangeStreamCaptureMode"(*mut i32);
            event_create = "cuEventCreate"(*mut RawEvent, c_uint);
            event_destroy = "cuEventDestroy_v2"(RawEvent);
            event_record = "cuEventRecord"(RawEvent, RawStream);
            event_query = "cuEventQuery"(RawEvent);
            event_synchronize = "cuEventSynchronize"(RawEvent);
            host_register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
            host_unregister = "cuMemHostUnregister"(*mut c_void);
            to_device = "cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, RawStream);
            to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, u64, usize, RawStream);
            within = "cuMemcpyDtoDAsync_v2"(u64, u64, usize, RawStream);
            module_load = "cuModuleLoadData"(*mut *mut c_void, *const c_void);
            module_unload = "cuModuleUnload"(*mut c_void);
            function = "cuModuleGetFunction"(*mut RawFunction, *mut c_void, *const c_char);
            launch = "cuLaunchKernel"(
                RawFunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, RawStream, *mut *mut c_void,
                *mut *mut c_void
            );
            error_name = "cuGetErrorName"(i32, *mut *const c_char);
            error_string = "cuGetErrorString"(i32, *mut *const c_char);
        }
        optional {
            allocate = "cuMemAllocAsync"(*mut u64, usize, RawStream);
            free = "cuMemFreeAsync"(u64, RawStream);
            pool_create = "cuMemPoolCreate"(*mut MemoryPool, *const MemoryPoolProperties);
            pool_set = "cuMemPoolSetAttribute"(MemoryPool, i32, *mut c_void);
            pool_destroy = "cuMemPoolDestroy"(MemoryPool);
            allocate_from = "cuMemAllocFromPoolAsync"(*mut u64, usize, MemoryPool, RawStream);
            window = "cuMemAlloc_v2"(*mut u64, usize);
            window_free = "cuMemFree_v2"(u64);
            window_offer = "cuIpcGetMemHandle"(*mut IpcMemoryHandle, u64);
            window_open = "cuIpcOpenMemHandle_v2"(*mut u64, IpcMemoryHandle, c_uint);
            window_close = "cuIpcCloseMemHandle"(u64);
        }
    }
}

/// Names memory of a device to other processes: `CUipcMemHandle`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct IpcMemoryHandle(pub [u8; 64]);

/// The driver, initialised.
#[derive(Clone)]
pub struct CudaDriver {
    table: Arc<DriverTable>,
}

/// The properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Such as `NVIDIA H100`.
    pub name: String,
    /// The unique identifier of the device.
    pub uuid: [u8; 16],
    /// Compute capability, such as 90.
    pub arch: u32,
    /// Its memory in bytes.
    pub bytes: u64,
}

impl CudaDriver {
    /// Finds, loads and initialises the driver. No context is made.
    ///
    /// # Errors
    /// `NotFound`, `Symbols`, `Driver`.
    pub fn load_from(search_path: &LibrarySearchPath) -> Result<Self> {
        let library = search_path.load_library(CudaLibrary::Driver)?;
        Self::from_table(DriverTable::from_library(&library)?)
    }

    /// Initialises a driver of these functions.
    ///
    /// # Errors
    /// `Driver`.
    pub fn from_table(table: DriverTable) -> Result<Self> {
        let driver = Self { table: Arc::new(table) };
        // SAFETY: 0 is the only flag there is.
        driver.check_status("cuInit", 0, unsafe { (driver.table.init)(0) })?;
        Ok(driver)
    }

    /// Returns the functions.
    pub(crate) fn function_table(&self) -> &DriverTable {
        &self.table
    }

    /// Returns the newest version of CUDA it serves, such as 13020.
    ///
    /// # Errors
    /// `Driver`.
    pub fn cuda_version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: the place lives across the call.
        self.check_status("cuDriverGetVersion", 0, unsafe {
            (self.table.version)(&raw mut version)
        })?;
        Ok(version)
    }

    /// Devices that this process sees.
    ///
    /// # Errors
    /// `Driver`.
    pub fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: the place lives across the call.
        match unsafe { (self.table.count)(&raw mut count) } {
            // The driver reports a machine without a GPU as an error.
            NO_DEVICE => Ok(0),
            status => {
                self.check_status("cuDeviceGetCount", 0, status)?;
                Ok(u32::try_from(count).unwrap_or_default())
            }
        }
    }

    /// Returns the driver's own number of a device.
    ///
    /// # Errors
    /// `Driver` when there is no such device.
    pub(crate) fn device_handle(&self, ordinal: u32) -> Result<i32> {
        let mut device = 0;
        let number = i32::try_from(ordinal).unwrap_or(i32::MAX);
        // SAFETY: the place lives across the call.
        self.check_status("cuDeviceGet", ordinal, unsafe {
            (self.table.device)(&raw mut device, number)
        })?;
        Ok(device)
    }

    /// Returns the properties of a device. No context is made for it.
    ///
    /// # Errors
    /// `Driver` when there is no such device.
    pub fn device_properties(&self, ordinal: u32) -> Result<DeviceProperties> {
        let device = self.device_handle(ordinal)?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the place lives across the call.
            let status = unsafe { (self.table.attribute)(&raw mut value, which, device) };
            self.check_status("cuDeviceGetAttribute", ordinal, status)?;
            Ok(u32::try_from(value).unwrap_or_default())
        };
        let arch = attribute(COMPUTE_CAPABILITY_MAJOR)? * 10 + attribute(COMPUTE_CAPABILITY_MINOR)?;
        let mut name = [0_u8; 128];
        // SAFETY: the place has room for the 127 bytes that are asked for, and ends with a zero.
        let status = unsafe { (self.table.name)(name.as_mut_ptr().cast(), 127, device) };
        self.check_status("cuDeviceGetName", ordinal, status)?;
        let name =
            CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        let (mut uuid, mut bytes) = ([0; 16], 0);
        // SAFETY: the place has the 16 bytes of the type.
        self.check_status("cuDeviceGetUuid", ordinal, unsafe {
            (self.table.uuid)(&raw mut uuid, device)
        })?;
        // SAFETY: the place lives across the call.
        self.check_status("cuDeviceTotalMem", ordinal, unsafe {
            (self.table.memory)(&raw mut bytes, device)
        })?;
        Ok(DeviceProperties { name, uuid, arch, bytes: bytes as u64 })
    }

    /// Returns whether memory of a device can be taken and given back in the order of streams.
    pub(crate) fn supports_memory_pools(&self, ordinal: u32) -> bool {
        let mut there = 0;
        // SAFETY: the place lives across the call.
        let asked = |device| unsafe {
            (self.table.attribute)(&raw mut there, MEMORY_POOLS_SUPPORTED, device)
        };
        let asked = self.device_handle(ordinal).map(asked);
        // Old drivers know neither the attribute nor the functions.
        asked == Ok(0) && there != 0 && self.table.allocate.is_some() && self.table.free.is_some()
    }

    /// Returns whether the driver has the functions that share memory with other processes.
    pub(crate) fn supports_ipc(&self) -> bool {
        let table = &self.table;
        let own =
            table.window.is_some() && table.window_free.is_some() && table.window_offer.is_some();
        own && table.window_open.is_some() && table.window_close.is_some()
    }

    /// Returns the context that the framework uses, too.
    ///
    /// # Errors
    /// `Driver`.
    pub fn retain_primary_context(&self, ordinal: u32) -> Result<PrimaryContext> {
        let device = self.device_handle(ordinal)?;
        let mut context = null_mut();
        // SAFETY: `context` lives across the call, and the retained context is released once.
        let status = unsafe { (self.table.retain)(&raw mut context, device) };
        self.check_status("cuDevicePrimaryCtxRetain", ordinal, status)?;
        Ok(PrimaryContext { driver: self.clone(), ordinal, device, context, pool: OnceLock::new() })
    }

    /// Returns the error of a function that failed.
    pub(crate) fn check_status(
        &self,
        function: &'static str,
        ordinal: u32,
        status: i32,
    ) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let say = |find_text: unsafe extern "C" fn(i32, *mut *const c_char) -> i32| {
            let mut text = std::ptr::null();
            // SAFETY: the place lives across the call; the text is the driver's own, for ever.
            let has_text = unsafe { find_text(status, &raw mut text) } == 0 && !text.is_null();
            // SAFETY: as above; it ends with a zero.
            has_text.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let (name, words) = (say(self.table.error_name), say(self.table.error_string));
        let reason = match (name, words) {
            (Some(name), Some(words)) => format!("{name}, {words}"),
            (name, words) => name.or(words).unwrap_or_else(|| format!("status {status}")),
        };
        Err(Error::Driver { function, ordinal, reason })
    }
}

/// A device's context, shared with all other users of the device in this process.
pub struct PrimaryContext {
    driver: CudaDriver,
    ordinal: u32,
    device: i32,
    context: *mut c_void,
    /// Made when memory is first taken; none where the default one has to do.
    pool: OnceLock<Option<MemoryPool>>,
}

// SAFETY: contexts and pools may be used from any thread; each thread makes it its current one
// first.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above.
unsafe impl Sync for PrimaryContext {}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        let pool = self.pool.get().copied().flatten().zip(self.driver.table.pool_destroy);
        if let Some((pool, destroy)) = pool {
            // SAFETY: the pool is ours, and no caller allocates from it any more. A failure here
            // cannot be handled.
            drop(self.call_driver("cuMemPoolDestroy", |_| unsafe { destroy(pool) }));
        }
        // SAFETY: retained once at creation.
        unsafe { (self.driver.table.release)(self.device) };
    }
}

impl PrimaryContext {
    /// Returns the driver.
    pub fn cuda_driver(&self) -> &CudaDriver {
        &self.driver
    }

    /// Returns the ordinal of the device among the devices that this process sees.
    pub fn device_ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Calls a function of the driver with this context current, and leaves the thread as it was.
    /// If another thread captures a graph, that continues: calls made here are no part of it.
    ///
    /// # Errors
    /// `Driver` with the function's name.
    pub(crate) fn call_driver(
        &self,
        function: &'static str,
        call: impl FnOnce(&DriverTable) -> i32,
    ) -> Result<()> {
        self.call_for_status(function, call)
            .and_then(|status| self.driver.check_status(function, self.ordinal, status))
    }

    fn call_for_status(
        &self,
        function: &'static str,
        call: impl FnOnce(&DriverTable) -> i32,
    ) -> Result<i32> {
        let table = self.driver.function_table();
        // SAFETY: the context is retained.
        self.driver.check_status(function, self.ordinal, unsafe { (table.push)(self.context) })?;
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: the place lives across the call, which leaves the thread's own mode there.
        let relaxed = unsafe { (table.capture_mode)(&raw mut mode) } == 0;
        let status = call(table);
        let mut popped = null_mut();
        // SAFETY: the places live across the calls; the capture mode and the context are restored.
        unsafe {
            if relaxed {
                (table.capture_mode)(&raw mut mode);
            }
            (table.pop)(&raw mut popped);
        }
        Ok(status)
    }

    /// Returns a stream that does not wait for the default one, of the highest priority.
    ///
    /// # Errors
    /// `Driver`.
    pub(crate) fn create_stream(&self) -> Result<RawStream> {
        let mut stream = null_mut();
        self.call_driver("cuStreamCreateWithPriority", |table| {
            let (mut least, mut greatest) = (0, 0);
            // SAFETY: the places live across the calls.
            unsafe {
                match (table.priorities)(&raw mut least, &raw mut greatest) {
                    0 => (table.stream_create)(&raw mut stream, STREAM_NON_BLOCKING, greatest),
                    status => status,
                }
            }
        })?;
        Ok(stream)
    }

    /// Returns whether work on a stream is noted down for a graph, and not done.
    ///
    /// # Errors
    /// `Driver`.
    pub(crate) fn is_capturing(&self, stream: RawStream) -> Result<bool> {
        let mut state = 0;
        // SAFETY: the place lives across the call, and the caller's stream, too.
        self.call_driver("cuStreamIsCapturing", |table| unsafe {
            (table.capturing)(stream, &raw mut state)
        })?;
        Ok(state != 0)
    }

    /// Returns an event without a time.
    ///
    /// # Errors
    /// `Driver`.
    pub(crate) fn create_event(&self) -> Result<RawEvent> {
        let mut mark = null_mut();
        // SAFETY: the place lives across the call.
        self.call_driver("cuEventCreate", |table| unsafe {
            (table.event_create)(&raw mut mark, EVENT_DISABLE_TIMING)
        })?;
        Ok(mark)
    }

    /// Returns whether everything before the mark is done.
    ///
    /// # Errors
    /// `Driver` when the work failed.
    pub(crate) fn is_event_complete(&self, mark: RawEvent) -> Result<bool> {
        // SAFETY: the caller owns the mark.
        match self.call_for_status("cuEventQuery", |table| unsafe { (table.event_query)(mark) })? {
            NOT_READY => Ok(false),
            status => self.driver.check_status("cuEventQuery", self.ordinal, status).map(|()| true),
        }
    }

    /// Returns memory of the device, for later work of the stream.
    ///
    /// # Errors
    /// `Driver` when there is none left.
    pub(crate) fn allocate_async(&self, bytes: usize, stream: RawStream) -> Result<u64> {
        let mut address = 0;
        let pool = *self.pool.get_or_init(|| self.create_memory_pool());
        self.call_driver("cuMemAllocAsync", |table| {
            match (table.allocate, pool.zip(table.allocate_from)) {
                // SAFETY: the place lives across the call, and the caller's stream and our pool,
                // too.
                (_, Some((pool, allocate))) => unsafe {
                    allocate(&raw mut address, bytes, pool, stream)
                },
                // SAFETY: as above.
                (Some(allocate), None) => unsafe { allocate(&raw mut address, bytes, stream) },
                (None, None) => NOT_SUPPORTED,
            }
        })?;
        Ok(address)
    }

    /// Returns a pool of our own. The default pool returns its memory to the system at each wait
    /// for a stream, and allocates again for the next result, which takes longer than most results.
    fn create_memory_pool(&self) -> Option<MemoryPool> {
        let table = self.driver.function_table();
        let (create, set) = table.pool_create.zip(table.pool_set)?;
        let settings = MemoryPoolProperties {
            kind: 1,
            handles: 0,
            location_kind: 1,
            device: self.device,
            security: null_mut(),
            reserved: [0; 8],
        };
        let (mut pool, mut kept) = (null_mut(), POOL_RELEASE_THRESHOLD_BYTES);
        // SAFETY: the places live across the call.
        let made = self.call_driver("cuMemPoolCreate", |_| unsafe {
            create(&raw mut pool, &raw const settings)
        });
        made.ok()?;
        // SAFETY: the pool was made above, and the attribute has the type of the place. A pool that
        // keeps nothing does, too.
        drop(self.call_driver("cuMemPoolSetAttribute", |_| unsafe {
            set(pool, RELEASE_THRESHOLD_ATTRIBUTE, (&raw mut kept).cast())
        }));
        Some(pool)
    }

    /// Frees memory after the present work of a stream.
    ///
    /// # Errors
    /// `Driver`.
    pub(crate) fn free_async(&self, address: u64, stream: RawStream) -> Result<()> {
        self.call_driver("cuMemFreeAsync", |table| match table.free {
            // SAFETY: the caller has it from `allocate`, gives it back once and names a stream that
            // lives.
            Some(free) => unsafe { free(address, stream) },
            None => NOT_SUPPORTED,
        })
    }

    /// Locks host memory, so that copies need not stop on the way.
    ///
    /// # Errors
    /// `Driver` when no more can be locked.
    pub(crate) fn lock_host_pages(&self, address: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller keeps the memory until it is unlocked.
        self.call_driver("cuMemHostRegister", |table| unsafe {
            (table.host_register)(address.cast(), bytes, HOST_REGISTER_PORTABLE)
        })
    }

    /// Reverses `lock_host_pages`.
    pub(crate) fn unlock_host_pages(&self, address: *mut u8) {
        // SAFETY: locked before, and still there. There is nothing to do about a failure.
        drop(self.call_driver("cuMemHostUnregister", |table| unsafe {
            (table.host_unregister)(address.cast())
        }));
    }
}
