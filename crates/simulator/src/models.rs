// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The layers of three models, from their published architectures, in `float32`.

use std::time::Duration;

/// Bytes of a parameter.
const BYTES_PER_PARAMETER: u64 = 4;

/// One tensor of parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelLayer {
    /// Place in the model.
    pub name: String,
    /// Bytes of its gradient.
    pub bytes: u64,
    /// Multiplications of its forward pass for one example; 0 where they are few.
    pub work: u64,
}

/// Passes on one rank without waits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassTiming {
    /// The forward pass, and the update of parameters.
    pub forward: Duration,
    /// The backward pass.
    pub backward: Duration,
}

/// A model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelProfile {
    /// As the command calls it.
    pub name: &'static str,
    /// In the order of the forward pass.
    pub layers: Vec<ModelLayer>,
    /// Passes on one GPU, by default.
    pub timing: PassTiming,
    /// Source of these times.
    pub source: &'static str,
}

impl ModelProfile {
    /// Their names.
    pub const MODEL_NAMES: [&'static str; 3] = ["resnet50", "bert-large", "vgg16"];

    /// Returns the model of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "resnet50" => Some(resnet50_profile()),
            "bert-large" => Some(bert_large_profile()),
            "vgg16" => Some(vgg16_profile()),
            _ => None,
        }
    }

    /// Returns the bytes of all gradients.
    pub fn gradient_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.bytes).sum()
    }
}

/// Collects layers.
#[derive(Default)]
struct LayerStack(Vec<ModelLayer>);

impl LayerStack {
    fn push(&mut self, name: String, parameters: u64, work: u64) {
        self.0.push(ModelLayer { name, bytes: parameters * BYTES_PER_PARAMETER, work });
    }

    /// Adds a convolution of `kernel` x `kernel` without bias, to `size` x `size` places.
    fn push_convolution(&mut self, name: &str, kernel: u64, from: u64, to: u64, size: u64) {
        let parameters = kernel * kernel * from * to;
        self.push(format!("{name}.weight"), parameters, parameters * size * size);
    }

    /// Adds two vectors: batch or layer normalization.
    fn push_normalization(&mut self, name: &str, width: u64) {
        self.push(format!("{name}.weight"), width, 0);
        self.push(format!("{name}.bias"), width, 0);
    }

    /// Adds a matrix and a bias, applied at `places`.
    fn push_linear(&mut self, name: &str, from: u64, to: u64, places: u64) {
        self.push(format!("{name}.weight"), from * to, from * to * places);
        self.push(format!("{name}.bias"), to, 0);
    }
}

/// Returns the time of a step of so many examples at a rate: a third of it is the forward pass, as
/// the backward pass computes gradients of inputs and of weights.
fn timing_from_rate(examples: f64, rate: f64) -> PassTiming {
    let step = examples / rate;
    PassTiming {
        forward: Duration::from_secs_f64(step / 3.0),
        backward: Duration::from_secs_f64(step * 2.0 / 3.0),
    }
}

/// He et al., "Deep Residual Learning for Image Recognition", table 1; images of 224 x 224.
fn resnet50_profile() -> ModelProfile {
    let mut stack = LayerStack::default();
    stack.push_convolution("conv1", 7, 3, 64, 112);
    stack.push_normalization("bn1", 64);
    let mut width = 64;
    for (stage, (blocks, inner, size)) in
        [(3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)].into_iter().enumerate()
    {
        for block in 0..blocks {
            let name = |part: &str| format!("layer{}.{block}.{part}", stage + 1);
            // The first block of a stage halves the image in its second convolution (version 1.5);
            // its first one sees the larger image.
            let before = if block == 0 && stage > 0 { 2 * size } else { size };
            stack.push_convolution(&name("conv1"), 1, width, inner, before);
            stack.push_normalization(&name("bn1"), inner);
            stack.push_convolution(&name("conv2"), 3, inner, inner, size);
            stack.push_normalization(&name("bn2"), inner);
            stack.push_convolution(&name("conv3"), 1, inner, 4 * inner, size);
            stack.push_normalization(&name("bn3"), 4 * inner);
            if block == 0 {
                stack.push_convolution(&name("downsample.0"), 1, width, 4 * inner, size);
                stack.push_normalization(&name("downsample.1"), 4 * inner);
            }
            width = 4 * inner;
        }
    }
    stack.push_linear("fc", width, 1000, 1);
    ModelProfile {
        name: "resnet50",
        layers: stack.0,
        timing: timing_from_rate(64.0, 219.0),
        source: "64 images at 219 images/s: one P100 in TensorFlow's benchmarks of May 2017, \
                 synthetic data",
    }
}

