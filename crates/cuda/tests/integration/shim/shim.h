// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

// What the kernels need of CUDA, on a host: each thread of a block is called by turns, or, where
// threads wait for each other, is a thread of the system.

#pragma once
#define FARANDOLE_ON_HOST
#include <pthread.h>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

struct Index {
    unsigned x;
};

static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
static pthread_barrier_t *barrier = nullptr;
static std::mutex turn;

#define __device__
#define __global__ __attribute__((visibility("default")))
#define __shared__ static

static inline void __syncthreads() {
    pthread_barrier_wait(barrier);
}

static inline float float_of_bits(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline unsigned bits_of_float(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

static inline float float_of_half(unsigned short bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return (float)value;
}

static inline unsigned short half_of_float(float value) {
    _Float16 half = (_Float16)value;
    unsigned short bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

// One thread after the other.
template <class Body>
static void by_turns(unsigned blocks, unsigned threads, Body body) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (unsigned block = 0; block < blocks; ++block) {
        for (unsigned thread = 0; thread < threads; ++thread) {
            blockIdx.x = block;
            threadIdx.x = thread;
            body();
        }
    }
}

// The threads of a block at the same time; one launch after the other, since what a block shares is
// there once.
template <class Body>
static void together(unsigned blocks, unsigned threads, Body body) {
    std::lock_guard<std::mutex> lock(turn);
    pthread_barrier_t meeting;
    pthread_barrier_init(&meeting, nullptr, threads);
    barrier = &meeting;
    for (unsigned block = 0; block < blocks; ++block) {
        std::vector<std::thread> all;
        for (unsigned thread = 0; thread < threads; ++thread) {
            all.emplace_back([=] {
                gridDim.x = blocks;
                blockDim.x = threads;
                blockIdx.x = block;
                threadIdx.x = thread;
                body();
            });
        }
        for (std::thread &one : all) {
            one.join();
        }
    }
    pthread_barrier_destroy(&meeting);
    barrier = nullptr;
}
