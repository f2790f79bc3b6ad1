// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole doctor`: reports the installed software, the features that work (by trials), the
//! problems, and how to fix them.

mod launcher;
mod page;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use farandole::config::{Config, PortRange, environment_variable};
use farandole::cuda::{CudaInventoryEntry, CudaLibrary, LibrarySearchPath, collect_inventory};
use farandole::launcher::allocation::LocalEnvironment;
use farandole::launcher::{StaticJob, StopLevel};
use farandole::registrar::{
    PROTOCOL_VERSION, Registrar, RegistrarOptions, TaskClient, local_host_facts,
};
use farandole::transport::{LinkKind, MemoryRendezvous, Mesh, MeshOptions};
use farandole::world::{Rank, TaskId, format_counted_noun};

use self::page::DoctorPage;
use crate::console::ConsoleSink;
use crate::embedding_interpreter::{EmbeddingInterpreter, PythonDistribution, PythonInstallation};

/// Longest time for one trial.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes in each ring of a trial link.
const TRIAL_LINK_BYTES: usize = 64 << 10;

/// Modules and the distributions that provide them.
type ModuleDistributions = BTreeMap<String, Vec<PythonDistribution>>;

/// A package that enables a feature: its module, its name, and the extra that installs it.
const FRAMEWORK_PACKAGES: &[(&str, &str, &str)] = &[
    ("torch", "PyTorch", "torch"),
    ("tensorflow", "TensorFlow", "tensorflow"),
    ("keras", "Keras", "tensorflow"),
    ("jax", "JAX", "jax"),
];
const SPARK_PACKAGES: &[(&str, &str, &str)] = &[
    ("pyspark", "PySpark", "spark"),
    ("pyarrow", "PyArrow", "spark"),
    ("pandas", "pandas", "spark"),
];

/// Prints the page; returns the exit status, 1 if there are problems.
pub(crate) fn run_doctor(surroundings: &dyn EmbeddingInterpreter) -> Result<i32> {
    let page = examine_host(&surroundings.installation(), &surroundings.module_distributions());
    let mut out = std::io::stdout().lock();
    write!(out, "{}", page.text).context("write to stdout")?;
    writeln!(out, "\nProblems")?;
    if page.problems.is_empty() {
        writeln!(out, "    none")?;
    }
    for problem in &page.problems {
        writeln!(out, "    - {problem}")?;
    }
    Ok(i32::from(!page.problems.is_empty()))
}

fn examine_host(python: &PythonInstallation, modules: &ModuleDistributions) -> DoctorPage {
    let mut page = DoctorPage::default();
    add_versions(&mut page, python);
    add_packages(&mut page, "Frameworks", FRAMEWORK_PACKAGES, modules);
    if !FRAMEWORK_PACKAGES.iter().any(|(module, ..)| modules.contains_key(*module)) {
        page.problems
            .push("no framework is installed: pip install \"farandole[torch]\"".to_owned());
    }
    add_packages(&mut page, "Spark", SPARK_PACKAGES, modules);
    check_java(&mut page, modules.contains_key("pyspark"));
    try_links(&mut page);
    check_devices(&mut page, python);
    launcher::add_launcher_section(&mut page, &LocalEnvironment);
    // An invalid configuration is already a problem, and every launched process would fail because
    // of it.
    if Config::from_env().is_ok() {
        try_launching(&mut page);
    }
    page
}

fn add_versions(page: &mut DoctorPage, python: &PythonInstallation) {
    page.text.push_str(&format!(
        "Farandole {} (protocol {PROTOCOL_VERSION})\n",
        env!("CARGO_PKG_VERSION")
    ));
    page.add_section("This host");
    page.add_line("python", &format!("{} at {}", python.version, python.executable));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    page.add_line("system", &format!("Linux {} on {}", kernel.trim(), std::env::consts::ARCH));
    let cores =
        thread::available_parallelism().map_or_else(|_| "?".to_owned(), |cores| cores.to_string());
    page.add_line("cores", &cores);
    page.add_line("host hash", &local_host_facts::host_facts().host_hash().0);
    let addresses: Vec<String> =
        local_host_facts::local_addresses().iter().map(ToString::to_string).collect();
    page.add_line("addresses", &addresses.join(", "));
    match Config::from_env() {
        Ok(_) => page.add_line("configuration", "the environment parses"),
        Err(error) => {
            page.add_line("configuration", &error.to_string());
            page.problems.push(format!("{error}: correct or unset the variable"));
        }
    }
}

