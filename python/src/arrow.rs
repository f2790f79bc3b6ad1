// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Record batches as Python hands them in, and batches as it takes them: by pointers, without
//! copies.
#![expect(unsafe_code, reason = "the Arrow C data interface and the buffer protocol are pointers")]

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use arrow::array::{Array, RecordBatch, StructArray};
use arrow::ffi::{FFI_ArrowArray, FFI_ArrowSchema, from_ffi};
use farandole::reader;
use pyo3::exceptions::{PyBufferError, PyKeyError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyMemoryView, PyTuple};

/// Imports anything with `__arrow_c_array__` that is a struct: a record batch.
///
/// # Errors
/// `TypeError` for other objects, `ValueError` for data that is no record batch.
pub(crate) fn import_record_batch(object: &Bound<'_, PyAny>) -> PyResult<RecordBatch> {
    let wrong = |what: String| PyValueError::new_err(format!("not an Arrow record batch: {what}"));
    let export = object.getattr("__arrow_c_array__").map_err(|_| {
        let kind = object.get_type();
        PyTypeError::new_err(format!("a record batch with __arrow_c_array__ is needed: {kind}"))
    })?;
    let (schema, array): (Bound<'_, PyCapsule>, Bound<'_, PyCapsule>) =
        export.call0()?.extract()?;
    let schema = schema.pointer_checked(Some(c"arrow_schema"))?.cast::<FFI_ArrowSchema>();
    let array = array.pointer_checked(Some(c"arrow_array"))?.cast::<FFI_ArrowArray>();
    // SAFETY: the capsule's name says that it points at an ArrowArray; from_raw moves it out and
    // leaves a released one, as the interface asks of a consumer.
    let array = unsafe { FFI_ArrowArray::from_raw(array.as_ptr()) };
    // SAFETY: the capsule's name says that it points at an ArrowSchema, and the capsule lives until
    // the end of this function, where it releases the schema.
    let schema = unsafe { schema.as_ref() };
    // SAFETY: array and schema were exported together, so they describe each other.
    let data = unsafe { from_ffi(array, schema) }.map_err(|error| wrong(error.to_string()))?;
    if !matches!(data.data_type(), arrow::datatypes::DataType::Struct(_)) {
        return Err(wrong(data.data_type().to_string()));
    }
    let rows = StructArray::from(data);
    // A record batch has no validity of its rows, so these nulls would be lost without a word.
    if rows.null_count() > 0 {
        return Err(wrong(format!("{} rows are null as a whole", rows.null_count())));
    }
    Ok(RecordBatch::from(rows))
}

/// Bytes of a batch.
#[derive(Clone, Copy)]
struct ByteRange {
    /// Address of the first byte, taken while the batch was ours alone.
    address: usize,
    length: usize,
}

impl ByteRange {
    fn borrowed_byte_range(bytes: &mut [u8]) -> Self {
        // An address and no reference: Python writes to the memory while Rust still owns it.
        Self { address: bytes.as_mut_ptr().expose_provenance(), length: bytes.len() }
    }

    /// Returns `length` bytes from byte `start` on.
    ///
    /// # Errors
    /// `BufferError` for bytes outside of the span.
    fn subrange(self, start: usize, length: usize) -> PyResult<Self> {
        // A view outside of the batch would let Python read any memory of the process.
        let inside = start.checked_add(length).is_some_and(|end| end <= self.length);
        let address = inside.then(|| self.address + start);
        let address =
            address.ok_or_else(|| PyBufferError::new_err("bytes outside of the batch"))?;
        Ok(Self { address, length })
    }
}

/// A batch whose bytes Python may read and write.
struct SharedBatch {
    batch: reader::Batch,
    /// Columns of one width, and weights.
    whole: ByteRange,
    /// The ends of values and the values, for columns of any length.
    texts: Vec<Option<[ByteRange; 2]>>,
}

impl SharedBatch {
    /// Gives the bytes away: from now on only Python touches them.
    fn new(mut batch: reader::Batch) -> Self {
        let whole = ByteRange::borrowed_byte_range(batch.buffer_mut());
        let columns = 0..batch.fields().len();
        let texts = columns.map(|index| {
            batch
                .offsets_and_values_to_share(index)
                .map(|(ends, values)| [ends, values].map(ByteRange::borrowed_byte_range))
        });
        let texts = texts.collect();
        Self { batch, whole, texts }
    }

    /// Returns the batch in Rust.
    fn reader_batch(&self) -> &reader::Batch {
        &self.batch
    }
}

/// Fills `view` with `span`, which `owner` keeps alive.
///
/// # Errors
/// `BufferError` for more bytes than Python counts.
///
/// # Safety
/// `view` is the one that Python passed to `__getbuffer__`, and `owner` holds the memory of `span`,
/// which nothing in Rust reads or writes any more.
unsafe fn fill_buffer_view(
    owner: &Bound<'_, PyAny>,
    span: ByteRange,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    let bytes = ffi::Py_ssize_t::try_from(span.length);
    let bytes = bytes.map_err(|_| PyBufferError::new_err("more bytes than a buffer can have"))?;
    let address: *mut c_void = std::ptr::with_exposed_provenance_mut(span.address);
    // SAFETY: the address is valid for `bytes` bytes as long as `owner` lives, and the view holds a
    // reference to it; only Python reads and writes them.
    let status = unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), address, bytes, 0, flags) };
    if status == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}

/// Rows of all columns: one buffer, or one for each column.
#[pyclass(frozen, module = "farandole._native.reader")]
pub(crate) struct Batch(Arc<SharedBatch>);

