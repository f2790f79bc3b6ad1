// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use arrow::array::{
    BooleanArray, Date32Array, Date64Array, Decimal128Array, DurationNanosecondArray, Float16Array,
    Float32Array, Float64Array, Int8Array, Int32Array, Int64Array, ListArray, StringArray,
    Time32MillisecondArray, TimestampMicrosecondArray, TimestampMillisecondArray,
    TimestampSecondArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{ArrowPrimitiveType, Field, Fields};

use super::*;

const ORIGIN: ConversionContext<'_> =
    ConversionContext { column: "c", partition: 4, row: 100, fill: None, allow_nan: false };

fn run(array: ArrayRef, shape: Option<&[u64]>) -> Result<ConvertedColumn> {
    convert_column(ORIGIN, &array, shape)
}

fn list(values: ArrayRef, lengths: &[usize]) -> ArrayRef {
    let field = Arc::new(Field::new("item", values.data_type().clone(), true));
    Arc::new(ListArray::new(
        field,
        OffsetBuffer::from_lengths(lengths.iter().copied()),
        values,
        None,
    ))
}

fn floats(converted: &ConvertedColumn) -> Vec<Vec<f64>> {
    let rows = converted.array.as_fixed_size_binary();
    rows.iter()
        .map(|row| {
            row.unwrap()
                .chunks_exact(8)
                .map(|chunk| f64::from_le_bytes(chunk.try_into().unwrap()))
                .collect()
        })
        .collect()
}

/// A Spark vector: type, size, indices, values.
type Vector<'a> = (i8, Option<i32>, &'a [i32], &'a [f64]);

fn spark(rows: &[Vector<'_>]) -> ArrayRef {
    let indices: Vec<i32> = rows.iter().flat_map(|row| row.2.to_vec()).collect();
    let values: Vec<f64> = rows.iter().flat_map(|row| row.3.to_vec()).collect();
    let (index_lengths, value_lengths): (Vec<_>, Vec<_>) =
        rows.iter().map(|row| (row.2.len(), row.3.len())).unzip();
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int8Array::from_iter_values(rows.iter().map(|row| row.0))),
        Arc::new(Int32Array::from_iter(rows.iter().map(|row| row.1))),
        list(Arc::new(Int32Array::from(indices)), &index_lengths),
        list(Arc::new(Float64Array::from(values)), &value_lengths),
    ];
    let fields: Fields = VECTOR_FIELDS
        .iter()
        .zip(&columns)
        .map(|(name, column)| Field::new(*name, column.data_type().clone(), true))
        .collect();
    Arc::new(StructArray::new(fields, columns, None))
}

#[test]
fn scalars_keep_their_type_and_times_become_integers() {
    let kept = run(Arc::new(Float32Array::from(vec![1.5, 2.5])), None).unwrap();
    assert_eq!((kept.element, kept.shape.len()), (ElementType::Float32, 0));
    let decimal = Decimal128Array::from(vec![150, -25]).with_precision_and_scale(10, 2).unwrap();
    let decimal = run(Arc::new(decimal), None).unwrap();
    assert_eq!(decimal.array.as_primitive::<Float64Type>().values().to_vec(), [1.5, -0.25]);
    let times: [(ArrayRef, i64); 6] = [
        (Arc::new(Date32Array::from(vec![7])), 7),
        (Arc::new(Date64Array::from(vec![-1])), -1),
        (Arc::new(Time32MillisecondArray::from(vec![7])), 7000),
        (Arc::new(TimestampMicrosecondArray::from(vec![7])), 7),
        (Arc::new(TimestampSecondArray::from(vec![-7])), -7_000_000),
        (Arc::new(DurationNanosecondArray::from(vec![-1])), -1),
    ];
    for (array, expected) in times {
        let found = run(array, None).unwrap().array;
        assert_eq!(found.as_ref(), &Int64Array::from(vec![expected]) as &dyn Array);
    }
    let never: ArrayRef =
        Arc::new(TimestampMillisecondArray::from(vec![Some(0), None, Some(i64::MAX)]));
    let error =
        convert_column(ConversionContext { fill: Some(("0", true)), ..ORIGIN }, &never, None);
    assert_eq!(
        error.unwrap_err().to_string(),
        "column c, row 102 of partition 4: 9223372036854775807 milliseconds are more microseconds \
         than an int64 can hold"
    );
    assert_eq!(
        run(Arc::new(StringArray::from(vec!["x"])), None).unwrap().element,
        ElementType::Utf8
    );
}

