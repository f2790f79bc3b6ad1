// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The facade for bindings: re-exports, with one module for each crate. It has no logic and no
//! types.
//!
//! ```text
//! python ──┐
//! cli ─────┼─> farandole ──> session, launcher, engine, ... : each crate under its own name
//! ffi ─────┘
//! ```

pub use farandole_collectives as collectives;
pub use farandole_config as config;
pub use farandole_cuda as cuda;
pub use farandole_dataset as dataset;
pub use farandole_engine as engine;
pub use farandole_images as images;
pub use farandole_kernels as kernels;
pub use farandole_launcher as launcher;
pub use farandole_prepare as prepare;
pub use farandole_reader as reader;
pub use farandole_registrar as registrar;
pub use farandole_session as session;
pub use farandole_store as store;
pub use farandole_telemetry as telemetry;
pub use farandole_transport as transport;
pub use farandole_ui as ui;
pub use farandole_world as world;
