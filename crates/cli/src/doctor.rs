// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole doctor`: reports what is installed, what works (by trying it), what is wrong, and how
//! to fix it.

mod launcher;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use farandole::config::{Config, PortRange, environment};
use farandole::cuda::{Finding, Kind, Places, inventory};
use farandole::launcher::allocation::Here;
use farandole::launcher::{Job, Wish};
use farandole::registrar::{Client, Options, PROTOCOL_VERSION, Registrar, host};
use farandole::transport::{LinkKind, MemoryRendezvous, Mesh, MeshOptions};
use farandole::world::{Rank, TaskId};

use crate::console::Console;
use crate::surroundings::{Distribution, Python, Surroundings};

/// Longest time that one try may take.
const LIMIT: Duration = Duration::from_secs(20);
/// Bytes of a trial link.
const TRIAL: usize = 64 << 10;

/// Modules and the distributions that provide them.
type Modules = BTreeMap<String, Vec<Distribution>>;

/// A package that enables something: its module, what it is, the extra that installs it.
const FRAMEWORKS: &[(&str, &str, &str)] = &[
    ("torch", "PyTorch", "torch"),
    ("tensorflow", "TensorFlow", "tensorflow"),
    ("keras", "Keras", "tensorflow"),
    ("jax", "JAX", "jax"),
];
const SPARK: &[(&str, &str, &str)] = &[
    ("pyspark", "PySpark", "spark"),
    ("pyarrow", "PyArrow", "spark"),
    ("pandas", "pandas", "spark"),
];

/// One page, section by section, with the problems at its end.
#[derive(Default)]
struct Page {
    text: String,
    problems: Vec<String>,
}

impl Page {
    fn section(&mut self, title: &str) {
        self.text.push_str(&format!("\n{title}\n"));
    }

    fn line(&mut self, name: &str, value: &str) {
        self.text.push_str(&format!("    {name:<16}{value}\n"));
    }

    fn check(&mut self, works: bool, name: &str, detail: &str) {
        let mark = if works { 'X' } else { ' ' };
        self.text.push_str(&format!("    [{mark}] {name:<24}{detail}\n"));
    }

    /// Tries something, and notes how to mend it if it fails.
    fn attempt(&mut self, name: &str, advice: &str, trial: impl FnOnce() -> Result<String>) {
        let started = Instant::now();
        match trial() {
            Ok(detail) => {
                let took = format!("{detail} ({:.1} ms)", started.elapsed().as_secs_f64() * 1e3);
                self.check(true, name, &took);
            }
            Err(error) => {
                self.check(false, name, &format!("{error:#}"));
                self.problems.push(format!("{name}: {error:#}. {advice}"));
            }
        }
    }
}

/// Prints the page; the exit status is 1 when something is wrong.
pub(crate) fn doctor(surroundings: &dyn Surroundings) -> Result<i32> {
    let page = examine(&surroundings.python(), &surroundings.modules());
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

fn examine(python: &Python, modules: &Modules) -> Page {
    let mut page = Page::default();
    versions(&mut page, python);
    packages(&mut page, "Frameworks", FRAMEWORKS, modules);
    if !FRAMEWORKS.iter().any(|(module, ..)| modules.contains_key(*module)) {
        page.problems
            .push("no framework is installed: pip install \"farandole[torch]\"".to_owned());
    }
    packages(&mut page, "Spark", SPARK, modules);
    java(&mut page, modules.contains_key("pyspark"));
    links(&mut page);
    devices(&mut page, python);
    launcher::section(&mut page, &Here);
    // What cannot be read is a problem already, and everything that is started would fail by it.
    if Config::from_env().is_ok() {
        launching(&mut page);
    }
    page
}

fn versions(page: &mut Page, python: &Python) {
    page.text.push_str(&format!(
        "Farandole {} (protocol {PROTOCOL_VERSION})\n",
        env!("CARGO_PKG_VERSION")
    ));
    page.section("This host");
    page.line("python", &format!("{} at {}", python.version, python.executable));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    page.line("system", &format!("Linux {} on {}", kernel.trim(), std::env::consts::ARCH));
    let cores =
        thread::available_parallelism().map_or_else(|_| "?".to_owned(), |cores| cores.to_string());
    page.line("cores", &cores);
    page.line("host hash", &host::facts().hash().0);
    let addresses: Vec<String> = host::addresses().iter().map(ToString::to_string).collect();
    page.line("addresses", &addresses.join(", "));
    match Config::from_env() {
        Ok(_) => page.line("configuration", "the environment parses"),
        Err(error) => {
            page.line("configuration", &error.to_string());
            page.problems.push(format!("{error}: correct or unset the variable"));
        }
    }
}

fn packages(page: &mut Page, title: &str, wanted: &[(&str, &str, &str)], modules: &Modules) {
    page.section(title);
    for (module, what, extra) in wanted {
        match modules.get(*module) {
            Some(providers) => page.check(true, what, &provided(module, providers)),
            None => page.check(false, what, &format!("pip install \"farandole[{extra}]\"")),
        }
    }
}

/// Returns the version, and whose it is where that is not clear from the module's name.
fn provided(module: &str, providers: &[Distribution]) -> String {
    let one = |Distribution { name, version }: &Distribution| match name == module {
        true => version.clone(),
        false => format!("{version} ({name})"),
    };
    providers.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn java(page: &mut Page, needed: bool) {
    let program = environment("JAVA_HOME")
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
            // Before it, the JVM names variables with options that it takes.
            let told = text.lines().find(|line| line.contains(" version "));
            page.check(true, "Java", told.or(text.lines().next()).unwrap_or_default());
        }
        None => {
            page.check(false, "Java", &format!("{program} does not run"));
            if needed {
                page.problems.push(format!(
                    "{program} does not run, and Spark needs it: install a JDK 17 or newer, or set \
                     JAVA_HOME"
                ));
            }
        }
    }
}

