// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The callback of an asynchronous kernel, moved out of the caller's stack.
//!
//! TensorFlow hands `compute` the address of a `std::function<void()>` that lives on its stack and
//! dies when `compute` returns, long before the operation has ended. The C API has no way to keep
//! it, so it is moved here, by the layout of libstdc++: two words of functor, the manager, the
//! invoker.
#![expect(unsafe_code, reason = "moves a C++ object by its layout")]

use std::ffi::{c_int, c_void};

use crate::api::{Api, Opaque};

type FunctionManagerFn = unsafe extern "C" fn(*mut c_void, *const c_void, c_int) -> c_int;

/// The manager's operation for the destructor.
const DESTROY_OPERATION: c_int = 3;

/// `std::function<void()>` of libstdc++.
#[repr(C)]
struct CppFunction {
    functor: [usize; 2],
    manager: Option<FunctionManagerFn>,
    invoker: Option<unsafe extern "C" fn(*const c_void)>,
}

/// A moved callback. Runs once; dropped unrun, it is only destroyed.
pub(crate) struct DoneCallback {
    api: &'static Api,
    // Boxed: the manager and the invoker get its address.
    function: Box<CppFunction>,
}

// SAFETY: TensorFlow's callbacks are made to run on other threads.
unsafe impl Send for DoneCallback {}

impl DoneCallback {
    /// Takes the function away from its owner, which then finds it empty, as after a move in C++.
    ///
    /// # Safety
    /// `done` is what TensorFlow passed to an asynchronous `compute` that has not returned.
    pub(crate) unsafe fn take_from_caller(api: &'static Api, done: Opaque) -> Self {
        let original = done.cast::<CppFunction>();
        // SAFETY: by the caller's promise `original` is a live `std::function`; emptying it is the
        // second half of its move constructor.
        let function = unsafe {
            let moved = std::ptr::read(original);
            (*original).manager = None;
            (*original).invoker = None;
            moved
        };
        Self { api, function: Box::new(function) }
    }

    /// Reports the end of the kernel to TensorFlow.
    pub(crate) fn run(mut self) {
        let address: Opaque = (&raw mut *self.function).cast();
        // SAFETY: the function is live and in place; it is destroyed on drop.
        unsafe { (self.api.run_done)(address) };
    }
}

impl Drop for DoneCallback {
    fn drop(&mut self) {
        if let Some(manager) = self.function.manager.take() {
            let functor: *mut c_void = (&raw mut self.function.functor).cast();
            // SAFETY: the manager belongs to this functor, and this is the only destruction.
            unsafe { manager(functor, functor, DESTROY_OPERATION) };
        }
    }
}
