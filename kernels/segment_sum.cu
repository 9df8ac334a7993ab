// segment_sum: out[t][into[s]] = (values[t][order[b]] + … + values[t][order[e-1]]) / divisors[s]
// order    left to right from b = bounds[s] to e = bounds[s+1], b < e; one rounding per add in the
//          accumulate dtype of In; there a true division unless by 1; if into[s] is ~row, cast to
//          the accumulate dtype of Out and added to the row; one rounding at the store
// types    <Out, In>: 16-bit types accumulate in float; integers take divisor 1 only; indices are i64
// aliasing none: out does not overlap later operands, and into repeats no row
// launch   1-D, any grid and block; blocks stride over chunks of (segment, column); 64-bit indices
// limits   none; without has_into into[s] is s, without has_divisors divisors[s] is divisor
// reference src/gradreduce/ops/segment_sum.py, bit-equal except NaN payloads
// source   own; tf.IndexedSlices and the unsorted segment sum that makes one dense
#include "common.cuh"

template <typename Out, typename In> struct SegmentSum : Elementwise {
    static constexpr bool GROUPED = true;
    typedef typename accumulate<In>::type Acc;
    typedef typename accumulate<Out>::type Sum;
    Out* out;
    const In* values;
    const i64 *order, *into, *bounds;
    const double* divisors;
    double divisor;
    i64 width;

    DEVICE SegmentSum(const Row& row, i64 has_into, i64 has_divisors, double divisor)
        : divisor(divisor) {
        out = row.operand<Out>(0);
        values = row.operand<const In>(1);
        order = row.operand<const i64>(2);
        into = has_into ? row.operand<const i64>(3) : nullptr;
        divisors = has_divisors ? row.operand<const double>(3 + has_into) : nullptr;
        bounds = row.operand<const i64>(3 + has_into + has_divisors);
        width = row.size() / (row.last_size() - 1);  // an item is a column of a segment
    }

    template <int LANES> DEVICE void at(i64 i) const {
        if (LANES > 1 && width % LANES) {  // a vector would cross into the next row
            for (i64 l = i; l < i + LANES; ++l) at<1>(l);
            return;
        }
        const i64 segment = i / width, column = i % width, end = bounds[segment + 1];
        i64 k = bounds[segment];
        Lanes<Acc, LANES> total = load<Acc, LANES>(values, order[k] * width + column);
        while (++k < end) add_to(total, load<Acc, LANES>(values, order[k] * width + column));
        Divisor<Acc>(divisors ? divisors[segment] : divisor).divide(total);
        const i64 row = into ? into[segment] : segment;
        if (row < 0) {
            Lanes<Sum, LANES> sum = load<Sum, LANES>(out, ~row * width + column);
            UNROLL
            for (int l = 0; l < LANES; ++l)
                sum.lane[l] = add<Sum>(sum.lane[l], to<Sum>::from(total.lane[l]));
            store(out, ~row * width + column, sum);
        } else {
            store(out, row * width + column, total);
        }
    }
};

template <typename Out, typename In>
__global__ void segment_sum(
    TABLE_ARGUMENT table, i64 has_into, i64 has_divisors, double divisor) {
    elementwise<SegmentSum<Out, In>, lanes_of<Out, In>::value>(
        table, has_into, has_divisors, divisor);
}
