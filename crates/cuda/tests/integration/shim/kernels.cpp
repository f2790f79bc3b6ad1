// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

// The kernels as functions of a host, and a way to launch each kind of them.

#include "shim.h"

#include "types.cu"
#include "pack.cu"
#include "adasum.cu"
#include "reduce.cu"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void run_move(void (*kernel)(Batch, u8 *, double), const Batch *batch, u8 *base, double factor, u32 blocks) {
    by_turns(blocks, 256, [=] { kernel(*batch, base, factor); });
}

EXPORT void run_reduce(void (*kernel)(Inputs, void *, u64), const Inputs *inputs, void *out, u64 count, u32 blocks) {
    by_turns(blocks, 256, [=] { kernel(*inputs, out, count); });
}

EXPORT void run_products(
    void (*kernel)(const void *, const void *, u64, double *), const void *a, const void *b, u64 count, double *sums,
    u32 blocks) {
    together(blocks, 256, [=] { kernel(a, b, count, sums); });
}

EXPORT void run_total(void (*kernel)(double *, u32), double *sums, u32 blocks) {
    together(1, 256, [=] { kernel(sums, blocks); });
}

EXPORT void run_combine(
    void (*kernel)(const void *, const void *, void *, u64, const double *), const void *a, const void *b, void *out,
    u64 count, const double *sums, u32 blocks) {
    by_turns(blocks, 256, [=] { kernel(a, b, out, count, sums); });
}
