// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use farandole_engine::{AutotuneOptions, CollectiveRequest};
use farandole_world::ProcessSetId;

use crate::cluster::{Cluster, call, call_sum, sum, values};

#[test]
fn autotune_ends_by_itself_and_logs_what_it_tried_while_results_stay_right() {
    let path = std::env::temp_dir().join(format!("farandole-autotune-{}.csv", std::process::id()));
    let log = path.to_str().unwrap().to_owned();
    let tune = AutotuneOptions { warmup_samples: 1, steps_per_score: 2, max_samples: 3, log };
    Cluster::new(&[2, 1]).with(|settings| settings.tune = Some(tune)).run(|_, engine| {
        // A warm-up sample and three others of five scores, each of two steps and the beginning of
        // a third.
        for _ in 0..60 {
            let handles =
                ["a", "b", "c"].map(|name| engine.submit(sum(name, &[1.0, 2.0])).unwrap());
            for handle in handles {
                assert_eq!(values(&engine, handle), [3.0, 6.0]);
            }
        }
        call(&engine, CollectiveRequest::barrier("over", ProcessSetId::GLOBAL)).unwrap();
        assert_eq!(call_sum(&engine, "other", &[1.0]), [3.0]);
    });
    let log = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let rows: Vec<&str> = log.lines().collect();
    assert!(rows[0].ends_with("tensor_fusion_threshold,score"), "{log}");
    assert_eq!(rows.len(), 1 + 3 + 1, "{log}");
    assert!(rows[1..].iter().all(|row| row.split(',').count() == 7), "{log}");
}
