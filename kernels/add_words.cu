// add_words: word[t][0][i] + … + word[t][n-1][i] += in[t][0][i] + in[t][1][i] + …, as real numbers
// order    inputs from left to right; another order may give other words, but the same exact sum
// types    <Acc, In, N>: words of float or double; N: words known when compiled; 0: any number up to 8
// special  an input that is not finite, or a sum that overflows, makes word 0 infinite or NaN and the others 0.
//          All words are -0 if all inputs are
// flag     out[t][n], one i32: becomes 1 if a sum overflowed, or did not fit into n words; else it is not written
// aliasing an input may be a word exactly: every thread reads all operands at i before it writes i
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   8 words
// reference src/gradreduce/ops/add_words.py, bit-equal except NaN payloads
// source   own; two-sum is Knuth's (TAOCP 2, 4.2.2), the order of the words by Priest and Shewchuk,
//          Adaptive Precision Floating-Point Arithmetic (Discrete & Computational Geometry 18, 1997)
#include "exact.cuh"

template <typename T> DEVICE bool is_finite(T value) { return value - value == 0; }

// A sum that is not finite: word 0, and the others are 0.
template <int MOST, typename T> DEVICE bool replace(T* word, T sum) {
    word[0] = sum;
    UNROLL
    for (int w = 1; w < MOST; ++w) word[w] = 0;
    return true;
}

// Adds the rest to the words, and returns whether some of it, or a sum of finite numbers that overflows, is left.
// Neighbours become their sum and its error, from the least on, until each word is the rounded sum of itself and the
// next one. No pass changes the exact sum, so the limit of their number only bounds the time.
template <int MOST, typename T> DEVICE bool renormalise(T* word, T rest, int count, bool finite) {
    if (rest != rest) return replace<MOST>(word, word[0]) && finite;
    bool moves = true;
    NO_UNROLL
    for (int pass = 0; moves && pass < count + 2; ++pass) {
        moves = false;
        UNROLL
        for (int w = MOST - 1; w >= 0; --w) {
            if (w >= count) continue;
            const int next = w + 1 < MOST ? w + 1 : w;
            const T left = word[w], right = w + 1 == count ? rest : word[next], sum = plus(left, right);
            const T added = plus(sum, -left), error = plus(plus(left, -plus(sum, -added)), plus(right, -added));
            if (error != error) return replace<MOST>(word, sum);
            (w + 1 == count ? rest : word[next]) = error;
            word[w] = sum;
            moves |= sum != left;
        }
    }
    return rest != 0;
}

template <typename Acc, typename In, int N> struct AddWords : Elementwise {
    static constexpr bool GROUPED = true;
    static constexpr int MOST = N ? N : 8;
    Row row;
    int count;
    i64 num_inputs;
    bool fresh;

    DEVICE AddWords(const Row& row, i64 num_outs, i64 num_inputs, i64 fresh)
        : row(row), count(N ? N : (int)num_outs - 1), num_inputs(num_inputs), fresh(fresh != 0) {}

    template <int LANES> DEVICE void at(i64 i) const {
        Lanes<Acc, LANES> word[MOST];
        UNROLL
        for (int w = 0; w < MOST; ++w) {
            if (w < count && !fresh) {
                const Raw<Acc, LANES> raw = load_raw<LANES>(row.operand<const Acc>(w), i);
                EACH_LANE
                for (int l = 0; l < LANES; ++l) word[w].lane[l] = raw.element[l];
            } else {
                EACH_LANE
                for (int l = 0; l < LANES; ++l) word[w].lane[l] = -(Acc)0;
            }
        }
        NO_UNROLL
        for (i64 k = 0; k < num_inputs; ++k) {
            const Lanes<Acc, LANES> term = load<Acc, LANES>(row.operand<const In>(count + 1 + k), i);
            // Minus the errors: that of an exact sum is +0, and a word of -0 minus it stays -0.
            Lanes<Acc, LANES> first, error;
            EACH_LANE
            for (int l = 0; l < LANES; ++l) {
                first.lane[l] = word[0].lane[l];
                error.lane[l] = -term.lane[l];
            }
            UNROLL
            for (int w = 0; w < MOST; ++w)
                if (w < count) subtract(word[w], error);
            u32 inexact = 0;
            EACH_LANE
            for (int l = 0; l < LANES; ++l) inexact |= (u32)!(error.lane[l] == 0) << l;
            NO_UNROLL
            for (int l = 0; inexact && l < LANES; ++l)
                if (inexact >> l & 1) renormalise_lane(word, l, first, term, error);
        }
        UNROLL
        for (int w = 0; w < MOST; ++w)
            if (w < count) store(row.operand<Acc>(w), i, word[w]);
    }

    // word - error; the error becomes minus that of this sum.
    template <int LANES> static DEVICE void subtract(Lanes<Acc, LANES>& word, Lanes<Acc, LANES>& error) {
        EACH_LANE
        for (int l = 0; l < LANES; ++l) {
            const Acc before = word.lane[l], sum = plus(before, -error.lane[l]), added = plus(sum, -before);
            error.lane[l] = plus(plus(added, error.lane[l]), plus(plus(sum, -added), -before));
            word.lane[l] = sum;
        }
    }

    // Adds what did not fit into the words of one lane after all, or sets the flag.
    template <int LANES>
    DEVICE void renormalise_lane(Lanes<Acc, LANES>* word, int lane, const Lanes<Acc, LANES>& first,
                                 const Lanes<Acc, LANES>& term, const Lanes<Acc, LANES>& error) const {
        Acc part[MOST] = {}, rest = 0;
        bool finite = false;
        EACH_LANE  // no variable index: the lanes are registers
        for (int l = 0; l < LANES; ++l) {
            if (l != lane) continue;
            UNROLL
            for (int w = 0; w < MOST; ++w) part[w] = word[w].lane[l];
            rest = -error.lane[l];
            finite = is_finite(first.lane[l]) && is_finite(term.lane[l]);
        }
        if (renormalise<MOST>(part, rest, count, finite)) *row.operand<i32>(count) = 1;
        EACH_LANE
        for (int l = 0; l < LANES; ++l) {
            UNROLL
            for (int w = 0; w < MOST; ++w) word[w].lane[l] = l == lane ? part[w] : word[w].lane[l];
        }
    }
};

template <typename Acc, typename In, int N>
__global__ void add_words(TABLE_ARGUMENT table, i64 num_outs, i64 num_inputs, i64 fresh) {
    elementwise<AddWords<Acc, In, N>, lanes_of<Acc, In>::value>(table, num_outs, num_inputs, fresh);
}