impl Batch {
    /// Gives a batch away to Python.
    pub(crate) fn new(batch: reader::Batch) -> Self {
        Self(Arc::new(SharedBatch::new(batch)))
    }

    fn column_index(&self, name: &str) -> PyResult<usize> {
        let found = self.0.reader_batch().fields().iter().position(|field| field.name == name);
        found.ok_or_else(|| PyKeyError::new_err(name.to_owned()))
    }
}

#[pymethods]
impl Batch {
    #[getter]
    fn rows(&self) -> usize {
        self.0.reader_batch().row_count()
    }

    #[getter]
    fn valid_rows(&self) -> usize {
        self.0.reader_batch().valid_rows()
    }

    #[getter]
    fn names(&self) -> Vec<String> {
        self.0.reader_batch().fields().iter().map(|field| field.name.clone()).collect()
    }

    #[getter]
    fn column_offsets(&self) -> Vec<usize> {
        let batch = self.0.reader_batch();
        (0..batch.fields().len())
            .filter_map(|index| batch.column_extent(index))
            .map(|held| held.start)
            .collect()
    }

    fn row_weights(&self) -> BatchColumn {
        // The reader stores the weights behind the last column.
        BatchColumn { shared: Arc::clone(&self.0), index: self.0.reader_batch().fields().len() }
    }

    fn column(&self, name: &str) -> PyResult<BatchColumn> {
        Ok(BatchColumn { shared: Arc::clone(&self.0), index: self.column_index(name)? })
    }

    fn text_buffers<'py>(
        &self,
        py: Python<'py>,
        name: &str,
    ) -> PyResult<(Bound<'py, PyMemoryView>, Bound<'py, PyMemoryView>)> {
        let index = self.column_index(name)?;
        let spans = self.0.texts.get(index).copied().flatten();
        let [ends, values] = spans.ok_or_else(|| PyKeyError::new_err(name.to_owned()))?;
        let view = |span| {
            let owner = Bound::new(py, ColumnTextBuffer { span, _shared: Arc::clone(&self.0) })?;
            PyMemoryView::from(owner.as_any())
        };
        Ok((view(ends)?, view(values)?))
    }

    fn padded_length(&self, name: &str) -> PyResult<Option<usize>> {
        Ok(self.0.reader_batch().padded_length(self.column_index(name)?))
    }

    /// # Safety
    /// Python calls it with a view to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let shared = Arc::clone(&slf.get().0);
        // SAFETY: the view is Python's own, and `slf` holds the batch.
        unsafe { fill_buffer_view(slf.as_any(), shared.whole, view, flags) }
    }
}

/// One column of a batch; the one after the last are the weights.
#[pyclass(frozen, module = "farandole._native.reader")]
pub(crate) struct BatchColumn {
    shared: Arc<SharedBatch>,
    index: usize,
}

#[pymethods]
impl BatchColumn {
    #[getter]
    fn dtype(&self) -> &'static str {
        self.shared
            .reader_batch()
            .column_extent(self.index)
            .map_or("", |held| held.element.numpy_name())
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let batch = self.shared.reader_batch();
        let row =
            batch.fields().get(self.index).map(|field| field.shape.clone()).unwrap_or_default();
        PyTuple::new(py, std::iter::once(batch.row_count() as u64).chain(row).collect::<Vec<_>>())
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.shared.reader_batch().column_extent(self.index).map_or(0, |held| held.bytes)
    }

    /// # Safety
    /// Python calls it with a view to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let (shared, index) = (Arc::clone(&slf.get().shared), slf.get().index);
        let (start, bytes) = shared
            .reader_batch()
            .column_extent(index)
            .map_or((0, 0), |held| (held.start, held.bytes));
        let span = shared.whole.subrange(start, bytes)?;
        // SAFETY: the view is Python's own, and `slf` holds the batch.
        unsafe { fill_buffer_view(slf.as_any(), span, view, flags) }
    }
}

/// Values of a column of any length, or where they end: the owner of a memory view.
#[pyclass(frozen)]
struct ColumnTextBuffer {
    span: ByteRange,
    _shared: Arc<SharedBatch>,
}

#[pymethods]
impl ColumnTextBuffer {
    /// # Safety
    /// Python calls it with a view to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let span = slf.get().span;
        // SAFETY: the view is Python's own, and `slf` holds the batch.
        unsafe { fill_buffer_view(slf.as_any(), span, view, flags) }
    }
}

/// Decoded images, one after the other.
#[pyclass(frozen, module = "farandole._native.images")]
pub(crate) struct DecodedPixels {
    span: ByteRange,
    _memory: Box<dyn Any + Send + Sync>,
}

impl DecodedPixels {
    /// Gives bytes away to Python.
    pub(crate) fn from_bytes(mut values: Vec<u8>) -> Self {
        Self { span: ByteRange::borrowed_byte_range(&mut values), _memory: Box::new(values) }
    }

    /// Gives floats away to Python.
    pub(crate) fn from_floats(mut values: Vec<f32>) -> Self {
        let (address, length) =
            (values.as_mut_ptr().expose_provenance(), size_of_val(values.as_slice()));
        Self { span: ByteRange { address, length }, _memory: Box::new(values) }
    }
}

#[pymethods]
impl DecodedPixels {
    /// # Safety
    /// Python calls it with a view to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let span = slf.get().span;
        // SAFETY: the view is Python's own, and `slf` holds the memory.
        unsafe { fill_buffer_view(slf.as_any(), span, view, flags) }
    }
}
