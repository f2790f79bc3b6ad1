// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

// Adasum of two vectors: their products first, then the sum they give. Products and factors are
// doubles; which thread adds which in which order depends on the number of blocks alone, so the
// bits are the same from run to run.

#define THREADS 256

// Adds what the threads of a block have, in pairs; thread 0 writes the three sums.
__device__ inline void add_up(double dot, double first, double second, double *out) {
    __shared__ double sums[3][THREADS];
    sums[0][threadIdx.x] = dot;
    sums[1][threadIdx.x] = first;
    sums[2][threadIdx.x] = second;
    __syncthreads();
    for (u32 distance = THREADS / 2; distance > 0; distance /= 2) {
        if (threadIdx.x < distance) {
            for (int k = 0; k < 3; ++k) {
                sums[k][threadIdx.x] += sums[k][threadIdx.x + distance];
            }
        }
        __syncthreads();
    }
    if (threadIdx.x < 3) {
        out[threadIdx.x] = sums[threadIdx.x][0];
    }
    __syncthreads();
}

// Three sums of each block, one after the other.
template <class T>
__device__ inline void products(const T *a, const T *b, u64 count, double *sums) {
    double dot = 0, first = 0, second = 0;
    const int step = Sixteen<T>::COUNT;
    u64 whole = is_aligned((u64)a) && is_aligned((u64)b) ? count / step * step : 0;
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = thread * step; i < whole; i += threads * step) {
        Sixteen<T> x = *(const Sixteen<T> *)(a + i);
        Sixteen<T> y = *(const Sixteen<T> *)(b + i);
#pragma unroll
        for (int k = 0; k < step; ++k) {
            double p = widen<T>(x.at[k]), q = widen<T>(y.at[k]);
            dot += p * q;
            first += p * p;
            second += q * q;
        }
    }
    for (u64 i = whole + thread; i < count; i += threads) {
        double p = widen<T>(a[i]), q = widen<T>(b[i]);
        dot += p * q;
        first += p * p;
        second += q * q;
    }
    add_up(dot, first, second, sums + 3 * (u64)blockIdx.x);
}

// One block: the sums of all blocks, to the front of `sums`.
extern "C" __global__ void adasum_total(double *sums, u32 blocks) {
    double dot = 0, first = 0, second = 0;
    for (u32 i = threadIdx.x; i < blocks; i += blockDim.x) {
        dot += sums[3 * (u64)i];
        first += sums[3 * (u64)i + 1];
        second += sums[3 * (u64)i + 2];
    }
    __syncthreads();
    add_up(dot, first, second, sums);
}

__device__ inline double factor_of(double dot, double length) {
    // The square root of the smallest normal number: a shorter vector counts as none.
    return length < 1.4916681462400413e-154 ? 1.0 : 1.0 - dot / (2.0 * length);
}

template <class T>
__device__ inline void combine(const T *a, const T *b, T *out, u64 count, const double *sums) {
    typedef typename Wide<T>::type Value;
    double mine = factor_of(sums[0], sums[1]), theirs = factor_of(sums[0], sums[2]);
    const int step = Sixteen<T>::COUNT;
    bool aligned = is_aligned((u64)a) && is_aligned((u64)b) && is_aligned((u64)out);
    u64 whole = aligned ? count / step * step : 0;
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = thread * step; i < whole; i += threads * step) {
        Sixteen<T> x = *(const Sixteen<T> *)(a + i);
        Sixteen<T> y = *(const Sixteen<T> *)(b + i);
#pragma unroll
        for (int k = 0; k < step; ++k) {
            double sum = mine * (double)widen<T>(x.at[k]) + theirs * (double)widen<T>(y.at[k]);
            x.at[k] = Narrow<T>::of((Value)sum);
        }
        *(Sixteen<T> *)(out + i) = x;
    }
    for (u64 i = whole + thread; i < count; i += threads) {
        double sum = mine * (double)widen<T>(a[i]) + theirs * (double)widen<T>(b[i]);
        out[i] = Narrow<T>::of((Value)sum);
    }
}

#define ADASUM(T)                                                                                          \
    extern "C" __global__ void adasum_products_##T(const T *a, const T *b, u64 count, double *sums) {      \
        products<T>(a, b, count, sums);                                                                    \
    }                                                                                                      \
    extern "C" __global__ void adasum_combine_##T(                                                         \
        const T *a, const T *b, T *out, u64 count, const double *sums) {                                   \
        combine<T>(a, b, out, count, sums);                                                                \
    }

ADASUM(f32)
ADASUM(f64)
ADASUM(f16)
ADASUM(bf16)
