// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! TensorFlow's C API as function pointers, looked up in the library that the process already
//! holds.
#![expect(unsafe_code, reason = "symbols are looked up by name and given their declared types")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LAZY};

/// An opaque pointer to a TensorFlow object.
pub(crate) type Opaque = *mut c_void;

/// Makes a kernel of a node; null after a failure.
pub(crate) type CreateKernelFn = unsafe extern "C" fn(construction: Opaque) -> *mut c_void;
/// Runs a kernel; the last argument is the callback of an asynchronous one.
pub(crate) type AsyncComputeKernelFn =
    unsafe extern "C" fn(kernel: *mut c_void, context: Opaque, done: Opaque);
/// Runs a synchronous kernel.
pub(crate) type ComputeKernelFn = unsafe extern "C" fn(kernel: *mut c_void, context: Opaque);
/// Destroys a kernel.
pub(crate) type DeleteKernelFn = unsafe extern "C" fn(kernel: *mut c_void);
/// Infers shapes of outputs.
pub(crate) type InferShapeFn = unsafe extern "C" fn(context: Opaque, status: Opaque);
/// Frees the memory of a tensor.
pub(crate) type DeallocateTensorFn =
    unsafe extern "C" fn(data: *mut c_void, length: usize, argument: *mut c_void);

/// Finds a library only if the process has loaded it: a second copy of TensorFlow would have
/// registries of its own, in which the ops would not be found.
const RTLD_NOLOAD: c_int = 4;

/// Sonames that hold the API, newest first.
const TENSORFLOW_LIBRARIES: [&str; 2] = ["libtensorflow_framework.so.2", "libtensorflow_cc.so.2"];

/// Returns the libraries of TensorFlow in this process, which never unloads them.
fn loaded_libraries() -> impl Iterator<Item = Library> {
    TENSORFLOW_LIBRARIES
        .iter()
        // SAFETY: the call loads nothing, so no code of a library runs.
        .filter_map(|name| unsafe { Library::open(Some(*name), RTLD_LAZY | RTLD_NOLOAD) }.ok())
}

