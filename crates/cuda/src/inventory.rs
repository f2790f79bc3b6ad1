// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A report about CUDA for users: which libraries were found where, their versions, and why some
//! were refused.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use farandole_world::format_counted_noun;

use crate::driver::CudaDriver;
use crate::{CudaLibrary, LibrarySearchPath, NcclLibrary, NvrtcCompiler, Result, SharedLibrary};

/// One library, or one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaInventoryEntry {
    /// Its name.
    pub name: String,
    /// Whether it can be used.
    pub works: bool,
    /// Version and file, or why not.
    pub detail: String,
}

/// Returns whether there is a driver, and the version of NCCL as it counts, such as 23007; 0 where
/// there is none, or no driver. The driver is not initialised, so that a process may still fork.
pub fn detect_driver_and_nccl_version(search_path: &LibrarySearchPath) -> (bool, i32) {
    if search_path.load_library(CudaLibrary::Driver).is_err() {
        return (false, 0);
    }
    (true, NcclLibrary::load_from(search_path).map_or(0, |nccl| nccl.version_code()))
}

/// Looks for every library, loads it, and asks for its version; devices are counted without using
/// one.
pub fn collect_inventory(search_path: &LibrarySearchPath) -> Vec<CudaInventoryEntry> {
    let driver = CudaDriver::load_from(search_path);
    let found = driver.as_ref().map_err(Clone::clone).and_then(|driver| {
        let version = driver.cuda_version()?;
        Ok(format!(
            "serves CUDA {}.{}, {}",
            version / 1000,
            version % 1000 / 10,
            format_counted_noun(driver.device_count()?.into(), "device")
        ))
    });
    let mut all = vec![to_inventory_entry(CudaLibrary::Driver.library_name(), found)];
    all.push(to_inventory_entry(
        CudaLibrary::Runtime.library_name(),
        describe_runtime(search_path),
    ));
    let compiler = NvrtcCompiler::load_from(search_path).map(|nvrtc| {
        let (major, minor) = nvrtc.compiler_version();
        let archs = nvrtc.supported_architectures();
        let range = match (archs.first(), archs.last()) {
            (Some(first), Some(last)) => format!(", sm_{first} to sm_{last}"),
            _ => String::new(),
        };
        format!("{major}.{minor}{range}, {}", nvrtc.library_path())
    });
    all.push(to_inventory_entry(CudaLibrary::Nvrtc.library_name(), compiler));
    let nccl = NcclLibrary::load_from(search_path).map(|nccl| {
        let with = if nccl.supports_registration() { " with registration" } else { "" };
        format!("{}{with}, {}", nccl.version_text(), nccl.library_path())
    });
    all.push(to_inventory_entry(CudaLibrary::Nccl.library_name(), nccl));
    if let Ok(driver) = driver {
        all.extend(
            (0..driver.device_count().unwrap_or_default())
                .map(|ordinal| describe_gpu(&driver, ordinal)),
        );
    }
    all
}

fn describe_gpu(driver: &CudaDriver, ordinal: u32) -> CudaInventoryEntry {
    let found = driver
        .device_properties(ordinal)
        .map(|facts| format!("{}, sm_{}, {} GiB", facts.name, facts.arch, facts.bytes >> 30));
    to_inventory_entry(&format!("GPU {ordinal}"), found)
}

fn describe_runtime(search_path: &LibrarySearchPath) -> Result<String> {
    let library = search_path.load_library(CudaLibrary::Runtime)?;
    // SAFETY: the function's type in the runtime's header.
    let ask = unsafe {
        library.find_function::<unsafe extern "C" fn(*mut i32) -> i32>(
            CudaLibrary::Runtime.probe_symbol(),
        )
    };
    let mut version = 0;
    // SAFETY: the place lives across the call.
    let found = ask.is_some_and(|ask| unsafe { ask(&raw mut version) } == 0);
    crate::library::check_functions_found(
        &library,
        if found { &[] } else { &["cudaRuntimeGetVersion"] },
    )?;
    Ok(format!(
        "{}.{}, {}",
        version / 1000,
        version % 1000 / 10,
        library_file(&library, CudaLibrary::Runtime)
    ))
}

fn library_file(library: &SharedLibrary, kind: CudaLibrary) -> String {
    library
        .file_of_function(kind.probe_symbol())
        .unwrap_or_else(|| library.opened_name().to_owned())
}

fn to_inventory_entry(name: &str, found: Result<String>) -> CudaInventoryEntry {
    let works = found.is_ok();
    let detail = found.unwrap_or_else(|error| error.to_string());
    CudaInventoryEntry { name: name.to_owned(), works, detail }
}
