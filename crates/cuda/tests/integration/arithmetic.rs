// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The kernels' own source, compiled for the host: the same indices, tails and roundings, compared
//! with what the engine does on hosts. Wrong alignment traps, as it would on a GPU; what is written
//! beside a tensor is seen.
#![expect(clippy::unwrap_used, reason = "tests")]
#![expect(unsafe_code, reason = "kernels are called by address")]

use std::ffi::{CString, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use farandole_cuda::{
    PackLaunchArguments, ReductionInputs, SharedLibrary, block_count_for, pack_kernel_name,
    plan_pack_launches, reduction_kernel_name,
};
use farandole_kernels::{DataType, ReduceOp};
use farandole_testkit::reduce_member_blocks;

/// The kernels as a library, built once for all tests.
static SHIM: LazyLock<SharedLibrary> = LazyLock::new(|| {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("kernels.so");
    let mut compiler = Command::new("g++");
    compiler
        .args(["-O1", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off"])
        .args(["-fsanitize=alignment,bounds,shift", "-fsanitize-undefined-trap-on-error", "-I"])
        .arg(here.join("kernels"))
        .arg("-o")
        .args([&library, &here.join("tests/integration/shim/kernels.cpp")]);
    assert!(compiler.status().unwrap().success(), "the kernels compile for the host");
    SharedLibrary::open_library(&library).unwrap()
});

fn address_of(name: &str) -> *const c_void {
    let text = CString::new(name).unwrap();
    // SAFETY: kernels are only called through the functions below, which take their address.
    unsafe { SHIM.find_function::<*const c_void>(&text) }.unwrap()
}

/// Memory that begins `skew` bytes after a multiple of 16, with bytes around it that must stay.
struct Tensor {
    bytes: Vec<u128>,
    skew: usize,
    len: usize,
}

const GUARD: u8 = 0xa5;

impl Tensor {
    fn new(skew: usize, content: &[u8]) -> Self {
        let words = (content.len() + skew).div_ceil(16) + 2;
        let mut tensor =
            Self { bytes: vec![u128::from_ne_bytes([GUARD; 16]); words], skew, len: content.len() };
        tensor.all()[16 + skew..16 + skew + content.len()].copy_from_slice(content);
        tensor
    }

    fn all(&mut self) -> &mut [u8] {
        // SAFETY: any bytes are words and the other way round.
        unsafe { self.bytes.align_to_mut::<u8>() }.1
    }

    fn address(&mut self) -> u64 {
        let (skew, all) = (self.skew, self.all());
        all[16 + skew..].as_mut_ptr().expose_provenance() as u64
    }

    /// Returns the bytes; the memory around them is unchanged.
    fn content(&mut self) -> Vec<u8> {
        let (start, end) = (16 + self.skew, 16 + self.skew + self.len);
        let all = self.all();
        assert!(
            all[..start].iter().chain(&all[end..]).all(|byte| *byte == GUARD),
            "written beside a tensor"
        );
        all[start..end].to_vec()
    }
}

/// Numbers that follow from a seed.
fn random(mut seed: u64) -> impl FnMut() -> u64 {
    move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        seed >> 24
    }
}

/// Elements of a type: small numbers, of both signs where there are, with fractions for floats.
fn elements(dtype: DataType, count: usize, seed: u64) -> Vec<u8> {
    let mut next = random(seed);
    (0..count)
        .flat_map(|_| {
            let number = i16::try_from(next() % 2001).unwrap() - 1000;
            let float = f32::from(number) / 64.0;
            match dtype {
                DataType::F32 => float.to_ne_bytes().to_vec(),
                DataType::F64 => f64::from(float).to_ne_bytes().to_vec(),
                DataType::F16 => half::f16::from_f32(float).to_ne_bytes().to_vec(),
                DataType::Bf16 => half::bf16::from_f32(float).to_ne_bytes().to_vec(),
                DataType::Bool => vec![u8::from(number % 3 == 0)],
                other => i64::from(number).wrapping_mul(0x0103_0507).to_ne_bytes()
                    [..other.element_size()]
                    .to_vec(),
            }
        })
        .collect()
}

type Move = unsafe extern "C" fn(*const c_void, *const PackLaunchArguments, u64, f64, u32);

fn run_move(name: &str, tensors: &[(u64, u64)], size: u64, base: u64, factor: f64) {
    // SAFETY: the type in `kernels.cpp`.
    let run: Move = unsafe { SHIM.find_function(c"run_move") }.unwrap();
    for batch in
        plan_pack_launches(tensors, size).unwrap().0.iter().filter(|batch| batch.block_count() > 0)
    {
        // SAFETY: the tensors and the buffer live across the call, and are as large as the plan
        // says.
        unsafe { run(address_of(name), batch, base, factor, batch.block_count()) }
    }
}

/// Lengths of tensors around what a thread, a block and a tile move; more than one launch has.
fn lengths() -> Vec<usize> {
    let edges = [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 255, 1023, 4095, 4096, 4097, 8192, 12_289];
    edges.into_iter().chain((0..160).map(|i| i % 37)).collect()
}

fn packs_and_unpacks(
    dtype: DataType,
    buffer: DataType,
    factor: f64,
    expected: impl Fn(&[u8]) -> Vec<u8>,
) {
    let name = pack_kernel_name(dtype, buffer, factor).unwrap();
    let contents: Vec<Vec<u8>> =
        lengths().into_iter().zip(1..).map(|(count, seed)| elements(dtype, count, seed)).collect();
    // Every third tensor lies where its own type may, but not at a multiple of 16.
    let skew = |index: usize| if index % 3 == 2 { dtype.element_size() } else { 0 };
    let mut tensors: Vec<Tensor> = contents
        .iter()
        .enumerate()
        .map(|(index, content)| Tensor::new(skew(index) % 16, content))
        .collect();
    let list = |tensors: &mut [Tensor]| -> Vec<(u64, u64)> {
        tensors
            .iter_mut()
            .map(|tensor| (tensor.address(), (tensor.len / dtype.element_size()) as u64))
            .collect()
    };
    let size = buffer.element_size() as u64;
    let all = list(&mut tensors);
    let (_, bytes) = plan_pack_launches(&all, size).unwrap();
    let mut packed = Tensor::new(0, &vec![GUARD; usize::try_from(bytes).unwrap()]);
    run_move(&format!("pack_{name}"), &all, size, packed.address(), factor);
    let whole = packed.content();
    let mut at = 0;
    for content in &contents {
        let own = expected(content);
        assert_eq!(whole[at..at + own.len()], own, "{dtype} to {buffer}, {} elements", own.len());
        let end = at + own.len();
        at = end.next_multiple_of(16);
        assert!(whole[end..at].iter().all(|byte| *byte == GUARD), "written between tensors");
    }
    assert_eq!(at, whole.len());
    for tensor in &mut tensors {
        tensor.content();
    }
    // Back into tensors of zeros: what was packed, in the tensors' own type again.
    let mut back: Vec<Tensor> = contents
        .iter()
        .enumerate()
        .map(|(index, content)| Tensor::new(skew(index) % 16, &vec![0; content.len()]))
        .collect();
    run_move(&format!("unpack_{name}"), &list(&mut back), size, packed.address(), 1.0);
    let mut again = Tensor::new(0, &vec![GUARD; whole.len()]);
    run_move(&format!("pack_{name}"), &list(&mut back), size, again.address(), 1.0);
    assert_eq!(again.content(), whole, "unpacked and packed again");
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes))
}

