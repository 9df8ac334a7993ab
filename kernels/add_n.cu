// add_n: out[t][i] = in[t][0][i] + in[t][1][i] + … + in[t][num_inputs-1][i], for every row t
// order    left to right; one rounding per add in the accumulate dtype of In, one at the store
// types    <Out, In, N>: 16-bit types accumulate in float; Out may be wider or narrower than In (a cast)
//          N: inputs known when compiled (their loads are in flight together); 0: any number
// aliasing out may be any input exactly: every thread reads all inputs at i before it writes i
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none on rows, inputs or elements
// reference src/gradreduce/ops/add_n.py, bit-equal except NaN payloads
// source   own; tf.add_n (aggregation_method.md) for the operation, not for its order
#include "common.cuh"

template <typename Out, typename In, int N> struct AddN : Elementwise {
    static constexpr bool GROUPED = N == 0, STREAMED = true;
    static constexpr int AHEAD = N == 1 ? lanes_of<Out, In>::ahead : 1;
    typedef typename accumulate<In>::type Acc;
    Out* out;
    const In* in[N ? N : 1];
    Row row;
    i64 num_inputs;

    DEVICE AddN(const Row& row, i64 num_inputs) : row(row), num_inputs(num_inputs) {
        out = row.operand<Out>(0);
        UNROLL
        for (int k = 0; k < (N ? N : 1); ++k) in[k] = row.operand<const In>(1 + k);
    }

    template <int LANES> DEVICE void at(i64 i) const {
        Lanes<Acc, LANES> total = load<Acc, LANES>(in[0], i);
        UNROLL
        for (int k = 1; k < N; ++k) add_to(total, load<Acc, LANES>(in[k], i));
        if constexpr (N == 0) {
            for (i64 k = 1; k < num_inputs; ++k)
                add_to(total, load<Acc, LANES>(row.operand<const In>(1 + k), i));
        }
        store(out, i, total);
    }

    DEVICE const In* input() const { return in[0]; }

    template <int LANES> DEVICE void put(i64 i, const Lanes<Acc, LANES>& value) const { store(out, i, value); }
};

// Uses registers for all loads before the first add; else ptxas issues 2, 3 and 3 of 8. H100: 1.01 of a copy.
template <typename Out, typename In, int N>
__global__ void __launch_bounds__(256, N > 2 ? 2 : 0) add_n(TABLE_ARGUMENT table, i64 num_inputs) {
    elementwise<AddN<Out, In, N>, lanes_of<Out, In>::value>(table, num_inputs);
}
