// sgd:      var -= lr * grad
// momentum: mom = decay * mom + grad; var -= lr * mom
// nesterov: mom = decay * mom + grad; var -= lr * grad + lr * decay * mom
// order    as written, one rounding per operation (-fmad=false), one at each store
// types    <T, State>: 16-bit T computed in float; State (of the slots) is T, or float with a master
// aliasing none: variable, master, slots and gradient are different arrays
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none on rows or elements; num_written is that of T and State: operands before grad
// reference src/gradreduce/ops/update.py, bit-equal except subnormals (CuPy builds with -ftz=true)
// source   TensorFlow's ApplyGradientDescent and ApplyMomentum: the formulas
#include "rules.cuh"

template <typename T, typename State>
__global__ void sgd(TABLE_ARGUMENT table, i64 num_written, double lr) {
    changed_by<Update, Sgd, T, State>(table, num_written, lr);
}

template <typename T, typename State>
__global__ void momentum(TABLE_ARGUMENT table, i64 num_written, double lr, double decay) {
    changed_by<Update, Momentum, T, State>(table, num_written, lr, decay);
}

template <typename T, typename State>
__global__ void nesterov(TABLE_ARGUMENT table, i64 num_written, double lr, double decay) {
    changed_by<Update, Nesterov, T, State>(table, num_written, lr, decay);
}
