// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! memfd segments, mirrored rings and the hand-over of descriptors between processes.
