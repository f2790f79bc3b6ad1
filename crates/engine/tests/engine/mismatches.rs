// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use farandole_engine::{CollectiveRequest, Error, RequestKind};
use farandole_kernels::{DataType, ReduceOp};
use farandole_world::{FaultOrigin, Rank};

use crate::cluster::{Cluster, SUM, call, call_sum, request, sum, wait};

/// All ranks of two hosts submit what `of` says; each gets the same text.
fn text(of: impl Fn(u32) -> CollectiveRequest + Sync) -> String {
    let texts = Cluster::new(&[2, 1]).run(|rank, engine| {
        let error = call(&engine, of(rank)).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error:?}");
        // The engine continues, also under this name.
        assert_eq!(call_sum(&engine, "t", &[1.0]), [3.0]);
        error.to_string()
    });
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    texts.into_iter().next().unwrap()
}

#[test]
fn data_types() {
    let text = text(|rank| {
        let dtype = if rank == 2 { DataType::I32 } else { DataType::F32 };
        CollectiveRequest { dtype, ..sum("t", &[1.0, 2.0]) }
    });
    assert_eq!(
        text,
        "Mismatched data types: tensor t: ranks 0-1 submitted allreduce Sum of float32 [2] on the \
         host; rank 2 submitted allreduce Sum of int32 [2] on the host"
    );
}

#[test]
fn operations() {
    let text = text(|rank| {
        let kind = if rank == 1 { RequestKind::Broadcast { root: Rank(0) } } else { SUM };
        request("t", kind, &[1], &[1.0])
    });
    assert!(text.starts_with("Mismatched operations: tensor t: "), "{text}");
    assert!(
        text.contains("rank 1 submitted broadcast of float32 [1] on the host from rank 0"),
        "{text}"
    );
}

#[test]
fn shapes() {
    let reduced = text(|rank| sum("t", &vec![1.0; 1 + rank as usize]));
    assert!(
        reduced.starts_with("Mismatched ALLREDUCE tensor shapes: tensor t: rank 0 submitted"),
        "{reduced}"
    );
    assert_eq!(reduced.matches(" submitted ").count(), 3);
    let gathered = text(|rank| {
        request(
            "t",
            RequestKind::Allgather,
            &[1, u64::from(rank / 2) + 1],
            &vec![1.0; 1 + rank as usize / 2],
        )
    });
    assert!(gathered.starts_with("Mismatched ALLGATHER tensor shapes: "), "{gathered}");
    assert!(gathered.contains("allgather of float32 [.., 2]"), "{gathered}");
}

#[test]
fn factors_reductions_and_roots() {
    let factors = text(|rank| {
        let kind = RequestKind::Allreduce {
            op: ReduceOp::Sum,
            prescale: 1.0 + f64::from(rank / 2),
            postscale: 1.0,
        };
        request("t", kind, &[1], &[1.0])
    });
    assert!(factors.starts_with("Mismatched prescale and/or postscale factors: "), "{factors}");
    let reductions = text(|rank| {
        let op = if rank == 0 { ReduceOp::Min } else { ReduceOp::Max };
        request("t", RequestKind::Allreduce { op, prescale: 1.0, postscale: 1.0 }, &[1], &[1.0])
    });
    assert!(reductions.starts_with("Mismatched reduction operation: "), "{reductions}");
    let roots =
        text(|rank| request("t", RequestKind::Broadcast { root: Rank(rank) }, &[1], &[1.0]));
    assert!(roots.starts_with("Mismatched BROADCAST root ranks: "), "{roots}");
}

/// EN-3: no rank waits for the rest of a group that others do not know, or know in another form.
#[test]
fn ranks_that_group_differently_are_all_told_at_once_in_whatever_they_wait_for() {
    let told = |groups: [&[&[&str]]; 3]| {
        for hosts in [&[1, 2][..], &[3], &[1, 1, 1]] {
            let texts = Cluster::new(hosts).run(|rank, engine| {
                // A late submission gets the error at once.
                let (mut handles, mut errors) = (Vec::new(), Vec::new());
                for group in groups[rank as usize] {
                    let requests = group.iter().map(|name| sum(name, &[1.0]));
                    let submitted = match group {
                        [name] => engine.submit(sum(name, &[1.0])).map(|handle| vec![handle]),
                        _ => engine.submit_group(requests.collect()),
                    };
                    match submitted {
                        Ok(submitted) => handles.extend(submitted),
                        Err(error) => errors.push(error),
                    }
                }
                errors.extend(handles.into_iter().map(|handle| wait(&engine, handle).unwrap_err()));
                errors.push(engine.submit(sum("later", &[1.0])).unwrap_err());
                errors
                    .into_iter()
                    .map(|error| (error.fault(), error.to_string()))
                    .collect::<Vec<_>>()
            });
            for (fault, text) in texts.into_iter().flatten() {
                assert_eq!(fault, FaultOrigin::Usage, "{text}");
                assert!(text.contains("Mismatched groups: tensor "), "{text}");
                assert!(
                    text.contains(" submitted allreduce Sum of float32 [1] on the host"),
                    "{text}"
                );
            }
        }
    };
    let (grouped, single): (&[&[&str]], &[&[&str]]) =
        (&[&["a", "b", "c"]], &[&["a"], &["b"], &["c"]]);
    told([grouped, single, single]);
    told([single, single, grouped]);
    told([single, grouped, single]);
    told([grouped, &[&["b"]], single]);
    told([&[&["a", "b"], &["c"]], &[&["a", "c"], &["b"]], &[&["a", "b"], &["c"]]]);
    told([&[&["a", "b"]], &[&["a", "b"]], &[&["b", "c"]]]);
}

#[test]
fn a_group_of_which_one_member_differs_fails_as_a_whole_and_its_names_are_free_again() {
    Cluster::new(&[1, 2]).run(|rank, engine| {
        let length = if rank == 1 { 2 } else { 1 };
        let group = vec![sum("a", &[1.0]), sum("b", &vec![1.0; length]), sum("c", &[1.0])];
        for handle in engine.submit_group(group).unwrap() {
            let error = wait(&engine, handle).unwrap_err();
            assert!(
                error.to_string().starts_with("Mismatched ALLREDUCE tensor shapes: tensor b: "),
                "{error}"
            );
        }
        for name in ["c", "b", "a"] {
            assert_eq!(call_sum(&engine, name, &[1.0]), [3.0]);
        }
    });
}

#[test]
fn a_refused_name_between_good_ones_harms_none() {
    Cluster::new(&[2, 1]).run(|rank, engine| {
        let names: Vec<String> = (0..30).map(|k| format!("t{k}")).collect();
        let length = |k: usize| if k % 10 == 3 && rank == 1 { 2 } else { 1 };
        let handles: Vec<_> = (0..30)
            .map(|k| engine.submit(sum(&names[k], &vec![1.0; length(k)])).unwrap())
            .collect();
        for (k, handle) in handles.into_iter().enumerate() {
            assert_eq!(wait(&engine, handle).is_err(), k % 10 == 3);
        }
    });
}