#[test]
fn tensors_of_any_length_and_place_are_packed_and_unpacked() {
    for dtype in
        [DataType::U8, DataType::I16, DataType::I32, DataType::C64, DataType::F32, DataType::F64]
    {
        packs_and_unpacks(dtype, dtype, 1.0, <[u8]>::to_vec);
    }
    packs_and_unpacks(DataType::F16, DataType::F16, 1.0, <[u8]>::to_vec);
    packs_and_unpacks(DataType::Bf16, DataType::Bf16, 1.0, <[u8]>::to_vec);
}

#[test]
fn tensors_are_multiplied_and_converted_on_the_way() {
    packs_and_unpacks(DataType::F32, DataType::F32, 0.3, |content| {
        floats(content).flat_map(|value| (value * 0.3_f32).to_ne_bytes()).collect()
    });
    packs_and_unpacks(DataType::F32, DataType::Bf16, 0.3, |content| {
        floats(content)
            .flat_map(|value| half::bf16::from_f32(value * 0.3_f32).to_ne_bytes())
            .collect()
    });
    packs_and_unpacks(DataType::F32, DataType::F16, 0.3, |content| {
        floats(content)
            .flat_map(|value| half::f16::from_f32(value * 0.3_f32).to_ne_bytes())
            .collect()
    });
}

#[test]
fn halves_round_to_nearest_even_and_keep_what_is_not_a_number() {
    let values: Vec<f32> = [
        0.0,
        -0.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN_POSITIVE,
        1.003_906_3,
    ]
    .into_iter()
    .chain((0..4000_u16).map(|i| f32::from_bits(0x3f80_0000 + u32::from(i) * 0x1001)))
    .collect();
    let content: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    let mut tensor = Tensor::new(0, &content);
    let list = [(tensor.address(), values.len() as u64)];
    let mut packed = Tensor::new(0, &vec![0; (values.len() * 2).next_multiple_of(16)]);
    run_move("pack_f32_bf16", &list, 2, packed.address(), 1.0);
    for (value, bytes) in values.iter().zip(packed.content().as_chunks().0) {
        let (got, expected) = (half::bf16::from_ne_bytes(*bytes), half::bf16::from_f32(*value));
        assert!(
            got == expected || (got.is_nan() && expected.is_nan()),
            "{value}: {got} is not {expected}"
        );
    }
}

