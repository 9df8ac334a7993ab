// all_sum: every out[t][j][i] = ((in[0] + … + in[split-1]) + (in[split] + … + in[n-1])) / divisor
// order    each group left to right, then both; split 0: one group. A true division if the
//          divisor is not 1, in the accumulate dtype of In, before the one rounding at the store
// types    <Out, In, N>: 16-bit types accumulate in float; integers take divisor 1 only
//          N: inputs known when compiled (their loads are in flight together); 0: any number
// aliasing any out may be any in exactly: every thread reads all inputs at i before it writes i
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none on rows, outputs, inputs or elements
// reference src/gradreduce/ops/all_sum.py, bit-equal except NaN payloads
// source   own; the groups are those of hierarchical copy (all_reduce_cross_device_ops.md)
#include "common.cuh"

template <typename Out, typename In, int N> struct AllSum : Elementwise {
    static constexpr bool GROUPED = true, STREAMED = true;
    static constexpr int AHEAD = N == 1 ? lanes_of<Out, In>::ahead : 1;
    typedef typename accumulate<In>::type Acc;
    Row row;
    i64 num_outs, num_inputs, split;
    Divisor<Acc> divisor;
    const In* in[N ? N : 1];

    DEVICE AllSum(const Row& row, i64 num_outs, i64 num_inputs, i64 split, double divisor)
        : row(row), num_outs(num_outs), num_inputs(num_inputs), split(split), divisor(divisor) {
        UNROLL
        for (int k = 0; k < N; ++k) in[k] = row.operand<const In>(num_outs + k);
    }

    template <int LANES> DEVICE Lanes<Acc, LANES> group(i64 first, i64 end, i64 i) const {
        Lanes<Acc, LANES> total = load<Acc, LANES>(row.operand<const In>(num_outs + first), i);
        NO_UNROLL
        for (i64 k = first + 1; k < end; ++k)
            add_to(total, load<Acc, LANES>(row.operand<const In>(num_outs + k), i));
        return total;
    }

    template <int LANES> DEVICE Lanes<Acc, LANES> sum_of_any(i64 i) const {
        Lanes<Acc, LANES> total = group<LANES>(0, split ? split : num_inputs, i);
        if (split) add_to(total, group<LANES>(split, num_inputs, i));
        return total;
    }

    template <int LANES> DEVICE Lanes<Acc, LANES> sum_of_n(i64 i) const {
        Raw<In, LANES> raw[N];
        UNROLL
        for (int k = 0; k < N; ++k) raw[k] = load_raw<LANES>(in[k], i);
        Lanes<Acc, LANES> total = widened<Acc>(raw[0]), first = {};
        UNROLL
        for (int k = 1; k < N; ++k) {
            const Lanes<Acc, LANES> term = widened<Acc>(raw[k]);
            UNROLL
            for (int l = 0; l < LANES; ++l) {  // a select: with a branch NVRTC puts terms on the stack
                if (k == split) first.lane[l] = total.lane[l];
                total.lane[l] = k == split ? term.lane[l] : add<Acc>(total.lane[l], term.lane[l]);
            }
        }
        if (!split) return total;
        add_to(first, total);
        return first;
    }

    template <int LANES> DEVICE Lanes<Acc, LANES> sum(i64 i) const {
        if constexpr (N > 0) return sum_of_n<LANES>(i);
        else return sum_of_any<LANES>(i);
    }

    template <int LANES> DEVICE void at(i64 i) const { put(i, sum<LANES>(i)); }

    DEVICE const In* input() const { return in[0]; }

    template <int LANES> DEVICE void put(i64 i, Lanes<Acc, LANES>&& total) const {
        divisor.divide(total);
        NO_UNROLL
        for (i64 j = 0; j < num_outs; ++j) store(row.operand<Out>(j), i, total);
    }
};

// Uses registers for all N loads before the first add. H100: 0.94 of a copy. In the fast build loops
// over lanes are twice as slow with N terms at once.
template <typename Out, typename In, int N>
__global__ void __launch_bounds__(256, N ? 2 : 4) all_sum(
    TABLE_ARGUMENT table, i64 num_outs, i64 num_inputs, i64 split, double divisor) {
    elementwise<AllSum<Out, In, FAST ? 0 : N>, lanes_of<Out, In>::value>(
        table, num_outs, num_inputs, split, divisor);
}
