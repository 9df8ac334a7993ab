// all_sum: every out[t][j][i] = ((in[0] + … + in[split-1]) + (in[split] + … + in[n-1])) / divisor
// order    each group left to right, then both; split 0: one group. Divided (truly) if the
//          divisor is not 1, in the accumulate dtype of In, before the one rounding at the store
// types    <Out, In>: 16-bit types accumulate in float; integers take divisor 1 only
// aliasing any out may be any in exactly: every thread reads all inputs at i before it writes i
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none on rows, outputs, inputs or elements
// reference src/gradreduce/ops/all_sum.py, bit-equal except subnormals (CuPy builds with -ftz=true)
// source   own; the groups are those of hierarchical copy (all_reduce_cross_device_ops.md)
#include "common.cuh"

template <typename Out, typename In> struct AllSum {
    static constexpr bool GROUPED = true;
    typedef typename accumulate<In>::type Acc;
    Row row;
    i64 num_outs, num_inputs, split;
    double divisor;

    DEVICE AllSum(const Row& row, i64 num_outs, i64 num_inputs, i64 split, double divisor)
        : row(row), num_outs(num_outs), num_inputs(num_inputs), split(split), divisor(divisor) {}

    template <int LANES> DEVICE Lanes<Acc, LANES> sum(i64 first, i64 end, i64 i) const {
        Lanes<Acc, LANES> total = load<Acc, LANES>(row.operand<const In>(num_outs + first), i);
        for (i64 k = first + 1; k < end; ++k)
            add_to(total, load<Acc, LANES>(row.operand<const In>(num_outs + k), i));
        return total;
    }

    template <int LANES> DEVICE void at(i64 i) const {
        Lanes<Acc, LANES> total = sum<LANES>(0, split ? split : num_inputs, i);
        if (split) add_to(total, sum<LANES>(split, num_inputs, i));
        UNROLL
        for (int l = 0; l < LANES; ++l) total.lane[l] = quotient(total.lane[l], divisor);
        for (i64 j = 0; j < num_outs; ++j) store(row.operand<Out>(j), i, total);
    }
};

template <typename Out, typename In>
__global__ void all_sum(
    TABLE_ARGUMENT table, i64 num_outs, i64 num_inputs, i64 split, double divisor) {
    elementwise<AllSum<Out, In>, lanes_of<Out, In>::value, true>(
        table, num_outs, num_inputs, split, divisor);
}
