// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The settings of a session's GPUs.

use std::path::PathBuf;

use farandole_config::{Config, environment_variable};
use farandole_cuda::{KernelCache, LibrarySearchPath, ProcessGpus};

use crate::Result;

/// The treatment of tensors on GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GpuTensorPolicy {
    /// NCCL reduces if possible; CUDA IPC if ranks share the GPU; otherwise host memory is used.
    Auto,
    /// Reduced in host memory.
    Staged,
    /// Copied to the host by the framework.
    Copied,
}

impl GpuTensorPolicy {
    /// Returns the value of the knob.
    ///
    /// # Errors
    /// The knob's value is invalid.
    pub(crate) fn from_config(config: &Config) -> Result<Self, farandole_config::KnobError> {
        match config.gpu_tensors.to_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "staged" => Ok(Self::Staged),
            "copied" => Ok(Self::Copied),
            _ => Err(farandole_config::KnobError {
                name: "FARANDOLE_GPU_TENSORS".to_owned(),
                expected: "auto, staged or copied",
                value: config.gpu_tensors.clone(),
            }),
        }
    }
}

/// Creates the GPUs of this process; looks for none yet.
///
/// # Errors
/// A knob's value is invalid.
pub(crate) fn create_gpus(config: &Config) -> Result<ProcessGpus, farandole_config::KnobError> {
    let gpus = ProcessGpus::new(LibrarySearchPath::from_knob(&config.cuda_libraries));
    if GpuTensorPolicy::from_config(config)? != GpuTensorPolicy::Auto {
        return Ok(gpus.with_nccl_disabled());
    }
    let gpus = if config.nccl_memory { gpus.with_memory_registration_enabled() } else { gpus };
    // Without a home directory there is no cache: in a shared folder, other users could plant
    // kernels.
    Ok(match kernel_cache_folder(environment_variable) {
        Some(folder) => gpus.with_ipc_enabled(KernelCache::new(folder)),
        None => gpus,
    })
}

/// Returns the folder of compiled kernels, which is in the user's own cache.
fn kernel_cache_folder(variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let home = || variable("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = variable("XDG_CACHE_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let cache = cache.or_else(home).filter(|folder| folder.is_absolute())?;
    Some(cache.join("farandole/kernels"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn chosen(value: &str) -> Result<GpuTensorPolicy, String> {
        let given = BTreeMap::from([("gpu_tensors".to_owned(), value.to_owned())]);
        let config = Config::read(|_| None, &given).unwrap();
        GpuTensorPolicy::from_config(&config).map_err(|error| error.to_string())
    }

    #[test]
    fn tensors_on_gpus_are_treated_in_one_of_three_ways() {
        assert_eq!(chosen("auto"), Ok(GpuTensorPolicy::Auto));
        assert_eq!(chosen("Staged"), Ok(GpuTensorPolicy::Staged));
        assert_eq!(chosen("copied"), Ok(GpuTensorPolicy::Copied));
        assert!(chosen("nccl").unwrap_err().contains("auto, staged or copied"));
    }

    #[test]
    fn kernels_are_kept_in_the_users_cache_or_nowhere() {
        let folder = |known: &[(&str, &str)]| {
            let known: BTreeMap<String, String> = known
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect();
            kernel_cache_folder(|name| known.get(name).cloned())
                .map(|folder| folder.display().to_string())
        };
        let both = [("XDG_CACHE_HOME", "/cache"), ("HOME", "/home/a")];
        assert_eq!(folder(&both).unwrap(), "/cache/farandole/kernels");
        assert_eq!(folder(&both[1..]).unwrap(), "/home/a/.cache/farandole/kernels");
        assert_eq!(folder(&[("XDG_CACHE_HOME", "here"), ("HOME", "")]), None);
    }
}
