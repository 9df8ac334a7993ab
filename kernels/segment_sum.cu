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
    static constexpr bool GROUPED = true, SPACED = false;
    typedef typename accumulate<In>::type Acc;
    typedef typename accumulate<Out>::type Sum;
    Row row;
    const In* values;
    const i64 *order, *bounds;
    i64 has_into, has_divisors;  // of operands that are read from the table only at the end: fewer registers
    double divisor;
    i64 width;  // an item is a column of a segment

    DEVICE SegmentSum(const Row& row, i64 has_into, i64 has_divisors, double divisor)
        : row(row), has_into(has_into), has_divisors(has_divisors), divisor(divisor) {
        values = row.operand<const In>(1);
        order = row.operand<const i64>(2);
        bounds = row.operand<const i64>(3 + has_into + has_divisors);
        width = row.size() / (row.last_size() - 1);
    }

    template <int LANES> DEVICE bool whole() const { return width % LANES == 0; }  // in one row

    template <int LANES> DEVICE void at(i64 i) const {
        // Rows that a thread loads before it adds the first: 64 bytes. H100, of a copy, 10 rows of 64 float32
        // for each segment: 0.77 with one, 0.92 with 4, 0.87 with 8 and half the blocks.
        constexpr int ahead = FAST ? 1 : LANES == 1 ? 4 : 64 / (LANES * (int)sizeof(In));
        const i64 segment = i / width, column = i - segment * width;
        const i64 begin = bounds[segment], end = bounds[segment + 1];
        Lanes<Acc, LANES> total = {};
        i64 next[ahead];  // rows: those to come are read before the loaded ones are added
        UNROLL
        for (int t = 0; t < ahead; ++t) next[t] = order[begin + t < end ? begin + t : begin];
        NO_UNROLL
        for (i64 k = begin; k < end; k += ahead) {
            Raw<In, LANES> raw[ahead];
            UNROLL
            for (int t = 0; t < ahead; ++t)
                raw[t] = load_raw<LANES>(values, next[t] * width + column, t == 0 || k + t < end);
            UNROLL
            for (int t = 0; t < ahead; ++t) {
                const i64 later = k + ahead + t;
                next[t] = order[later < end ? later : begin];
            }
            UNROLL
            for (int t = 0; t < ahead; ++t) {
                const Lanes<Acc, LANES> term = widened<Acc>(raw[t]);
                if (t == 0 && k == begin) total = term;
                else if (t == 0 || k + t < end) add_to(total, term);
            }
        }
        Divisor<Acc>(has_divisors ? row.operand<const double>(3 + has_into)[segment] : divisor).divide(total);
        const i64 into = has_into ? row.operand<const i64>(3)[segment] : segment;
        Out* const out = row.operand<Out>(0);
        if (into < 0) {
            Lanes<Sum, LANES> sum = load<Sum, LANES>(out, ~into * width + column);
            UNROLL
            for (int l = 0; l < LANES; ++l)
                sum.lane[l] = add<Sum>(sum.lane[l], to<Sum>::from(total.lane[l]));
            store(out, ~into * width + column, sum);
        } else {
            store(out, into * width + column, total);
        }
    }
};

// As many blocks as fit without spills.
template <typename Out, typename In>
__global__ void __launch_bounds__(256, sizeof(In) == 4 ? 4 : sizeof(In) == 1 ? 2 : 3) segment_sum(
    TABLE_ARGUMENT table, i64 has_into, i64 has_divisors, double divisor) {
    elementwise<SegmentSum<Out, In>, lanes_of<Out, In>::value>(
        table, has_into, has_divisors, divisor);
}
