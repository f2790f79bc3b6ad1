// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Ranges for NVIDIA's profilers. If the process cannot load their annotation library, the
//! functions here do nothing.
//!
//! The used part of the library's C interface: `nvtxDomainCreateA(name)`,
//! `nvtxDomainRangeStartEx(domain, attributes)`, which returns a number, and
//! `nvtxDomainRangeEnd(domain, number)`. All are cheap while no tool listens.

#![expect(unsafe_code, reason = "a C library that is loaded at run time")]

use std::ffi::{CString, c_char, c_void};
use std::mem;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// Libraries with the functions: NVTX 2, then the build of NVTX 3 for callers that are not C.
const NVTX_LIBRARIES: [&str; 4] =
    ["libnvToolsExt.so.1", "libnvtx3interop.so.1", "libnvtx3interop.so", "libnvToolsExt.so"];
const ATTRIBUTES_VERSION: u16 = 2;
const MESSAGE_TYPE_ASCII: i32 = 1;

/// `nvtxEventAttributes_v2`.
#[repr(C)]
struct NvtxEventAttributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_char,
}

type DomainCreateFn = unsafe extern "C" fn(*const c_char) -> *mut c_void;
type RangeStartFn = unsafe extern "C" fn(*mut c_void, *const NvtxEventAttributes) -> u64;
type RangeEndFn = unsafe extern "C" fn(*mut c_void, u64);

/// A domain of ranges.
pub struct NvtxDomain {
    domain: *mut c_void,
    start: RangeStartFn,
    end: RangeEndFn,
}

// SAFETY: NVTX may be called from any thread, and the domain lives as long as the process.
unsafe impl Send for NvtxDomain {}
// SAFETY: as above.
unsafe impl Sync for NvtxDomain {}

/// A range that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvtxRange(u64);

impl NvtxDomain {
    /// Returns the domain `Farandole` of the annotation library, if there is one. It is loaded for
    /// good.
    pub fn load_domain() -> Option<Self> {
        NVTX_LIBRARIES.iter().find_map(|library| Self::from_library(library))
    }

    fn from_library(library: &str) -> Option<Self> {
        // SAFETY: the library is one that is made to be loaded into any process.
        let library = unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        // SAFETY: these are the functions' types in NVTX 2 and 3.
        let (create, start, end) = unsafe {
            (
                *library.get::<DomainCreateFn>("nvtxDomainCreateA").ok()?,
                *library.get::<RangeStartFn>("nvtxDomainRangeStartEx").ok()?,
                *library.get::<RangeEndFn>("nvtxDomainRangeEnd").ok()?,
            )
        };
        mem::forget(library);
        // SAFETY: the name ends with a zero, and NVTX copies it.
        let domain = unsafe { create(c"Farandole".as_ptr()) };
        Some(Self { domain, start, end })
    }

    /// Begins a range, which may overlap with others.
    pub fn start_range(&self, message: &str) -> NvtxRange {
        // A text with a zero byte is no C string; an empty name is better than a lost range.
        let message = CString::new(message).unwrap_or_default();
        let attributes = NvtxEventAttributes {
            version: ATTRIBUTES_VERSION,
            size: u16::try_from(size_of::<NvtxEventAttributes>()).unwrap_or_default(),
            category: 0,
            color_type: 0,
            color: 0,
            payload_type: 0,
            reserved: 0,
            payload: 0,
            message_type: MESSAGE_TYPE_ASCII,
            message: message.as_ptr(),
        };
        // SAFETY: the domain is the library's own; the attributes and the message live across the
        // call, and NVTX keeps neither.
        NvtxRange(unsafe { (self.start)(self.domain, &raw const attributes) })
    }

    /// Ends it.
    pub fn end_range(&self, range: NvtxRange) {
        // SAFETY: the domain is the library's own; an unknown number is ignored.
        unsafe { (self.end)(self.domain, range.0) }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A library that writes its calls to a file next to itself.
    const FAKE: &str = r#"
        #include <stdint.h>
        #include <stdio.h>
        #include <string.h>
        struct attributes { uint16_t version, size; uint32_t category; int32_t color_type; uint32_t color;
            int32_t payload_type, reserved; uint64_t payload; int32_t message_type; const char *message; };
        static FILE *out(void) { FILE *f = fopen(OUT, "a"); return f; }
        void *nvtxDomainCreateA(const char *name) { FILE *f = out(); fprintf(f, "domain %s\n", name); fclose(f); return (void *)7; }
        uint64_t nvtxDomainRangeStartEx(void *domain, const struct attributes *a) { FILE *f = out();
            fprintf(f, "start %d %d %d %s\n", (int)(intptr_t)domain, a->size == sizeof *a, a->message_type, a->message);
            fclose(f); return 41; }
        void nvtxDomainRangeEnd(void *domain, uint64_t id) { FILE *f = out(); fprintf(f, "end %d %d\n", (int)(intptr_t)domain, (int)id); fclose(f); }
    "#;

    #[test]
    fn the_library_is_called_as_its_headers_say() {
        let folder = tempfile::tempdir().unwrap();
        let (source, library, calls) = (
            folder.path().join("fake.c"),
            folder.path().join("fake.so"),
            folder.path().join("calls"),
        );
        std::fs::write(&source, FAKE).unwrap();
        let define = format!("-DOUT=\"{}\"", calls.display());
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", &define, "-o"]).args([&library, &source]);
        assert!(
            compiler.status().unwrap().success(),
            "this test needs a C compiler, as linking does"
        );
        let nvtx = NvtxDomain::from_library(library.to_str().unwrap()).unwrap();
        let range = nvtx.start_range("ALLREDUCE gradient");
        nvtx.end_range(range);
        let calls = std::fs::read_to_string(calls).unwrap();
        assert_eq!(calls, "domain Farandole\nstart 7 1 1 ALLREDUCE gradient\nend 7 41\n");
    }

    #[test]
    fn a_library_that_is_missing_or_another_is_passed_over() {
        assert!(NvtxDomain::from_library("libdoes-not-exist.so.1").is_none());
        assert!(NvtxDomain::from_library("libc.so.6").is_none());
    }
}
