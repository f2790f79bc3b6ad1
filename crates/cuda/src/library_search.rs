// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The search for CUDA's libraries.
//!
//! The order is: folders named by the user, libraries that the process has loaded already (torch
//! loads its own), wheels next to this package, and the system's loader. Wheels keep libraries in
//! folders that no loader searches: CUDA 13 in `nvidia/cu13/lib`, CUDA 12 in a folder for each
//! library, such as `nvidia/cuda_nvrtc/lib`.

use std::path::{Path, PathBuf};

use crate::library::{SharedLibrary, file_at_address};
use crate::{Error, Result};

/// A library of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CudaLibrary {
    /// The driver's, which comes with it and in no wheel.
    Driver,
    /// The runtime's.
    Runtime,
    /// The compiler of kernels.
    Nvrtc,
    /// Collectives among GPUs.
    Nccl,
}

impl CudaLibrary {
    /// All of them.
    pub const ALL_LIBRARIES: [Self; 4] = [Self::Driver, Self::Runtime, Self::Nvrtc, Self::Nccl];

    /// Returns the name without a version.
    pub const fn library_name(self) -> &'static str {
        match self {
            Self::Driver => "libcuda",
            Self::Runtime => "libcudart",
            Self::Nvrtc => "libnvrtc",
            Self::Nccl => "libnccl",
        }
    }

    /// Names of files, the newest version first.
    const fn file_names(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1"],
            Self::Runtime => &["libcudart.so.13", "libcudart.so.12"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
            Self::Nccl => &["libnccl.so.2"],
        }
    }

    /// Folders of wheels below `nvidia`.
    const fn wheel_folders(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &[],
            Self::Runtime => &["cu13/lib", "cuda_runtime/lib"],
            Self::Nvrtc => &["cu13/lib", "cuda_nvrtc/lib"],
            Self::Nccl => &["nccl/lib"],
        }
    }

    /// Returns a function that every version has.
    pub(crate) const fn probe_symbol(self) -> &'static std::ffi::CStr {
        match self {
            Self::Driver => c"cuInit",
            Self::Runtime => c"cudaRuntimeGetVersion",
            Self::Nvrtc => c"nvrtcVersion",
            Self::Nccl => c"ncclGetVersion",
        }
    }
}

/// Folders to search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LibrarySearchPath {
    /// Folders named by the user; they come first.
    pub user_folders: Vec<PathBuf>,
    /// Folders of installed packages.
    pub packages: Vec<PathBuf>,
}

impl LibrarySearchPath {
    /// Returns the folders of a knob, separated by colons, and the packages next to this library.
    pub fn from_knob(named: &str) -> Self {
        let named =
            named.split(':').filter(|folder| !folder.is_empty()).map(PathBuf::from).collect();
        // The library this function is in: an extension in a package next to others.
        let here: fn(&str) -> Self = Self::from_knob;
        let here = file_at_address(here as *const std::ffi::c_void);
        let packages = here.and_then(|file| Some(Path::new(&file).parent()?.parent()?.to_owned()));
        Self { user_folders: named, packages: packages.into_iter().collect() }
    }

    /// Returns the candidates for a library, in order. Files need not exist, but for those named by
    /// a folder.
    fn list_candidates(&self, kind: CudaLibrary) -> Vec<LibraryCandidate> {
        let files = || kind.file_names().iter();
        let mut all = Vec::new();
        for folder in &self.user_folders {
            all.extend(files().map(|file| LibraryCandidate::File(folder.join(file))));
        }
        all.extend(files().map(|file| LibraryCandidate::Loaded(file)));
        for package in &self.packages {
            for wheel in kind.wheel_folders() {
                let folder = package.join("nvidia").join(wheel);
                all.extend(files().map(|file| LibraryCandidate::File(folder.join(file))));
            }
        }
        all.extend(files().map(|file| LibraryCandidate::System(file)));
        all
    }

