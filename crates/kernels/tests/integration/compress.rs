// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Compressors: what comes out of a payload, and what error feedback makes of it.
#![expect(clippy::unwrap_used, reason = "tests")]

use farandole_kernels::{
    Error,
    compress::{
        Bf16Compressor, Compressor, Fp16Compressor, Int8Compressor, TopKCompressor,
        encode_with_residual,
    },
};

/// Numbers of very different sizes, the same every time.
fn numbers(count: usize) -> Vec<f32> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let unit = f32::from(u16::try_from(state >> 48).unwrap()) / 32768.0 - 1.0;
            unit * f32::powi(10.0, i32::from(u8::try_from(state & 3).unwrap()) - 2)
        })
        .collect()
}

fn payload_of(compressor: &dyn Compressor, values: &[f32]) -> Vec<u8> {
    let mut payload = vec![0xAA; compressor.payload_bytes(values.len())];
    compressor.encode(values, &mut payload).unwrap();
    payload
}

fn decoded(compressor: &dyn Compressor, values: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    compressor.accumulate(&payload_of(compressor, values), &mut out).unwrap();
    out
}

#[test]
fn a_payload_is_within_its_precision() {
    let precisions: [(&dyn Compressor, f32, f32); 4] = [
        (&Fp16Compressor, 1.0 / 2048.0, 1e-7),
        (&Bf16Compressor, 1.0 / 256.0, 0.0),
        (&Int8Compressor::new(64), 0.0, 10.0 / 254.0),
        (&TopKCompressor::new(1.0), 0.0, 0.0),
    ];
    for (compressor, relative, absolute) in precisions {
        for count in [0, 1, 63, 64, 65, 512, 1000, 5000] {
            let values = numbers(count);
            for (value, out) in values.iter().zip(decoded(compressor, &values)) {
                assert!(
                    (value - out).abs() <= relative * value.abs() + absolute,
                    "{value} came out as {out}"
                );
            }
        }
    }
}

#[test]
fn blocks_of_small_numbers_keep_their_precision_beside_large_ones() {
    let mut values = vec![1e-6_f32; 128];
    values[..64].fill(1e6);
    let out = decoded(&Int8Compressor::new(64), &values);
    assert_eq!(out[0], 1e6);
    assert!((out[100] - 1e-6).abs() < 1e-12);
    // One block for all loses the small ones.
    assert_eq!(decoded(&Int8Compressor::new(128), &values)[100], 0.0);
}

#[test]
fn sums_of_codes_never_overflow() {
    let values = vec![1.0_f32; 300];
    let payload = payload_of(&Int8Compressor::new(256), &values);
    let mut sum = vec![0.0; 300];
    for _ in 0..1000 {
        Int8Compressor::new(256).accumulate(&payload, &mut sum).unwrap();
    }
    assert!(sum.iter().all(|sum| (sum - 1000.0).abs() < 0.1));
}

#[test]
fn nan_is_noticed() {
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let mut values = numbers(100);
        values[70] = bad;
        assert!(!decoded(&Fp16Compressor, &values)[70].is_finite());
        assert!(!decoded(&Int8Compressor::new(64), &values)[70].is_finite());
        assert!(
            decoded(&Int8Compressor::new(64), &values)[..64].iter().all(|value| value.is_finite())
        );
        assert!(!decoded(&TopKCompressor::new(0.01), &values)[70].is_finite());
        // The residual forgets it.
        for compressor in [
            &Int8Compressor::new(64) as &dyn Compressor,
            &Fp16Compressor,
            &TopKCompressor::new(0.01),
        ] {
            let mut residual = vec![0.0; 100];
            let mut payload = vec![0; compressor.payload_bytes(100)];
            encode_with_residual(compressor, &values, &mut residual, &mut payload).unwrap();
            assert!(residual.iter().all(|left| left.is_finite()));
        }
    }
}

#[test]
fn the_smallest_numbers_there_are_come_out_as_zeros_or_themselves() {
    let values = [f32::MIN_POSITIVE / 4.0, -f32::MIN_POSITIVE, 0.0, -0.0];
    assert!(
        decoded(&Int8Compressor::new(4), &values)
            .iter()
            .all(|value| value.abs() <= f32::MIN_POSITIVE)
    );
}

#[test]
fn the_largest_numbers_are_chosen_and_ties_go_to_the_first() {
    let values = [1.0, -5.0, 2.0, 5.0, -2.0, 2.0, 0.0, 0.0];
    assert_eq!(
        decoded(&TopKCompressor::new(0.5), &values),
        [0.0, -5.0, 2.0, 5.0, -2.0, 0.0, 0.0, 0.0]
    );
    assert_eq!(TopKCompressor::new(0.001).sent_value_count(100), 1);
    assert_eq!(TopKCompressor::new(0.0).sent_value_count(0), 0);
    assert_eq!(TopKCompressor::new(f64::NAN).sent_value_count(5), 1);
}

#[test]
fn with_error_feedback_the_sum_over_steps_is_right() {
    for compressor in
        [&Bf16Compressor as &dyn Compressor, &Int8Compressor::new(64), &TopKCompressor::new(0.1)]
    {
        let values = numbers(200);
        let (mut residual, mut sum) = (vec![0.0; 200], vec![0.0; 200]);
        let mut payload = vec![0; compressor.payload_bytes(200)];
        let steps = 400_u16;
        for _ in 0..steps {
            encode_with_residual(compressor, &values, &mut residual, &mut payload).unwrap();
            compressor.accumulate(&payload, &mut sum).unwrap();
        }
        for ((value, sum), left) in values.iter().zip(&sum).zip(&residual) {
            let whole = value * f32::from(steps);
            assert!(
                (sum + left - whole).abs() <= whole.abs() * 1e-3 + 1e-3,
                "{sum} and {left} make {whole}"
            );
            // One step loses some; the residual does not grow with the number of steps.
            assert!(left.abs() <= 400.0, "residual {left}");
        }
    }
}

#[test]
fn payloads_that_do_not_fit_are_refused() {
    let mut sum = vec![0.0; 10];
    for compressor in [
        &Fp16Compressor as &dyn Compressor,
        &Bf16Compressor,
        &Int8Compressor::new(4),
        &TopKCompressor::new(0.5),
    ] {
        let size = compressor.payload_bytes(10);
        for wrong in [0, size - 1, size + 1] {
            let payload = vec![0; wrong];
            assert!(matches!(compressor.accumulate(&payload, &mut sum), Err(Error::Shape { .. })));
            assert!(matches!(
                compressor.encode(&[0.0; 10], &mut vec![0; wrong]),
                Err(Error::Shape { .. })
            ));
        }
    }
    let beyond = [10_u32.to_ne_bytes(), 1.0_f32.to_ne_bytes()].concat();
    assert!(matches!(
        TopKCompressor::new(0.1).accumulate(&beyond, &mut sum),
        Err(Error::Shape { .. })
    ));
    let mut residual = vec![0.0; 9];
    assert!(
        encode_with_residual(&Fp16Compressor, &[0.0; 10], &mut residual, &mut [0; 20]).is_err()
    );
}
