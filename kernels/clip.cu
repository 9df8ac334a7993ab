// clip: out[t][i] = in[t][i] * factor, with factor = limit * min(1 / norm, 1 / limit)
// order    the factor in double, rounded to the accumulate dtype of T; one product, one store
// types    <T>: 16-bit types multiplied in float; norm is one double in device memory
// aliasing out may be in exactly
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none; a norm that is infinite or NaN makes every element NaN
// reference src/gradreduce/ops/clip.py, bit-equal except NaN payloads
// source   own; tf.clip_by_global_norm for the formula
#include "common.cuh"

template <typename T> struct Clip : Elementwise {
    static constexpr int AHEAD = lanes_of<T, T>::ahead;
    typedef typename accumulate<T>::type Acc;
    T* out;
    const T* in;
    Acc factor;

    DEVICE Clip(const Row& row, double limit) {
        out = row.operand<T>(0);
        in = row.operand<const T>(1);
        const double norm = *row.operand<const double>(2), most = 1 / limit, least = 1 / norm;
        factor = (Acc)(limit * (least < most ? least : most) + (norm - norm));
    }

    template <int LANES> DEVICE void at(i64 i) const { put(i, load<Acc, LANES>(in, i)); }

    DEVICE const T* input() const { return in; }

    template <int LANES> DEVICE void put(i64 i, Lanes<Acc, LANES> values) const {
        UNROLL
        for (int l = 0; l < LANES; ++l) values.lane[l] = values.lane[l] * factor;
        store(out, i, values);
    }
};

template <typename T> __global__ void clip(TABLE_ARGUMENT table, double limit) {
    elementwise<Clip<T>, lanes_of<T, T>::value>(table, limit);
}
