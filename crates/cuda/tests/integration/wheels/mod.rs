// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Paths of the wheels of the development environment.

use std::path::{Path, PathBuf};

use farandole_cuda::{CudaLibrary, LibrarySearchPath, SharedLibrary};

/// The folders of the environment that tests of Python use.
pub(crate) fn search_path() -> LibrarySearchPath {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let pythons = std::fs::read_dir(root).into_iter().flatten().flatten();
    let packages: Vec<PathBuf> =
        pythons.map(|python| python.path().join("site-packages")).collect();
    LibrarySearchPath { user_folders: Vec::new(), packages }
}

/// The library, or the reason why a test has nothing to test.
pub(crate) fn there(kind: CudaLibrary) -> Option<SharedLibrary> {
    search_path()
        .load_library(kind)
        .inspect_err(|error| {
            eprintln!("skipped: {error}; install torch, or nvidia-cuda-nvrtc, into .venv")
        })
        .ok()
}
