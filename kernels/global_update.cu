// global_sgd:      update.cu's sgd by sum / period; then copy = var
// global_momentum: likewise
// global_nesterov: likewise
// global_adam:     likewise with adaptive.cu's adam
// global_adagrad:  likewise
// global_rmsprop:  likewise
// global_rmsprop_centered: likewise
// order    the rule's, one rounding per operation (-fmad=false); the mean by a true division
// types    <T, State>: see update.cu; the sum is T, or float for 16-bit T
// aliasing none: variable, master, slots, copy, its master and sum are different arrays
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none on rows or elements; period is 1 or more
// reference src/gradreduce/ops/global_update.py, bit-equal except subnormals (CuPy builds with -ftz=true)
// source   TensorFlow's AGNOptimizer (agn_optimizer.md): push, global update and pull
#include "rules.cuh"

template <typename T, typename State>
__global__ void global_sgd(TABLE_ARGUMENT table, i64 num_written, i64 period, double lr) {
    changed_by<GlobalUpdate, Sgd, T, State>(table, num_written, period, lr);
}

template <typename T, typename State>
__global__ void global_momentum(TABLE_ARGUMENT table, i64 num_written, i64 period, double lr,
                                double decay) {
    changed_by<GlobalUpdate, Momentum, T, State>(table, num_written, period, lr, decay);
}

template <typename T, typename State>
__global__ void global_nesterov(TABLE_ARGUMENT table, i64 num_written, i64 period, double lr,
                                double decay) {
    changed_by<GlobalUpdate, Nesterov, T, State>(table, num_written, period, lr, decay);
}

template <typename T, typename State>
__global__ void global_adam(TABLE_ARGUMENT table, i64 num_written, i64 period, double lr,
                            double one_minus_beta1, double one_minus_beta2, double epsilon) {
    changed_by<GlobalUpdate, Adam, T, State>(table, num_written, period, lr, one_minus_beta1, one_minus_beta2, epsilon);
}

template <typename T, typename State>
__global__ void global_adagrad(TABLE_ARGUMENT table, i64 num_written, i64 period, double lr) {
    changed_by<GlobalUpdate, Adagrad, T, State>(table, num_written, period, lr);
}

template <typename T, typename State>
__global__ void global_rmsprop(TABLE_ARGUMENT table, i64 num_written, i64 period, double lr,
                               double one_minus_decay, double decay, double epsilon) {
    changed_by<GlobalUpdate, RmsProp, T, State>(table, num_written, period, lr, one_minus_decay, decay, epsilon);
}

template <typename T, typename State>
__global__ void global_rmsprop_centered(TABLE_ARGUMENT table, i64 num_written, i64 period,
                                        double lr, double one_minus_decay, double decay, double epsilon) {
    changed_by<GlobalUpdate, CenteredRmsProp, T, State>(
        table, num_written, period, lr, one_minus_decay, decay, epsilon);
}
