// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

// The reduction of all members' buffers, where one GPU can read them all: `post * ((pre * x0) op
// (pre * x1) op ...)`, in member order, with the arithmetic of the host's kernels, so that the bits
// are the same.

#define MEMBERS 64

struct Inputs {
    u64 address[MEMBERS];
    u32 members;
    u32 op;
    double prescale;
    double postscale;
};

enum Op {
    AVERAGE = 0,
    SUM = 1,
    MIN = 3,
    MAX = 4,
    PRODUCT = 5,
};

// Calculates with T: floats as they are, those of 16 and 8 bits in singles.
template <class T>
struct Floats {
    typedef typename Wide<T>::type Value;

    __device__ static Value scaled(Value value, double factor) {
        return value * (Value)factor;
    }

    __device__ static Value take(T value, double prescale, u32) {
        return scaled(widen<T>(value), prescale);
    }

    __device__ static Value join(Value a, Value b, u32 op) {
        switch (op) {
        case MIN:
            return a < b || a != a ? a : b;
        case MAX:
            return a > b || a != a ? a : b;
        case PRODUCT:
            return a * b;
        default:
            return a + b;
        }
    }

    __device__ static T give(Value value, u32 members, double postscale, u32 op) {
        if (op == AVERAGE) {
            value /= (Value)members;
        }
        return Narrow<T>::of(scaled(value, postscale));
    }
};

// Integers: sums and products wrap around, averages have room. LEAST and MOST are those of T;
// UNSIGNED wraps as T does.
template <class T, class UNSIGNED, class ROOM, bool SIGNED>
struct Integers {
    typedef ROOM Value;

    __device__ static T scaled(T value, double factor) {
        if (factor == 1.0) {
            return value;
        }
        const UNSIGNED all = (UNSIGNED)~(UNSIGNED)0;
        const T most = (T)(SIGNED ? all >> 1 : all);
        const T least = SIGNED ? (T)(-most - 1) : (T)0;
        double result = (double)value * factor;
        if (result != result) {
            return 0;
        }
        // `most` may round up to what no T is.
        if (result >= (double)most) {
            return most;
        }
        return result <= (double)least ? least : (T)result;
    }

    __device__ static Value take(T value, double prescale, u32) {
        return (Value)scaled(value, prescale);
    }

    __device__ static Value join(Value a, Value b, u32 op) {
        switch (op) {
        case MIN:
            return a < b ? a : b;
        case MAX:
            return a > b ? a : b;
        case PRODUCT:
            return (Value)(T)(UNSIGNED)((u64)a * (u64)b);
        case SUM:
            return (Value)(T)(UNSIGNED)((u64)a + (u64)b);
        default:
            return a + b;
        }
    }

    __device__ static T give(Value value, u32 members, double postscale, u32 op) {
        if (op == AVERAGE) {
            value = value / (Value)members;
        }
        return scaled((T)value, postscale);
    }
};

// Any byte but 0 is true.
struct Truths {
    typedef u8 Value;

    __device__ static Value take(truth value, double, u32) {
        return value.byte != 0;
    }

    __device__ static Value join(Value a, Value b, u32 op) {
        return op == MIN || op == PRODUCT ? a & b : a | b;
    }

    __device__ static truth give(Value value, u32, double, u32) {
        truth made;
        made.byte = value;
        return made;
    }
};

template <class T, class How>
__device__ inline T reduced(const Inputs &inputs, u64 i) {
    typename How::Value value = How::take(((const T *)inputs.address[0])[i], inputs.prescale, inputs.op);
    for (u32 member = 1; member < inputs.members; ++member) {
        T next = ((const T *)inputs.address[member])[i];
        value = How::join(value, How::take(next, inputs.prescale, inputs.op), inputs.op);
    }
    return How::give(value, inputs.members, inputs.postscale, inputs.op);
}

template <class T, class How>
__device__ inline void reduce(const Inputs &inputs, T *out, u64 count) {
    const int step = Sixteen<T>::COUNT;
    bool aligned = is_aligned((u64)out);
    for (u32 member = 0; member < inputs.members; ++member) {
        aligned = aligned && is_aligned(inputs.address[member]);
    }
    u64 whole = aligned ? count / step * step : 0;
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = thread * step; i < whole; i += threads * step) {
        typename How::Value values[step];
        for (u32 member = 0; member < inputs.members; ++member) {
            Sixteen<T> in = *(const Sixteen<T> *)((const T *)inputs.address[member] + i);
#pragma unroll
            for (int k = 0; k < step; ++k) {
                typename How::Value value = How::take(in.at[k], inputs.prescale, inputs.op);
                values[k] = member == 0 ? value : How::join(values[k], value, inputs.op);
            }
        }
        Sixteen<T> result;
#pragma unroll
        for (int k = 0; k < step; ++k) {
            result.at[k] = How::give(values[k], inputs.members, inputs.postscale, inputs.op);
        }
        *(Sixteen<T> *)(out + i) = result;
    }
    for (u64 i = whole + thread; i < count; i += threads) {
        out[i] = reduced<T, How>(inputs, i);
    }
}

#define REDUCE(T, ...)                                                                                     \
    extern "C" __global__ void reduce_##T(Inputs inputs, T *out, u64 count) {                              \
        reduce<T, __VA_ARGS__>(inputs, out, count);                                                        \
    }

REDUCE(f32, Floats<f32>)
REDUCE(f64, Floats<f64>)
REDUCE(f16, Floats<f16>)
REDUCE(bf16, Floats<bf16>)
REDUCE(f8e4m3, Floats<f8e4m3>)
REDUCE(f8e5m2, Floats<f8e5m2>)
REDUCE(i8, Integers<i8, u8, i64, true>)
REDUCE(u8, Integers<u8, u8, i64, false>)
REDUCE(i16, Integers<i16, u16, i64, true>)
REDUCE(u16, Integers<u16, u16, i64, false>)
REDUCE(i32, Integers<i32, u32, i64, true>)
REDUCE(u32, Integers<u32, u32, i64, false>)
REDUCE(i64, Integers<i64, u64, __int128, true>)
REDUCE(u64, Integers<u64, u64, __int128, false>)
REDUCE(truth, Truths)
