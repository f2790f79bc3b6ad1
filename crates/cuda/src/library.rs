// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Shared libraries that are loaded at run time and never unloaded, and tables of their functions.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use std::ffi::{CStr, CString, c_void};
use std::mem::{MaybeUninit, transmute_copy};
use std::path::Path;
use std::ptr::NonNull;

use crate::{Error, Result};

/// A loaded library. It is never unloaded: CUDA's own threads may still run in it.
#[derive(Clone, Debug)]
pub struct Library {
    handle: NonNull<c_void>,
    name: String,
}

// SAFETY: a handle of the loader may be used from any thread, and libraries stay loaded.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Loads the library at a path, or by a name that the system's loader knows.
    ///
    /// # Errors
    /// The loader's words.
    pub fn open(name: &Path) -> Result<Self, String> {
        Self::with(name, libc::RTLD_NOW | libc::RTLD_LOCAL)
    }

    /// Returns the library of this name that the process has loaded already.
    pub fn loaded(name: &str) -> Option<Self> {
        Self::with(Path::new(name), libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NOLOAD).ok()
    }

    fn with(name: &Path, flags: i32) -> Result<Self, String> {
        let name = name.display().to_string();
        let text =
            CString::new(name.as_str()).map_err(|_| "its name contains a zero".to_owned())?;
        // SAFETY: the name ends with a zero; the libraries asked for are made to be loaded into any
        // process.
        let handle = unsafe { libc::dlopen(text.as_ptr(), flags) };
        NonNull::new(handle).map(|handle| Self { handle, name }).ok_or_else(|| {
            // SAFETY: what it returns is a string or null, valid until this thread's next call of
            // the loader.
            let words = NonNull::new(unsafe { libc::dlerror() });
            words.map_or_else(
                || "it is not loaded".to_owned(),
                // SAFETY: as above.
                |words| unsafe { CStr::from_ptr(words.as_ptr()) }.to_string_lossy().into_owned(),
            )
        })
    }

    /// Returns the name by which it was requested.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the function of this name.
    ///
    /// # Safety
    /// `F` is a pointer to a function of the type that the library's header gives it.
    pub unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a pointer to a function") };
        // SAFETY: the handle is valid for ever and the name ends with a zero.
        let address = NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) })?;
        // SAFETY: the size was checked, and the type is the caller's promise.
        Some(unsafe { transmute_copy::<*mut c_void, F>(&address.as_ptr()) })
    }

    /// Returns the file that has this function of the library.
    pub(crate) fn file(&self, function: &CStr) -> Option<String> {
        // SAFETY: the handle is valid for ever and the name ends with a zero.
        let address =
            NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), function.as_ptr()) })?;
        file_of(address.as_ptr())
    }
}

/// Returns the file that is mapped at an address, as far as the loader knows.
pub(crate) fn file_of(address: *const c_void) -> Option<String> {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `found` has room for what is written, and any address may be asked for.
    let known = unsafe { libc::dladdr(address, found.as_mut_ptr()) } != 0;
    // SAFETY: zeros are a value of the type, whose members are pointers.
    let name =
        NonNull::new(unsafe { found.assume_init() }.dli_fname.cast_mut()).filter(|_| known)?;
    // SAFETY: the loader keeps the name as long as the library, and libraries are not unloaded
    // here.
    Some(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

/// The missing functions of a library, as an error.
pub(crate) fn complete(library: &Library, missing: &[&str]) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Symbols { path: library.name().to_owned(), symbols: missing.join(", ") })
}

/// A table of a library's functions: those that must be there, then those that newer versions have.
macro_rules! table {
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
            pub const NEEDED: &[&str] = &[$($name),*];

            /// Finds the functions in a library.
            ///
            /// # Errors
            /// `Symbols` that names all that are missing.
            pub fn of(library: &$crate::Library) -> $crate::Result<Self> {
                let mut missing: Vec<&str> = Vec::new();
                $(
                    // SAFETY: the type is the one in the library's header.
                    let $field = unsafe {
                        library.function::<unsafe extern "C" fn($($argument),*) -> $status>(
                            const { match std::ffi::CStr::from_bytes_with_nul(concat!($name, "\0").as_bytes()) {
                                Ok(name) => name,
                                Err(_) => c"",
                            } },
                        )
                    };
                    if $field.is_none() {
                        missing.push($name);
                    }
                )*
                $crate::library::complete(library, &missing)?;
                let ($(Some($field),)*) = ($($field,)*) else {
                    return $crate::library::complete(library, Self::NEEDED).and(Err($crate::Error::Symbols {
                        path: library.name().to_owned(), symbols: String::new(),
                    }));
                };
                Ok(Self {
                    $($field,)*
                    $(
                        // SAFETY: the type is the one in the library's header.
                        $extra: unsafe {
                            library.function(
                                const { match std::ffi::CStr::from_bytes_with_nul(concat!($title, "\0").as_bytes()) {
                                    Ok(name) => name,
                                    Err(_) => c"",
                                } },
                            )
                        },
                    )*
                })
            }
        }
    };
}

pub(crate) use table;

#[cfg(test)]
mod tests {
    #![expect(unreachable_pub, reason = "tables are made public, for those that leave the crate")]

    use super::*;

    #[test]
    fn a_missing_library_is_reported_in_the_loaders_words() {
        let error = Library::open(Path::new("libdoes-not-exist.so.1")).unwrap_err();
        assert!(error.contains("libdoes-not-exist.so.1"), "{error}");
        assert!(Library::loaded("libdoes-not-exist.so.1").is_none());
    }

    #[test]
    fn functions_of_a_library_are_found_and_called() {
        let library = Library::open(Path::new("libc.so.6")).unwrap();
        // SAFETY: the type of `abs` in the C standard.
        let abs: unsafe extern "C" fn(i32) -> i32 = unsafe { library.function(c"abs") }.unwrap();
        // SAFETY: any number may be given.
        assert_eq!(unsafe { abs(-3) }, 3);
        assert!(library.file(c"abs").unwrap().contains("libc"));
        // SAFETY: not called.
        let none: Option<unsafe extern "C" fn()> = unsafe { library.function(c"no_such_function") };
        assert!(none.is_none());
    }

    table! {
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

    table! {
        /// For the test.
        pub struct Whole -> i32 {
            needed { abs = "abs"(i32); }
            optional { labs = "labs"(i32); also = "nor_this_one"(); }
        }
    }

    #[test]
    fn a_table_names_all_that_is_missing_and_goes_without_what_is_optional() {
        let library = Library::open(Path::new("libc.so.6")).unwrap();
        let error = Broken::of(&library)
            .map(|table| (table.abs, table.lost, table.gone, table.also))
            .unwrap_err();
        assert_eq!(error.to_string(), "libc.so.6 lacks functions: no_such_function, neither_this");
        let whole = Whole::of(&library).unwrap();
        assert!(whole.labs.is_some() && whole.also.is_none());
        // SAFETY: any number may be given.
        assert_eq!(unsafe { (whole.abs)(-4) }, 4);
    }
}
