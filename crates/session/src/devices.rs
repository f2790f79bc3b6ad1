// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The GPUs of a session, which are added when a tensor is on one.

use std::path::PathBuf;
use std::sync::Arc;

use farandole_cuda::{GpuDevice, NcclMemory};

use crate::gpu_policy::GpuTensorPolicy;
use crate::{Result, Session};

impl Session {
    /// Returns whether operations may use memory of GPUs.
    pub fn supports_device_memory(&self) -> bool {
        self.gpu_tensors != GpuTensorPolicy::Copied
    }

    /// Opens the GPU with this number among the GPUs that the process sees. Operations may then use
    /// its memory. CUDA's libraries are also searched for in the wheels in `packages`.
    ///
    /// # Errors
    /// `Forked`; `Cuda` when there is no such GPU, or no driver.
    pub fn open_gpu(&self, ordinal: u32, packages: &[PathBuf]) -> Result<Arc<GpuDevice>> {
        self.check_not_forked()?;
        let gpu = self.gpus.open_gpu(ordinal, packages)?;
        if !self.engine().has_device(ordinal) {
            self.engine().add_device(Arc::clone(&gpu) as _);
        }
        Ok(gpu)
    }

    /// Allocates memory of a GPU that NCCL communicators register, for work in the order of
    /// `stream`. Returns `None` if registration is off or not available.
    ///
    /// # Errors
    /// `Forked`; `Cuda` when the GPU has no memory left.
    pub fn allocate_device_memory(
        &self,
        ordinal: u32,
        stream: usize,
        bytes: usize,
    ) -> Result<Option<NcclMemory>> {
        self.check_not_forked()?;
        Ok(self.gpus.allocate_registered(ordinal, stream, bytes)?)
    }
}
