// exact_sum: every out[t][j][i] = (in[t][0][i] + … + in[t][num_inputs-1][i]) / divisor, added as real numbers
// order    any order of the inputs gives the same bits: the exact sum is rounded once, to Out; if the divisor
//          is not 1, to float, in which the sum is divided before it is rounded to Out
// types    <Out, In, N>: float and 16-bit floats; N: inputs known when compiled; 0: any number. <double, double, 0>
// special  infinities and NaN as in IEEE 754 for any order; a sum of 0 is -0 if all inputs are -0, else +0
// flag     of double, the last out, one i32: becomes 1 if a sum overflows on the way, or does not fit into 8 words;
//          else it is not written
// aliasing any out may be any in exactly: every thread reads all inputs at i before it writes i
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   at most 2^31 inputs
// reference src/gradreduce/ops/exact_sum.py, bit-equal except NaN payloads
// source   own; two-sum is Knuth's (TAOCP 2, 4.2.2), the sum of three floats is from Boldo, Melquiond,
//          Emulation of a FMA and correctly rounded sums (IEEE Transactions on Computers 57, 2008)
#include "exact.cuh"

// A sum as WORDS floats, whose exact sum it is unless inexact is set.
template <int WORDS> struct Words {
    float word[WORDS];
    u32 inexact;  // not 0, or 0 with a sign: the rest of an addition was not 0

    DEVICE explicit Words(float first = 0, float second = 0) {
        UNROLL
        for (int w = 2; w < WORDS; ++w) word[w] = 0;
        word[0] = first;
        word[1] = second;
        inexact = 0;
    }

    DEVICE void add(float rest) {
        UNROLL
        for (int w = 0; w < WORDS - 1; ++w) {
            const TwoSum made(word[w], rest);
            word[w] = made.sum;
            rest = made.error;
        }
        // The error of the last word is 0 if and only if the sum gives back both of its terms.
        const float last = word[WORDS - 1], sum = plus(last, rest);
        inexact |= (bits_of(plus(sum, -last)) ^ bits_of(rest)) | (bits_of(plus(sum, -rest)) ^ bits_of(last));
        word[WORDS - 1] = sum;
    }

    // The sum rounded once, to odd or to nearest.
    template <bool ODD> DEVICE float rounded() const {
        float first = word[0], second = word[1];
        if constexpr (WORDS == 3) {
            const TwoSum tail(second, word[2]), middle(first, tail.error), head(tail.sum, middle.sum);
            first = head.sum;
            second = TwoSum(middle.error, head.error).to_odd();
        }
        const TwoSum total(first, second);
        const float sum = ODD ? total.to_odd() : total.sum;
        // The first word is -0 only if all terms are; adding another word would make it +0.
        return word[0] == sum ? word[0] : sum;
    }

    // Whether a rounded sum is not that of the terms. If a number on the way was not finite, the sum is not.
    DEVICE u32 is_inexact(float sum) const {
        return (u32)((inexact & 0x7fffffff) != 0) | (u32)((bits_of(sum) & 0x7f800000) == 0x7f800000);
    }
};

// The words of LANES elements.
template <int WORDS, int LANES> struct Sums {
    float word[WORDS][LANES];
    u32 inexact[LANES];

    DEVICE Words<WORDS> get(int l) const {
        Words<WORDS> words;
        UNROLL
        for (int w = 0; w < WORDS; ++w) words.word[w] = word[w][l];
        words.inexact = inexact[l];
        return words;
    }

    DEVICE void set(int l, const Words<WORDS>& words) {
        UNROLL
        for (int w = 0; w < WORDS; ++w) word[w][l] = words.word[w];
        inexact[l] = words.inexact;
    }
};

// The sum of any floats, as an integer in units of 2^-149, the least float.
struct Integer {
    static constexpr int LIMBS = 10;  // of 32 bits each; floats have 277 bits, and 2^31 of them 308
    i64 limb[LIMBS];
    float special;  // the sum of what is not finite

    DEVICE Integer() : special(0) {
        UNROLL
        for (int w = 0; w < LIMBS; ++w) limb[w] = 0;
    }