fn add_packages(
    page: &mut DoctorPage,
    title: &str,
    wanted: &[(&str, &str, &str)],
    modules: &ModuleDistributions,
) {
    page.add_section(title);
    for (module, what, extra) in wanted {
        match modules.get(*module) {
            Some(providers) => {
                page.add_check(true, what, &distribution_version_text(module, providers))
            }
            None => page.add_check(false, what, &format!("pip install \"farandole[{extra}]\"")),
        }
    }
}

/// Returns the version, with the distribution's name if it differs from the module's.
fn distribution_version_text(module: &str, providers: &[PythonDistribution]) -> String {
    let one = |PythonDistribution { name, version }: &PythonDistribution| match name == module {
        true => version.clone(),
        false => format!("{version} ({name})"),
    };
    providers.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn check_java(page: &mut DoctorPage, needed: bool) {
    // Spark looks for Java in the same order.
    let program = environment_variable("JAVA_HOME")
        .map_or_else(|| "java".to_owned(), |home| format!("{home}/bin/java"));
    // `java -version` writes to stderr.
    let version = Command::new(&program)
        .arg("-version")
        .output()
        .ok()
        .filter(|output| output.status.success());
    match version {
        Some(output) => {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            // Before the version, the JVM lists variables from which it takes options.
            let description = text.lines().find(|line| line.contains(" version "));
            page.add_check(true, "Java", description.or(text.lines().next()).unwrap_or_default());
        }
        None => {
            page.add_check(false, "Java", &format!("{program} does not run"));
            if needed {
                page.problems.push(format!(
                    "{program} does not run, and Spark needs it: install a JDK 17 or newer, or set \
                     JAVA_HOME"
                ));
            }
        }
    }
}

fn try_links(page: &mut DoctorPage) {
    page.add_section("Links (tried between two ranks of this process)");
    page.run_and_record_trial(
        "shared memory",
        "Ranks of this host will use TCP. A container needs memfd_create and Unix sockets: look at \
         its seccomp profile.",
        || try_link(true, LinkKind::SharedMemory),
    );
    page.run_and_record_trial("TCP", "Look at firewall rules for the loopback interface.", || {
        try_link(false, LinkKind::Tcp)
    });
}

/// Links two ranks, sends a byte, and returns the kind of the link.
fn try_link(use_shared_memory: bool, expected: LinkKind) -> Result<String> {
    let rendezvous = MemoryRendezvous::default();
    let options = |rank| MeshOptions {
        use_shared_memory,
        setup_timeout: TRIAL_TIMEOUT,
        // Loopback only: a firewall of another interface must not fail this trial.
        bind: vec![std::net::IpAddr::from(std::net::Ipv4Addr::LOCALHOST).into()],
        // Any port: the range of the user may be taken by a job.
        ports: PortRange { first: 0, last: 0 },
        // Both ranks are in this process, so the key protects nothing.
        ..MeshOptions::new(Rank(rank), 2, local_host_facts::host_facts().host_hash(), [7; 32])
    };
    thread::scope(|scope| {
        let sender = scope.spawn(|| -> Result<()> {
            let mesh = Mesh::join(options(0), &rendezvous)?;
            let mut link =
                mesh.open_links(1, &[Rank(1)], TRIAL_LINK_BYTES)?.pop().context("no link")?;
            link.sender.window()?.first_mut().context("no room in the link")?.clone_from(&42);
            link.sender.commit(1)?;
            // The receiver answers when its end closes; by then it has read the byte.
            let deadline = Instant::now() + TRIAL_TIMEOUT;
            while link.receiver.window()?.is_empty() {
                link.sender.flush()?;
                if Instant::now() > deadline {
                    bail!("no answer within {TRIAL_TIMEOUT:?}");
                }
                thread::yield_now();
            }
            Ok(())
        });
        let receiver = scope.spawn(|| -> Result<LinkKind> {
            let mesh = Mesh::join(options(1), &rendezvous)?;
            let mut link =
                mesh.open_links(1, &[Rank(0)], TRIAL_LINK_BYTES)?.pop().context("no link")?;
            let deadline = Instant::now() + TRIAL_TIMEOUT;
            while link.receiver.window()?.first() != Some(&42) {
                if Instant::now() > deadline {
                    bail!("nothing arrived within {TRIAL_TIMEOUT:?}");
                }
                thread::yield_now();
            }
            link.sender.window()?.first_mut().context("no room in the link")?.clone_from(&43);
            link.sender.commit(1)?;
            // The answer must have left before the link is dropped.
            while !link.sender.flush()? {
                thread::yield_now();
            }
            Ok(link.kind)
        });
        let panicked = |_| anyhow::anyhow!("the trial broke off");
        let sent = sender.join().map_err(panicked)?;
        let kind = receiver.join().map_err(panicked)??;
        sent?;
        if kind != expected {
            bail!("two ranks of this host were linked by {kind:?}");
        }
        Ok("works".to_owned())
    })
}

fn check_devices(page: &mut DoctorPage, python: &PythonInstallation) {
    page.add_section("Devices");
    let driver = fs::read_to_string("/proc/driver/nvidia/version").ok();
    let count = fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, Iterator::count);
    match driver.as_deref().and_then(|text| text.lines().next()) {
        Some(version) => {
            let version = version.trim_start_matches("NVRM version:").trim();
            page.add_check(
                true,
                "NVIDIA driver",
                &format!("{}, {version}", format_counted_noun(count as u64, "device")),
            );
        }
        None => page.add_check(false, "NVIDIA driver", "none; tensors are reduced on the CPU"),
    }
    let named = Config::from_env().map(|config| config.cuda_libraries).unwrap_or_default();
    let mut places = LibrarySearchPath::from_knob(&named);
    places.packages.extend(python.folders.iter().cloned());
    // A missing library is no problem: without it, tensors on a GPU go through host memory.
    let findings = collect_inventory(&places);
    for CudaInventoryEntry { name, works, detail } in &findings {
        page.add_check(*works, name, detail);
    }
    let chosen = Config::from_env().map(|config| config.gpu_tensors).unwrap_or_default();
    let works = |name: &str| findings.iter().any(|finding| finding.name == name && finding.works);
    let (by_nccl, way) = describe_gpu_tensor_path(
        &chosen,
        works(CudaLibrary::Driver.library_name()),
        works(CudaLibrary::Nccl.library_name()),
    );
    page.add_check(by_nccl, "tensors on GPUs", way);
}

