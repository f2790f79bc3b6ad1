// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A report about CUDA for users: which libraries were found where, their versions, and why some
//! were refused.
#![expect(unsafe_code, reason = "functions of libraries that are loaded at run time")]

use crate::driver::Driver;
use crate::{Kind, Library, Nccl, Nvrtc, Places, Result};

/// One library, or one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its name.
    pub name: String,
    /// Whether it can be used.
    pub works: bool,
    /// Version and file, or why not.
    pub detail: String,
}

/// Returns whether there is a driver, and the version of NCCL as it counts, such as 23007; 0 where
/// there is none, or no driver. The driver is not initialised, so that a process may still fork.
pub fn built(places: &Places) -> (bool, i32) {
    if places.load(Kind::Driver).is_err() {
        return (false, 0);
    }
    (true, Nccl::load(places).map_or(0, |nccl| nccl.code()))
}

/// Looks for every library, loads it, and asks for its version; devices are counted without using
/// one.
pub fn inventory(places: &Places) -> Vec<Finding> {
    let driver = Driver::load(places);
    let told = driver.as_ref().map_err(Clone::clone).and_then(|driver| {
        let version = driver.version()?;
        Ok(format!(
            "serves CUDA {}.{}, {} devices",
            version / 1000,
            version % 1000 / 10,
            driver.count()?
        ))
    });
    let mut all = vec![finding(Kind::Driver.name(), told)];
    all.push(finding(Kind::Runtime.name(), runtime(places)));
    let compiler = Nvrtc::load(places).map(|nvrtc| {
        let (major, minor) = nvrtc.version();
        let archs = nvrtc.architectures();
        let range = match (archs.first(), archs.last()) {
            (Some(first), Some(last)) => format!(", sm_{first} to sm_{last}"),
            _ => String::new(),
        };
        format!("{major}.{minor}{range}, {}", nvrtc.path())
    });
    all.push(finding(Kind::Nvrtc.name(), compiler));
    let nccl = Nccl::load(places).map(|nccl| {
        let with = if nccl.registers() { " with registration" } else { "" };
        format!("{}{with}, {}", nccl.version(), nccl.path())
    });
    all.push(finding(Kind::Nccl.name(), nccl));
    if let Ok(driver) = driver {
        all.extend((0..driver.count().unwrap_or_default()).map(|ordinal| gpu(&driver, ordinal)));
    }
    all
}

fn gpu(driver: &Driver, ordinal: u32) -> Finding {
    let told = driver
        .facts(ordinal)
        .map(|facts| format!("{}, sm_{}, {} GiB", facts.name, facts.arch, facts.bytes >> 30));
    finding(&format!("GPU {ordinal}"), told)
}

fn runtime(places: &Places) -> Result<String> {
    let library = places.load(Kind::Runtime)?;
    // SAFETY: the function's type in the runtime's header.
    let ask =
        unsafe { library.function::<unsafe extern "C" fn(*mut i32) -> i32>(Kind::Runtime.probe()) };
    let mut version = 0;
    // SAFETY: the place lives across the call.
    let told = ask.is_some_and(|ask| unsafe { ask(&raw mut version) } == 0);
    crate::library::complete(&library, if told { &[] } else { &["cudaRuntimeGetVersion"] })?;
    Ok(format!("{}.{}, {}", version / 1000, version % 1000 / 10, file(&library, Kind::Runtime)))
}

fn file(library: &Library, kind: Kind) -> String {
    library.file(kind.probe()).unwrap_or_else(|| library.name().to_owned())
}

fn finding(name: &str, told: Result<String>) -> Finding {
    let works = told.is_ok();
    let detail = told.unwrap_or_else(|error| error.to_string());
    Finding { name: name.to_owned(), works, detail }
}
