// local_sgd:      sum = grad, or sum + grad; and what update.cu's sgd does
// local_momentum: likewise
// local_nesterov: likewise
// local_adam:     likewise with adaptive.cu's adam
// local_adagrad:  likewise
// local_rmsprop:  likewise
// local_rmsprop_centered: likewise
// order    the rule's, one rounding per operation (-fmad=false); the sum left to right
// types    <T, State>: see update.cu; the sum is T, or float for 16-bit T
// aliasing none: variable, master, slots, sum and gradient are different arrays
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none on rows or elements; first is 1 or 0: the sum is overwritten, or added to
// reference src/gradreduce/ops/local_update.py, bit-equal except subnormals (CuPy builds with -ftz=true)
// source   TensorFlow's AGNOptimizer (agn_optimizer.md): local update and accumulation
#include "rules.cuh"

template <typename T, typename State>
__global__ void local_sgd(TABLE_ARGUMENT table, i64 num_written, i64 first, double lr) {
    changed_by<LocalUpdate, Sgd, T, State>(table, num_written, first, lr);
}

template <typename T, typename State>
__global__ void local_momentum(TABLE_ARGUMENT table, i64 num_written, i64 first, double lr,
                               double decay) {
    changed_by<LocalUpdate, Momentum, T, State>(table, num_written, first, lr, decay);
}

template <typename T, typename State>
__global__ void local_nesterov(TABLE_ARGUMENT table, i64 num_written, i64 first, double lr,
                               double decay) {
    changed_by<LocalUpdate, Nesterov, T, State>(table, num_written, first, lr, decay);
}

template <typename T, typename State>
__global__ void local_adam(TABLE_ARGUMENT table, i64 num_written, i64 first, double lr,
                           double one_minus_beta1, double one_minus_beta2, double epsilon) {
    changed_by<LocalUpdate, Adam, T, State>(table, num_written, first, lr, one_minus_beta1, one_minus_beta2, epsilon);
}

template <typename T, typename State>
__global__ void local_adagrad(TABLE_ARGUMENT table, i64 num_written, i64 first, double lr) {
    changed_by<LocalUpdate, Adagrad, T, State>(table, num_written, first, lr);
}

template <typename T, typename State>
__global__ void local_rmsprop(TABLE_ARGUMENT table, i64 num_written, i64 first, double lr,
                              double one_minus_decay, double decay, double epsilon) {
    changed_by<LocalUpdate, RmsProp, T, State>(table, num_written, first, lr, one_minus_decay, decay, epsilon);
}

template <typename T, typename State>
__global__ void local_rmsprop_centered(TABLE_ARGUMENT table, i64 num_written, i64 first,
                                       double lr, double one_minus_decay, double decay, double epsilon) {
    changed_by<LocalUpdate, CenteredRmsProp, T, State>(
        table, num_written, first, lr, one_minus_decay, decay, epsilon);
}
