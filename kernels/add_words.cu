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

// A sum rounded to nearest, and its error.
template <typename T> struct TwoSum {
    T sum, error;

    DEVICE TwoSum(T left, T right) {
        sum = plus(left, right);
        const T added = plus(sum, -left);
        error = plus(plus(left, -plus(sum, -added)), plus(right, -added));
    }
};

// A sum as words, the first of them the largest, and what did not fit into them.
template <typename T, int MOST> struct Words {
    T word[MOST];
    T rest;

    // Adds a term. The errors have the opposite sign: so that of an exact sum is +0, and a word of -0 minus it -0.
    DEVICE void add(T term, int count) {
        const T first = word[0], sum = plus(first, term), added = plus(sum, -first);
        T error = plus(plus(added, -term), plus(plus(sum, -added), -first));
        word[0] = sum;
        UNROLL
        for (int w = 1; w < MOST; ++w) {
            if (w >= count) continue;
            const T before = word[w], less = plus(before, -error), change = plus(less, -before);
            error = plus(plus(change, error), plus(plus(less, -change), -before));
            word[w] = less;
        }
        rest = -error;
    }

    // Adds what did not fit after all, and returns whether it still does not. `before` is word 0 before `term`.
    DEVICE bool settle(T before, T term, int count) {
        if (rest != rest) return overflow(word[0], count) && is_finite(before) && is_finite(term);
        // Sums of neighbours, from the least on, until each word is the rounded sum of itself and the next one.
        for (bool changed = true; changed;) {
            changed = false;
            for (int w = count; w > 0; --w) {
                T& low = w < count ? word[w] : rest;
                const TwoSum<T> made(word[w - 1], low);
                if (made.error != made.error) return overflow(made.sum, count);
                changed |= made.sum != word[w - 1];
                word[w - 1] = made.sum;
                low = made.error;
            }
        }
        return rest != 0;
    }

    DEVICE bool overflow(T sum, int count) {
        word[0] = sum;
        for (int w = 1; w < count; ++w) word[w] = 0;
        return true;
    }
};

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
                word[w] = load<Acc, LANES>(row.operand<const Acc>(w), i);
            } else {
                EACH_LANE
                for (int l = 0; l < LANES; ++l) word[w].lane[l] = -(Acc)0;
            }
        }
        NO_UNROLL
        for (i64 k = 0; k < num_inputs; ++k) {
            const Lanes<Acc, LANES> term = load<Acc, LANES>(row.operand<const In>(count + 1 + k), i);
            Lanes<Acc, LANES> before = word[0], rest;
            u32 inexact = 0;
            EACH_LANE
            for (int l = 0; l < LANES; ++l) {
                Words<Acc, MOST> words;
                UNROLL
                for (int w = 0; w < MOST; ++w) words.word[w] = word[w].lane[l];
                words.add(term.lane[l], count);
                UNROLL
                for (int w = 0; w < MOST; ++w) word[w].lane[l] = words.word[w];
                rest.lane[l] = words.rest;
                inexact |= (u32)!(words.rest == 0) << l;
            }
            NO_UNROLL
            for (int l = 0; inexact && l < LANES; ++l) {
                if (!(inexact >> l & 1)) continue;
                Words<Acc, MOST> words;
                Acc first = 0, added = 0;
                EACH_LANE  // no variable index: the lanes are registers
                for (int m = 0; m < LANES; ++m) {
                    if (m != l) continue;
                    UNROLL
                    for (int w = 0; w < MOST; ++w) words.word[w] = word[w].lane[m];
                    words.rest = rest.lane[m];
                    first = before.lane[m];
                    added = term.lane[m];
                }
                if (words.settle(first, added, count)) *row.operand<i32>(count) = 1;
                EACH_LANE
                for (int m = 0; m < LANES; ++m) {
                    UNROLL
                    for (int w = 0; w < MOST; ++w) word[w].lane[m] = m == l ? words.word[w] : word[w].lane[m];
                }
            }
        }
        UNROLL
        for (int w = 0; w < MOST; ++w)
            if (w < count) store(row.operand<Acc>(w), i, word[w]);
    }
};

template <typename Acc, typename In, int N>
__global__ void add_words(TABLE_ARGUMENT table, i64 num_outs, i64 num_inputs, i64 fresh) {
    elementwise<AddWords<Acc, In, N>, lanes_of<Acc, In>::value>(table, num_outs, num_inputs, fresh);
}
