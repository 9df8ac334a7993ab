// take_rows: out[t][k][column] = in[t][rows[k]][column]
// order    nothing is added
// types    <T>: unsigned words of any dtype; rows are i64
// aliasing none: out does not overlap later operands
// launch   1-D, any grid and block; blocks stride over chunks of out's elements; 64-bit indices
// limits   none; a row may be taken more than once
// reference src/gradreduce/ops/take_rows.py, bit-equal
// source   own; tf.gather for the operation
#include "common.cuh"

// Quotients by one number, without the branches of a division, which separate the loads of an iteration. The
// factor is at most 1 below 2^64 / by, so the upper half of a product with it is the quotient, or 1 less.
// H100, half of 1 M rows of 64 float32, of a copy: 0.94; one load in flight: 0.91; with divisions 0.87.
struct Quotient {
    u64 by, factor;

    DEVICE explicit Quotient(i64 by) : by((u64)by), factor(~(u64)0 / (u64)by) {}

    DEVICE i64 of(i64 number) const {
#if defined(__CUDACC__)
        const u64 found = __umul64hi((u64)number, factor);
#else
        const u64 found = (u64)((unsigned __int128)(u64)number * factor >> 64);
#endif
        return (i64)(found + ((u64)number - found * by >= by));
    }
};

template <typename T> struct TakeRows : Elementwise {
    static constexpr bool GROUPED = true;
    static constexpr int AHEAD = lanes_of<T, T>::ahead;
    typedef T Acc;
    T* out;
    const T* values;
    const i64* rows;
    Quotient width;

    DEVICE explicit TakeRows(const Row& row) : width(row.size() / row.last_size()) {
        out = row.operand<T>(0);
        values = row.operand<const T>(1);
        rows = row.operand<const i64>(2);
    }

    template <int LANES> DEVICE bool whole() const { return width.by % LANES == 0; }  // in one row

    DEVICE i64 place(i64 i, bool wanted) const {
        const i64 k = width.of(i), row = rows[wanted ? k : 0];
        return (row - k) * (i64)width.by + i;
    }

    template <int LANES> DEVICE void at(i64 i) const {
        if constexpr (is_spaced(LANES)) {  // each in a row of its own
            Raw<T, LANES> raw;
            i64 from[LANES];
            UNROLL
            for (int l = 0; l < LANES; ++l) from[l] = place(i + l * (i64)blockDim.x, true);
            UNROLL
            for (int l = 0; l < LANES; ++l) raw.element[l] = values[from[l]];
            put(i, widened<T>(raw));
        } else {
            put(i, load<T, LANES>(values, place(i, true)));
        }
    }

    DEVICE const T* input() const { return values; }

    template <int LANES> DEVICE void put(i64 i, const Lanes<T, LANES>& taken) const { store(out, i, taken); }
};

template <typename T> __global__ void take_rows(TABLE_ARGUMENT table) {
    elementwise<TakeRows<T>, lanes_of<T, T>::value>(table);
}