type Reduce = unsafe extern "C" fn(*const c_void, *const ReductionInputs, u64, u64, u32);

fn reduced(
    dtype: DataType,
    op: ReduceOp,
    factors: (f64, f64),
    inputs: &mut [Tensor],
    skew: usize,
) -> Vec<u8> {
    // SAFETY: the type in `kernels.cpp`.
    let run: Reduce = unsafe { SHIM.find_function(c"run_reduce") }.unwrap();
    let bytes = inputs[0].len;
    let addresses: Vec<u64> = inputs.iter_mut().map(Tensor::address).collect();
    let arguments = ReductionInputs::new(&addresses, dtype, op, factors).unwrap();
    let mut out = Tensor::new(skew, &vec![0; bytes]);
    let count = (bytes / dtype.element_size()) as u64;
    let kernel = address_of(&reduction_kernel_name(dtype).unwrap());
    // SAFETY: all tensors live across the call and have as many elements.
    unsafe { run(kernel, &raw const arguments, out.address(), count, block_count_for(count)) }
    out.content()
}

#[test]
fn reductions_give_the_bits_of_the_hosts_kernels() {
    let types = DataType::ALL.into_iter().filter(|dtype| reduction_kernel_name(*dtype).is_ok());
    for dtype in types {
        for op in
            [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product]
        {
            for (count, members, skew) in
                [(1, 1, 0), (5, 3, 1), (4099, 2, 0), (777, 4, 1), (64, 7, 0)]
            {
                for factors in [(1.0, 1.0), (0.3, 2.5)] {
                    if dtype == DataType::Bool && (op == ReduceOp::Average || factors != (1.0, 1.0))
                    {
                        continue;
                    }
                    let contents: Vec<Vec<u8>> =
                        (0..members).map(|member| elements(dtype, count, member + 1)).collect();
                    let skew = skew * dtype.element_size() % 16;
                    let mut tensors: Vec<Tensor> =
                        contents.iter().map(|content| Tensor::new(skew, content)).collect();
                    let got = reduced(dtype, op, factors, &mut tensors, skew);
                    let inputs: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
                    let mut expected = vec![0; got.len()];
                    reduce_member_blocks(dtype, op, &inputs, &mut expected, factors.0, factors.1)
                        .unwrap();
                    let case =
                        format!("{op:?} of {members} x {count} {dtype}, factors {factors:?}");
                    assert!(same(dtype, &got, &expected), "{case}: {got:?} is not {expected:?}");
                }
            }
        }
    }
}

#[test]
fn all_pairs_of_eight_bits_give_the_bits_of_the_hosts_kernels() {
    let [a, b]: [Vec<u8>; 2] =
        [0, 8].map(|from| (0..=u16::MAX).map(|pair| (pair >> from).to_le_bytes()[0]).collect());
    for dtype in [DataType::F8E4M3, DataType::F8E5M2] {
        for factors in [(1.0, 1.0), (0.7, 1e-3), (900.0, 1.0), (-1e30, 1e30)] {
            let mut inputs = [Tensor::new(0, &a), Tensor::new(0, &b)];
            let got = reduced(dtype, ReduceOp::Sum, factors, &mut inputs, 0);
            let mut expected = vec![0; got.len()];
            reduce_member_blocks(
                dtype,
                ReduceOp::Sum,
                &[&a, &b],
                &mut expected,
                factors.0,
                factors.1,
            )
            .unwrap();
            assert!(same(dtype, &got, &expected), "{dtype} by {factors:?}");
        }
    }
}

/// Equal bits, or no numbers both.
fn same(dtype: DataType, a: &[u8], b: &[u8]) -> bool {
    let is_nan = |bytes: &[u8]| match dtype {
        DataType::F32 => f32::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::F16 => half::f16::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::Bf16 => half::bf16::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::F8E4M3 => bytes[0] & 0x7f == 0x7f,
        DataType::F8E5M2 => bytes[0] & 0x7f > 0x7c,
        _ => false,
    };
    let size = dtype.element_size();
    a.chunks(size).zip(b.chunks(size)).all(|(a, b)| a == b || (is_nan(a) && is_nan(b)))
}

