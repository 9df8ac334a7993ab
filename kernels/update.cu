// sgd:      var -= rate * grad
// momentum: mom = decay * mom + grad; var -= rate * mom
// nesterov: mom = decay * mom + grad; var -= rate * grad + rate * decay * mom
// order    as written, one rounding per operation (-fmad=false), one at each store
// types    <T>: halves computed in float; the momentum has the variable's type
// aliasing none: variable, slots and gradient are different arrays
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none on rows or elements
// twin     src/gradreduce/ops/update.py, bit-equal except subnormals (CuPy builds with -ftz=true)
// source   TensorFlow's ApplyGradientDescent and ApplyMomentum: the formulas
#include "common.cuh"

template <typename T> struct Sgd {
    static constexpr bool GROUPED = false;
    typedef typename accumulate<T>::type Acc;
    T* var;
    const T* grad;
    Acc rate;

    DEVICE Sgd(const Row& row, double rate) : rate((Acc)rate) {
        var = row.operand<T>(0);
        grad = row.operand<const T>(1);
    }

    template <int LANES> DEVICE void at(i64 i) const {
        Lanes<Acc, LANES> v = load<Acc, LANES>(var, i), g = load<Acc, LANES>(grad, i);
        UNROLL
        for (int l = 0; l < LANES; ++l) v.lane[l] = v.lane[l] - rate * g.lane[l];
        store(var, i, v);
    }
};

template <typename T> __global__ void sgd(TABLE_ARGUMENT table, double rate) {
    elementwise<Sgd<T>, lanes_of<T, T>::value>(table, rate);
}

template <typename T> struct Momentum {
    static constexpr bool GROUPED = false;
    typedef typename accumulate<T>::type Acc;
    T* var;
    T* mom;
    const T* grad;
    Acc rate, decay;

    DEVICE Momentum(const Row& row, double rate, double decay)
        : rate((Acc)rate), decay((Acc)decay) {
        var = row.operand<T>(0);
        mom = row.operand<T>(1);
        grad = row.operand<const T>(2);
    }

    template <int LANES> DEVICE void at(i64 i) const {
        Lanes<Acc, LANES> v = load<Acc, LANES>(var, i), m = load<Acc, LANES>(mom, i);
        const Lanes<Acc, LANES> g = load<Acc, LANES>(grad, i);
        UNROLL
        for (int l = 0; l < LANES; ++l) {
            m.lane[l] = decay * m.lane[l] + g.lane[l];
            v.lane[l] = v.lane[l] - rate * m.lane[l];
        }
        store(mom, i, m);
        store(var, i, v);
    }
};

template <typename T> __global__ void momentum(TABLE_ARGUMENT table, double rate, double decay) {
    elementwise<Momentum<T>, lanes_of<T, T>::value>(table, rate, decay);
}

template <typename T> struct Nesterov : Momentum<T> {
    typedef typename accumulate<T>::type Acc;
    using Momentum<T>::Momentum;

    template <int LANES> DEVICE void at(i64 i) const {
        const Acc rate = this->rate, decay = this->decay;
        Lanes<Acc, LANES> v = load<Acc, LANES>(this->var, i), m = load<Acc, LANES>(this->mom, i);
        const Lanes<Acc, LANES> g = load<Acc, LANES>(this->grad, i);
        UNROLL
        for (int l = 0; l < LANES; ++l) {
            m.lane[l] = decay * m.lane[l] + g.lane[l];
            v.lane[l] = v.lane[l] - (rate * g.lane[l] + rate * decay * m.lane[l]);
        }
        store(this->mom, i, m);
        store(this->var, i, v);
    }
};

template <typename T> __global__ void nesterov(TABLE_ARGUMENT table, double rate, double decay) {
    elementwise<Nesterov<T>, lanes_of<T, T>::value>(table, rate, decay);
}
