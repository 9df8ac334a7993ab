// take_rows: out[t][k][column] = in[t][rows[k]][column]
// order    nothing is added
// types    <T>: unsigned words of any dtype; rows are i64
// aliasing none: out does not overlap later operands
// launch   1-D, any grid and block; blocks stride over chunks of out's elements; 64-bit indices
// limits   none; a row may be taken more than once
// reference src/gradreduce/ops/take_rows.py, bit-equal
// source   own; tf.gather for the operation
#include "common.cuh"

template <typename T> struct TakeRows : Elementwise {
    static constexpr bool GROUPED = true;
    T* out;
    const T* values;
    const i64* rows;
    i64 width;

    DEVICE explicit TakeRows(const Row& row) {
        out = row.operand<T>(0);
        values = row.operand<const T>(1);
        rows = row.operand<const i64>(2);
        width = row.size() / row.last_size();
    }

    template <int LANES> DEVICE void at(i64 i) const {
        if (LANES > 1 && width % LANES) {  // a vector would cross into the next row
            for (i64 l = i; l < i + LANES; ++l) at<1>(l);
            return;
        }
        store(out, i, load<T, LANES>(values, rows[i / width] * width + i % width));
    }
};

template <typename T> __global__ void take_rows(TABLE_ARGUMENT table) {
    elementwise<TakeRows<T>, lanes_of<T, T>::value>(table);
}
