// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Adasum against its formula in `float64`, on any number of ranks, alone and fused.

use farandole_collectives::CollectiveOperation;
use farandole_kernels::{DataType, ReduceOp};
use farandole_testkit::{
    Harness, Links, Tensor, allreduce, complete, complete_all, elements, oracle, run_world,
};

/// Returns the permitted difference from the formula, as a fraction of the largest element.
fn tolerance(dtype: DataType) -> f64 {
    match dtype {
        DataType::F16 => 1e-3,
        DataType::Bf16 => 8e-3,
        DataType::F32 => 1e-6,
        _ => 1e-14,
    }
}

fn assert_close(dtype: DataType, got: &[u8], expected: &[f64], what: &str) {
    let got = oracle::floats(dtype, got);
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
    for (k, (got, expected)) in got.iter().zip(expected).enumerate() {
        let apart = (got - expected).abs();
        assert!(
            apart <= tolerance(dtype) * largest,
            "{what}: element {k} is {got} and not {expected}"
        );
    }
}

const COUNTS: [usize; 7] = [1, 2, 3, 0, 1000, 64, 40_001];

fn input(dtype: DataType, k: usize, rank: usize) -> Vec<u8> {
    elements(dtype, COUNTS[k], (rank * 100 + k) as u64)
}

fn expected(dtype: DataType, k: usize, size: usize) -> Vec<f64> {
    let inputs: Vec<Vec<f64>> =
        (0..size).map(|rank| oracle::floats(dtype, &input(dtype, k, rank))).collect();
    oracle::adasum(&inputs)
}

#[test]
fn any_number_of_ranks_computes_the_formula_for_each_tensor_alone_and_fused() {
    for size in [1, 2, 3, 4, 5, 6, 7, 8, 11] {
        for dtype in [DataType::F16, DataType::Bf16, DataType::F32, DataType::F64] {
            let results = Harness::new(size).ring(16 << 10).run(|rank, mut communicator| {
                let make = |k| Tensor::new(&input(dtype, k, rank.index()), k % 2 == 0);
                let fused: Vec<Tensor> = (0..COUNTS.len()).map(make).collect();
                let alone: Vec<Tensor> = (0..COUNTS.len()).map(make).collect();
                let each = alone.iter().map(std::slice::from_ref);
                let mut operations = vec![allreduce(dtype, ReduceOp::Adasum, &fused)];
                operations.extend(each.map(|tensor| allreduce(dtype, ReduceOp::Adasum, tensor)));
                complete_all(&mut communicator, operations).unwrap();
                let bytes =
                    |tensors: &[Tensor]| tensors.iter().map(Tensor::result).collect::<Vec<_>>();
                assert!(bytes(&fused) == bytes(&alone), "{dtype} of {size}");
                bytes(&fused)
            });
            assert!(results.iter().all(|result| *result == results[0]), "{dtype} of {size}");
            for (k, result) in results[0].iter().enumerate() {
                let what = format!("{dtype} of {size}, tensor {k}");
                assert_close(dtype, result, &expected(dtype, k, size), &what);
            }
        }
    }
}

#[test]
fn every_kind_of_link_gives_the_same_bits() {
    for size in [3, 4] {
        let run = |links| {
            Harness::new(size).over(links).ring(16 << 10).run(|rank, mut communicator| {
                let tensor = Tensor::new(&input(DataType::F32, 6, rank.index()), true);
                let operation =
                    allreduce(DataType::F32, ReduceOp::Adasum, std::slice::from_ref(&tensor));
                complete(&mut communicator, operation).unwrap();
                tensor.result()
            })
        };
        let expected = run(Links::Loopback);
        for links in [Links::SharedMemory, Links::Tcp, Links::TwoHosts] {
            assert!(run(links) == expected, "{links:?} of {size}");
        }
    }
}

#[test]
fn equal_vectors_are_averaged_and_orthogonal_ones_added_with_factors_applied() {
    run_world(4, |rank, mut communicator| {
        let bytes = |values: [f32; 4]| -> Vec<u8> {
            values.iter().flat_map(|value| value.to_ne_bytes()).collect()
        };
        let equal = Tensor::new(&bytes([1.0, 2.0, 3.0, 4.0]), true);
        let mut unit = [0.0; 4];
        unit[rank.index()] = 1.0;
        let orthogonal = Tensor::new(&bytes(unit), false);
        let operation = CollectiveOperation::Allreduce {
            dtype: DataType::F32,
            op: ReduceOp::Adasum,
            prescale: 2.0,
            postscale: 0.25,
            segments: vec![equal.segment(), orthogonal.segment()],
        };
        complete(&mut communicator, operation).unwrap();
        assert_eq!(equal.result(), bytes([0.5, 1.0, 1.5, 2.0]));
        assert_eq!(orthogonal.result(), bytes([0.5; 4]));
    });
}

#[test]
fn a_rank_with_zeros_changes_nothing() {
    run_world(3, |rank, mut communicator| {
        let own = elements(DataType::F32, 500, 7);
        let mut bytes = own.clone();
        if rank.0 != 1 {
            bytes.fill(0);
        }
        let tensor = Tensor::new(&bytes, true);
        let operation = allreduce(DataType::F32, ReduceOp::Adasum, std::slice::from_ref(&tensor));
        complete(&mut communicator, operation).unwrap();
        assert!(tensor.result() == own, "rank {rank}");
    });
}

#[test]
fn a_tensor_that_is_no_vector_of_floats_is_refused_by_name() {
    use farandole_collectives::{Communicator, OperationToken};
    run_world(2, |_, mut communicator| {
        for dtype in
            [DataType::I32, DataType::Bool, DataType::C64, DataType::F8E4M3, DataType::F8E5M2]
        {
            let refused = communicator
                .submit_operation(OperationToken(1), allreduce(dtype, ReduceOp::Adasum, &[]))
                .unwrap_err();
            assert_eq!(refused.to_string(), format!("Adasum is not defined for {dtype}"));
        }
    });
}
