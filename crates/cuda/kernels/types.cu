// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

// Types of elements, and how they become what is calculated with. No header of CUDA is included:
// NVRTC needs none then.

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

struct f8e4m3 {
    u8 bits;
};

struct f8e5m2 {
    u8 bits;
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

// 8-bit floats: what `kernel/float8.rs` of the host says of them holds here. LAST is what too large
// numbers become.
template <u32 MANTISSA, u32 BIAS, u32 LAST>
struct Eight {
    __device__ static float widen(u8 code) {
        u32 sign = (u32)(code & 0x80u) << 24, magnitude = code & 0x7fu;
        u32 bits = (magnitude << (23u - MANTISSA)) + ((127u - BIAS) << 23);
        if (magnitude >> MANTISSA == 0) {
            bits = bits_of_float((float)magnitude * float_of_bits((128u - BIAS - MANTISSA) << 23));
        } else if (magnitude > LAST) {
            bits = 0x7fc00000u;
        } else if (magnitude == LAST && LAST % (1u << MANTISSA) == 0) {
            bits = 0x7f800000u;
        }
        return float_of_bits(bits | sign);
    }

    __device__ static u8 narrow(float value) {
        const u32 dropped = 23u - MANTISSA, large = (128u - BIAS + dropped) << 23;
        u32 bits = bits_of_float(value);
        u32 sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu, code;
        if (magnitude > 0x7f800000u) {
            code = 0x7fu;
        } else if (magnitude >= (128u - BIAS) << 23) {
            u32 half = (1u << (dropped - 1u)) - 1u + (magnitude >> dropped & 1u);
            code = (magnitude - ((127u - BIAS) << 23) + half) >> dropped;
            code = code < LAST ? code : LAST;
        } else {
            code = bits_of_float(float_of_bits(magnitude) + float_of_bits(large)) - large;
        }
        return (u8)(code | sign);
    }
};
typedef Eight<3, 7, 0x7e> E4M3;
typedef Eight<2, 15, 0x7c> E5M2;

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
template <>
struct Wide<f8e4m3> {
    typedef float type;
};
template <>
struct Wide<f8e5m2> {
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
template <>
__device__ inline float widen<f8e4m3>(f8e4m3 value) {
    return E4M3::widen(value.bits);
}
template <>
__device__ inline float widen<f8e5m2>(f8e5m2 value) {
    return E5M2::widen(value.bits);
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
template <>
struct Narrow<f8e4m3> {
    __device__ static f8e4m3 of(float value) {
        f8e4m3 made;
        made.bits = E4M3::narrow(value);
        return made;
    }
};
template <>
struct Narrow<f8e5m2> {
    __device__ static f8e5m2 of(float value) {
        f8e5m2 made;
        made.bits = E5M2::narrow(value);
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
