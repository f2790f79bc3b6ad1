// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory of tests, which no other code knows.
#![expect(unsafe_code, reason = "buffers are read and written through unsafe methods")]

use farandole_kernels::HostMemory;

/// Memory that holds these bytes.
pub fn filled(bytes: &[u8]) -> HostMemory {
    let memory = HostMemory::new(bytes.len());
    let buffer = memory.as_buffer();
    // SAFETY: the memory was made here, so no other code has it.
    unsafe { buffer.as_bytes_mut() }.copy_from_slice(bytes);
    memory
}

/// Writes bytes from `at` on, as far as the memory goes.
pub fn fill(memory: &HostMemory, at: usize, bytes: &[u8]) {
    let buffer = memory.as_buffer().slice(at, bytes.len());
    // SAFETY: tests call this before they submit or after completion: no other code uses it.
    let place = unsafe { buffer.as_bytes_mut() };
    place.copy_from_slice(&bytes[..place.len()]);
}

/// The bytes in a memory no operation is using.
pub fn contents(memory: &HostMemory) -> Vec<u8> {
    let buffer = memory.as_buffer();
    // SAFETY: tests call this before they submit or after completion: no code writes.
    unsafe { buffer.as_bytes() }.to_vec()
}
