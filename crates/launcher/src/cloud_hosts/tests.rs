// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use std::collections::BTreeMap;
use std::{fs, io};

use super::*;
use crate::launch_environment::LocalEnvironment;

/// Given variables, and real files below a directory that stands for the root.
struct RootedEnvironment {
    root: tempfile::TempDir,
    variables: BTreeMap<&'static str, &'static str>,
}

impl RootedEnvironment {
    fn new(
        variables: &[(&'static str, &'static str)],
        files: &[(&'static str, &'static str)],
    ) -> Self {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(&path[1..]);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Self { root, variables: variables.iter().copied().collect() }
    }

    fn at(&self, path: &str) -> String {
        format!("{}{path}", self.root.path().display())
    }
}

impl LaunchEnvironment for RootedEnvironment {
    fn environment_variable(&self, name: &str) -> Option<String> {
        self.variables.get(name).map(|value| (*value).to_owned())
    }

    fn read_file(&self, path: &str) -> io::Result<String> {
        LocalEnvironment.read_file(&self.at(path))
    }

    fn file_names(&self, directory: &str) -> io::Result<Vec<String>> {
        LocalEnvironment.file_names(&self.at(directory))
    }

    fn has_program(&self, _name: &str) -> bool {
        false
    }
}

type Variables = &'static [(&'static str, &'static str)];
type Files = &'static [(&'static str, &'static str)];

const RESOURCES: &str = "/opt/ml/input/config/resourceconfig.json";
const TWO_HOSTS: &str = r#"{"current_host": "algo-1", "hosts": ["algo-1", "algo-2"],
    "network_interface_name": "eth0"}"#;

