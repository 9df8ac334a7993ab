// Shared by all kernels: element types, 16-byte vectors, the pointer table and the loop over it.
// No CUDA header is included: NVRTC has none, and a host compiler needs none. The same text
// is built three times: by NVRTC for a GPU, by g++ "exact" (every block and thread of a launch in
// turn) and by g++ "fast" (GRADREDUCE_FAST: one thread, which the compiler may vectorise).

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if defined(__CUDACC__)
#define DEVICE __device__ __forceinline__
#define TABLE_ARGUMENT const __grid_constant__ Table
#define UNROLL _Pragma("unroll")
// From sm_100 on the compiler unrolls grid-stride loops (272 loads instead of 96, 2.5 times the
// compile time) and gains nothing: NVRTC 12.9, 2026-11.
#define NO_UNROLL _Pragma("unroll 1")
#define INDEPENDENT
#else
#define DEVICE inline
#define __global__ static inline
#define __launch_bounds__(...)
#define TABLE_ARGUMENT const Table
#define UNROLL _Pragma("GCC unroll 16")
#define NO_UNROLL
#define INDEPENDENT _Pragma("GCC ivdep")  // operands alias exactly or not at all
struct Dim3 { unsigned int x, y, z; };
#if defined(GRADREDUCE_FAST)
static constexpr Dim3 threadIdx = {0, 0, 0}, blockIdx = {0, 0, 0}, blockDim = {1, 1, 1}, gridDim = {1, 1, 1};
#else
static thread_local Dim3 threadIdx, blockIdx, blockDim, gridDim;
#endif
#endif

// ---- elements ----------------------------------------------------------------------------------

struct f16 { u16 bits; };   // IEEE binary16
struct bf16 { u16 bits; };  // the upper half of a float

DEVICE float widen(f16 value) {
#if defined(__CUDACC__)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
#else
    _Float16 half;
    __builtin_memcpy(&half, &value.bits, 2);
    return (float)half;
#endif
}

DEVICE float widen(bf16 value) {
    union { u32 bits; float wide; } pun;
    pun.bits = (u32)value.bits << 16;
    return pun.wide;
}

template <typename T> DEVICE T widen(T value) { return value; }

// to<T> rounds once, to nearest, ties to even.
template <typename To> struct to {
    template <typename From> static DEVICE To from(From value) { return (To)value; }
};

template <> struct to<f16> {
    static DEVICE f16 from(float value) {
        f16 half;
#if defined(__CUDACC__)
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(value));
#else
        _Float16 narrow = (_Float16)value;
        __builtin_memcpy(&half.bits, &narrow, 2);
#endif
        return half;
    }
};

