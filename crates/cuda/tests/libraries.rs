// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The libraries that torch's wheels bring have what is called. No GPU is needed.

mod wheels;

use farandole_cuda::{DriverTable, Kind, Nccl, NcclTable, inventory};

#[test]
fn nccl_of_the_wheel_has_every_function_and_a_version() {
    let Some(library) = wheels::there(Kind::Nccl) else { return };
    // By its path, or by its name alone when the other test has loaded it already.
    assert!(library.name().ends_with("libnccl.so.2"), "{}", library.name());
    NcclTable::of(&library).unwrap();
    let nccl = Nccl::load(&wheels::places()).unwrap();
    assert!(nccl.code() >= 21_800, "{}", nccl.version());
    assert_eq!(nccl.version().split('.').count(), 3);
    assert_eq!(nccl.registers(), nccl.code() >= 21_900, "{}", nccl.version());
}

#[test]
fn functions_of_the_driver_have_the_names_that_its_header_knows() {
    let packages = wheels::places().packages;
    let headers = packages.iter().map(|package| package.join("nvidia/cu13/include/cuda.h"));
    let Some(header) = headers.filter_map(|header| std::fs::read_to_string(header).ok()).next()
    else {
        eprintln!("skipped: no cuda.h is here; install nvidia-cuda-runtime into .venv");
        return;
    };
    let separate = |letter: char| !letter.is_ascii_alphanumeric() && letter != '_';
    let words: std::collections::HashSet<&str> = header.split(separate).collect();
    let unknown: Vec<_> =
        DriverTable::NEEDED.iter().filter(|name| !words.contains(*name)).collect();
    assert_eq!(unknown, Vec::<&&str>::new());
}

#[test]
fn an_inventory_names_every_library_with_its_version_or_what_was_tried() {
    let findings = inventory(&wheels::places());
    let names: Vec<&str> = findings.iter().map(|finding| finding.name.as_str()).take(4).collect();
    assert_eq!(names, ["libcuda", "libcudart", "libnvrtc", "libnccl"]);
    for (kind, finding) in Kind::ALL.into_iter().zip(&findings) {
        if wheels::there(kind).is_none() {
            assert!(!finding.works);
            assert!(finding.detail.contains("was not found"), "{finding:?}");
        } else if kind != Kind::Driver {
            assert!(finding.works && finding.detail.contains(kind.name()), "{finding:?}");
        }
    }
}
