// adam:    m += rest1*(grad - m); v += rest2*(grad*grad - v); var -= rate*m / (root(v) + epsilon)
// adagrad: sum += grad*grad; var -= rate*grad / root(sum)
// rmsprop: s += rest*(grad*grad - s); m = decay*m + rate*grad / root(s + epsilon); var -= m
// order    as written, left to right, one rounding per operation (-fmad=false), one at each store
// types    <T, State>: halves computed in float; State, of the slots, is T, or float with a master
// aliasing none: variable, master, slots and gradient are different arrays
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none on rows or elements; num_written is that of T and State: operands before grad
// twin     src/gradreduce/ops/adaptive.py, bit-equal except subnormals (CuPy builds with -ftz=true)
// source   TensorFlow's ApplyAdam, ApplyAdagrad and ApplyRMSProp: the formulas
#include "common.cuh"

template <typename Acc> struct Adam {
    static constexpr int SLOTS = 2;
    Acc rate, rest1, rest2, epsilon;

    DEVICE Adam(double rate, double rest1, double rest2, double epsilon)
        : rate((Acc)rate), rest1((Acc)rest1), rest2((Acc)rest2), epsilon((Acc)epsilon) {}

    DEVICE void step(Acc& var, Acc* moments, Acc grad) const {
        moments[0] = moments[0] + rest1 * (grad - moments[0]);
        moments[1] = moments[1] + rest2 * (grad * grad - moments[1]);
        var = var - rate * moments[0] / (root(moments[1]) + epsilon);
    }
};

template <typename T, typename State>
__global__ void adam(TABLE_ARGUMENT table, i64 num_written, double rate, double rest1, double rest2,
                     double epsilon) {
    update<Adam, T, State>(table, num_written, rate, rest1, rest2, epsilon);
}

template <typename Acc> struct Adagrad {
    static constexpr int SLOTS = 1;
    Acc rate;

    DEVICE explicit Adagrad(double rate) : rate((Acc)rate) {}

    DEVICE void step(Acc& var, Acc* sum, Acc grad) const {
        sum[0] = sum[0] + grad * grad;
        var = var - rate * grad / root(sum[0]);
    }
};

template <typename T, typename State>
__global__ void adagrad(TABLE_ARGUMENT table, i64 num_written, double rate) {
    update<Adagrad, T, State>(table, num_written, rate);
}

template <typename Acc> struct RmsProp {
    static constexpr int SLOTS = 2;
    Acc rate, rest, decay, epsilon;

    DEVICE RmsProp(double rate, double rest, double decay, double epsilon)
        : rate((Acc)rate), rest((Acc)rest), decay((Acc)decay), epsilon((Acc)epsilon) {}

    DEVICE void step(Acc& var, Acc* slots, Acc grad) const {
        slots[0] = slots[0] + rest * (grad * grad - slots[0]);
        slots[1] = decay * slots[1] + rate * grad / root(slots[0] + epsilon);
        var = var - slots[1];
    }
};

template <typename T, typename State>
__global__ void rmsprop(TABLE_ARGUMENT table, i64 num_written, double rate, double rest,
                        double decay, double epsilon) {
    update<RmsProp, T, State>(table, num_written, rate, rest, decay, epsilon);
}
