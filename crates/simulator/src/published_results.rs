// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Scaling efficiencies that others have published.

/// A published measurement of others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PublishedEfficiency {
    /// The trained model.
    pub model: &'static str,
    /// GPUs.
    pub ranks: u32,
    /// Images per second of all GPUs, divided by images per second of one GPU times their number.
    pub efficiency: f64,
}

/// Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow" (2018),
/// on 128 hosts with four Pascal GPUs each and RDMA over 25 Gbit/s.
pub const PUBLISHED_EFFICIENCIES: [PublishedEfficiency; 3] = [
    PublishedEfficiency { model: "Inception V3", ranks: 512, efficiency: 0.90 },
    PublishedEfficiency { model: "ResNet-101", ranks: 512, efficiency: 0.90 },
    PublishedEfficiency { model: "VGG-16", ranks: 512, efficiency: 0.68 },
];
