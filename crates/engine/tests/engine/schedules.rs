// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Random programs: every rank submits the same operations, in orders and ways of its own.

use farandole_engine::{CollectiveRequest, Engine, RequestHandle, RequestKind};
use farandole_testkit::contents;
use farandole_world::Rank;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::cluster::{Cluster, SUM, floats, request, wait};

#[derive(Clone, Debug)]
struct Planned {
    name: String,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    Sum(usize),
    Broadcast { root: u32, length: usize },
    Gather { seed: u64 },
    Group { lengths: Vec<usize> },
    Mismatch,
}

fn rows(seed: u64, rank: u32) -> usize {
    ((seed >> (rank % 8 * 2)) % 4) as usize
}

fn window(random: &mut StdRng, size: u32) -> Vec<Planned> {
    let mut plan = Vec::new();
    for index in 0..random.random_range(1..12) {
        // Few names, so that they come again with other shapes.
        let name = format!("t{}", (index * 3 + random.random_range(0..3)) % 40);
        let length = *[0, 1, 5, 100, 3000, 40_000].get(random.random_range(0..6)).unwrap();
        let what = match random.random_range(0..10) {
            0..4 => What::Sum(length),
            4..6 => What::Broadcast { root: random.random_range(0..size), length },
            6..8 => What::Gather { seed: random.random() },
            8 => What::Group {
                lengths: (0..random.random_range(1..4))
                    .map(|_| random.random_range(0..50))
                    .collect(),
            },
            _ => What::Mismatch,
        };
        plan.push(Planned { name, what });
    }
    plan
}

impl Planned {
    fn requests(&self, rank: u32) -> Vec<CollectiveRequest> {
        let fill = |length: usize| vec![rank as f32 + 1.0; length];
        let one =
            |kind, length: usize| vec![request(&self.name, kind, &[length as u64], &fill(length))];
        match &self.what {
            What::Sum(length) => one(SUM, *length),
            What::Broadcast { root, length } => {
                one(RequestKind::Broadcast { root: Rank(*root) }, *length)
            }
            What::Gather { seed } => one(RequestKind::Allgather, rows(*seed, rank)),
            What::Group { lengths } => (0..)
                .zip(lengths)
                .map(|(k, length): (u32, _)| {
                    request(&format!("{}.{k}", self.name), SUM, &[*length as u64], &fill(*length))
                })
                .collect(),
            What::Mismatch => one(SUM, 1 + rank as usize),
        }
    }

    fn check(&self, engine: &Engine, size: u32, handles: Vec<RequestHandle>) {
        let total: f32 = (1..=size).map(|value| value as f32).sum();
        let expected: Vec<Vec<f32>> = match &self.what {
            What::Sum(length) => vec![vec![total; *length]],
            What::Broadcast { root, length } => vec![vec![*root as f32 + 1.0; *length]],
            What::Gather { seed } => {
                vec![
                    (0..size).flat_map(|rank| vec![rank as f32 + 1.0; rows(*seed, rank)]).collect(),
                ]
            }
            What::Group { lengths } => lengths.iter().map(|length| vec![total; *length]).collect(),
            What::Mismatch if size == 1 => vec![vec![1.0]],
            What::Mismatch => {
                assert!(handles.into_iter().all(|handle| wait(engine, handle).is_err()));
                return;
            }
        };
        for (handle, expected) in handles.into_iter().zip(expected) {
            let output = wait(engine, handle).unwrap().output.unwrap();
            assert_eq!(floats(&contents(&output)), expected, "{self:?}");
        }
    }
}

fn run(seed: u64, hosts: &[u32], windows: usize) {
    let size = hosts.iter().sum();
    let capacity = [0, 3, 64][(seed % 3) as usize];
    let threshold = [0, 256, 1 << 20][(seed / 3 % 3) as usize];
    let cluster = Cluster::new(hosts).with(|settings| {
        settings.cache_capacity = capacity;
        settings.fusion_threshold = threshold;
    });
    cluster.run(|rank, engine| {
        let mut common = StdRng::seed_from_u64(seed);
        let mut own = StdRng::seed_from_u64(seed ^ (u64::from(rank) + 1) << 40);
        for _ in 0..windows {
            let plan = window(&mut common, size);
            let mut order: Vec<usize> = (0..plan.len()).collect();
            order.shuffle(&mut own);
            let mut flying: Vec<(usize, Vec<RequestHandle>)> = Vec::new();
            for index in order {
                let mut requests = plan[index].requests(rank);
                let handles = match (&plan[index].what, requests.len()) {
                    (What::Group { .. }, _) => engine.submit_group(requests).unwrap(),
                    _ if own.random_bool(0.5) => vec![engine.submit(requests.remove(0)).unwrap()],
                    _ => vec![engine.submit_before_wait(requests.remove(0)).unwrap()],
                };
                flying.push((index, handles));
                if own.random_bool(0.1) {
                    engine.poll(flying[0].1[0]).unwrap();
                }
            }
            flying.shuffle(&mut own);
            flying
                .into_iter()
                .for_each(|(index, handles)| plan[index].check(&engine, size, handles));
        }
    });
}

#[test]
fn random_programs_give_what_they_should_on_one_to_eight_ranks() {
    // EN-1, EN-2. A seed that fails is printed by the assertion's plan; run it alone with
    // `run(seed, ..)`.
    let shapes: [&[u32]; 8] =
        [&[1], &[2], &[1, 2], &[2, 2], &[5], &[2, 1, 3], &[3, 4], &[1, 1, 2, 2, 1, 1]];
    for (seed, hosts) in (0..).zip(shapes.iter().cycle()).take(40) {
        run(seed, hosts, 12);
    }
}