    DEVICE void add(float term) {
        const u32 bits = bits_of(term), exponent = bits >> 23 & 255;
        if (exponent == 255) {
            special = plus(special, term);
            return;
        }
        const u32 significand = (bits & 0x7fffff) | (exponent ? 0x800000 : 0), shift = exponent ? exponent - 1 : 0;
        const u64 shifted = (u64)significand << (shift & 31);
        const i64 low = (u32)shifted, high = (u32)(shifted >> 32);
        const int place = shift >> 5;
        UNROLL  // no array with a variable index, which would be in memory
        for (int w = 0; w < LIMBS; ++w) {
            const i64 part = w == place ? low : w == place + 1 ? high : 0;
            limb[w] += bits >> 31 ? -part : part;
        }
    }

    DEVICE void carry() {
        UNROLL
        for (int w = 0; w < LIMBS - 1; ++w) {
            limb[w + 1] += limb[w] >> 32;
            limb[w] &= 0xffffffff;
        }
    }

    // The sum rounded once, to odd or to nearest.
    template <bool ODD> DEVICE float rounded() {
        if (special != 0) return special;
        carry();
        const bool negative = limb[LIMBS - 1] < 0;
        if (negative) {
            UNROLL
            for (int w = 0; w < LIMBS; ++w) limb[w] = -limb[w];
            carry();
        }
        // The first limb that is not 0, the one below it, and whether any other one is not 0.
        u64 window = 0, below = 0;
        int place = 0;
        UNROLL
        for (int w = 0; w < LIMBS; ++w) {
            if (w > 1) below |= (u64)limb[w - 2];
            if (limb[w]) {
                window = (u64)limb[w] << 32 | (w ? (u64)limb[w - 1] : 0) | (below != 0);
                place = w;
            }
        }
        if (!window) return 0;
        const int surplus = 64 - 24 - leading_zeros(window), dropped = place || surplus > 32 ? surplus : 32;
        const u64 rest = window << (64 - dropped), half = 1ull << 63;
        u64 kept = window >> dropped;
        if (ODD)
            kept |= rest != 0;
        else
            kept += rest > half || (rest == half && kept & 1);
        // A significand of 24 bits adds one to the exponent.
        const u64 bits = ((u64)(dropped + 32 * place - 32) << 23) + kept, most = ODD ? 0x7f7fffff : 0x7f800000;
        return float_of((u32)(bits < most ? bits : most) | (u32)negative << 31);
    }

    static DEVICE int leading_zeros(u64 value) {
#if defined(__CUDACC__)
        return __clzll((i64)value);
#else
        return __builtin_clzll(value);
#endif
    }
};

// ODD: the sum is rounded to odd, and not divided.
template <typename Out, typename In, int N, bool ODD> struct ExactSum : Elementwise {
    static constexpr bool GROUPED = true;
    static constexpr int WORDS = N ? 2 : 3;
    static constexpr int KNOWN = N ? N : 1;
    Row row;
    i64 num_outs, num_inputs;
    Divisor<float> divisor;
    const In* in[KNOWN];

    DEVICE ExactSum(const Row& row, i64 num_outs, i64 num_inputs, double divisor)
        : row(row), num_outs(num_outs), num_inputs(num_inputs), divisor(divisor) {
        UNROLL
        for (int k = 0; k < KNOWN; ++k) in[k] = row.operand<const In>(num_outs + k);
    }

    template <int LANES> DEVICE void at(i64 i) const {
        Lanes<float, LANES> total;
        Raw<In, LANES> raw[KNOWN];
        UNROLL
        for (int k = 0; k < KNOWN; ++k) raw[k] = load_raw<LANES>(in[k], i);
        Sums<WORDS, LANES> sums;
        EACH_LANE
        for (int l = 0; l < LANES; ++l) {
            Words<WORDS> words(widen(raw[0].element[l]));
            if constexpr (N > 0) {
                const TwoSum first(words.word[0], widen(raw[1].element[l]));
                words = Words<WORDS>(first.sum, first.error);
            }
            UNROLL
            for (int k = 2; k < KNOWN; ++k) words.add(widen(raw[k].element[l]));
            sums.set(l, words);
        }
        if constexpr (N == 0) {
            for (i64 k = 1; k < num_inputs; ++k) {
                const Lanes<float, LANES> next = load<float, LANES>(row.operand<const In>(num_outs + k), i);
                EACH_LANE
                for (int l = 0; l < LANES; ++l) {
                    Words<WORDS> words = sums.get(l);
                    words.add(next.lane[l]);
                    sums.set(l, words);
                }
            }
        }
        u32 inexact = 0;
        EACH_LANE
        for (int l = 0; l < LANES; ++l) {
            const Words<WORDS> words = sums.get(l);
            total.lane[l] = words.template rounded<ODD>();
            inexact |= words.is_inexact(total.lane[l]) << l;
        }
        NO_UNROLL
        for (int l = 0; inexact && l < LANES; ++l) {
            if (!(inexact >> l & 1)) continue;
            const float sum = integer_sum(i + l * (is_spaced(LANES) ? blockDim.x : 1));
            EACH_LANE  // no variable index: the lanes are registers
            for (int m = 0; m < LANES; ++m) total.lane[m] = m == l ? sum : total.lane[m];
        }
        put(i, total);
    }

    template <int LANES> DEVICE void put(i64 i, Lanes<float, LANES>& total) const {
        if constexpr (!ODD) divisor.divide(total);
        NO_UNROLL
        for (i64 j = 0; j < num_outs; ++j) store(row.operand<Out>(j), i, total);
    }

    DEVICE float integer_sum(i64 i) const {
        Integer sum;
        NO_UNROLL
        for (i64 k = 0; k < num_inputs; ++k) sum.add(widen(row.operand<const In>(num_outs + k)[i]));
        return sum.rounded<ODD>();
    }
};

