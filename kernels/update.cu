// sgd:      var -= rate * grad
// momentum: mom = decay * mom + grad; var -= rate * mom
// nesterov: mom = decay * mom + grad; var -= rate * grad + rate * decay * mom
// order    as written, one rounding per operation (-fmad=false), one at each store
// types    <T, State>: halves computed in float; State, of the slots, is T, or float with a master
// aliasing none: variable, master, slots and gradient are different arrays
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none on rows or elements; num_written is that of T and State: operands before grad
// twin     src/gradreduce/ops/update.py, bit-equal except subnormals (CuPy builds with -ftz=true)
// source   TensorFlow's ApplyGradientDescent and ApplyMomentum: the formulas
#include "common.cuh"

template <typename Acc> struct Sgd {
    static constexpr int SLOTS = 0;
    Acc rate;

    DEVICE explicit Sgd(double rate) : rate((Acc)rate) {}

    DEVICE void step(Acc& var, Acc*, Acc grad) const { var = var - rate * grad; }
};

template <typename T, typename State>
__global__ void sgd(TABLE_ARGUMENT table, i64 num_written, double rate) {
    update<Sgd, T, State>(table, num_written, rate);
}

template <typename Acc> struct Momentum {
    static constexpr int SLOTS = 1;
    Acc rate, decay;

    DEVICE Momentum(double rate, double decay) : rate((Acc)rate), decay((Acc)decay) {}

    DEVICE void step(Acc& var, Acc* mom, Acc grad) const {
        mom[0] = decay * mom[0] + grad;
        var = var - rate * mom[0];
    }
};

template <typename T, typename State>
__global__ void momentum(TABLE_ARGUMENT table, i64 num_written, double rate, double decay) {
    update<Momentum, T, State>(table, num_written, rate, decay);
}

template <typename Acc> struct Nesterov : Momentum<Acc> {
    using Momentum<Acc>::Momentum;

    DEVICE void step(Acc& var, Acc* mom, Acc grad) const {
        const Acc rate = this->rate, decay = this->decay;
        mom[0] = decay * mom[0] + grad;
        var = var - (rate * grad + rate * decay * mom[0]);
    }
};

template <typename T, typename State>
__global__ void nesterov(TABLE_ARGUMENT table, i64 num_written, double rate, double decay) {
    update<Nesterov, T, State>(table, num_written, rate, decay);
}
