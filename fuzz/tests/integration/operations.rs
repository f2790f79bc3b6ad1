// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A communicator among peers that send garbage: it fails or waits, and never completes an
//! operation by it.

use farandole_collectives::{CollectiveOperation, Communicator, HostCommunicator, OperationToken};
use farandole_fuzz::cases;
use farandole_transport::loopback;
use farandole_world::Rank;

#[test]
fn a_greeting_of_garbage_is_refused() {
    cases(|random| {
        let (a, mut b) = loopback::link_pair(Rank(0), Rank(1), 4096).unwrap();
        let mut communicator = HostCommunicator::new(Rank(0), vec![a]).unwrap();
        communicator.submit_operation(OperationToken(1), CollectiveOperation::Barrier).unwrap();
        let mut completed = Vec::new();
        for _ in 0..random.below(20) {
            let bytes = random.bytes(128);
            let Ok(window) = b.sender.window() else { break };
            let fits = bytes.len().min(window.len());
            window[..fits].copy_from_slice(&bytes[..fits]);
            b.sender.commit(fits).unwrap();
            if communicator.make_progress(&mut completed).is_err() {
                assert!(
                    communicator
                        .submit_operation(OperationToken(2), CollectiveOperation::Barrier)
                        .is_err(),
                    "a failure lasts"
                );
                break;
            }
        }
        assert_eq!(completed, []);
    });
}
