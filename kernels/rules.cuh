// The update rules: step changes var and slots of one element by its gradient. Each rule is written once;
// update.cu uses its step in the plain update and in AGN's local and global updates. A rule's
// members are its scalars, in the order of src/gradreduce/ops/update_rules.py.
#include "common.cuh"

template <typename Acc> struct Sgd {
    static constexpr int SLOTS = 0;
    Acc lr;

    DEVICE void step(Acc& var, Acc*, Acc grad) const { var = var - lr * grad; }
};

template <typename Acc> struct Momentum {
    static constexpr int SLOTS = 1;
    Acc lr, decay;

    DEVICE void step(Acc& var, Acc* mom, Acc grad) const {
        mom[0] = decay * mom[0] + grad;
        var = var - lr * mom[0];
    }
};

template <typename Acc> struct Nesterov {
    static constexpr int SLOTS = 1;
    Acc lr, decay;

    DEVICE void step(Acc& var, Acc* mom, Acc grad) const {
        mom[0] = decay * mom[0] + grad;
        var = var - (lr * grad + lr * decay * mom[0]);
    }
};

// The slots are the momentum and the sum of the gradients that it does not contain yet. is_last is 1 for the
// last of each num_pushes gradients, which adds their mean to the momentum.
template <typename Acc> struct DelayedNesterov {
    static constexpr int SLOTS = 2;
    Acc lr_each, lr, decay, num_pushes, is_last;

    DEVICE void step(Acc& var, Acc* slots, Acc grad) const {
        const Acc sum = slots[1] + grad;
        if (is_last != (Acc)0) {
            slots[0] = decay * slots[0] + sum / num_pushes;
            slots[1] = (Acc)0;
            var = var - (lr_each * grad + lr * decay * slots[0]);
        } else {
            slots[1] = sum;
            var = var - lr_each * grad;
        }
    }
};

template <typename Acc>
DEVICE Acc adam_step(Acc* moments, Acc grad, Acc lr, Acc one_minus_beta1, Acc one_minus_beta2, Acc epsilon) {
    moments[0] = moments[0] + one_minus_beta1 * (grad - moments[0]);
    moments[1] = moments[1] + one_minus_beta2 * (grad * grad - moments[1]);
    return lr * moments[0] / (square_root(moments[1]) + epsilon);
}

template <typename Acc> struct Adam {
    static constexpr int SLOTS = 2;
    Acc lr, one_minus_beta1, one_minus_beta2, epsilon;

    DEVICE void step(Acc& var, Acc* moments, Acc grad) const {
        var = var - adam_step(moments, grad, lr, one_minus_beta1, one_minus_beta2, epsilon);
    }
};

// scale is 1 - lr * weight_decay.
template <typename Acc> struct Adamw {
    static constexpr int SLOTS = 2;
    Acc lr, one_minus_beta1, one_minus_beta2, epsilon, scale;

    DEVICE void step(Acc& var, Acc* moments, Acc grad) const {
        var = scale * var - adam_step(moments, grad, lr, one_minus_beta1, one_minus_beta2, epsilon);
    }
};

// scale is 1 - lr * weight_decay.
template <typename Acc> struct Lion {
    static constexpr int SLOTS = 1;
    Acc lr, beta1, one_minus_beta1, beta2, one_minus_beta2, scale;

    DEVICE void step(Acc& var, Acc* moment, Acc grad) const {
        const Acc mean = beta1 * moment[0] + one_minus_beta1 * grad;
        const Acc sign = mean > 0 ? (Acc)1 : mean < 0 ? (Acc)-1 : mean == 0 ? (Acc)0 : mean;
        var = scale * var - lr * sign;
        moment[0] = beta2 * moment[0] + one_minus_beta2 * grad;
    }
};

template <typename Acc> struct Adagrad {
    static constexpr int SLOTS = 1;
    Acc lr;

    DEVICE void step(Acc& var, Acc* sum, Acc grad) const {
        sum[0] = sum[0] + grad * grad;
        var = var - lr * grad / square_root(sum[0]);
    }
};

// TensorFlow has an epsilon inside the square root, PyTorch outside; the unused one is 0.
template <typename Acc> struct Rmsprop {
    static constexpr int SLOTS = 2;
    Acc lr, one_minus_decay, decay, epsilon_inside, epsilon_outside;

    DEVICE void step(Acc& var, Acc* slots, Acc grad) const {
        slots[0] = slots[0] + one_minus_decay * (grad * grad - slots[0]);
        const Acc divisor = square_root(slots[0] + epsilon_inside) + epsilon_outside;
        slots[1] = decay * slots[1] + lr * grad / divisor;
        var = var - slots[1];
    }
};

template <typename Acc> struct RmspropCentered {
    static constexpr int SLOTS = 3;
    Acc lr, one_minus_decay, decay, epsilon_inside, epsilon_outside;

    DEVICE void step(Acc& var, Acc* slots, Acc grad) const {
        slots[0] = slots[0] + one_minus_decay * (grad * grad - slots[0]);
        slots[1] = slots[1] + one_minus_decay * (grad - slots[1]);
        const Acc variance = slots[0] - slots[1] * slots[1];
        const Acc divisor = square_root(variance + epsilon_inside) + epsilon_outside;
        slots[2] = decay * slots[2] + lr * grad / divisor;
        var = var - slots[2];
    }
};
