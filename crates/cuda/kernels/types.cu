// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

// Types of elements, and how they become what is calculated with. No header of CUDA is included: NVRTC needs none then.

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct f16 {
    u16 bits;
};

struct bf16 {
    u16 bits;
};

// One byte that is 0 or 1.
struct truth {
    u8 byte;
};

#ifndef FARANDOLE_ON_HOST
__device__ inline float float_of_bits(u32 bits) {
    return __uint_as_float(bits);
}

__device__ inline u32 bits_of_float(float value) {
    return __float_as_uint(value);
}

__device__ inline float float_of_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ inline u16 half_of_float(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

__device__ inline float float_of_bfloat(u16 bits) {
    return float_of_bits((u32)bits << 16);
}

// Rounds to nearest even; a NaN stays one.
__device__ inline u16 bfloat_of_float(float value) {
    u32 bits = bits_of_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (u16)(bits >> 16 | 0x40u);
    }
    return (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// What a type is calculated in.
template <class T>
struct Wide {
    typedef T type;
};
template <>
struct Wide<f16> {
    typedef float type;
};
template <>
struct Wide<bf16> {
    typedef float type;
};

template <class T>
__device__ inline typename Wide<T>::type widen(T value) {
    return value;
}
template <>
__device__ inline float widen<f16>(f16 value) {
    return float_of_half(value.bits);
}
template <>
__device__ inline float widen<bf16>(bf16 value) {
    return float_of_bfloat(value.bits);
}

template <class T>
struct Narrow {
    template <class V>
    __device__ static T of(V value) {
        return (T)value;
    }
};
template <>
struct Narrow<f16> {
    __device__ static f16 of(float value) {
        f16 made;
        made.bits = half_of_float(value);
        return made;
    }
};
template <>
struct Narrow<bf16> {
    __device__ static bf16 of(float value) {
        bf16 made;
        made.bits = bfloat_of_float(value);
        return made;
    }
};

// Elements that are moved by one instruction: 16 bytes.
template <class T>
struct alignas(16) Sixteen {
    static const int COUNT = 16 / sizeof(T);
    T at[COUNT];
};

__device__ inline bool is_aligned(u64 address) {
    return address % 16 == 0;
}
