// adam:    m += one_minus_beta1*(grad - m); v += one_minus_beta2*(grad*grad - v); var -= lr*m / (sqrt(v) + epsilon)
// adagrad: sum += grad*grad; var -= lr*grad / sqrt(sum)
// rmsprop: s += one_minus_decay*(grad*grad - s); m = decay*m + lr*grad / sqrt(s + epsilon); var -= m
// rmsprop_centered: likewise with the variance: c += one_minus_decay*(grad - c), sqrt(s - c*c + epsilon)
// order    as written, left to right, one rounding per operation (-fmad=false), one at each store
// types    <T, State>: 16-bit T computed in float; State (of the slots) is T, or float with a master
// aliasing none: variable, master, slots and gradient are different arrays
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none on rows or elements; num_written is that of T and State: operands before grad
// reference src/gradreduce/ops/adaptive.py, bit-equal except subnormals (CuPy builds with -ftz=true)
// source   TensorFlow's ApplyAdam, ApplyAdagrad, ApplyRMSProp, ApplyCenteredRMSProp: the formulas
#include "rules.cuh"

template <typename T, typename State>
__global__ void adam(TABLE_ARGUMENT table, i64 num_written, double lr, double one_minus_beta1, double one_minus_beta2,
                     double epsilon) {
    changed_by<Update, Adam, T, State>(table, num_written, lr, one_minus_beta1, one_minus_beta2, epsilon);
}

template <typename T, typename State>
__global__ void adagrad(TABLE_ARGUMENT table, i64 num_written, double lr) {
    changed_by<Update, Adagrad, T, State>(table, num_written, lr);
}

template <typename T, typename State>
__global__ void rmsprop(TABLE_ARGUMENT table, i64 num_written, double lr, double one_minus_decay,
                        double decay, double epsilon) {
    changed_by<Update, RmsProp, T, State>(table, num_written, lr, one_minus_decay, decay, epsilon);
}

template <typename T, typename State>
__global__ void rmsprop_centered(TABLE_ARGUMENT table, i64 num_written, double lr, double one_minus_decay,
                                 double decay, double epsilon) {
    changed_by<Update, CenteredRmsProp, T, State>(table, num_written, lr, one_minus_decay, decay, epsilon);
}