fn links(page: &mut Page) {
    page.section("Links (tried between two ranks of this process)");
    page.attempt(
        "shared memory",
        "Ranks of this host will use TCP. A container needs memfd_create and Unix sockets: look at \
         its seccomp profile.",
        || link(true, LinkKind::SharedMemory),
    );
    page.attempt("TCP", "Look at firewall rules for the loopback interface.", || {
        link(false, LinkKind::Tcp)
    });
}

/// Joins two ranks, sends a byte there, and says what carried it.
fn link(use_shared_memory: bool, expected: LinkKind) -> Result<String> {
    let rendezvous = MemoryRendezvous::default();
    let options = |rank| MeshOptions {
        use_shared_memory,
        patience: LIMIT,
        bind: vec![std::net::IpAddr::from(std::net::Ipv4Addr::LOCALHOST).into()],
        ports: PortRange { first: 0, last: 0 },
        ..MeshOptions::new(Rank(rank), 2, host::facts().hash(), [7; 32])
    };
    thread::scope(|scope| {
        let sender = scope.spawn(|| -> Result<()> {
            let mesh = Mesh::join(options(0), &rendezvous)?;
            let mut link = mesh.open(1, &[Rank(1)], TRIAL)?.pop().context("no link")?;
            link.sender.window()?.first_mut().context("no room in the link")?.clone_from(&42);
            link.sender.commit(1)?;
            // The receiver answers with its own end: by then the byte was read.
            let deadline = Instant::now() + LIMIT;
            while link.receiver.window()?.is_empty() {
                link.sender.flush()?;
                if Instant::now() > deadline {
                    bail!("no answer within {LIMIT:?}");
                }
                thread::yield_now();
            }
            Ok(())
        });
        let receiver = scope.spawn(|| -> Result<LinkKind> {
            let mesh = Mesh::join(options(1), &rendezvous)?;
            let mut link = mesh.open(1, &[Rank(0)], TRIAL)?.pop().context("no link")?;
            let deadline = Instant::now() + LIMIT;
            while link.receiver.window()?.first() != Some(&42) {
                if Instant::now() > deadline {
                    bail!("nothing arrived within {LIMIT:?}");
                }
                thread::yield_now();
            }
            link.sender.window()?.first_mut().context("no room in the link")?.clone_from(&43);
            link.sender.commit(1)?;
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

fn devices(page: &mut Page, python: &Python) {
    page.section("Devices");
    let driver = fs::read_to_string("/proc/driver/nvidia/version").ok();
    let count = fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, Iterator::count);
    match driver.as_deref().and_then(|text| text.lines().next()) {
        Some(version) => {
            let version = version.trim_start_matches("NVRM version:").trim();
            page.check(true, "NVIDIA driver", &format!("{count} devices, {version}"));
        }
        None => page.check(false, "NVIDIA driver", "none; tensors are reduced on the CPU"),
    }
    let named = Config::from_env().map(|config| config.cuda_libraries).unwrap_or_default();
    let mut places = Places::of(&named);
    places.packages.extend(python.folders.iter().cloned());
    // A missing library is no problem: without it, tensors on a GPU go through host memory.
    let findings = inventory(&places);
    for Finding { name, works, detail } in &findings {
        page.check(*works, name, detail);
    }
    let chosen = Config::from_env().map(|config| config.gpu_tensors).unwrap_or_default();
    let works = |name: &str| findings.iter().any(|finding| finding.name == name && finding.works);
    let (by_nccl, way) =
        tensors_on_gpus(&chosen, works(Kind::Driver.name()), works(Kind::Nccl.name()));
    page.check(by_nccl, "tensors on GPUs", way);
}

/// Returns whether NCCL reduces them, and what becomes of them.
fn tensors_on_gpus(chosen: &str, driver: bool, nccl: bool) -> (bool, &'static str) {
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

fn launching(page: &mut Page) {
    page.section("Launching (tried)");
    page.attempt("registrar", "Look at firewall rules for the loopback interface.", || {
        let config = Config::from_env()?;
        let options =
            Options { host: Some("127.0.0.1".to_owned()), ..Options::from_config(1, &config) };
        let registrar = Registrar::start(options)?;
        let deadline = Instant::now() + LIMIT;
        let client = Client::connect(registrar.ticket(), TaskId(0), None, deadline)?;
        client.register(0, &host::facts(), deadline)?;
        let world = client.await_assignment(deadline)?;
        Ok(format!("{} task was given a rank over TLS", world.size()))
    });
    page.attempt("worker processes", "The message names what the system refused.", || {
        let command = ["/bin/sh", "-c", "test \"$WORLD_SIZE\" = 2"].map(str::to_owned).to_vec();
        let job = Job::here(2, command, std::collections::BTreeMap::new(), Config::from_env()?);
        let sink = std::sync::Arc::new(Console::default())
            as std::sync::Arc<dyn farandole::telemetry::Sink>;
        let report = job.run(&sink, &|| Wish::GoOn)?;
        match report.reason() {
            None => Ok("2 were started and ended".to_owned()),
            Some(reason) => bail!("{reason}"),
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules(provided: &[(&str, &str, &str)]) -> Modules {
        let one = |(module, name, version): &(&str, &str, &str)| {
            let provider =
                Distribution { name: (*name).to_owned(), version: (*version).to_owned() };
            ((*module).to_owned(), vec![provider])
        };
        provided.iter().map(one).collect()
    }

    #[test]
    fn a_framework_is_found_whatever_its_distribution_is_called() {
        let mut page = Page::default();
        let mut found =
            modules(&[("tensorflow", "tf-nightly", "2.22"), ("torch", "torch", "2.15.0")]);
        packages(&mut page, "Frameworks", FRAMEWORKS, &found);
        assert!(
            page.text.contains("[X] TensorFlow              2.22 (tf-nightly)\n"),
            "{}",
            page.text
        );
        assert!(page.text.contains("[X] PyTorch                 2.15.0\n"), "{}", page.text);
        assert!(page.text.contains("[ ] JAX                     pip install"), "{}", page.text);
        let second = Distribution { name: "tensorflow".to_owned(), version: "2.21".to_owned() };
        let both = found.get_mut("tensorflow").unwrap();
        both.push(second);
        assert_eq!(provided("tensorflow", both), "2.22 (tf-nightly), 2.21");
    }

    #[test]
    fn a_healthy_host_with_a_framework_has_working_links_and_workers() {
        let python =
            Python { version: "3.11".into(), executable: "python".into(), ..Python::default() };
        let page = examine(&python, &modules(&[("torch", "torch", "2.15.0")]));
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
        assert!(tensors_on_gpus("auto", true, true).0);
        for (chosen, driver, nccl, way) in [
            ("auto", false, true, "no driver"),
            ("auto", true, false, "no NCCL"),
            ("Staged", true, true, "through host memory"),
            ("copied", true, true, "by torch"),
        ] {
            let (by_nccl, told) = tensors_on_gpus(chosen, driver, nccl);
            assert!(!by_nccl && told.contains(way), "{told}");
        }
    }

    #[test]
    fn a_python_without_a_framework_gets_a_hint_what_to_install() {
        let page = examine(&Python::default(), &Modules::new());
        assert!(
            page.text.contains("[ ] PyTorch                 pip install \"farandole[torch]\""),
            "{}",
            page.text
        );
        assert!(page.problems[0].contains("no framework is installed"));
    }
}