#[test]
fn fills_are_numbers_of_batches_not_of_the_source() {
    let filled = |array: ArrayRef, text| {
        convert_column(ConversionContext { fill: Some((text, true)), ..ORIGIN }, &array, None)
    };
    let whole = Decimal128Array::from(vec![Some(2), None]).with_precision_and_scale(5, 0).unwrap();
    let whole = filled(Arc::new(whole), "1.5").unwrap().array;
    assert_eq!(whole.as_primitive::<Float64Type>().values().to_vec(), [2.0, 1.5]);
    let half = Float16Array::from(vec![None, Some(half_of(1.0))]);
    let half = filled(Arc::new(half), "0.1").unwrap().array;
    assert_eq!(half.as_primitive::<Float32Type>().values().to_vec(), [0.1, 1.0]);
    let times: ArrayRef = Arc::new(TimestampMillisecondArray::from(vec![Some(1), None]));
    for (text, expected) in [("5", 5), ("1970-01-01T00:00:01", 1_000_000)] {
        let times = filled(Arc::clone(&times), text).unwrap().array;
        assert_eq!(times.as_ref(), &Int64Array::from(vec![1000, expected]) as &dyn Array);
    }
    assert!(matches!(filled(times, "never"), Err(Error::Fill { .. })));
}

fn half_of(value: f32) -> <arrow::datatypes::Float16Type as ArrowPrimitiveType>::Native {
    <arrow::datatypes::Float16Type as ArrowPrimitiveType>::Native::from_f32(value)
}

#[test]
fn lists_of_one_length_become_rows_of_bytes() {
    let values: ArrayRef = Arc::new(Float64Array::from(vec![9.0, 1.0, 2.0, 3.0, 4.0]));
    let column = list(values, &[1, 2, 2]).slice(1, 2);
    let converted = run(column, None).unwrap();
    assert_eq!((converted.element, converted.shape.as_slice()), (ElementType::Float64, &[2][..]));
    assert_eq!(floats(&converted), [[1.0, 2.0], [3.0, 4.0]]);
}

#[test]
fn nested_lists_have_nested_shapes_and_booleans_take_a_byte() {
    let values: ArrayRef =
        Arc::new(BooleanArray::from(vec![true, false, true, true, false, false]));
    let converted = run(list(list(values, &[3, 3]), &[2]), None).unwrap();
    assert_eq!((converted.element, converted.shape.as_slice()), (ElementType::Bool, &[2, 3][..]));
    assert_eq!(converted.array.as_fixed_size_binary().value(0), [1, 0, 1, 1, 0, 0]);
}

#[test]
fn ragged_lists_name_the_column_and_both_lengths() {
    let values: ArrayRef = Arc::new(Int32Array::from(vec![1; 5]));
    let error = run(list(values.clone(), &[2, 3]), None).unwrap_err().to_string();
    assert_eq!(
        error,
        "column c has rows of 2 and of 3 values; all must have one length (partition 4)"
    );
    let error = run(list(values, &[5]), Some(&[4])).unwrap_err().to_string();
    assert!(error.contains("rows of 4 and of 5 values"), "{error}");
}

#[test]
fn spark_vectors_come_dense_and_sparse() {
    let column = spark(&[
        (1, None, &[], &[1.0, 2.0, 3.0]),
        (0, Some(3), &[2, 0], &[5.0, 4.0]),
        (0, Some(3), &[], &[]),
    ]);
    let converted = run(column, None).unwrap();
    assert_eq!(converted.shape, [3]);
    assert_eq!(floats(&converted), [[1.0, 2.0, 3.0], [4.0, 0.0, 5.0], [0.0, 0.0, 0.0]]);
}

#[test]
fn broken_vectors_are_refused() {
    let ragged = spark(&[(1, None, &[], &[1.0]), (0, Some(3), &[], &[])]);
    assert!(run(ragged, None).unwrap_err().to_string().contains("rows of 1 and of 3"));
    let past = spark(&[(0, Some(3), &[3], &[1.0])]);
    let error = run(past, None).unwrap_err().to_string();
    assert_eq!(error, "column c has a broken sparse vector, an index past its size 3: 3");
}

#[test]
fn nulls_name_column_count_and_partition() {
    let error =
        run(Arc::new(Int64Array::from(vec![Some(1), None, None])), None).unwrap_err().to_string();
    let told = "column c has nulls in 2 of 3 rows, in partition 4, first at its row 101 (a fill \
                can take their place)";
    assert_eq!(error, told);
}

#[test]
fn nulls_and_nan_inside_arrays_are_counted_by_rows() {
    let inner: ArrayRef =
        Arc::new(Int64Array::from(vec![Some(1), Some(2), Some(3), None, None, None]));
    let error = run(list(inner, &[2, 2, 2]), None).unwrap_err().to_string();
    assert!(error.starts_with(
        "column c has nulls inside arrays in 2 of 3 rows, in partition 4, first at its row 101"
    ));
    let inner: ArrayRef = Arc::new(Float32Array::from(vec![1.0, f32::NAN, f32::NAN, 1.0]));
    let error = run(list(list(inner, &[1, 1, 1, 1]), &[2, 2]), None).unwrap_err().to_string();
    assert!(
        error.starts_with("column c has NaN in 2 of 2 rows, in partition 4, first at its row 100"),
        "{error}"
    );
    let error = run(spark(&[(1, None, &[], &[1.0, 2.0]), (1, None, &[], &[1.0, f64::NAN])]), None)
        .unwrap_err();
    assert!(error.to_string().contains("has NaN in 1 of 2 rows"), "{error}");
}

