// accumulate_n: total[t][i] = total[t][i] + in[t][0][i] + … + in[t][num_inputs-1][i], in place
// order    left to right, the total first; one rounding per add, one at the store
// types    <Total, In>: adds in the accumulate dtype of Total, to which each input is cast
// aliasing an input may be the total exactly (then its value before the launch is added)
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none on rows, inputs or elements
// reference src/gradreduce/ops/accumulate_n.py, bit-equal except NaN payloads
// source   own; tf.accumulate_n (aggregation_method.md) for the operation
#include "common.cuh"

template <typename Total, typename In> struct AccumulateN : Elementwise {
    static constexpr bool GROUPED = true;
    typedef typename accumulate<Total>::type Acc;
    Total* total;
    const In* first;
    Row row;
    i64 num_inputs;

    DEVICE AccumulateN(const Row& row, i64 num_inputs) : row(row), num_inputs(num_inputs) {
        total = row.operand<Total>(0);
        first = row.operand<const In>(1);
    }

    template <int LANES> DEVICE void at(i64 i) const {
        Lanes<Acc, LANES> sum = load<Acc, LANES>(total, i);
        add_to(sum, load<Acc, LANES>(first, i));
        for (i64 k = 1; k < num_inputs; ++k)
            add_to(sum, load<Acc, LANES>(row.operand<const In>(1 + k), i));
        store(total, i, sum);
    }
};

template <typename Total, typename In>
__global__ void accumulate_n(TABLE_ARGUMENT table, i64 num_inputs) {
    elementwise<AccumulateN<Total, In>, lanes_of<Total, In>::value>(table, num_inputs);
}
