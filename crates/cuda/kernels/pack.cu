// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

// Many tensors into one buffer and back in one launch, multiplied and converted on the way.
//
// A block has one tile of one tensor. Tensors lie in the buffer at multiples of 16 bytes, so tiles
// of tensors that are aligned themselves go by 16 bytes; what is left over at a tensor's end, and
// tensors that are not aligned, go element by element.

#define TENSORS 160
#define TILE 4096

// A launch: 3848 bytes, as arguments of kernels may have 4096.
struct Batch {
    // Where tensors are.
    u64 address[TENSORS];
    // Their elements.
    u64 count[TENSORS];
    // Where each lies in the buffer, in 16 bytes.
    u32 start[TENSORS];
    // Tiles of this tensor and of those before it.
    u32 tiles[TENSORS];
    u32 tensors;
};

template <class From, class To>
struct Convert {
    __device__ static To of(From value, double factor) {
        typedef typename Wide<From>::type Value;
        return Narrow<To>::of(widen<From>(value) * (Value)factor);
    }
};

// Moves what is only bytes, and is not multiplied.
template <class T>
struct Keep {
    __device__ static T of(T value, double) {
        return value;
    }
};

template <class From, class To, class How>
__device__ inline void move(const From *from, To *to, u64 count, double factor) {
    const int step = Sixteen<From>::COUNT > Sixteen<To>::COUNT ? Sixteen<From>::COUNT : Sixteen<To>::COUNT;
    u64 whole = is_aligned((u64)from) && is_aligned((u64)to) ? count / step * step : 0;
    for (u64 i = (u64)threadIdx.x * step; i < whole; i += (u64)blockDim.x * step) {
        Sixteen<From> in[step / Sixteen<From>::COUNT];
        Sixteen<To> out[step / Sixteen<To>::COUNT];
        const Sixteen<From> *source = (const Sixteen<From> *)(from + i);
        Sixteen<To> *target = (Sixteen<To> *)(to + i);
#pragma unroll
        for (int k = 0; k < step / Sixteen<From>::COUNT; ++k) {
            in[k] = source[k];
        }
#pragma unroll
        for (int k = 0; k < step; ++k) {
            out[k / Sixteen<To>::COUNT].at[k % Sixteen<To>::COUNT] =
                How::of(in[k / Sixteen<From>::COUNT].at[k % Sixteen<From>::COUNT], factor);
        }
#pragma unroll
        for (int k = 0; k < step / Sixteen<To>::COUNT; ++k) {
            target[k] = out[k];
        }
    }
    for (u64 i = whole + threadIdx.x; i < count; i += blockDim.x) {
        to[i] = How::of(from[i], factor);
    }
}

// The tensor of this block, and which elements of it.
struct Part {
    u32 tensor;
    u64 first;
    u64 count;
};

__device__ inline Part part_of(const Batch &batch) {
    u32 low = 0;
    u32 high = batch.tensors - 1;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (batch.tiles[middle] <= blockIdx.x) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    u32 before = low == 0 ? 0 : batch.tiles[low - 1];
    Part part;
    part.tensor = low;
    part.first = (u64)(blockIdx.x - before) * TILE;
    u64 left = batch.count[low] - part.first;
    part.count = left < TILE ? left : TILE;
    return part;
}

template <class From, class To, class How>
__device__ inline void pack(const Batch &batch, u8 *base, double factor) {
    Part part = part_of(batch);
    const From *from = (const From *)batch.address[part.tensor];
    To *to = (To *)(base + (u64)batch.start[part.tensor] * 16);
    move<From, To, How>(from + part.first, to + part.first, part.count, factor);
}

template <class From, class To, class How>
__device__ inline void unpack(const Batch &batch, u8 *base, double factor) {
    Part part = part_of(batch);
    const From *from = (const From *)(base + (u64)batch.start[part.tensor] * 16);
    To *to = (To *)batch.address[part.tensor];
    move<From, To, How>(from + part.first, to + part.first, part.count, factor);
}

// `pack_<tensor>_<buffer>`, and `unpack_<tensor>_<buffer>` the other way.
#define MOVES(TENSOR, BUFFER)                                                                              \
    extern "C" __global__ void pack_##TENSOR##_##BUFFER(Batch batch, u8 *base, double factor) {            \
        pack<TENSOR, BUFFER, Convert<TENSOR, BUFFER>>(batch, base, factor);                                \
    }                                                                                                      \
    extern "C" __global__ void unpack_##TENSOR##_##BUFFER(Batch batch, u8 *base, double factor) {          \
        unpack<BUFFER, TENSOR, Convert<BUFFER, TENSOR>>(batch, base, factor);                              \
    }
#define KEEPS(TYPE)                                                                                        \
    extern "C" __global__ void pack_##TYPE(Batch batch, u8 *base, double factor) {                         \
        pack<TYPE, TYPE, Keep<TYPE>>(batch, base, factor);                                                 \
    }                                                                                                      \
    extern "C" __global__ void unpack_##TYPE(Batch batch, u8 *base, double factor) {                       \
        unpack<TYPE, TYPE, Keep<TYPE>>(batch, base, factor);                                               \
    }

typedef float f32;
typedef double f64;

MOVES(f32, f32)
MOVES(f32, f16)
MOVES(f32, bf16)
MOVES(f16, f16)
MOVES(bf16, bf16)
MOVES(f64, f64)
KEEPS(u8)
KEEPS(u16)
KEEPS(u32)
KEEPS(u64)