#[test]
fn a_fill_takes_the_place_of_nulls_and_nan() {
    let fill = |text, named| ConversionContext { fill: Some((text, named)), ..ORIGIN };
    let holes: ArrayRef = Arc::new(Float64Array::from(vec![Some(1.0), None, Some(f64::NAN)]));
    let filled = convert_column(fill("-1", false), &holes, None).unwrap();
    assert_eq!(filled.array.as_primitive::<Float64Type>().values().to_vec(), [1.0, -1.0, -1.0]);
    let kept = convert_column(fill("nan", false), &holes, None).unwrap();
    assert!(
        kept.array.as_primitive::<Float64Type>().values()[1..].iter().all(|value| value.is_nan())
    );
    let nan: ArrayRef = Arc::new(Float64Array::from(vec![1.0, f64::NAN]));
    assert!(convert_column(ConversionContext { allow_nan: true, ..ORIGIN }, &nan, None).is_ok());
    let inside: ArrayRef = Arc::new(Float64Array::from(vec![Some(1.0), None]));
    let inside = convert_column(fill("7", false), &list(inside, &[2]), None).unwrap();
    assert_eq!(floats(&inside), [[1.0, 7.0]]);
    let vector =
        convert_column(fill("7", true), &spark(&[(0, Some(2), &[1], &[f64::NAN])]), None).unwrap();
    assert_eq!(floats(&vector), [[0.0, 7.0]]);
    let flags: ArrayRef = Arc::new(BooleanArray::from(vec![Some(true), None]));
    let flags = convert_column(fill("0", false), &flags, None).unwrap();
    assert_eq!(flags.array.as_boolean(), &BooleanArray::from(vec![true, false]));
}

#[test]
fn infinities_are_counted_by_rows_and_no_fill_takes_their_place() {
    let scalars: ArrayRef =
        Arc::new(Float32Array::from(vec![1.0, f32::NEG_INFINITY, f32::NAN, f32::INFINITY]));
    let told = "column c has infinite values in 2 of 4 rows, in partition 4, first at its row 101 \
                (allow_nan takes them as they are)";
    for fill in [None, Some(("0", false))] {
        let error = convert_column(ConversionContext { fill, ..ORIGIN }, &scalars, None)
            .unwrap_err()
            .to_string();
        assert_eq!(error, told);
    }
    let inside: ArrayRef =
        Arc::new(Float64Array::from(vec![1.0, 2.0, f64::INFINITY, f64::INFINITY]));
    let error = run(list(inside, &[2, 2]), None).unwrap_err().to_string();
    assert!(
        error.contains("infinite values in 1 of 2 rows, in partition 4, first at its row 101"),
        "{error}"
    );
    let vectors = spark(&[(0, Some(2), &[1], &[f64::INFINITY])]);
    assert!(matches!(run(Arc::clone(&vectors), None), Err(Error::Infinite { .. })));
    let taken = ConversionContext { allow_nan: true, fill: Some(("0", false)), ..ORIGIN };
    assert_eq!(floats(&convert_column(taken, &vectors, None).unwrap()), [[0.0, f64::INFINITY]]);
    let taken = convert_column(taken, &scalars, None).unwrap();
    let taken = taken.array.as_primitive::<arrow::datatypes::Float32Type>().values().to_vec();
    assert_eq!(taken, [1.0, f32::NEG_INFINITY, 0.0, f32::INFINITY]);
}

#[test]
fn a_fill_that_is_no_value_of_the_column_is_said_when_it_was_meant_for_it() {
    let fill = |named| ConversionContext { fill: Some(("x", named)), ..ORIGIN };
    let holes: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), None]));
    assert!(matches!(convert_column(fill(false), &holes, None), Err(Error::Missing { .. })));
    let error = convert_column(fill(true), &holes, None).unwrap_err().to_string();
    assert_eq!(error, "column c is Int64, which cannot hold the value of fill: x");
    let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None]));
    assert!(
        matches!(convert_column(fill(false), &texts, None), Err(Error::Missing { .. })),
        "texts are filled by name only"
    );
    let texts = convert_column(fill(true), &texts, None).unwrap();
    assert_eq!(texts.array.as_string::<i32>(), &StringArray::from(vec!["a", "x"]));
}

#[test]
fn types_that_cannot_be_trained_on_are_refused() {
    let texts = list(Arc::new(StringArray::from(vec!["a", "b"])), &[1, 1]);
    assert!(matches!(run(texts, None), Err(Error::Type { .. })));
    let empty = list(Arc::new(Int32Array::from(Vec::<i32>::new())), &[0, 0]);
    assert!(run(empty, None).unwrap_err().to_string().contains("rows of no values"));
}
