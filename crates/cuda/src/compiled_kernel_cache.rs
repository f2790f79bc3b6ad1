// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A cache of compiled kernels on disk, with source, architecture and compiler version as the key.
//! Several processes may write at the same time; a reader sees a complete file or none.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest as _, Sha256};

use crate::{Error, NvrtcCompiler, Result};

/// The size of the digest at the beginning of a file.
const DIGEST_BYTES: usize = 32;
/// Makes names of files in progress differ within a process.
static NEXT_PART_NUMBER: AtomicU64 = AtomicU64::new(0);

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct KernelCache {
    folder: PathBuf,
}

impl KernelCache {
    /// Returns a cache in this folder, which is created with the first file.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Returns the machine code of `source` for an architecture: from the folder, or else compiled
    /// and, if possible, stored.
    ///
    /// # Errors
    /// `Compile`. A folder that cannot be written only costs the time to compile.
    pub fn get_or_compile(
        &self,
        compiler: &NvrtcCompiler,
        source: &str,
        arch: u32,
    ) -> Result<Vec<u8>> {
        self.get_or_compile_with(source, arch, compiler.compiler_version(), || {
            compiler.compile_source(source, arch)
        })
    }

    fn get_or_compile_with(
        &self,
        source: &str,
        arch: u32,
        version: (i32, i32),
        compile: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Vec<u8>> {
        let path = self.cubin_path(source, arch, version);
        if let Some(code) = read_cubin(&path) {
            return Ok(code);
        }
        let code = compile()?;
        // A cache that cannot be written is no failure: the next process compiles again.
        drop(self.store_cubin(&path, &code));
        Ok(code)
    }

    /// Returns the file for this source, architecture and compiler.
    fn cubin_path(&self, source: &str, arch: u32, (major, minor): (i32, i32)) -> PathBuf {
        let digest = Sha256::digest(source.as_bytes());
        let name: String = digest.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
        self.folder.join(format!("{name}-sm{arch}-nvrtc{major}.{minor}.cubin"))
    }

    fn store_cubin(&self, path: &Path, code: &[u8]) -> Result<()> {
        let fail = |error: std::io::Error| Error::Cache {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        fs::create_dir_all(&self.folder).map_err(fail)?;
        let number = NEXT_PART_NUMBER.fetch_add(1, Ordering::Relaxed);
        let unfinished = path.with_extension(format!("{}-{number}.part", std::process::id()));
        let write = || -> std::io::Result<()> {
            let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&unfinished)?;
            file.write_all(&Sha256::digest(code))?;
            file.write_all(code)?;
            // Without fsync: if the machine crashes, the digest shows that the file is incomplete.
            drop(file);
            fs::rename(&unfinished, path)
        };
        write().map_err(|error| {
            drop(fs::remove_file(&unfinished));
            fail(error)
        })
    }
}

/// Returns the code in a file that is whole.
fn read_cubin(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let (digest, code) = bytes.split_at_checked(DIGEST_BYTES)?;
    if code.is_empty() || *Sha256::digest(code) != *digest {
        return None;
    }
    Some(bytes.split_off(DIGEST_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refuse() -> Result<Vec<u8>> {
        Err(Error::Compile { arch: 90, log: "asked for again".to_owned() })
    }

    #[test]
    fn a_compiled_kernel_is_read_by_the_next_process() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(folder.path().join("a/b"));
        assert_eq!(
            cache.get_or_compile_with("source", 90, (13, 2), || Ok(vec![1, 2])).unwrap(),
            [1, 2]
        );
        assert_eq!(cache.get_or_compile_with("source", 90, (13, 2), refuse).unwrap(), [1, 2]);
        let left: Vec<_> = fs::read_dir(folder.path().join("a/b")).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }

    #[test]
    fn another_source_architecture_or_compiler_is_compiled_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(folder.path());
        cache.get_or_compile_with("source", 90, (13, 2), || Ok(vec![1])).unwrap();
        for (source, arch, version) in
            [("other", 90, (13, 2)), ("source", 80, (13, 2)), ("source", 90, (12, 9))]
        {
            assert_eq!(
                cache.get_or_compile_with(source, arch, version, || Ok(vec![2])).unwrap(),
                [2]
            );
        }
    }

    #[test]
    fn a_truncated_or_changed_file_is_compiled_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(folder.path());
        let path = cache.cubin_path("source", 90, (13, 2));
        for damage in [&b""[..], b"short", &[0; 40]] {
            fs::write(&path, damage).unwrap();
            assert_eq!(
                cache.get_or_compile_with("source", 90, (13, 2), || Ok(vec![7, 8])).unwrap(),
                [7, 8]
            );
            assert_eq!(cache.get_or_compile_with("source", 90, (13, 2), refuse).unwrap(), [7, 8]);
        }
    }

    #[test]
    fn a_folder_that_cannot_be_made_costs_only_time() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        let cache = KernelCache::new(folder.path().join("file/below"));
        assert_eq!(cache.get_or_compile_with("source", 90, (13, 2), || Ok(vec![1])).unwrap(), [1]);
    }

    #[test]
    fn processes_that_start_together_leave_one_whole_file() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(folder.path());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    cache
                        .get_or_compile_with("source", 90, (13, 2), || Ok(vec![5; 100_000]))
                        .unwrap()
                });
            }
        });
        assert_eq!(read_cubin(&cache.cubin_path("source", 90, (13, 2))).unwrap(), vec![5; 100_000]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
