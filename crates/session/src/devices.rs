// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The GPUs of a session, which are added when a tensor is on one.

use std::path::PathBuf;
use std::sync::Arc;

use farandole_config::{Config, environment};
use farandole_cuda::{Cache, Gpu, Gpus, NcclMemory, Places};

use crate::{Result, Session};

/// The treatment of tensors on GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GpuTensors {
    /// Reduced by NCCL where it can, on a GPU that ranks share by CUDA IPC, else in host memory.
    Auto,
    /// Reduced in host memory.
    Staged,
    /// Copied to the host by the framework.
    Copied,
}

impl GpuTensors {
    /// The value of the knob.
    ///
    /// # Errors
    /// Its value is none.
    pub(crate) fn of(config: &Config) -> Result<Self, farandole_config::Error> {
        match config.gpu_tensors.to_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "staged" => Ok(Self::Staged),
            "copied" => Ok(Self::Copied),
            _ => Err(farandole_config::Error {
                name: "FARANDOLE_GPU_TENSORS".to_owned(),
                expected: "auto, staged or copied",
                value: config.gpu_tensors.clone(),
            }),
        }
    }
}

/// The GPUs of this process; none is looked for yet.
///
/// # Errors
/// A knob's value is none.
pub(crate) fn gpus(config: &Config) -> Result<Gpus, farandole_config::Error> {
    let gpus = Gpus::new(Places::of(&config.cuda_libraries));
    if GpuTensors::of(config)? != GpuTensors::Auto {
        return Ok(gpus.without_nccl());
    }
    let gpus = if config.nccl_memory { gpus.with_registration() } else { gpus };
    // Without a home directory there is no cache, so that no other user's kernels are loaded.
    Ok(match kernels(environment) {
        Some(folder) => gpus.with_ipc(Cache::new(folder)),
        None => gpus,
    })
}

/// Returns the folder of compiled kernels: in the user's own cache.
fn kernels(variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let home = || variable("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = variable("XDG_CACHE_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let cache = cache.or_else(home).filter(|folder| folder.is_absolute())?;
    Some(cache.join("farandole/kernels"))
}

impl Session {
    /// Returns whether operations may name memory of GPUs.
    pub fn takes_devices(&self) -> bool {
        self.gpu_tensors != GpuTensors::Copied
    }

    /// The GPU of this number among those that the process sees; from here on operations may name
    /// its memory. CUDA's libraries are also looked for in the wheels in `packages`.
    ///
    /// # Errors
    /// `Forked`; `Cuda` when there is no such GPU, or no driver.
    pub fn gpu(&self, ordinal: u32, packages: &[PathBuf]) -> Result<Arc<Gpu>> {
        self.check_process()?;
        let gpu = self.gpus.open(ordinal, packages)?;
        if !self.engine().has_device(ordinal) {
            self.engine().add_device(Arc::clone(&gpu) as _);
        }
        Ok(gpu)
    }

    /// Memory of a GPU that communicators of NCCL register, for work in the order of this stream;
    /// nothing where none is to be, or there is none.
    ///
    /// # Errors
    /// `Forked`; `Cuda` when there is none left.
    pub fn device_memory(
        &self,
        ordinal: u32,
        stream: usize,
        bytes: usize,
    ) -> Result<Option<NcclMemory>> {
        self.check_process()?;
        Ok(self.gpus.memory(ordinal, stream, bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn chosen(value: &str) -> Result<GpuTensors, String> {
        let given = BTreeMap::from([("gpu_tensors".to_owned(), value.to_owned())]);
        let config = Config::read(|_| None, &given).unwrap();
        GpuTensors::of(&config).map_err(|error| error.to_string())
    }

    #[test]
    fn tensors_on_gpus_are_treated_in_one_of_three_ways() {
        assert_eq!(chosen("auto"), Ok(GpuTensors::Auto));
        assert_eq!(chosen("Staged"), Ok(GpuTensors::Staged));
        assert_eq!(chosen("copied"), Ok(GpuTensors::Copied));
        assert!(chosen("nccl").unwrap_err().contains("auto, staged or copied"));
    }

    #[test]
    fn kernels_are_kept_in_the_users_cache_or_nowhere() {
        let folder = |known: &[(&str, &str)]| {
            let known: BTreeMap<String, String> = known
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect();
            kernels(|name| known.get(name).cloned()).map(|folder| folder.display().to_string())
        };
        let both = [("XDG_CACHE_HOME", "/cache"), ("HOME", "/home/a")];
        assert_eq!(folder(&both).unwrap(), "/cache/farandole/kernels");
        assert_eq!(folder(&both[1..]).unwrap(), "/home/a/.cache/farandole/kernels");
        assert_eq!(folder(&[("XDG_CACHE_HOME", "here"), ("HOME", "")]), None);
    }
}