// The body of elementwise for these types.
template <typename Out, typename In, int N, bool ODD> struct body_of { typedef ExactSum<Out, In, N, ODD> type; };

#if defined(GRADREDUCE_FAST) && defined(__AVX2__)
// Sums in double: exact if the terms of an element have similar magnitudes. 8 x 8M float32 on two cores, times
// plain add_n: 1.2, with words 1.9; without the prefetch 1.6; 64 x 1M: 1.0 and 2.3 (Zen 3, g++ 12, 2026-11).
struct DoubleSums {
    static constexpr int LANES = 16;  // the vectors fit into the registers of AVX2
    typedef float Floats __attribute__((vector_size(16), aligned(4), may_alias));
    typedef double Doubles __attribute__((vector_size(32)));
    typedef u64 Parts __attribute__((vector_size(32)));
    typedef i32 Signed __attribute__((vector_size(32)));
    typedef u32 Bits __attribute__((vector_size(32), aligned(4), may_alias));
    Doubles sum[LANES / 4];
    Bits most[LANES / 8], least[LANES / 8];  // the largest term, and the least that is not 0, minus 1

    DoubleSums() {
        UNROLL
        for (int v = 0; v < LANES / 4; ++v) sum[v] = -Doubles{};
        UNROLL
        for (int v = 0; v < LANES / 8; ++v) {
            most[v] = Bits{};
            least[v] = ~Bits{};
        }
    }

    void add(const float* term) {
        __builtin_prefetch(term + 128);
        UNROLL
        for (int v = 0; v < LANES / 4; ++v)  // from memory in one instruction, which g++ 12 does not find itself
            sum[v] += (Doubles)__builtin_ia32_cvtps2pd256(((const Floats*)term)[v]);
        UNROLL
        for (int v = 0; v < LANES / 8; ++v) {
            const Bits size = ((const Bits*)term)[v] & 0x7fffffff, less = size - 1;
            most[v] = size > most[v] ? size : most[v];
            least[v] = less < least[v] ? less : least[v];
        }
    }

    // Whether 53 bits hold each sum: those of a term are 24, those of terms with other exponents as many more as
    // the exponents differ, and those of a sum of 2^b terms b more.
    bool is_exact(i64 num_terms) const {
        const int spare = 29 - (num_terms > 1 ? 64 - __builtin_clzll(num_terms - 1) : 0);
        Parts inexact = {};
        UNROLL
        for (int v = 0; v < LANES / 8; ++v) inexact |= (Parts)((Signed)(most[v] - least[v]) > spare * (1 << 23));
        return !(inexact[0] | inexact[1] | inexact[2] | inexact[3]);
    }

