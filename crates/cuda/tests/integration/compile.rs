// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The kernels compile for every architecture that is promised, with the compiler that users have.
//! No GPU is needed.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::HashSet;

use crate::wheels;
use farandole_cuda::{
    CudaLibrary, Error, KERNEL_SOURCE, KernelCache, NvrtcCompiler, pack_kernel_name,
    reduction_kernel_name,
};
use farandole_kernels::DataType;

const ARCHITECTURES: [u32; 5] = [75, 80, 90, 100, 120];

fn compiler() -> Option<NvrtcCompiler> {
    wheels::there(CudaLibrary::Nvrtc)?;
    Some(NvrtcCompiler::load_from(&wheels::search_path()).unwrap())
}

/// The names that stand in the tables of machine code.
fn names(code: &[u8]) -> HashSet<&[u8]> {
    code.split(|byte| *byte == 0).filter(|name| (4..64).contains(&name.len())).collect()
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let Some(compiler) = compiler() else { return };
    let known = compiler.supported_architectures();
    let (compiler, known) = (&compiler, &known);
    std::thread::scope(|scope| {
        for arch in ARCHITECTURES {
            scope.spawn(move || compiles(compiler, known, arch));
        }
    });
}

fn compiles(compiler: &NvrtcCompiler, known: &[u32], arch: u32) {
    assert!(
        known.contains(&arch),
        "{:?} does not compile for sm_{arch}",
        compiler.compiler_version()
    );
    let code = compiler.compile_source(KERNEL_SOURCE, arch).unwrap();
    assert_eq!(&code[..4], b"\x7fELF");
    let names = names(&code);
    let has = |name: &str| names.contains(name.as_bytes());
    for dtype in DataType::ALL.into_iter().filter(|dtype| dtype.element_size() <= 8) {
        for side in ["pack", "unpack"] {
            let name = format!("{side}_{}", pack_kernel_name(dtype, dtype, 1.0).unwrap());
            assert!(has(&name), "sm_{arch} lacks {name}");
        }
    }
    for half in [DataType::F16, DataType::Bf16] {
        let name = format!("pack_{}", pack_kernel_name(DataType::F32, half, 0.5).unwrap());
        assert!(has(&name), "sm_{arch} lacks {name}");
    }
    let reduced = DataType::ALL.into_iter().filter_map(|dtype| reduction_kernel_name(dtype).ok());
    for name in reduced.chain(["adasum_total".to_owned(), "adasum_products_bf16".to_owned()]) {
        assert!(has(&name), "sm_{arch} lacks {name}");
    }
}

#[test]
fn a_mistake_is_reported_in_the_compilers_words() {
    let Some(compiler) = compiler() else { return };
    let error = compiler.compile_source("__global__ void broken() { nonsense; }", 90).unwrap_err();
    assert!(
        matches!(&error, Error::Compile { arch: 90, log } if log.contains("nonsense")),
        "{error}"
    );
    assert!(compiler.compile_source(KERNEL_SOURCE, 10).is_err());
}

#[test]
fn a_compiled_program_is_found_by_the_next_process() {
    let Some(compiler) = compiler() else { return };
    let folder = tempfile::tempdir().unwrap();
    let source = "extern \"C\" __global__ void nothing() {}";
    let first = KernelCache::new(folder.path()).get_or_compile(&compiler, source, 90).unwrap();
    let files: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()).collect();
    let before = std::fs::metadata(&files[0]).unwrap().modified().unwrap();
    assert_eq!(
        KernelCache::new(folder.path()).get_or_compile(&compiler, source, 90).unwrap(),
        first
    );
    assert_eq!(
        std::fs::metadata(&files[0]).unwrap().modified().unwrap(),
        before,
        "it was not written again"
    );
}