macro_rules! api {
    ($($field:ident = $symbol:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions that are used.
        pub(crate) struct Api {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Api {
            fn load() -> Result<Self, String> {
                let libraries: Vec<Library> = loaded_libraries().collect();
                if libraries.is_empty() {
                    return Err("TensorFlow is not loaded".to_owned());
                }
                $(
                    let $field = libraries
                        .iter()
                        .find_map(|library| {
                            // SAFETY: the function has this type in the headers of TensorFlow's
                            // stable C API, and `None` is a null pointer.
                            unsafe {
                                library.get::<Option<unsafe extern "C" fn($($argument),*) $(-> $result)?>>(
                                    stringify!($symbol),
                                )
                            }
                            .ok()
                            .and_then(|found| *found)
                        })
                        .ok_or(concat!("this TensorFlow lacks ", stringify!($symbol)))?;
                )*
                Ok(Self { $($field),* })
            }
        }
    };
}

api! {
    new_status = TF_NewStatus() -> Opaque;
    delete_status = TF_DeleteStatus(Opaque);
    set_status = TF_SetStatus(Opaque, c_int, *const c_char);
    get_code = TF_GetCode(Opaque) -> c_int;
    message = TF_Message(Opaque) -> *const c_char;

    new_op = TF_NewOpDefinitionBuilder(*const c_char) -> Opaque;
    add_input = TF_OpDefinitionBuilderAddInput(Opaque, *const c_char);
    add_output = TF_OpDefinitionBuilderAddOutput(Opaque, *const c_char);
    add_attr = TF_OpDefinitionBuilderAddAttr(Opaque, *const c_char);
    set_stateful = TF_OpDefinitionBuilderSetIsStateful(Opaque, bool);
    set_shapes = TF_OpDefinitionBuilderSetShapeInferenceFunction(Opaque, InferShapeFn);
    register_op = TF_RegisterOpDefinition(Opaque, Opaque);

    new_async_kernel =
        TF_NewAsyncKernelBuilder(*const c_char, *const c_char, Option<CreateKernelFn>, AsyncComputeKernelFn, Option<DeleteKernelFn>) -> Opaque;
    new_kernel =
        TF_NewKernelBuilder(*const c_char, *const c_char, Option<CreateKernelFn>, ComputeKernelFn, Option<DeleteKernelFn>) -> Opaque;
    host_memory = TF_KernelBuilder_HostMemory(Opaque, *const c_char);
    register_kernel = TF_RegisterKernelBuilder(*const c_char, Opaque, Opaque);

    construction_failure = TF_OpKernelConstruction_Failure(Opaque, Opaque);
    attr_int = TF_OpKernelConstruction_GetAttrInt64(Opaque, *const c_char, *mut i64, Opaque);
    attr_bool = TF_OpKernelConstruction_GetAttrBool(Opaque, *const c_char, *mut u8, Opaque);
    attr_size = TF_OpKernelConstruction_GetAttrSize(Opaque, *const c_char, *mut i32, *mut i32, Opaque);
    attr_string = TF_OpKernelConstruction_GetAttrString(Opaque, *const c_char, *mut c_char, usize, Opaque);

    run_done = TF_RunAsyncOpKernelDoneCallback(Opaque);
    context_failure = TF_OpKernelContext_Failure(Opaque, Opaque);
    num_inputs = TF_NumInputs(Opaque) -> c_int;
    get_input = TF_GetInput(Opaque, c_int, *mut Opaque, Opaque);
    set_output = TF_SetOutput(Opaque, c_int, Opaque, Opaque);
    allocate_output = TF_AllocateOutput(Opaque, c_int, c_int, *const i64, c_int, usize, Opaque) -> Opaque;
    forward_or_allocate =
        TF_ForwardInputOrAllocateOutput(Opaque, *const c_int, c_int, c_int, *const i64, c_int, *mut c_int, Opaque)
            -> Opaque;

    new_tensor =
        TF_NewTensor(c_int, *const i64, c_int, *mut c_void, usize, DeallocateTensorFn, *mut c_void) -> Opaque;
    delete_tensor = TF_DeleteTensor(Opaque);
    tensor_type = TF_TensorType(Opaque) -> c_int;
    num_dims = TF_NumDims(Opaque) -> c_int;
    dim = TF_Dim(Opaque, c_int) -> i64;
    tensor_bytes = TF_TensorByteSize(Opaque) -> usize;
    tensor_data = TF_TensorData(Opaque) -> *mut c_void;

    new_shape = TF_NewShapeHandle() -> Opaque;
    delete_shape = TF_DeleteShapeHandle(Opaque);
    shape_inputs = TF_ShapeInferenceContextNumInputs(Opaque) -> i64;
    shape_input = TF_ShapeInferenceContextGetInput(Opaque, c_int, Opaque, Opaque);
    shape_output = TF_ShapeInferenceContextSetOutput(Opaque, c_int, Opaque, Opaque);
    shape_unknown = TF_ShapeInferenceContextSetUnknownShape(Opaque, Opaque);
    shape_scalar = TF_ShapeInferenceContextScalar(Opaque) -> Opaque;
    shape_vector = TF_ShapeInferenceContextVectorFromSize(Opaque, usize) -> Opaque;
    shape_rank_known = TF_ShapeInferenceContextRankKnown(Opaque, Opaque) -> c_int;
    shape_at_least = TF_ShapeInferenceContextWithRankAtLeast(Opaque, Opaque, i64, Opaque, Opaque);
    shape_part = TF_ShapeInferenceContextSubshape(Opaque, Opaque, i64, i64, Opaque, Opaque);
    shape_concatenate = TF_ShapeInferenceContextConcatenateShapes(Opaque, Opaque, Opaque, Opaque, Opaque);
}

/// Returns a function that TensorFlow's libraries export under this name.
///
/// # Safety
/// `F` is a pointer to a function of the type that the library's header gives it.
pub(crate) unsafe fn find_symbol<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a pointer to a function") };
    // SAFETY: the size was checked, and the type is the caller's promise.
    loaded_libraries()
        .find_map(|library| unsafe { library.get::<F>(name) }.ok().map(|found| *found))
}

static TENSORFLOW_API: OnceLock<Result<Api, String>> = OnceLock::new();

/// Returns the API, looked up once.
///
/// # Errors
/// What TensorFlow lacks.
pub(crate) fn tensorflow_api() -> Result<&'static Api, &'static str> {
    TENSORFLOW_API.get_or_init(Api::load).as_ref().map_err(String::as_str)
}
