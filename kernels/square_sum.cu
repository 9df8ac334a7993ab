// square_sum: out[b * L + p] = in[s + p]^2 + in[s + p + L]^2 + …, T of them, for block b of L * T elements, from s = b * L * T
// order    left to right, from zero, in double; the squares too
// types    <In>: out is double; squared 0: of the elements themselves; rooted: the square root of the sum
// aliasing none: out does not overlap in
// launch   1-D, any grid and block; blocks stride over chunks of out's elements; 64-bit indices
// limits   none; L is lanes, T is terms; elements after the end of in count as zero
// reference src/gradreduce/ops/square_sum.py, bit-equal except NaN payloads
// source   own; tf.global_norm for the operation
#include "common.cuh"

template <typename In> struct SquareSum : Elementwise {
    static constexpr bool GROUPED = true, SPACED = false;
    double* out;
    const In* in;
    i64 stride, block, size;
    bool squared, rooted;

    DEVICE SquareSum(const Row& row, i64 lanes, i64 terms, i64 squared, i64 rooted)
        : stride(lanes), block(lanes * terms), squared(squared != 0), rooted(rooted != 0) {
        out = row.operand<double>(0);
        in = row.operand<const In>(1);
        size = row.last_size();
    }

    DEVICE double with(double total, double term) const {
        return total + (squared ? term * term : term);
    }

    template <int LANES> DEVICE void last(Lanes<double, LANES>& total, int l, i64 k) const {
        total.lane[l] = with(total.lane[l], load<double, 1>(in, k + l).lane[0]);
    }

    template <int LANES> DEVICE void add(Lanes<double, LANES>& total, const Raw<In, LANES>& raw) const {
        const Lanes<double, LANES> term = widened<double>(raw);
        UNROLL
        for (int l = 0; l < LANES; ++l) total.lane[l] = with(total.lane[l], term.lane[l]);
    }

    template <int LANES> DEVICE bool whole() const { return stride % LANES == 0; }

    template <int LANES> DEVICE void at(i64 i) const {
        // Loads in flight. H100, of a copy, 16 M float32: 0.59 with one, 0.90 with 4, 0.94 with 16.
        constexpr int batch = FAST ? 1 : 16;
        Lanes<double, LANES> total = {};
        const i64 number = i / stride, start = number * block;
        const i64 end = size - start < block ? size : start + block;
        i64 k = start + (i - number * stride);
        NO_UNROLL
        for (; k + (batch - 1) * stride + LANES <= end; k += batch * stride) {
            Raw<In, LANES> raw[batch];
            UNROLL
            for (int t = 0; t < batch; ++t) raw[t] = load_raw<LANES>(in, k + t * stride);
            UNROLL
            for (int t = 0; t < batch; ++t) add(total, raw[t]);
        }
        NO_UNROLL
        for (; k + LANES <= end; k += stride) add(total, load_raw<LANES>(in, k));
        for (int l = 0; l < LANES && k + l < end; ++l) last(total, l, k);
        if (rooted) {
            UNROLL
            for (int l = 0; l < LANES; ++l) total.lane[l] = square_root(total.lane[l]);
        }
        store(out, i, total);
    }
};

// Uses registers for all loads of a batch: without a bound NVRTC uses 64 on sm_100, and waits for each load.
template <typename In>
__global__ void __launch_bounds__(256, 2) square_sum(TABLE_ARGUMENT table, i64 lanes, i64 terms, i64 squared, i64 rooted) {
    elementwise<SquareSum<In>, lanes_of<double, In>::value>(table, lanes, terms, squared, rooted);
}
