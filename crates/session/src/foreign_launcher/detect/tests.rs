// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn found(pairs: &[(&str, &str)]) -> Result<LaunchDetection, String> {
    let map: BTreeMap<&str, &str> = pairs.iter().copied().collect();
    detect_launch(&|name| map.get(name).map(|value| (*value).to_owned()), &|_| None)
}

fn world(pairs: &[(&str, &str)]) -> DetectedRank {
    match found(pairs) {
        Ok(LaunchDetection::World(started)) => started,
        other => panic!("{other:?}"),
    }
}

const OPENMPI: [(&str, &str); 4] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
    ("PMIX_RANK", "1"),
];
const SLURM: [(&str, &str); 6] = [
    ("SLURM_PROCID", "3"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_JOB_ID", "17"),
    ("SLURM_STEP_NUM_NODES", "2"),
];
const TORCHRUN: [(&str, &str); 6] = [
    ("RANK", "0"),
    ("WORLD_SIZE", "2"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("TORCHELASTIC_RUN_ID", "none"),
    ("MASTER_ADDR", "10.0.0.1"),
    ("MASTER_PORT", "29500"),
];

fn with<'a>(pairs: &[(&'a str, &'a str)], more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    pairs.iter().chain(more).copied().collect()
}

#[test]
fn a_process_that_has_imported_mpi4py_by_itself_is_alone() {
    let singleton =
        [("PMIX_RANK", "0"), ("PMIX_NAMESPACE", "1360986113"), ("OMPI_MCA_ess", "singleton")];
    assert!(matches!(found(&singleton), Ok(LaunchDetection::Alone(None))));
    assert!(found(&singleton[..2]).unwrap_err().starts_with("PMIX_RANK tells a rank and no size"));
}

#[test]
fn every_starter_tells_rank_size_and_whether_hosts_are_several() {
    type Case<'a> = (&'a [(&'a str, &'a str)], &'a str, u32, u32, bool);
    let cases: [Case<'_>; 8] = [
        (&OPENMPI, "openmpi", 1, 4, true),
        (&SLURM, "slurm", 3, 4, false),
        (&TORCHRUN, "torchrun", 0, 2, true),
        (&[("PMI_RANK", "2"), ("PMI_SIZE", "3"), ("MPI_LOCALNRANKS", "2")], "hydra", 2, 3, false),
        (
            &[
                ("JSM_NAMESPACE_RANK", "0"),
                ("JSM_NAMESPACE_SIZE", "6"),
                ("JSM_NAMESPACE_LOCAL_SIZE", "6"),
            ],
            "jsrun",
            0,
            6,
            true,
        ),
        (
            &[("HOROVOD_RANK", "1"), ("HOROVOD_SIZE", "2"), ("HOROVOD_LOCAL_SIZE", "2")],
            "horovod",
            1,
            2,
            true,
        ),
        (
            &[
                ("MV2_COMM_WORLD_RANK", "2"),
                ("MV2_COMM_WORLD_SIZE", "4"),
                ("MV2_COMM_WORLD_LOCAL_SIZE", "2"),
            ],
            "mvapich",
            2,
            4,
            false,
        ),
        (
            &[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")],
            "torchrun",
            1,
            2,
            true,
        ),
    ];
    for (pairs, key, rank, size, one_host) in cases {
        let started = world(pairs);
        assert_eq!(
            (started.launcher_key, started.rank, started.size, started.one_host),
            (key, rank, size, one_host)
        );
    }
}

#[test]
fn a_process_without_a_starter_is_alone_and_so_is_the_only_one() {
    for pairs in [
        &[][..],
        &[("RANK", "private"), ("WORLD_SIZE", "large")],
        &[("RANK", "3")],
        &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")],
        &[
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_ID", "4"),
            ("SLURM_STEP_NUM_TASKS", "1"),
            ("SLURM_NTASKS", "4"),
        ],
    ] {
        assert_eq!(found(pairs), Ok(LaunchDetection::Alone(None)), "{pairs:?}");
    }
}

#[test]
fn variables_of_our_own_launcher_are_not_taken_for_another_launchers() {
    let ours =
        [("FARANDOLE_TASK", "1"), ("HOROVOD_RANK", "1"), ("HOROVOD_SIZE", "2"), ("RANK", "1")];
    assert_eq!(found(&ours), Ok(LaunchDetection::Alone(None)));
}

#[test]
fn a_batch_script_of_slurm_is_one_process_and_hears_so() {
    let script = [
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_JOB_ID", "2"),
        ("SLURM_NODEID", "0"),
    ];
    let Ok(LaunchDetection::Alone(Some(warning))) = found(&script) else {
        panic!("{:?}", found(&script))
    };
    assert!(warning.contains("4 tasks") && warning.contains("srun python"), "{warning}");
    assert_eq!(world(&with(&script, &OPENMPI)).size, 4);
    assert_eq!(
        found(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")]),
        Ok(LaunchDetection::Alone(None))
    );
}

#[test]
fn of_starters_within_each_other_the_inner_one_counts() {
    assert_eq!(world(&with(&SLURM, &OPENMPI)).launcher_key, "openmpi");
    assert_eq!(world(&with(&SLURM, &TORCHRUN)).launcher_key, "torchrun");
    assert_eq!(world(&with(&OPENMPI, &TORCHRUN)).launcher_key, "torchrun");
    let same = [("HOROVOD_RANK", "1"), ("HOROVOD_SIZE", "4"), ("RANK", "1"), ("WORLD_SIZE", "4")];
    assert_eq!(world(&with(&OPENMPI, &same)).size, 4);
}

#[test]
fn starters_that_contradict_each_other_are_refused_by_their_variables() {
    let other = [("HOROVOD_RANK", "1"), ("HOROVOD_SIZE", "2")];
    let error = found(&with(&OPENMPI, &other)).unwrap_err();
    assert!(
        error.contains("HOROVOD_SIZE=2") && error.contains("OMPI_COMM_WORLD_SIZE=4"),
        "{error}"
    );
    let error =
        found(&with(&OPENMPI, &[("HOROVOD_RANK", "0"), ("HOROVOD_SIZE", "4")])).unwrap_err();
    assert!(
        error.contains("HOROVOD_RANK=0") && error.contains("OMPI_COMM_WORLD_RANK=1"),
        "{error}"
    );
    // One torchrun for each of several tasks of srun would be several worlds of one.
    let one = [("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_RUN_ID", "a")];
    let error = found(&with(&SLURM, &one)).unwrap_err();
    assert!(error.contains("WORLD_SIZE=1") && error.contains("SLURM_STEP_NUM_TASKS=4"), "{error}");
}

#[test]
fn an_invalid_place_is_refused_with_its_variable() {
    for (pairs, expected) in [
        (&[("PMI_RANK", "4"), ("PMI_SIZE", "4")][..], "PMI_RANK=4 is no rank of PMI_SIZE=4"),
        (&[("PMI_RANK", "x"), ("PMI_SIZE", "4")], "PMI_RANK is not a number: x"),
        (&[("HOROVOD_RANK", "0"), ("HOROVOD_SIZE", "-1")], "HOROVOD_SIZE is not a number: -1"),
        (&[("RANK", "a"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "b")], "RANK is not a number: a"),
        (&[("HOROVOD_RANK", "0")], "HOROVOD_RANK is set without HOROVOD_SIZE"),
        (
            &[("OMPI_COMM_WORLD_RANK", "0")],
            "OMPI_COMM_WORLD_RANK is set without OMPI_COMM_WORLD_SIZE",
        ),
    ] {
        assert_eq!(found(pairs).unwrap_err(), expected);
    }
    let error = found(&[("PMIX_RANK", "2"), ("PMIX_NAMESPACE", "x")]).unwrap_err();
    assert!(error.starts_with("PMIX_RANK tells a rank and no size: set HOROVOD_RANK"), "{error}");
}

#[test]
fn starts_are_distinguished_by_values_that_all_their_processes_share() {
    let names = |pairs: &[(&str, &str)]| -> Vec<String> {
        world(pairs).start_variables.into_iter().map(|(name, _)| name).collect()
    };
    assert_eq!(names(&SLURM), ["SLURM_JOB_ID", "SLURM_STEP_ID"]);
    assert_eq!(names(&TORCHRUN), ["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"]);
    assert_eq!(world(&TORCHRUN).first_host.as_deref(), Some("10.0.0.1"));
    assert!(names(&OPENMPI).is_empty());
}

proptest! {
    /// Any values of the variables give a rank of its size, an error, or nothing.
    #[test]
    fn any_environment_gives_a_place_an_error_or_nothing(
        values in prop::collection::vec(prop::option::of("[0-9]{1,2}|-1|x|"), 24)
    ) {
        let names = KNOWN_LAUNCHERS.iter().flat_map(|starter| {
            starter.size_variables.iter().copied().chain([starter.rank_variable, SLURM_STEP_VARIABLE])
        });
        let pairs: Vec<(&str, &str)> =
            names.zip(&values).filter_map(|(name, value)| Some((name, value.as_deref()?))).collect();
        if let Ok(LaunchDetection::World(started)) = found(&pairs) {
            prop_assert!(started.rank < started.size && started.size > 1);
        }
    }
}