/// Returns whether NCCL reduces tensors on GPUs, and a description of their path.
fn describe_gpu_tensor_path(chosen: &str, driver: bool, nccl: bool) -> (bool, &'static str) {
    match chosen.to_lowercase().as_str() {
        _ if !driver => (false, "none: there is no driver"),
        "copied" => (false, "copied to host memory by torch: FARANDOLE_GPU_TENSORS=copied"),
        "staged" => (false, "through host memory: FARANDOLE_GPU_TENSORS=staged"),
        _ if !nccl => (
            false,
            "through host memory, and by CUDA IPC on a GPU that ranks share: there is no NCCL",
        ),
        _ => (
            true,
            "by NCCL if every rank has its own GPU, by CUDA IPC if ranks share one, otherwise \
             through host memory",
        ),
    }
}

fn try_launching(page: &mut DoctorPage) {
    page.add_section("Launching (tried)");
    page.run_and_record_trial(
        "registrar",
        "Look at firewall rules for the loopback interface.",
        || {
            let config = Config::from_env()?;
            let options = RegistrarOptions {
                host: Some("127.0.0.1".to_owned()),
                ..RegistrarOptions::from_config(1, &config)
            };
            let registrar = Registrar::start_job(options)?;
            let deadline = Instant::now() + TRIAL_TIMEOUT;
            let client = TaskClient::connect(registrar.ticket(), TaskId(0), None, deadline)?;
            client.register_task(0, &local_host_facts::host_facts(), deadline)?;
            let world = client.await_assignment(deadline)?;
            Ok(format!("{} task was given a rank over TLS", world.size()))
        },
    );
    page.run_and_record_trial(
        "worker processes",
        "The message names what the system refused.",
        || {
            // The test shows that workers get their variables, too.
            let command = ["/bin/sh", "-c", "test \"$WORLD_SIZE\" = 2"].map(str::to_owned).to_vec();
            let job = StaticJob::job_on_this_host(
                2,
                command,
                std::collections::BTreeMap::new(),
                Config::from_env()?,
            );
            let sink = std::sync::Arc::new(ConsoleSink::default())
                as std::sync::Arc<dyn farandole::telemetry::RecordSink>;
            let report = job.run(&sink, &|| StopLevel::Continue)?;
            match report.job_failure_reason() {
                None => Ok("2 were started and ended".to_owned()),
                Some(reason) => bail!("{reason}"),
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules(provided: &[(&str, &str, &str)]) -> ModuleDistributions {
        let one = |(module, name, version): &(&str, &str, &str)| {
            let provider =
                PythonDistribution { name: (*name).to_owned(), version: (*version).to_owned() };
            ((*module).to_owned(), vec![provider])
        };
        provided.iter().map(one).collect()
    }

    #[test]
    fn a_framework_is_found_whatever_its_distribution_is_called() {
        let mut page = DoctorPage::default();
        let mut found =
            modules(&[("tensorflow", "tf-nightly", "2.22"), ("torch", "torch", "2.15.0")]);
        add_packages(&mut page, "Frameworks", FRAMEWORK_PACKAGES, &found);
        assert!(
            page.text.contains("[X] TensorFlow              2.22 (tf-nightly)\n"),
            "{}",
            page.text
        );
        assert!(page.text.contains("[X] PyTorch                 2.15.0\n"), "{}", page.text);
        assert!(page.text.contains("[ ] JAX                     pip install"), "{}", page.text);
        let second =
            PythonDistribution { name: "tensorflow".to_owned(), version: "2.21".to_owned() };
        let both = found.get_mut("tensorflow").unwrap();
        both.push(second);
        assert_eq!(distribution_version_text("tensorflow", both), "2.22 (tf-nightly), 2.21");
    }

    #[test]
    fn a_healthy_host_with_a_framework_has_working_links_and_workers() {
        let python = PythonInstallation {
            version: "3.11".into(),
            executable: "python".into(),
            ..PythonInstallation::default()
        };
        let page = examine_host(&python, &modules(&[("torch", "torch", "2.15.0")]));
        for works in
            ["[X] PyTorch", "[X] shared memory", "[X] TCP", "[X] registrar", "[X] worker processes"]
        {
            assert!(page.text.contains(works), "{works} is missing in\n{}", page.text);
        }
        for library in ["] libcuda ", "] libcudart ", "] libnvrtc ", "] libnccl "] {
            assert!(page.text.contains(library), "{library} is missing in\n{}", page.text);
        }
        assert_eq!(page.problems, Vec::<String>::new());
    }

    #[test]
    fn the_way_of_tensors_on_gpus_follows_from_the_libraries() {
        assert!(describe_gpu_tensor_path("auto", true, true).0);
        for (chosen, driver, nccl, way) in [
            ("auto", false, true, "no driver"),
            ("auto", true, false, "no NCCL"),
            ("Staged", true, true, "through host memory"),
            ("copied", true, true, "by torch"),
        ] {
            let (by_nccl, description) = describe_gpu_tensor_path(chosen, driver, nccl);
            assert!(!by_nccl && description.contains(way), "{description}");
        }
    }

    #[test]
    fn a_python_without_a_framework_gets_a_hint_what_to_install() {
        let page = examine_host(&PythonInstallation::default(), &ModuleDistributions::new());
        assert!(
            page.text.contains("[ ] PyTorch                 pip install \"farandole[torch]\""),
            "{}",
            page.text
        );
        assert!(page.problems[0].contains("no framework is installed"));
    }
}
