// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! NVRTC: CUDA C++ to machine code, without a device.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::ffi::{CString, c_char, c_void};
use std::ptr::{null, null_mut};

use crate::library::function_table;
use crate::{CudaLibrary, Error, LibrarySearchPath, Result};

function_table! {
    /// Functions of NVRTC, by its header's types.
    pub struct NvrtcTable -> i32 {
        needed {
            version = "nvrtcVersion"(*mut i32, *mut i32);
            create = "nvrtcCreateProgram"(
                *mut *mut c_void, *const c_char, *const c_char, i32, *const *const c_char, *const *const c_char
            );
            destroy = "nvrtcDestroyProgram"(*mut *mut c_void);
            compile = "nvrtcCompileProgram"(*mut c_void, i32, *const *const c_char);
            code_size = "nvrtcGetCUBINSize"(*mut c_void, *mut usize);
            code = "nvrtcGetCUBIN"(*mut c_void, *mut c_char);
            log_size = "nvrtcGetProgramLogSize"(*mut c_void, *mut usize);
            log = "nvrtcGetProgramLog"(*mut c_void, *mut c_char);
        }
        optional {
            count_archs = "nvrtcGetNumSupportedArchs"(*mut i32);
            archs = "nvrtcGetSupportedArchs"(*mut i32);
        }
    }
}

/// The compiler.
pub struct NvrtcCompiler {
    table: NvrtcTable,
    version: (i32, i32),
    path: String,
}

/// A program, destroyed with its owner.
struct NvrtcProgram<'a> {
    table: &'a NvrtcTable,
    program: *mut c_void,
}

impl Drop for NvrtcProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: the program was created by this library and is destroyed once.
        unsafe { (self.table.destroy)(&raw mut self.program) };
    }
}

impl NvrtcCompiler {
    /// Finds and loads it.
    ///
    /// # Errors
    /// `NotFound`, `Symbols`, and `Compile` if the library does not report its version.
    pub fn load_from(search_path: &LibrarySearchPath) -> Result<Self> {
        let library = search_path.load_library(CudaLibrary::Nvrtc)?;
        let table = NvrtcTable::from_library(&library)?;
        let mut version = (0, 0);
        // SAFETY: both places live across the call.
        let status = unsafe { (table.version)(&raw mut version.0, &raw mut version.1) };
        check_status(0, status)?;
        let path = library
            .file_of_function(CudaLibrary::Nvrtc.probe_symbol())
            .unwrap_or_else(|| library.opened_name().to_owned());
        Ok(Self { table, version, path })
    }

    /// Returns the major and minor version.
    pub fn compiler_version(&self) -> (i32, i32) {
        self.version
    }

    /// Returns the file it was loaded from.
    pub fn library_path(&self) -> &str {
        &self.path
    }

    /// Returns the compute capabilities that the compiler supports, such as 90; empty if it does
    /// not report them.
    pub fn supported_architectures(&self) -> Vec<u32> {
        let (Some(count), Some(list)) = (self.table.count_archs, self.table.archs) else {
            return Vec::new();
        };
        let mut number = 0;
        // SAFETY: the place lives across the call.
        if unsafe { count(&raw mut number) } != 0 {
            return Vec::new();
        }
        let mut all = vec![0_i32; usize::try_from(number).unwrap_or_default()];
        // SAFETY: the list has room for as many as the library said.
        let status = unsafe { list(all.as_mut_ptr()) };
        let all = all.into_iter().filter_map(|arch| u32::try_from(arch).ok());
        if status == 0 { all.collect() } else { Vec::new() }
    }

    /// Compiles a source to machine code for one architecture, such as 90.
    ///
    /// # Errors
    /// `Compile` with the compiler's log.
    pub fn compile_source(&self, source: &str, arch: u32) -> Result<Vec<u8>> {
        let fail = |log: &str| Error::Compile { arch, log: log.to_owned() };
        let source = CString::new(source).map_err(|_| fail("the source contains a zero"))?;
        let mut program = NvrtcProgram { table: &self.table, program: null_mut() };
        // SAFETY: the texts end with zeros and live across the call; no headers are given.
        let status = unsafe {
            (self.table.create)(
                &raw mut program.program,
                source.as_ptr(),
                c"kernels.cu".as_ptr(),
                0,
                null(),
                null(),
            )
        };
        check_status(arch, status)?;
        // Machine code instead of PTX, so that the driver compiles nothing when it loads the
        // module.
        let arch_option = CString::new(format!("--gpu-architecture=sm_{arch}")).unwrap_or_default();
        let options = [
            arch_option.as_ptr(),
            c"--std=c++17".as_ptr(),
            // Averages of 64-bit integers are summed in 128 bits, as on the host.
            c"--device-int128".as_ptr(),
            // Products are rounded before they are added, as on the host.
            c"--fmad=false".as_ptr(),
        ];
        // SAFETY: the program is alive, and the options live across the call.
        let status = unsafe { (self.table.compile)(program.program, 4, options.as_ptr()) };
        if status != 0 {
            let log = self.program_log(&program).unwrap_or_default();
            return Err(fail(&format!("status {status}: {log}")));
        }
        let mut bytes = 0;
        // SAFETY: the program is alive, and so is the place.
        check_status(arch, unsafe { (self.table.code_size)(program.program, &raw mut bytes) })?;
        let mut code = vec![0_u8; bytes];
        // SAFETY: the memory has as many bytes as the library asked for.
        check_status(arch, unsafe {
            (self.table.code)(program.program, code.as_mut_ptr().cast())
        })?;
        Ok(code)
    }

    fn program_log(&self, program: &NvrtcProgram<'_>) -> Option<String> {
        let mut bytes = 0;
        // SAFETY: the program is alive, and so is the place.
        let status = unsafe { (self.table.log_size)(program.program, &raw mut bytes) };
        let mut log = vec![0_u8; bytes];
        // SAFETY: the memory has as many bytes as the library asked for.
        let has_log = status == 0
            && unsafe { (self.table.log)(program.program, log.as_mut_ptr().cast()) } == 0;
        has_log.then(|| String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned())
    }
}

fn check_status(arch: u32, status: i32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    Err(Error::Compile { arch, log: format!("NVRTC answers with status {status}") })
}