/// Variables and files of each system, and the hosts and slots that they mean.
const DESCRIPTIONS: &[(Variables, Files, &str)] = &[
    (
        &[
            ("SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2\n"),
            ("SKYPILOT_NUM_NODES", "2"),
            ("SKYPILOT_NODE_RANK", "0"),
            ("SKYPILOT_NUM_GPUS_PER_NODE", "8"),
        ],
        &[],
        "SkyPilot 10.0.0.1:8 10.0.0.2:8",
    ),
    (&[("SKYPILOT_NODE_IPS", "10.0.0.1")], &[], "SkyPilot 10.0.0.1:1"),
    (
        &[("SKYPILOT_NODE_IPS", "a\nb"), ("SKYPILOT_NUM_GPUS_PER_NODE", "0")],
        &[],
        "SkyPilot a:1 b:1",
    ),
    // A launcher of its own, and workers.
    (
        &[
            ("HOSTNAME", "job-master-0"),
            ("VC_TASK_INDEX", "0"),
            ("VC_WORKER_NUM", "2"),
            ("VC_WORKER_HOSTS", "job-worker-0.job,job-worker-1.job"),
        ],
        &[
            ("/etc/volcano/master.host", "job-master-0.job\n"),
            ("/etc/volcano/worker.host", "job-worker-0.job\njob-worker-1.job\n"),
        ],
        "Volcano job-worker-0.job:1 job-worker-1.job:1",
    ),
    // Workers alone; the name of the task has a hyphen.
    (
        &[("HOSTNAME", "j-mpi-worker-0"), ("VK_TASK_INDEX", "0"), ("VC_MPI_WORKER_NUM", "2")],
        &[("/etc/volcano/mpi-worker.host", "j-mpi-worker-0.j\nj-mpi-worker-1.j")],
        "Volcano j-mpi-worker-0.j:1 j-mpi-worker-1.j:1",
    ),
    (
        &[
            ("SM_HOSTS", r#"["algo-2", "algo-1"]"#),
            ("SM_CURRENT_HOST", "algo-1"),
            ("SM_NUM_GPUS", "4"),
        ],
        &[(RESOURCES, TWO_HOSTS)],
        "SageMaker algo-1:4 algo-2:4",
    ),
    (&[("SM_HOSTS", r#"["algo-1"]"#)], &[], "SageMaker algo-1:1"),
    // A container of one's own has the file alone.
    (&[], &[(RESOURCES, TWO_HOSTS)], "SageMaker algo-1:1 algo-2:1"),
    (
        &[("SM_INPUT_CONFIG_DIR", "/conf/"), ("SM_NUM_GPUS", "0")],
        &[(
            "/conf/resourceconfig.json",
            r#"{"current_host": "algo-2", "hosts": ["algo-10", "algo-2"],
            "instance_groups": [{"instance_type": "ml.p4d"}, {"instance_type": "ml.p4d"}]}"#,
        )],
        "SageMaker algo-2:1 algo-10:1",
    ),
];

#[test]
fn every_system_tells_its_hosts() {
    assert_eq!(find_cloud_hosts(&RootedEnvironment::new(&[], &[])).unwrap(), None);
    for (variables, files, expected) in DESCRIPTIONS {
        let found = find_cloud_hosts(&RootedEnvironment::new(variables, files)).unwrap().unwrap();
        let hosts: Vec<String> =
            found.hosts.iter().map(|host| format!("{}:{}", host.host, host.slots)).collect();
        assert_eq!(format!("{} {}", found.system, hosts.join(" ")), *expected);
        assert_eq!(found.refusal, None, "{expected}");
    }
}

/// A variable or a file, changed so that it contradicts another one, and the two names.
const CONTRADICTIONS: &[(usize, (&str, &str), [&str; 2])] = &[
    (0, ("SKYPILOT_NUM_NODES", "3"), ["SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES"]),
    (0, ("SKYPILOT_NODE_RANK", "2"), ["SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"]),
    (3, ("VC_WORKER_NUM", "3"), ["/etc/volcano/worker.host", "VC_WORKER_NUM"]),
    (3, ("VC_WORKER_HOSTS", "a,b"), ["/etc/volcano/worker.host", "VC_WORKER_HOSTS"]),
    (3, ("VK_TASK_INDEX", "1"), ["VC_TASK_INDEX", "VK_TASK_INDEX"]),
    (4, ("VC_MPI_WORKER_NUM", "1"), ["/etc/volcano/mpi-worker.host", "VC_MPI_WORKER_NUM"]),
    (5, ("SM_HOSTS", r#"["algo-1"]"#), ["SM_HOSTS", RESOURCES]),
    (5, ("SM_CURRENT_HOST", "algo-2"), ["SM_CURRENT_HOST", RESOURCES]),
    (6, ("SM_CURRENT_HOST", "algo-7"), ["SM_HOSTS", "SM_CURRENT_HOST"]),
];

#[test]
fn two_sources_that_contradict_each_other_are_both_named() {
    for (index, (name, value), sources) in CONTRADICTIONS {
        let (variables, files, _) = DESCRIPTIONS[*index];
        let mut environment = RootedEnvironment::new(variables, files);
        environment.variables.insert(*name, *value);
        let text = find_cloud_hosts(&environment).unwrap_err().to_string();
        for source in sources {
            assert!(text.contains(source), "{source} is not in: {text}");
        }
    }
}

#[test]
fn every_value_that_cannot_be_understood_and_every_choice_is_named() {
    let numbers = [
        (0, "SKYPILOT_NUM_NODES"),
        (0, "SKYPILOT_NODE_RANK"),
        (0, "SKYPILOT_NUM_GPUS_PER_NODE"),
        (3, "VC_WORKER_NUM"),
        (3, "VC_TASK_INDEX"),
        (4, "VK_TASK_INDEX"),
        (5, "SM_NUM_GPUS"),
        (5, "SM_HOSTS"),
    ];
    for (index, name) in numbers {
        let (variables, files, _) = DESCRIPTIONS[index];
        for value in ["two", "-1", "1.5", "[1]"] {
            let mut environment = RootedEnvironment::new(variables, files);
            environment.variables.insert(name, value);
            let text = find_cloud_hosts(&environment).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains(value), "{text}");
        }
    }
    for (path, content) in [
        (RESOURCES, "{"),
        (RESOURCES, r#"{"hosts": []}"#),
        (RESOURCES, r#"{"current_host": "a", "hosts": []}"#),
        ("/etc/volcano/worker.host", ""),
        ("/etc/volcano/worker.host", "a slots=x"),
    ] {
        let environment = RootedEnvironment::new(&[], &[(path, content)]);
        let text = find_cloud_hosts(&environment).unwrap_err().to_string();
        assert!(text.contains(path), "{text}");
    }
    let groups = r#"{"current_host": "a", "hosts": ["a", "b"],
        "instance_groups": [{"instance_type": "ml.p4d"}, {"instance_type": "ml.c5"}]}"#;
    let found = find_cloud_hosts(&RootedEnvironment::new(&[], &[(RESOURCES, groups)]));
    assert!(found.unwrap().unwrap().refusal.unwrap().contains("ml.c5, ml.p4d"));
    let (variables, files, _) = DESCRIPTIONS[3];
    let mut environment = RootedEnvironment::new(variables, files);
    environment.variables.insert("HOSTNAME", "elsewhere");
    let refusal = find_cloud_hosts(&environment).unwrap().unwrap().refusal.unwrap();
    for file in ["/etc/volcano/master.host", "/etc/volcano/worker.host"] {
        assert!(refusal.contains(file), "{refusal}");
    }
}

/// All hosts start the command, and one job must begin.
#[test]
fn only_the_first_host_launches_and_the_others_are_told_how() {
    for (index, name, value) in [
        (0, "SKYPILOT_NODE_RANK", "1"),
        (4, "VK_TASK_INDEX", "1"),
        (6, "SM_CURRENT_HOST", "algo-2"),
    ] {
        let (variables, files, _) = DESCRIPTIONS[index];
        let mut environment = RootedEnvironment::new(variables, files);
        if index == 6 {
            environment.variables.insert("SM_HOSTS", r#"["algo-1", "algo-2"]"#);
        }
        environment.variables.insert(name, value);
        let found = find_cloud_hosts(&environment).unwrap().unwrap();
        let refusal = found.refusal.unwrap_or_default();
        assert!(refusal.contains("then farandole run"), "{name}: {refusal}");
    }
}