template <> struct to<bf16> {
    static DEVICE bf16 from(float value) {
        union { float wide; u32 bits; } pun;
        pun.wide = value;
        // Add just under half a unit, and one more if the kept part is odd. A NaN must not be
        // rounded up into an infinity, so it only keeps its upper half, made quiet.
        u32 rounded = (pun.bits + 0x7fffu + ((pun.bits >> 16) & 1u)) >> 16;
        u32 quiet = (pun.bits >> 16) | 0x40u;
        bf16 half;
        half.bits = (u16)((pun.bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
        return half;
    }
};

// The accumulate type of T.
template <typename T> struct accumulate { typedef T type; };
template <> struct accumulate<f16> { typedef float type; };
template <> struct accumulate<bf16> { typedef float type; };

template <typename T> struct is_float { static constexpr bool value = false; };
template <> struct is_float<float> { static constexpr bool value = true; };
template <> struct is_float<double> { static constexpr bool value = true; };

// The narrow integers are promoted to int by C++; the cast brings the sum back modulo 2^bits.
template <typename Acc> DEVICE Acc add(Acc left, Acc right) { return (Acc)(left + right); }

// The square root, correctly rounded whatever the compiler's flags are.
#if defined(__CUDACC__)
DEVICE float square_root(float value) { return __fsqrt_rn(value); }
DEVICE double square_root(double value) { return __dsqrt_rn(value); }
#else
DEVICE float square_root(float value) { return __builtin_sqrtf(value); }
DEVICE double square_root(double value) { return __builtin_sqrt(value); }
#endif

// ---- vectors -----------------------------------------------------------------------------------

struct alignas(16) Vector { u32 word[4]; };

// Explicit 16-byte stores on the GPU: otherwise NVRTC 12.9 splits a 16-byte store into four in loops
// whose pointers it must reload (all_sum), and a warp's stores touch four times the sectors they fill.
DEVICE Vector load_vector(const void* from, bool wanted) {
    Vector v;
#if defined(__CUDACC__)
    asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(from), "r"((int)wanted));
#else
    v = wanted ? *(const Vector*)from : Vector{};
#endif
    return v;
}

// Loads one element here: NVRTC moves a plain load behind the call of a division.
template <typename T> DEVICE T load_element(const T* from) {
#if defined(__CUDACC__)
    union { T value; u16 half; u32 word; u64 words; } pun;
    if constexpr (sizeof(T) == 8) asm volatile("ld.global.u64 %0, [%1];" : "=l"(pun.words) : "l"(from));
    if constexpr (sizeof(T) == 4) asm volatile("ld.global.u32 %0, [%1];" : "=r"(pun.word) : "l"(from));
    if constexpr (sizeof(T) == 2) asm volatile("ld.global.u16 %0, [%1];" : "=h"(pun.half) : "l"(from));
    if constexpr (sizeof(T) == 1) asm volatile("ld.global.u8 %0, [%1];" : "=h"(pun.half) : "l"(from));
    return pun.value;
#else
    return *from;
#endif
}

DEVICE void store_vector(void* into, const Vector& v) {
#if defined(__CUDACC__)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(into), "r"(v.word[0]),
                 "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
#elif defined(GRADREDUCE_FAST) && defined(__SSE2__)  // of STREAM_LANES
    typedef i64 Words __attribute__((vector_size(16)));
    __builtin_ia32_movntdq((Words*)into, *(const Words*)&v);
#else
    *(Vector*)into = v;
#endif
}

// The number of elements that a GROUPED body works on at a time in the fast build. A body is GROUPED if it
// branches, or loops over an unknown number of operands: g++ vectorises only the innermost loops, which
// are then the loops over lanes. (all_sum of 8 x 8M float32: 46 ms plain, 11 ms grouped.)
static constexpr int HOST_LANES = 32;
#if defined(GRADREDUCE_FAST)
static constexpr bool FAST = true;  // the fast build
#else
static constexpr bool FAST = false;
#endif

// An odd number of lanes means elements that are blockDim.x apart. Then neighbouring threads access neighbouring
// elements, whatever the alignment.
DEVICE constexpr bool is_spaced(int lanes) { return lanes % 2 == 1; }

// LANES elements in their memory format. LANES * sizeof(T) is a multiple of 16, or LANES is odd.
template <typename T, int LANES, bool = is_spaced(LANES)> struct Raw {
    union { Vector vector[LANES * (int)sizeof(T) / 16]; T element[LANES]; };
};
template <typename T, int LANES> struct Raw<T, LANES, true> { T element[LANES]; };
template <typename T> struct Raw<T, HOST_LANES, false> { const T* element; };

// If not `wanted`, loads nothing and returns any value.
template <int LANES, typename T>
DEVICE Raw<T, LANES> load_raw(const T* from, i64 index, bool wanted = true) {
    Raw<T, LANES> raw;
    if constexpr (LANES == 1) {
        raw.element[0] = wanted ? from[index] : T{};
    } else if constexpr (is_spaced(LANES)) {
        UNROLL
        for (int l = 0; l < LANES; ++l) raw.element[l] = load_element(from + index + l * blockDim.x);
    } else if constexpr (LANES == HOST_LANES) {
        raw.element = from + index;
    } else {
        UNROLL
        for (int v = 0; v < LANES * (int)sizeof(T) / 16; ++v)
            raw.vector[v] = load_vector((const Vector*)(from + index) + v, wanted);
    }
    return raw;
}

// LANES elements in the accumulate type.
template <typename Acc, int LANES> struct Lanes { Acc lane[LANES]; };

template <typename Acc, typename T, int LANES>
DEVICE Lanes<Acc, LANES> widened(const Raw<T, LANES>& raw) {
    Lanes<Acc, LANES> lanes;
    if constexpr (LANES == HOST_LANES) {
        INDEPENDENT
        for (int l = 0; l < LANES; ++l) lanes.lane[l] = to<Acc>::from(widen(raw.element[l]));
    } else {
        UNROLL
        for (int l = 0; l < LANES; ++l) lanes.lane[l] = to<Acc>::from(widen(raw.element[l]));
    }
    return lanes;
}

template <typename Acc, int LANES, typename T>
DEVICE Lanes<Acc, LANES> load(const T* from, i64 index) {
    return widened<Acc>(load_raw<LANES>(from, index));
}

template <typename T, typename Acc, int LANES>
DEVICE void store(T* into, i64 index, const Lanes<Acc, LANES>& values) {
    if constexpr (is_spaced(LANES) || LANES == HOST_LANES) {
        INDEPENDENT
        for (int l = 0; l < LANES; ++l)
            (into + index)[l * (is_spaced(LANES) ? blockDim.x : 1)] = to<T>::from(values.lane[l]);
    } else {
        constexpr int vectors = LANES * (int)sizeof(T) / 16;
        union { Vector vector[vectors]; T element[LANES]; } pun;
        UNROLL
        for (int l = 0; l < LANES; ++l) pun.element[l] = to<T>::from(values.lane[l]);
        UNROLL
        for (int v = 0; v < vectors; ++v) store_vector((Vector*)(into + index) + v, pun.vector[v]);
    }
}

template <typename Acc, int LANES>
DEVICE void add_to(Lanes<Acc, LANES>& total, const Lanes<Acc, LANES>& term) {
    UNROLL
    for (int l = 0; l < LANES; ++l) total.lane[l] = add<Acc>(total.lane[l], term.lane[l]);
}

// A true division, not a product with 1/n; no division by 1. Integers are divided by divide.cu after
// the additions, not here.
template <typename Acc> struct Divisor {
    bool divides;
    Acc value;

    DEVICE explicit Divisor(double divisor) : divides(divisor != 1.0), value((Acc)divisor) {}

    template <int LANES> DEVICE void divide(Lanes<Acc, LANES>& lanes) const {
        if constexpr (is_float<Acc>::value) {
            if (!divides) return;
            UNROLL
            for (int l = 0; l < LANES; ++l) lanes.lane[l] = lanes.lane[l] / value;
        }
    }
};

// ---- the table ---------------------------------------------------------------------------------

// Made by src/gradreduce/device/run/table.py, whose docstring describes it.
struct Table {
    const i64* words;
    i64 num_rows;
    i64 row_words;
    i64 first_chunk;
    i64 end_chunk;
    i64 chunk_size;
    i64 inline_words[448];
};

// A row: first chunk, items of work, elements of the last operand, whether all is aligned, addresses.
struct Row {
    const i64* words;
    DEVICE i64 first_chunk() const { return words[0]; }
    DEVICE i64 size() const { return words[1]; }
    DEVICE i64 last_size() const { return words[2]; }
    DEVICE bool aligned() const { return words[3] != 0; }
    template <typename T> DEVICE T* operand(i64 position) const { return (T*)words[4 + position]; }
};

// Returns the last row whose first chunk is not after `chunk`. Inline words are in constant memory and
// cheap to search. In device memory each step of a search would wait for a load, so a map follows
// the rows there: the row of every chunk.
DEVICE Row find_row(const Table& table, i64 chunk) {
    if (table.words) {
        const i64 row = table.words[table.num_rows * table.row_words + chunk];
        return Row{table.words + row * table.row_words};
    }
    i64 low = 0, high = table.num_rows;
    while (high - low > 1) {
        i64 middle = (low + high) / 2;
        if (table.inline_words[middle * table.row_words] <= chunk) low = middle; else high = middle;
    }
    return Row{table.inline_words + low * table.row_words};
}

#if defined(GRADREDUCE_FAST)
// A STREAMED body stores this many elements at a time past the cache, which would read each line before it is
// written. It does so only if the outputs of a launch are too large to stay in the cache for the next launch.
// Time of such stores over plain ones, two cores, 32 MiB of L3, 2026-11: pack of 2^20, 2^21, 2^22 and 2^23 float32 and a read of its
// output 1.6, 1.1, 0.9, 0.8; at 2^23 pack 0.65, add_n of two 0.75, of eight 0.93, all_sum of eight 0.6; all_sum
// in place 1.1 to 2.
static constexpr int STREAM_LANES = 16;
static constexpr i64 STREAM_ITEMS = 1 << 22;

inline bool is_streamed(const Table& table, const Row& row) {
    const i64* const rows = table.words ? table.words : table.inline_words;
    const Row last{rows + (table.num_rows - 1) * table.row_words};
    bool in_place = false;
    for (i64 k = 1; 4 + k < table.row_words; ++k) in_place |= row.operand<void>(k) == row.operand<void>(0);
    return last.first_chunk() * table.chunk_size + last.size() >= STREAM_ITEMS &&
           row.size() >= table.chunk_size && row.aligned() && !in_place;
}
#endif

// The defaults of bodies; a body overrides those that differ.
struct Elementwise {
    static constexpr bool GROUPED = false;   // see HOST_LANES
    static constexpr bool STREAMED = false;  // see STREAM_LANES; not with 8 and 16-bit types, whose code takes g++ long
    static constexpr bool PADDED = false;    // the last operand may be shorter; no vector crosses its end
    static constexpr bool SPACED = true;     // a row that is not aligned goes through at<LANES>, LANES odd
    // For a body of one input, AHEAD vectors may be loaded first; then put(i, values) is called for each.
    static constexpr int AHEAD = 1;
    // Where that input has item i, if the item is wanted.
    static DEVICE i64 place(i64 i, bool) { return i; }
    // Whether the LANES items from a multiple of LANES on are vectors of every operand.
    template <int LANES> static DEVICE bool whole() { return true; }
};

// Runs body.at<LANES>(i) for whole vectors and body.at<1>(i) for the remaining items, over every item of
// every row. In a row that is not aligned it runs body.at<n>(i) for n items that are blockDim.x apart, n odd
// (see is_spaced). An item is an element of the first operand, unless Kernel.items is set. A `Body` is made
// once per chunk, from its row. Blocks stride over chunks, threads over the vectors of a chunk: the
// result is the same for any grid and block.
template <typename Body, int LANES, typename... Arguments>
DEVICE void elementwise(const Table& table, Arguments... arguments) {
    NO_UNROLL
    for (i64 chunk = table.first_chunk + blockIdx.x; chunk < table.end_chunk; chunk += gridDim.x) {
        const Row row = find_row(table, chunk);
        const Body body(row, arguments...);
        const i64 begin = (chunk - row.first_chunk()) * table.chunk_size;
        const i64 left = row.size() - begin;
        const i64 end = begin + (left < table.chunk_size ? left : table.chunk_size);
        i64 tail = begin, whole = end;
        if (Body::PADDED && row.last_size() < end) whole = row.last_size() > begin ? row.last_size() : begin;
#if defined(GRADREDUCE_FAST)
        if constexpr (Body::STREAMED && LANES <= 4)
            if (is_streamed(table, row))
                for (; tail + STREAM_LANES <= whole; tail += STREAM_LANES) body.template at<STREAM_LANES>(tail);
        if constexpr (Body::GROUPED)
            for (; body.template whole<HOST_LANES>() && tail + HOST_LANES <= whole; tail += HOST_LANES)
                body.template at<HOST_LANES>(tail);
#else
        const bool vectors = row.aligned() && body.template whole<LANES>();
        if (vectors) tail = begin + (whole - begin) / LANES * LANES;
        const i64 stride = (i64)blockDim.x * LANES;
        NO_UNROLL
        for (i64 i = begin + (i64)threadIdx.x * LANES; i < tail; i += Body::AHEAD * stride) {
            if constexpr (Body::AHEAD == 1) {
                body.template at<LANES>(i);
            } else {
                decltype(load_raw<LANES>(body.input(), i)) raw[Body::AHEAD];
                i64 place[Body::AHEAD];
                UNROLL
                for (int k = 0; k < Body::AHEAD; ++k)
                    place[k] = body.place(i + k * stride, k == 0 || i + k * stride < tail);
                UNROLL
                for (int k = 0; k < Body::AHEAD; ++k)
                    raw[k] = load_raw<LANES>(body.input(), place[k], k == 0 || i + k * stride < tail);
                UNROLL
                for (int k = 0; k < Body::AHEAD; ++k)
                    if (k == 0 || i + k * stride < tail)
                        body.put(i + k * stride, widened<typename Body::Acc>(raw[k]));
            }
        }
#endif
        i64 i = tail + threadIdx.x;
#if !defined(GRADREDUCE_FAST)
        if constexpr (Body::SPACED) {
            // Loads in flight. H100, pack off by one element, of a copy: float32 0.66 with one, 0.82 with
            // 3, 0.90 with 7; bfloat16 0.35, 0.63, 0.74. More operands need more registers.
            constexpr int lanes = Body::AHEAD == 1 ? 3 : LANES < 8 ? LANES + 3 : 11;
            const i64 last = (lanes - 1) * (i64)blockDim.x;
            NO_UNROLL
            for (; !vectors && i + last < whole; i += lanes * (i64)blockDim.x) body.template at<lanes>(i);
        }
#endif
        NO_UNROLL INDEPENDENT
        for (; i < end; i += blockDim.x) body.template at<1>(i);
    }
#if defined(GRADREDUCE_FAST) && defined(__SSE2__)
    if constexpr (Body::STREAMED) __builtin_ia32_sfence();  // before other threads continue
#endif
}

// The number of lanes with which every operand is a whole number of 16-byte vectors.
template <typename A, typename B> struct lanes_of {
    static constexpr int value = 16 / (int)(sizeof(A) < sizeof(B) ? sizeof(A) : sizeof(B));
    // AHEAD of a body whose one input is of B: 64 bytes. With the 4 or 5 blocks that fit on a multiprocessor
    // 64 to 80 KB are in flight; one vector and 6 blocks: 24 KB; registers for 8 blocks spill. H100: pack 0.99
    // of a copy, with 4 blocks as with 5.
    static constexpr int ahead = value * sizeof(B) < 64 ? 64 / (value * (int)sizeof(B)) : 1;
};
