// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The object behind a kernel's pointer, whatever the kernel does.
#![expect(unsafe_code, reason = "TensorFlow gives the pointer back")]

use std::ffi::c_void;
use std::sync::Arc;

use crate::collective_node::CollectiveNode;

/// The object behind a kernel's pointer.
pub(crate) enum KernelState {
    /// A collective.
    Collective(Arc<CollectiveNode>),
    /// A question about the world, and the process set it is about.
    WorldQuery(u32, u32),
    /// The probe, and how many microseconds it takes.
    Probe(u32),
}

/// Destroys any kernel of ours.
///
/// # Safety
/// TensorFlow calls it once with a pointer that `create_collective` returned.
pub(crate) unsafe extern "C" fn delete_kernel(kernel: *mut c_void) {
    if !kernel.is_null() {
        // SAFETY: boxed by a `create_collective`.
        drop(unsafe { Box::from_raw(kernel.cast::<KernelState>()) });
    }
}
