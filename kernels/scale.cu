// scale: out[t][i] = in[t][i] * weight / divisor for i < size of in[t], and 0 from there to the size of out[t]
// add_scaled: total[t][i] = total[t][i] + in[t][i] * weight
// order    a product, rounded once to the wider of both accumulate dtypes; then a quotient there, or a
//          sum in Total; one rounding each. No division by 1
// types    scale <Out, In>, double to 16-bit through float; add_scaled <Total, In>, where Total is an
//          accumulate dtype. Integers take whole weights, modulo 2^bits, and divisor 1 only
// aliasing the output may be the input exactly
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   weights are finite and at least 0; for integers below 2^63
// reference src/gradreduce/ops/scale.py, bit-equal except NaN payloads
// source   own; the exact product is Dekker's (Numerische Mathematik 18, 1971)
#include "common.cuh"

// ANY: also weights that are no Acc; else multiply has no branch.
template <typename Acc, bool ANY = true> struct Weight {
    Acc value;

    DEVICE explicit Weight(double weight) : value(is_float<Acc>::value ? (Acc)weight : (Acc)(i64)weight) {}

    template <int LANES> DEVICE void multiply(Lanes<Acc, LANES>& lanes) const {
        UNROLL
        for (int l = 0; l < LANES; ++l) lanes.lane[l] = (Acc)(lanes.lane[l] * value);
    }
};

// A product in double rounds twice if the weight has more than 29 significant bits. The second rounding,
// to float, is wrong only if the first one ends in the middle of two floats; below the normal ones the
// middles are elsewhere. For such products the weight is split into two parts of at most 27 bits, whose
// products with a float are exact in double.
template <> struct Weight<float, true> {
    float value;
    bool is_float;
    double all;

    DEVICE explicit Weight(double weight) : value((float)weight), is_float((double)value == weight), all(weight) {}

    template <int LANES> DEVICE void multiply(Lanes<float, LANES>& lanes) const {
        if (is_float) {
            UNROLL
            for (int l = 0; l < LANES; ++l) lanes.lane[l] = lanes.lane[l] * value;
        } else {
            UNROLL
            for (int l = 0; l < LANES; ++l) lanes.lane[l] = product(lanes.lane[l]);
        }
    }

    DEVICE float product(float term) const {
        union { double number; u64 bits; } pun;
        pun.number = term * all;
        const int twice = (pun.bits & 0x1fffffffull) == 0x10000000ull;
        const int small = (pun.number != 0) & (pun.number < 0x1p-126) & (pun.number > -0x1p-126);
        return twice | small ? exact(term) : (float)pun.number;
    }

    DEVICE float exact(float term) const {
        union { double number; u64 bits; } pun;
        pun.number = all;
        pun.bits &= ~0x7ffffffull;
        const double upper = term * pun.number, lower = term * (all - pun.number);
        pun.number = upper + lower;
        const double from_lower = pun.number - upper;
        const double rest = (upper - (pun.number - from_lower)) + (lower - from_lower);
        // Rounds to odd, so that the next rounding sees on which side of a tie the product lies.
        if (rest != 0 && rest - rest == 0 && !(pun.bits & 1))
            pun.bits += (rest > 0) == (pun.number > 0) ? 1 : -1;
        return (float)pun.number;
    }
};

template <typename A, typename B, bool = (sizeof(A) >= sizeof(B))> struct wider { typedef A type; };
template <typename A, typename B> struct wider<A, B, false> { typedef B type; };

template <typename Out, typename In> struct Scale : Elementwise {
    static constexpr bool GROUPED = true, PADDED = true, STREAMED = true;
    static constexpr int AHEAD = (lanes_of<Out, In>::ahead + 1) / 2;  // more would spill the exact products
    typedef typename wider<typename accumulate<Out>::type, typename accumulate<In>::type>::type Acc;
    Out* out;
    const In* in;
    i64 in_size;
    Weight<Acc> weight;
    Divisor<Acc> divisor;

    DEVICE Scale(const Row& row, double weight, double divisor)
        : in_size(row.last_size()), weight(weight), divisor(divisor) {
        out = row.operand<Out>(0);
        in = row.operand<const In>(1);
    }

    template <int LANES> DEVICE void at(i64 i) const {
        if (LANES > 1 || i < in_size)
            put(i, load<Acc, LANES>(in, i));
        else
            store(out, i, Lanes<Acc, LANES>{});
    }

    DEVICE const In* input() const { return in; }

    template <int LANES> DEVICE void put(i64 i, Lanes<Acc, LANES>&& values) const {
        weight.multiply(values);
        divisor.divide(values);
        store(out, i, values);
    }
};

template <typename Out, typename In>
__global__ void __launch_bounds__(256, sizeof(Out) == 8 ? 2 : 4) scale(
    TABLE_ARGUMENT table, double weight, double divisor) {
    elementwise<Scale<Out, In>, lanes_of<Out, In>::value>(table, weight, divisor);
}

template <typename Total, typename In, bool ANY> struct AddScaled : Elementwise {
    static constexpr bool GROUPED = true;
    typedef typename wider<Total, typename accumulate<In>::type>::type Acc;
    Total* total;
    const In* in;
    Weight<Acc, ANY> weight;

    DEVICE AddScaled(const Row& row, double weight) : weight(weight) {
        total = row.operand<Total>(0);
        in = row.operand<const In>(1);
    }

    template <int LANES> DEVICE void at(i64 i) const {
        Lanes<Acc, LANES> term = load<Acc, LANES>(in, i);
        weight.multiply(term);
        Lanes<Total, LANES> sum = load<Total, LANES>(total, i), rounded;
        UNROLL
        for (int l = 0; l < LANES; ++l) rounded.lane[l] = (Total)term.lane[l];
        add_to(sum, rounded);
        store(total, i, sum);
    }
};

template <typename Total, typename In>
__global__ void add_scaled(TABLE_ARGUMENT table, double weight) {
    constexpr int lanes = lanes_of<Total, In>::value;
    typedef typename AddScaled<Total, In, true>::Acc Acc;
    if (!is_float<Acc>::value || sizeof(Acc) == 8 || (double)(float)weight == weight)
        elementwise<AddScaled<Total, In, false>, lanes>(table, weight);
    else
        elementwise<AddScaled<Total, In, true>, lanes>(table, weight);
}
