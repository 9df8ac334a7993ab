// pack: out[t][i] = in[t][i] / divisor for i < size of in[t], and 0 from there to the size of out[t]
// order    one quotient, one rounding to Out (both omitted if they change nothing)
// types    <Out, In>: divided in the accumulate dtype of In; double to 16-bit through float;
//          integers take divisor 1 only
// aliasing out and in may be the same exactly
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none; unpacking is the same kernel with out and in exchanged
// reference src/gradreduce/ops/pack.py, bit-equal except NaN payloads
// source   own
#include "common.cuh"

template <typename Out, typename In> struct Pack : Elementwise {
    static constexpr bool GROUPED = true, PADDED = true, STREAMED = true;
    static constexpr int AHEAD = lanes_of<Out, In>::ahead;
    typedef typename accumulate<In>::type Acc;
    Out* out;
    const In* in;
    i64 in_size;
    Divisor<Acc> divisor;

    DEVICE Pack(const Row& row, double divisor) : in_size(row.last_size()), divisor(divisor) {
        out = row.operand<Out>(0);
        in = row.operand<const In>(1);
    }

    template <int LANES> DEVICE void at(i64 i) const {
        if (LANES > 1 || i < in_size)
            put(i, load<Acc, LANES>(in, i));
        else
            store(out, i, Lanes<Acc, LANES>{});  // not divided: 0 / -1 is -0, 0 / 0 is NaN
    }

    DEVICE const In* input() const { return in; }

    template <int LANES> DEVICE void put(i64 i, Lanes<Acc, LANES>&& values) const {
        divisor.divide(values);
        store(out, i, values);
    }
};

template <typename Out, typename In>
__global__ void __launch_bounds__(256, sizeof(Out) == 8 ? 3 : 4) pack(TABLE_ARGUMENT table, double divisor) {
    elementwise<Pack<Out, In>, lanes_of<Out, In>::value>(table, divisor);
}
