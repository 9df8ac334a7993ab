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
        LaneWords<Acc, MOST, LANES> sum;
        sum.count = count;
        UNROLL
        for (int w = 0; w < MOST; ++w) {
            if (w < count && !fresh) {
                const Raw<Acc, LANES> raw = load_raw<LANES>(row.operand<const Acc>(w), i);
                EACH_LANE
                for (int l = 0; l < LANES; ++l) sum.word[w].lane[l] = raw.element[l];
            } else {
                EACH_LANE
                for (int l = 0; l < LANES; ++l) sum.word[w].lane[l] = -(Acc)0;
            }
        }
        NO_UNROLL
        for (i64 k = 0; k < num_inputs; ++k)
            if (sum.add(load<Acc, LANES>(row.operand<const In>(count + 1 + k), i))) *row.operand<i32>(count) = 1;
        UNROLL
        for (int w = 0; w < MOST; ++w)
            if (w < count) store(row.operand<Acc>(w), i, sum.word[w]);
    }
};

template <typename Acc, typename In, int N>
__global__ void add_words(TABLE_ARGUMENT table, i64 num_outs, i64 num_inputs, i64 fresh) {
    elementwise<AddWords<Acc, In, N>, lanes_of<Acc, In>::value>(table, num_outs, num_inputs, fresh);
}
