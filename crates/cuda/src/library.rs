// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Shared libraries that are loaded at run time and never unloaded, and tables of their functions.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::error::Error as _;
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::path::Path;
use std::ptr::NonNull;

use libloading::AsSymbolName;
use libloading::os::unix::Library;

use crate::{Error, Result};

/// A loaded library. It is never unloaded: CUDA's own threads may still run in it.
#[derive(Clone, Debug)]
pub struct SharedLibrary {
    library: &'static Library,
    name: String,
}

impl SharedLibrary {
    /// Loads the library at a path, or by a name that the system's loader knows.
    ///
    /// # Errors
    /// The loader's words.
    pub fn open_library(name: &Path) -> Result<Self, String> {
        // NOW: a missing symbol is an error here, and not a crash at the first call. LOCAL: the
        // symbols stay apart from other copies in the process.
        Self::open_with_flags(name, libc::RTLD_NOW | libc::RTLD_LOCAL)
    }

    /// Returns the library of this name that the process has loaded already.
    pub fn find_loaded_library(name: &str) -> Option<Self> {
        Self::open_with_flags(
            Path::new(name),
            libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NOLOAD,
        )
        .ok()
    }

    fn open_with_flags(path: &Path, flags: i32) -> Result<Self, String> {
        // SAFETY: the libraries asked for are made to be loaded into any process.
        let library = unsafe { Library::open(Some(path), flags) }
            .map_err(|error| error.source().map_or(error.to_string(), ToString::to_string))?;
        Ok(Self { library: Box::leak(Box::new(library)), name: path.display().to_string() })
    }

    /// Returns the name or path by which it was opened.
    pub fn opened_name(&self) -> &str {
        &self.name
    }

    /// Returns the function of this name.
    ///
    /// # Safety
    /// `F` is a pointer to a function of the type that the library's header gives it.
    pub unsafe fn find_function<F: Copy>(&self, name: impl AsSymbolName) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a pointer to a function") };
        // SAFETY: the size was checked, and the type is the caller's promise.
        unsafe { self.library.get::<F>(name) }.ok().map(|function| *function)
    }

    /// Returns the file that has this function of the library.
    pub(crate) fn file_of_function(&self, function: &CStr) -> Option<String> {
        // SAFETY: the address is not called, and any type of pointer may hold it.
        unsafe { self.find_function::<*const c_void>(function) }.and_then(file_at_address)
    }
}

/// Returns the file that the loader has mapped at an address, if any.
pub(crate) fn file_at_address(address: *const c_void) -> Option<String> {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `found` has room for the result, and any address is allowed.
    let known = unsafe { libc::dladdr(address, found.as_mut_ptr()) } != 0;
    // SAFETY: zeros are a value of the type, whose members are pointers.
    let name =
        NonNull::new(unsafe { found.assume_init() }.dli_fname.cast_mut()).filter(|_| known)?;
    // SAFETY: the loader keeps the name as long as the library, and libraries are not unloaded
    // here.
    Some(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

/// Returns the missing functions of a library as an error.
pub(crate) fn check_functions_found(library: &SharedLibrary, missing: &[&str]) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Symbols { path: library.opened_name().to_owned(), symbols: missing.join(", ") })
}

/// A table of a library's functions: first the required ones, then the ones of newer versions.
macro_rules! function_table {
    (
        $(#[$doc:meta])*
        pub struct $table:ident -> $status:ty {
            needed {
                $( $field:ident = $name:literal ( $($argument:ty),* ); )*
            }
            optional {
                $( $extra:ident = $title:literal ( $($parameter:ty),* ); )*
            }
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $table {
            $( #[doc = concat!("`", $name, "`")] pub $field: unsafe extern "C" fn($($argument),*) -> $status, )*
            $( #[doc = concat!("`", $title, "`, where there is one")]
               pub $extra: Option<unsafe extern "C" fn($($parameter),*) -> $status>, )*
        }

        impl $table {
            /// Names of the functions without which nothing works.
            pub const NEEDED_FUNCTIONS: &[&str] = &[$($name),*];

            /// Finds the functions in a library.
            ///
            /// # Errors
            /// `Symbols` that names all that are missing.
            pub fn from_library(library: &$crate::SharedLibrary) -> $crate::Result<Self> {
                let mut missing: Vec<&str> = Vec::new();
                $(
                    // SAFETY: the type is the one in the library's header.
                    let $field = unsafe {
                        library.find_function::<unsafe extern "C" fn($($argument),*) -> $status>($name)
                    };
                    if $field.is_none() {
                        missing.push($name);
                    }
                )*
                $crate::library::check_functions_found(library, &missing)?;
                let ($(Some($field),)*) = ($($field,)*) else {
                    return $crate::library::check_functions_found(library, Self::NEEDED_FUNCTIONS).and(Err($crate::Error::Symbols {
                        path: library.opened_name().to_owned(), symbols: String::new(),
                    }));
                };
                Ok(Self {
                    $($field,)*
                    $(
                        // SAFETY: the type is the one in the library's header.
                        $extra: unsafe { library.find_function($title) },
                    )*
                })
            }
        }
    };
}

pub(crate) use function_table;

#[cfg(test)]
mod tests {
    #![expect(unreachable_pub, reason = "tables are made public, for those that leave the crate")]

    use super::*;

    #[test]
    fn a_missing_library_is_reported_in_the_loaders_words() {
        let error = SharedLibrary::open_library(Path::new("libdoes-not-exist.so.1")).unwrap_err();
        assert!(error.contains("libdoes-not-exist.so.1"), "{error}");
        assert!(SharedLibrary::find_loaded_library("libdoes-not-exist.so.1").is_none());
    }

    #[test]
    fn functions_of_a_library_are_found_and_called() {
        let library = SharedLibrary::open_library(Path::new("libc.so.6")).unwrap();
        // SAFETY: the type of `abs` in the C standard.
        let abs: unsafe extern "C" fn(i32) -> i32 =
            unsafe { library.find_function(c"abs") }.unwrap();
        // SAFETY: any number may be given.
        assert_eq!(unsafe { abs(-3) }, 3);
        assert!(library.file_of_function(c"abs").unwrap().contains("libc"));
        // SAFETY: not called.
        let none: Option<unsafe extern "C" fn()> =
            unsafe { library.find_function(c"no_such_function") };
        assert!(none.is_none());
    }

    function_table! {
        /// For the test.
        pub struct Broken -> i32 {
            needed {
                abs = "abs"(i32);
                lost = "no_such_function"(i32);
                gone = "neither_this"(i32);
            }
            optional { also = "nor_this_one"(); }
        }
    }

    function_table! {
        /// For the test.
        pub struct Whole -> i32 {
            needed { abs = "abs"(i32); }
            optional { labs = "labs"(i32); also = "nor_this_one"(); }
        }
    }

    #[test]
    fn a_table_names_all_that_is_missing_and_goes_without_what_is_optional() {
        let library = SharedLibrary::open_library(Path::new("libc.so.6")).unwrap();
        let error = Broken::from_library(&library)
            .map(|table| (table.abs, table.lost, table.gone, table.also))
            .unwrap_err();
        assert_eq!(error.to_string(), "libc.so.6 lacks functions: no_such_function, neither_this");
        let whole = Whole::from_library(&library).unwrap();
        assert!(whole.labs.is_some() && whole.also.is_none());
        // SAFETY: any number may be given.
        assert_eq!(unsafe { (whole.abs)(-4) }, 4);
    }
}
