// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The libraries that torch's wheels bring have what is called. No GPU is needed.

use crate::wheels;
use farandole_cuda::{CudaLibrary, DriverTable, NcclLibrary, NcclTable, collect_inventory};

#[test]
fn nccl_of_the_wheel_has_every_function_and_a_version() {
    let Some(library) = wheels::there(CudaLibrary::Nccl) else { return };
    // By its path, or by its name alone when the other test has loaded it already.
    assert!(library.opened_name().ends_with("libnccl.so.2"), "{}", library.opened_name());
    NcclTable::from_library(&library).unwrap();
    let nccl = NcclLibrary::load_from(&wheels::search_path()).unwrap();
    assert!(nccl.version_code() >= 21_800, "{}", nccl.version_text());
    assert_eq!(nccl.version_text().split('.').count(), 3);
    assert_eq!(
        nccl.supports_registration(),
        nccl.version_code() >= 21_900,
        "{}",
        nccl.version_text()
    );
}

#[test]
fn functions_of_the_driver_have_the_names_that_its_header_knows() {
    let packages = wheels::search_path().packages;
    let headers = packages.iter().map(|package| package.join("nvidia/cu13/include/cuda.h"));
    let Some(header) = headers.filter_map(|header| std::fs::read_to_string(header).ok()).next()
    else {
        eprintln!("skipped: no cuda.h is here; install nvidia-cuda-runtime into .venv");
        return;
    };
    let separate = |letter: char| !letter.is_ascii_alphanumeric() && letter != '_';
    let words: std::collections::HashSet<&str> = header.split(separate).collect();
    let unknown: Vec<_> =
        DriverTable::NEEDED_FUNCTIONS.iter().filter(|name| !words.contains(*name)).collect();
    assert_eq!(unknown, Vec::<&&str>::new());
}

#[test]
fn an_inventory_names_every_library_with_its_version_or_what_was_tried() {
    let findings = collect_inventory(&wheels::search_path());
    let names: Vec<&str> = findings.iter().map(|finding| finding.name.as_str()).take(4).collect();
    assert_eq!(names, ["libcuda", "libcudart", "libnvrtc", "libnccl"]);
    for (kind, finding) in CudaLibrary::ALL_LIBRARIES.into_iter().zip(&findings) {
        if wheels::there(kind).is_none() {
            assert!(!finding.works);
            assert!(finding.detail.contains("was not found"), "{finding:?}");
        } else if kind != CudaLibrary::Driver {
            assert!(finding.works && finding.detail.contains(kind.library_name()), "{finding:?}");
        }
    }
}