/// Simonyan and Zisserman, "Very Deep Convolutional Networks", configuration D; images of 224
/// x 224.
fn vgg16_profile() -> ModelProfile {
    let mut stack = LayerStack::default();
    let mut from = 3;
    for (stage, (convolutions, to, size)) in
        [(2, 64, 224), (2, 128, 112), (3, 256, 56), (3, 512, 28), (3, 512, 14)]
            .into_iter()
            .enumerate()
    {
        for number in 0..convolutions {
            let name = format!("conv{}_{}", stage + 1, number + 1);
            stack.push_convolution(&name, 3, from, to, size);
            stack.push(format!("{name}.bias"), to, 0);
            from = to;
        }
    }
    stack.push_linear("fc6", 512 * 7 * 7, 4096, 1);
    stack.push_linear("fc7", 4096, 4096, 1);
    stack.push_linear("fc8", 4096, 1000, 1);
    ModelProfile {
        name: "vgg16",
        layers: stack.0,
        timing: timing_from_rate(64.0, 154.0),
        source: "64 images at 154 images/s: one P100 in TensorFlow's benchmarks of May 2017, \
                 synthetic data",
    }
}

/// Devlin et al., "BERT", the large model with its pooler and without heads; sequences of 512
/// tokens.
fn bert_large_profile() -> ModelProfile {
    let (width, inner, tokens) = (1024, 4096, 512);
    let mut stack = LayerStack::default();
    for (name, rows) in [("word", 30_522), ("position", 512), ("token_type", 2)] {
        stack.push(format!("embeddings.{name}.weight"), rows * width, 0);
    }
    stack.push_normalization("embeddings.norm", width);
    for layer in 0..24 {
        let name = |part: &str| format!("layer.{layer}.{part}");
        for part in ["query", "key", "value", "output"] {
            stack.push_linear(&name(part), width, width, tokens);
        }
        stack.push_normalization(&name("attention.norm"), width);
        stack.push_linear(&name("intermediate"), width, inner, tokens);
        stack.push_linear(&name("dense"), inner, width, tokens);
        stack.push_normalization(&name("norm"), width);
    }
    stack.push_linear("pooler", width, width, 1);
    // 6 operations for each parameter and token, at half the peak single-precision rate of a P100.
    let sequence = 6.0 * 335.1e6 * 512.0;
    ModelProfile {
        name: "bert-large",
        layers: stack.0,
        timing: timing_from_rate(8.0, 0.5 * 10.6e12 / sequence),
        source: "an estimate: 8 sequences of 512 tokens, 6 operations for each parameter and \
                 token, half of a P100's 10.6 Tflop/s",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(name: &str) -> (usize, u64) {
        let model = ModelProfile::from_name(name).unwrap();
        (model.layers.len(), model.gradient_bytes() / BYTES_PER_PARAMETER)
    }

    #[test]
    fn models_have_the_parameters_that_are_published() {
        assert_eq!(parameters("resnet50"), (161, 25_557_032));
        assert_eq!(parameters("vgg16"), (32, 138_357_544));
        assert_eq!(parameters("bert-large"), (391, 335_141_888));
        assert!(
            ModelProfile::MODEL_NAMES
                .iter()
                .all(|name| ModelProfile::from_name(name).is_some_and(|model| model.name == *name))
        );
        assert!(ModelProfile::from_name("alexnet").is_none());
    }

    #[test]
    fn images_take_the_multiplications_that_are_published() {
        let work = |name: &str| {
            ModelProfile::from_name(name)
                .unwrap()
                .layers
                .iter()
                .map(|layer| layer.work)
                .sum::<u64>()
        };
        // 4.1 and 15.5 thousand millions.
        assert!((4_000_000_000..4_200_000_000).contains(&work("resnet50")), "{}", work("resnet50"));
        assert!((15_300_000_000..15_600_000_000).contains(&work("vgg16")), "{}", work("vgg16"));
    }
}