    /// Loads the first that can be.
    ///
    /// # Errors
    /// `NotFound` with the problems of the candidates that exist.
    pub fn load_library(&self, kind: CudaLibrary) -> Result<SharedLibrary> {
        let mut tried = Vec::new();
        for candidate in self.list_candidates(kind) {
            let opened = match &candidate {
                // A file that does not exist is no problem worth a report; one that cannot be
                // loaded is.
                LibraryCandidate::File(path) if matches!(path.try_exists(), Ok(false)) => continue,
                LibraryCandidate::File(path) => SharedLibrary::open_library(path),
                LibraryCandidate::Loaded(name) => match SharedLibrary::find_loaded_library(name) {
                    Some(library) => Ok(library),
                    None => continue,
                },
                LibraryCandidate::System(name) => SharedLibrary::open_library(Path::new(name)),
            };
            match opened {
                Ok(library) => return Ok(library),
                Err(reason) => tried.push(reason),
            }
        }
        Err(Error::NotFound { library: kind.library_name(), tried: tried.join("; ") })
    }
}

#[derive(Debug, PartialEq, Eq)]
enum LibraryCandidate {
    File(PathBuf),
    Loaded(&'static str),
    System(&'static str),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search_path(named: &str, package: &str) -> LibrarySearchPath {
        LibrarySearchPath { packages: vec![package.into()], ..LibrarySearchPath::from_knob(named) }
    }

    #[test]
    fn named_folders_come_first_then_what_is_loaded_then_wheels_then_the_system() {
        let all = search_path("/opt/a:/opt/b", "/site").list_candidates(CudaLibrary::Nccl);
        let file = |path: &str| LibraryCandidate::File(path.into());
        assert_eq!(
            all,
            [
                file("/opt/a/libnccl.so.2"),
                file("/opt/b/libnccl.so.2"),
                LibraryCandidate::Loaded("libnccl.so.2"),
                file("/site/nvidia/nccl/lib/libnccl.so.2"),
                LibraryCandidate::System("libnccl.so.2"),
            ]
        );
    }

    #[test]
    fn wheels_of_cuda_13_and_of_cuda_12_are_looked_into() {
        let all = search_path("", "/site").list_candidates(CudaLibrary::Nvrtc);
        for path in
            ["/site/nvidia/cu13/lib/libnvrtc.so.13", "/site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"]
        {
            assert!(all.contains(&LibraryCandidate::File(path.into())), "{path} is not in {all:?}");
        }
    }

    #[test]
    fn a_library_that_cannot_be_loaded_says_why() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("libnccl.so.2"), "no library").unwrap();
        let named = folder.path().to_str().unwrap();
        let search_path =
            LibrarySearchPath { packages: Vec::new(), ..LibrarySearchPath::from_knob(named) };
        if let Err(error) = search_path.load_library(CudaLibrary::Nccl) {
            let text = error.to_string();
            assert!(text.starts_with("libnccl was not found: ") && text.contains(named), "{text}");
        }
        let candidates = search_path.list_candidates(CudaLibrary::Nccl);
        assert_eq!(candidates[0], LibraryCandidate::File(folder.path().join("libnccl.so.2")));
    }

    #[test]
    fn a_real_library_in_a_folder_of_wheels_is_loaded_from_there() {
        let site = tempfile::tempdir().unwrap();
        let folder = site.path().join("nvidia/cuda_nvrtc/lib");
        std::fs::create_dir_all(&folder).unwrap();
        let (source, library) = (site.path().join("empty.c"), folder.join("libnvrtc.so.12"));
        std::fs::write(&source, "int nvrtcVersion(void) { return 0; }").unwrap();
        let mut compiler = std::process::Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).args([&library, &source]);
        assert!(
            compiler.status().unwrap().success(),
            "this test needs a C compiler, as linking does"
        );
        let search_path =
            LibrarySearchPath { user_folders: Vec::new(), packages: vec![site.path().to_owned()] };
        let found = search_path.load_library(CudaLibrary::Nvrtc).unwrap();
        assert_eq!(found.opened_name(), library.to_str().unwrap());
        assert!(found.file_of_function(CudaLibrary::Nvrtc.probe_symbol()).is_some());
    }
}
