// divide:  out[t][i] = in[t][i] / divisor, a true division of integers
// order    one rounding of the integer to Out (none up to 32 bits), one of the quotient
// types    <float, In> of 8 and 16 bits, <double, In> of 32 and 64; signed and unsigned
// aliasing out and in may be exactly the same (only with 64 bits: the others differ in size)
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none; the divisor is rounded to Out once; it may be 0, infinite or NaN
// reference src/gradreduce/ops/divide.py, bit-equal except NaN payloads
// source   tf.math.truediv: the types; own
#include "common.cuh"

template <typename Out, typename In> struct Divide : Elementwise {
    static constexpr int AHEAD = lanes_of<Out, In>::ahead;
    typedef Out Acc;
    Out* out;
    const In* in;
    Out divisor;

    DEVICE Divide(const Row& row, double divisor) : divisor((Out)divisor) {
        out = row.operand<Out>(0);
        in = row.operand<const In>(1);
    }

    template <int LANES> DEVICE void at(i64 i) const { put(i, load<Out, LANES>(in, i)); }

    DEVICE const In* input() const { return in; }

    template <int LANES> DEVICE void put(i64 i, Lanes<Out, LANES> values) const {
        UNROLL
        for (int l = 0; l < LANES; ++l) values.lane[l] = values.lane[l] / divisor;
        store(out, i, values);
    }
};

template <typename Out, typename In> __global__ void divide(TABLE_ARGUMENT table, double divisor) {
    elementwise<Divide<Out, In>, lanes_of<Out, In>::value>(table, divisor);
}