    // The sums rounded once, to odd or to nearest.
    template <bool ODD> void round(float* total) const {
        double lane[LANES];
        UNROLL
        for (int v = 0; v < LANES / 4; ++v) {
            constexpr u64 dropped = (1ull << 29) - 1;
            Parts bits = (Parts)sum[v];
            // A sum that is subnormal as a float is a float.
            if (ODD) bits = (bits | ((bits & dropped) + dropped)) & ~dropped;
            __builtin_memcpy(lane + 4 * v, &bits, sizeof bits);
        }
        EACH_LANE
        for (int l = 0; l < LANES; ++l) total[l] = (float)lane[l];
    }
};

// Of float: in double where that is exact, else in words.
template <typename Out, bool ODD> struct SumInDoubles : ExactSum<Out, float, 0, ODD> {
    using ExactSum<Out, float, 0, ODD>::ExactSum;

    template <int LANES> void at(i64 i) const {
        if constexpr (LANES == HOST_LANES) {
            Lanes<float, LANES> total;
            bool exact = true;
            for (int l = 0; exact && l < LANES; l += DoubleSums::LANES) exact = add(total.lane + l, i + l);
            if (exact) return this->put(i, total);
        }
        ExactSum<Out, float, 0, ODD>::template at<LANES>(i);
    }

    bool add(float* total, i64 i) const {
        DoubleSums sums;
        for (i64 k = 0; k < this->num_inputs; ++k)
            sums.add(this->row.template operand<const float>(this->num_outs + k) + i);
        sums.round<ODD>(total);
        return sums.is_exact(this->num_inputs);
    }
};

template <typename Out, int N, bool ODD> struct body_of<Out, float, N, ODD> { typedef SumInDoubles<Out, ODD> type; };
#endif

// Of double, in words: no integer holds all sums.
template <typename T> struct SumOfWords : Elementwise {
    static constexpr bool GROUPED = true;
    static constexpr int WORDS = 8;
    Row row;
    i64 num_outs, num_inputs;
    Divisor<T> divisor;

    DEVICE SumOfWords(const Row& row, i64 num_outs, i64 num_inputs, double divisor)
        : row(row), num_outs(num_outs), num_inputs(num_inputs), divisor(divisor) {}

    template <int LANES> DEVICE void at(i64 i) const {
        LaneWords<T, WORDS, LANES> sum;
        sum.count = WORDS;
        UNROLL
        for (int w = 0; w < WORDS; ++w) {
            EACH_LANE
            for (int l = 0; l < LANES; ++l) sum.word[w].lane[l] = -(T)0;
        }
        bool inexact = false;
        NO_UNROLL
        for (i64 k = 0; k < num_inputs; ++k)
            inexact |= sum.add(load<T, LANES>(row.operand<const T>(num_outs + 1 + k), i));
        inexact |= sum.renormalise_all();
        Lanes<T, LANES> total = sum.rounded();
        divisor.divide(total);
        NO_UNROLL
        for (i64 j = 0; j < num_outs; ++j) store(row.operand<T>(j), i, total);
        if (inexact) *row.operand<i32>(num_outs) = 1;
    }
};

template <typename Out, typename In, int N, int LANES>
DEVICE void add_floats(const Table& table, i64 num_outs, i64 num_inputs, double divisor) {
    // The store rounds to Out, too: only a sum that is rounded to odd before is rounded once. Two loops, because
    // g++ makes slow code of one with both.
    if constexpr (sizeof(Out) < sizeof(float)) {
        if (divisor == 1) {
            elementwise<typename body_of<Out, In, N, true>::type, LANES>(table, num_outs, num_inputs, divisor);
            return;
        }
    }
    elementwise<typename body_of<Out, In, N, false>::type, LANES>(table, num_outs, num_inputs, divisor);
}

// Uses registers for all loads before the first use, like add_n.
template <typename Out, typename In, int N>
__global__ void __launch_bounds__(256, 2) exact_sum(
    TABLE_ARGUMENT table, i64 num_outs, i64 num_inputs, double divisor) {
    constexpr int LANES = lanes_of<Out, In>::value;
    if constexpr (sizeof(Out) > sizeof(float)) {
        elementwise<SumOfWords<Out>, LANES>(table, num_outs - 1, num_inputs, divisor);
    } else {
        add_floats<Out, In, N, LANES>(table, num_outs, num_inputs, divisor);
    }
}