#[test]
fn min_and_max_keep_what_is_not_a_number() {
    let bytes =
        |values: [f32; 4]| values.into_iter().flat_map(f32::to_ne_bytes).collect::<Vec<u8>>();
    let (a, b) = (bytes([1.0, f32::NAN, 2.0, -0.0]), bytes([f32::NAN, 1.0, 3.0, 0.0]));
    for op in [ReduceOp::Min, ReduceOp::Max] {
        let got = reduced(
            DataType::F32,
            op,
            (1.0, 1.0),
            &mut [Tensor::new(0, &a), Tensor::new(0, &b)],
            0,
        );
        let mut expected = vec![0; 16];
        reduce_member_blocks(DataType::F32, op, &[&a, &b], &mut expected, 1.0, 1.0).unwrap();
        assert!(same(DataType::F32, &got, &expected), "{op:?}: {got:?} {expected:?}");
    }
}

type Products = unsafe extern "C" fn(*const c_void, u64, u64, u64, *mut f64, u32);
type Total = unsafe extern "C" fn(*const c_void, *mut f64, u32);
type Combine = unsafe extern "C" fn(*const c_void, u64, u64, u64, u64, *const f64, u32);

fn adasum(name: &str, a: &mut Tensor, b: &mut Tensor, size: usize) -> ([f64; 3], Vec<u8>) {
    // SAFETY: the types in `kernels.cpp`.
    let (products, total, combine): (Products, Total, Combine) = unsafe {
        (
            SHIM.find_function(c"run_products").unwrap(),
            SHIM.find_function(c"run_total").unwrap(),
            SHIM.find_function(c"run_combine").unwrap(),
        )
    };
    let count = (a.len / size) as u64;
    let blocks = block_count_for(count);
    let mut sums = vec![f64::NAN; 3 * blocks as usize];
    let mut out = Tensor::new(a.skew, &vec![0; a.len]);
    // SAFETY: all tensors live across the calls and have as many elements; each block has three
    // sums.
    unsafe {
        let scratch = sums.as_mut_ptr();
        products(
            address_of(&format!("adasum_products_{name}")),
            a.address(),
            b.address(),
            count,
            scratch,
            blocks,
        );
        total(address_of("adasum_total"), scratch, blocks);
        let kernel = address_of(&format!("adasum_combine_{name}"));
        combine(kernel, a.address(), b.address(), out.address(), count, scratch, blocks);
    }
    ([sums[0], sums[1], sums[2]], out.content())
}

#[test]
fn adasum_is_what_its_formula_says() {
    // Fewer than a vector, tails, several blocks, and tensors that are not aligned.
    for (count, skew) in [(1, 0), (7, 0), (257, 4), (4096, 0), (9001, 0)] {
        let (a, b) = (elements(DataType::F32, count, 1), elements(DataType::F32, count, 2));
        let (mut first, mut second) = (Tensor::new(skew, &a), Tensor::new(skew, &b));
        let (sums, out) = adasum("f32", &mut first, &mut second, 4);
        let pairs: Vec<(f64, f64)> =
            floats(&a).zip(floats(&b)).map(|(a, b)| (f64::from(a), f64::from(b))).collect();
        let exact = [
            pairs.iter().map(|(a, b)| a * b).sum::<f64>(),
            pairs.iter().map(|(a, _)| a * a).sum::<f64>(),
            pairs.iter().map(|(_, b)| b * b).sum::<f64>(),
        ];
        for (got, exact) in sums.iter().zip(exact) {
            assert!(
                (got - exact).abs() <= 1e-9 * exact.abs().max(1.0),
                "{count}: {got} is not {exact}"
            );
        }
        let (mine, theirs) = (1.0 - sums[0] / (2.0 * sums[1]), 1.0 - sums[0] / (2.0 * sums[2]));
        for (got, (a, b)) in floats(&out).zip(&pairs) {
            let exact = mine * a + theirs * b;
            assert!(
                (f64::from(got) - exact).abs() <= 1e-6 * exact.abs().max(1e-3),
                "{got} is not {exact}"
            );
        }
    }
}

#[test]
fn adasum_of_halves_rounds_once_and_a_vector_of_zeros_changes_nothing() {
    let half = |values: &[f32]| -> Vec<u8> {
        values.iter().flat_map(|value| half::f16::from_f32(*value).to_ne_bytes()).collect()
    };
    let (a, zeros) = (half(&[1.5, -2.0, 0.25]), half(&[0.0; 3]));
    let (sums, out) = adasum("f16", &mut Tensor::new(0, &a), &mut Tensor::new(0, &zeros), 2);
    assert_eq!((sums, out), ([0.0, 6.3125, 0.0], a.clone()));
    let (_, out) = adasum("f16", &mut Tensor::new(0, &a), &mut Tensor::new(0, &a), 2);
    assert_eq!(out, a, "equal vectors are averaged");
}
