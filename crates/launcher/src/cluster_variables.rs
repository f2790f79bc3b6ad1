// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Clusters that describe themselves in variables without the names of their hosts: Ray and
//! Databricks. Another part of Farandole starts processes there.

use crate::launch_environment::LaunchEnvironment;

/// A cluster in which this process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecognizedCluster {
    /// Name of the system.
    pub system: &'static str,
    /// The variable that names the cluster.
    pub variable: &'static str,
    /// The way to start processes on all of its hosts.
    pub advice: &'static str,
}

/// Every such cluster: the system, its variables, and the advice.
const CLUSTERS: [(&str, &[&str], &str); 2] = [
    (
        "Ray",
        // Of the user, of `ray job submit`, and of KubeRay's pods.
        &["RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_CLUSTER_NAME"],
        "farandole.ray.RayExecutor starts processes on all of its nodes",
    ),
    (
        "Databricks",
        &["DATABRICKS_RUNTIME_VERSION"],
        "farandole.spark.run starts processes on all of its nodes, LocalBackend on this one",
    ),
];

/// Returns the cluster of this process, if it is in one.
pub fn recognize_cluster(environment: &dyn LaunchEnvironment) -> Option<RecognizedCluster> {
    CLUSTERS.iter().find_map(|(system, variables, advice)| {
        let variable =
            variables.iter().find(|name| environment.environment_variable(name).is_some())?;
        Some(RecognizedCluster { system, variable, advice })
    })
}

impl RecognizedCluster {
    /// Describes the cluster and the way to its hosts, in a sentence.
    pub fn describe(&self) -> String {
        let Self { system, variable, advice } = self;
        format!("this host is in a cluster of {system} ({variable}): {advice}")
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    struct PlayedVariable(&'static str);

    impl LaunchEnvironment for PlayedVariable {
        fn environment_variable(&self, name: &str) -> Option<String> {
            (name == self.0).then(|| "x".to_owned())
        }

        fn read_file(&self, _path: &str) -> io::Result<String> {
            Err(io::ErrorKind::NotFound.into())
        }

        fn file_names(&self, _directory: &str) -> io::Result<Vec<String>> {
            Ok(Vec::new())
        }

        fn has_program(&self, _name: &str) -> bool {
            false
        }
    }

    #[test]
    fn a_cluster_is_recognized_by_each_of_its_variables() {
        for (name, system) in [
            ("RAY_ADDRESS", "Ray"),
            ("RAY_JOB_CONFIG_JSON_ENV_VAR", "Ray"),
            ("RAY_CLUSTER_NAME", "Ray"),
            ("DATABRICKS_RUNTIME_VERSION", "Databricks"),
        ] {
            let found = recognize_cluster(&PlayedVariable(name)).unwrap();
            assert_eq!((found.system, found.variable), (system, name));
            assert!(found.describe().contains(name));
        }
        assert_eq!(recognize_cluster(&PlayedVariable("HOME")), None);
    }
}
