// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Scaling efficiency of three models at 25 and 100 Gbit/s, next to the project's goals and to
//! published numbers.
//!
//! `cargo run --release -p farandole-simulator --example efficiency`

use std::collections::BTreeMap;
use std::time::Duration;

use farandole_config::Config;
use farandole_simulator::{
    AllreduceSimulator, ControlRound, FormationEstimate, ModelProfile, PUBLISHED_EFFICIENCIES,
    SimulatedCluster, StepEstimate, StepOptions,
};

/// Efficiencies at 512 ranks and 25 Gbit/s that the project wants to reach.
const EFFICIENCY_GOALS: [(&str, f64); 2] = [("resnet50", 0.97), ("vgg16", 0.85)];

/// Changes a cluster.
type ClusterChange = fn(&mut SimulatedCluster);

/// Changes that leave something out, to find the limit.
const LIFTED_LIMITS: [(&str, ClusterChange); 5] = [
    ("as it is", |_| {}),
    ("messages cost nothing", |cluster| cluster.message_cpu_time = Duration::ZERO),
    ("unlimited memory", |cluster| cluster.memory_rate = 1e18),
    ("unlimited copies and reductions", |cluster| cluster.copy_rate = 1e18),
    ("unlimited cores and memory", |cluster| {
        cluster.message_cpu_time = Duration::ZERO;
        cluster.memory_rate = 1e18;
        cluster.copy_rate = 1e18;
        cluster.socket_rate = 1e18;
    }),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = Config::read(|_| None, &BTreeMap::new())?;
    println!("hosts of 8 ranks, 20 us, defaults of `farandole simulate`; efficiency in percent");
    println!("{:<12} {:>8} {:>8} {:>8} {:>8} {:>8}", "model", "Gbit/s", 8, 64, 512, 4096);
    for name in ModelProfile::MODEL_NAMES {
        for gigabits in [25.0, 100.0] {
            let mut row = format!("{name:<12} {gigabits:>8}");
            for ranks in [8, 64, 512, 4096] {
                let efficiency =
                    scaling_efficiency(name, ranks / 8, ranks, gigabits, &config, false)?;
                row.push_str(&format!(" {:>8.1}", efficiency * 100.0));
            }
            println!("{row}");
        }
    }
    println!("\n512 ranks on 64 hosts, 25 Gbit/s");
    for (name, goal) in EFFICIENCY_GOALS {
        for (what, overlap_forward) in [("", false), (", overlapped forward pass", true)] {
            let found = scaling_efficiency(name, 64, 512, 25.0, &config, overlap_forward)?;
            let verdict = if found >= goal { "met" } else { "missed" };
            println!("{name}{what}: {:.1} %, goal {:.0} %: {verdict}", found * 100.0, goal * 100.0);
        }
    }
    println!("\n512 ranks on 128 hosts, 25 Gbit/s, as in Horovod's paper");
    for name in ["resnet50", "vgg16"] {
        println!(
            "{name}: {:.1} %",
            scaling_efficiency(name, 128, 512, 25.0, &config, false)? * 100.0
        );
    }
    for published in PUBLISHED_EFFICIENCIES {
        println!("published: {} {:.0} %", published.model, published.efficiency * 100.0);
    }
    println!(
        "\n512 ranks on 64 hosts, 25 Gbit/s: milliseconds of 64 MiB; efficiency of resnet50 and \
         vgg16"
    );
    for (what, change) in LIFTED_LIMITS {
        let mut cluster = SimulatedCluster::new(64, 512)?;
        change(&mut cluster);
        let time = AllreduceSimulator::new(&cluster, &config)?.simulate(64 << 20)?.time;
        let (resnet, vgg) = (
            simulate_model_step("resnet50", &cluster, &config, false)?,
            simulate_model_step("vgg16", &cluster, &config, false)?,
        );
        let ms = time.as_secs_f64() * 1e3;
        println!(
            "{what:<32} {ms:>8.1} {:>6.1} {:>6.1}",
            resnet.scaling_efficiency() * 100.0,
            vgg.scaling_efficiency() * 100.0
        );
        println!("  resnet50: {resnet:?}");
    }
    println!("\nforming a world, 1 ms");
    for ranks in [512, 4096] {
        let latency = Duration::from_millis(1);
        let forming = FormationEstimate::simulate(
            &SimulatedCluster { latency, ..SimulatedCluster::new(ranks / 8, ranks)? },
            &config,
        )?;
        println!("{ranks} ranks: {forming:?}");
    }
    Ok(())
}

fn scaling_efficiency(
    name: &str,
    hosts: u32,
    ranks: u32,
    gigabits: f64,
    config: &Config,
    overlap_forward: bool,
) -> Result<f64, Box<dyn std::error::Error>> {
    let cluster = SimulatedCluster {
        bandwidth: gigabits * 1e9 / 8.0,
        ..SimulatedCluster::new(hosts, ranks)?
    };
    Ok(simulate_model_step(name, &cluster, config, overlap_forward)?.scaling_efficiency())
}

fn simulate_model_step(
    name: &str,
    cluster: &SimulatedCluster,
    config: &Config,
    overlap_forward: bool,
) -> Result<StepEstimate, Box<dyn std::error::Error>> {
    let model = ModelProfile::from_name(name).ok_or("no such model")?;
    let mut collective = AllreduceSimulator::new(cluster, config)?;
    let control = ControlRound::simulate(cluster)?;
    Ok(StepEstimate::simulate(
        &mut collective,
        &control,
        &model,
        model.timing,
        StepOptions { fusion_threshold: config.fusion_threshold, overlap_forward },
    )?)
}
