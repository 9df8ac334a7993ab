// The update rules, each written once: a plain update, AGN's local one and its global one are bodies
// around the same step. A rule takes four scalars, of which it wants the first few.
#include "common.cuh"

// ---- rules: var and slots of one element, changed by its gradient --------------------------------

template <typename Acc> struct Sgd {
    static constexpr int SLOTS = 0;
    Acc lr;

    DEVICE explicit Sgd(double lr) : lr((Acc)lr) {}

    DEVICE void step(Acc& var, Acc*, Acc grad) const { var = var - lr * grad; }
};

template <typename Acc> struct Momentum {
    static constexpr int SLOTS = 1;
    Acc lr, decay;

    DEVICE Momentum(double lr, double decay) : lr((Acc)lr), decay((Acc)decay) {}

    DEVICE void step(Acc& var, Acc* mom, Acc grad) const {
        mom[0] = decay * mom[0] + grad;
        var = var - lr * mom[0];
    }
};

template <typename Acc> struct Nesterov : Momentum<Acc> {
    using Momentum<Acc>::Momentum;

    DEVICE void step(Acc& var, Acc* mom, Acc grad) const {
        const Acc lr = this->lr, decay = this->decay;
        mom[0] = decay * mom[0] + grad;
        var = var - (lr * grad + lr * decay * mom[0]);
    }
};

template <typename Acc> struct Adam {
    static constexpr int SLOTS = 2;
    Acc lr, one_minus_beta1, one_minus_beta2, epsilon;

    DEVICE Adam(double lr, double one_minus_beta1, double one_minus_beta2, double epsilon)
        : lr((Acc)lr), one_minus_beta1((Acc)one_minus_beta1), one_minus_beta2((Acc)one_minus_beta2), epsilon((Acc)epsilon) {}

    DEVICE void step(Acc& var, Acc* moments, Acc grad) const {
        moments[0] = moments[0] + one_minus_beta1 * (grad - moments[0]);
        moments[1] = moments[1] + one_minus_beta2 * (grad * grad - moments[1]);
        var = var - lr * moments[0] / (square_root(moments[1]) + epsilon);
    }
};

template <typename Acc> struct Adagrad {
    static constexpr int SLOTS = 1;
    Acc lr;

    DEVICE explicit Adagrad(double lr) : lr((Acc)lr) {}

    DEVICE void step(Acc& var, Acc* sum, Acc grad) const {
        sum[0] = sum[0] + grad * grad;
        var = var - lr * grad / square_root(sum[0]);
    }
};

template <typename Acc> struct RmsProp {
    static constexpr int SLOTS = 2;
    Acc lr, one_minus_decay, decay, epsilon;

    DEVICE RmsProp(double lr, double one_minus_decay, double decay, double epsilon)
        : lr((Acc)lr), one_minus_decay((Acc)one_minus_decay), decay((Acc)decay), epsilon((Acc)epsilon) {}

    DEVICE void step(Acc& var, Acc* slots, Acc grad) const {
        slots[0] = slots[0] + one_minus_decay * (grad * grad - slots[0]);
        slots[1] = decay * slots[1] + lr * grad / square_root(slots[0] + epsilon);
        var = var - slots[1];
    }
};

template <typename Acc> struct CenteredRmsProp {
    static constexpr int SLOTS = 3;
    Acc lr, one_minus_decay, decay, epsilon;

    DEVICE CenteredRmsProp(double lr, double one_minus_decay, double decay, double epsilon)
        : lr((Acc)lr), one_minus_decay((Acc)one_minus_decay), decay((Acc)decay), epsilon((Acc)epsilon) {}

    DEVICE void step(Acc& var, Acc* slots, Acc grad) const {
        slots[0] = slots[0] + one_minus_decay * (grad * grad - slots[0]);
        slots[1] = slots[1] + one_minus_decay * (grad - slots[1]);
        const Acc variance = slots[0] - slots[1] * slots[1];
        slots[2] = decay * slots[2] + lr * grad / square_root(variance + epsilon);
        var = var - slots[2];
    }
};

// ---- operands of a rule -------------------------------------------------------------------------

template <typename A, typename B> struct is_same { static constexpr bool value = false; };
template <typename A> struct is_same<A, A> { static constexpr bool value = true; };

// The operands that begin a row: var, [master,] slots. State is T, or float with a 16-bit T: then a
// master precedes the slots and replaces the variable, as long as it rounds to it; if not, the
// variable was assigned to, and is used.
template <template <typename> class Rule, typename T, typename State> struct Changed : Elementwise {
    static constexpr bool MASTER = !is_same<T, State>::value;
    typedef typename accumulate<T>::type Acc;
    static constexpr int SLOTS = Rule<Acc>::SLOTS;
    static constexpr int NEXT = 1 + MASTER + SLOTS;  // the operand after them
    T* var;
    State* state[1 + SLOTS];  // the master (or nothing), and the slots
    Rule<Acc> rule;

    template <typename... Scalars>
    DEVICE Changed(const Row& row, Scalars... scalars) : rule(scalars...) {
        var = row.operand<T>(0);
        state[0] = row.operand<State>(1);
        UNROLL
        for (int k = 1; k <= SLOTS; ++k) state[k] = row.operand<State>(MASTER + k);
    }

    // What it was, all of which is loaded before anything is stored.
    template <int LANES> struct Before {
        Raw<T, LANES> var;
        Raw<State, LANES> state[1 + SLOTS];
    };

    template <int LANES> DEVICE Before<LANES> before(i64 i) const {
        Before<LANES> before;
        before.var = load_raw<LANES>(var, i);
        UNROLL
        for (int k = MASTER ? 0 : 1; k <= SLOTS; ++k) before.state[k] = load_raw<LANES>(state[k], i);
        return before;
    }

    // The updated variable, unrounded.
    template <int LANES>
    DEVICE Lanes<Acc, LANES> by(i64 i, const Before<LANES>& before, const Lanes<Acc, LANES>& grad) const {
        Lanes<Acc, LANES> v = widened<Acc>(before.var), slots[1 + SLOTS];
        if constexpr (MASTER) {
            const Lanes<Acc, LANES> master = widened<Acc>(before.state[0]);
            UNROLL
            for (int l = 0; l < LANES; ++l)
                if (widen(to<T>::from(master.lane[l])) == v.lane[l]) v.lane[l] = master.lane[l];
        }
        UNROLL
        for (int k = 1; k <= SLOTS; ++k) slots[k] = widened<Acc>(before.state[k]);
        UNROLL
        for (int l = 0; l < LANES; ++l) {
            Acc here[1 + SLOTS];
            UNROLL
            for (int k = 1; k <= SLOTS; ++k) here[k] = slots[k].lane[l];
            rule.step(v.lane[l], here + 1, grad.lane[l]);
            UNROLL
            for (int k = 1; k <= SLOTS; ++k) slots[k].lane[l] = here[k];
        }
        UNROLL
        for (int k = 1; k <= SLOTS; ++k) store(state[k], i, slots[k]);
        if constexpr (MASTER) store(state[0], i, v);
        store(var, i, v);
        return v;
    }
};

// ---- the three bodies ----------------------------------------------------------------------------

// var, [master,] slots | grad
template <template <typename> class Rule, typename T, typename State>
struct Update : Changed<Rule, T, State> {
    typedef Changed<Rule, T, State> Base;
    const T* grad;

    template <typename... Scalars>
    DEVICE Update(const Row& row, i64 num_written, Scalars... scalars) : Base(row, scalars...) {
        grad = row.operand<const T>(num_written);
    }

    template <int LANES> DEVICE void at(i64 i) const {
        const auto before = this->template before<LANES>(i);
        this->template by<LANES>(i, before, load<typename Base::Acc, LANES>(grad, i));
    }
};

// var, [master,] slots, sum | grad: the sum of a period, which the first gradient writes
template <template <typename> class Rule, typename T, typename State>
struct LocalUpdate : Changed<Rule, T, State> {
    typedef Changed<Rule, T, State> Base;
    typedef typename Base::Acc Acc;
    Acc* sum;
    const T* grad;
    const bool first;

    template <typename... Scalars>
    DEVICE LocalUpdate(const Row& row, i64 num_written, i64 first, Scalars... scalars)
        : Base(row, scalars...), first(first) {
        sum = row.operand<Acc>(Base::NEXT);
        grad = row.operand<const T>(num_written);
    }

    template <int LANES> DEVICE void at(i64 i) const {
        const auto before = this->template before<LANES>(i);
        const Lanes<Acc, LANES> g = load<Acc, LANES>(grad, i);
        Lanes<Acc, LANES> total = g;
        if (!first) {
            total = load<Acc, LANES>(sum, i);
            add_to(total, g);
        }
        store(sum, i, total);
        this->template by<LANES>(i, before, g);
    }
};

// var, [master,] slots, copy, [its master] | sum: of the mean, and pulled into the copy
template <template <typename> class Rule, typename T, typename State>
struct GlobalUpdate : Changed<Rule, T, State> {
    typedef Changed<Rule, T, State> Base;
    typedef typename Base::Acc Acc;
    T* copy;
    State* master;
    const Acc* sum;
    const Divisor<Acc> period;

    template <typename... Scalars>
    DEVICE GlobalUpdate(const Row& row, i64 num_written, i64 period, Scalars... scalars)
        : Base(row, scalars...), period((double)period) {
        copy = row.operand<T>(Base::NEXT);
        master = row.operand<State>(Base::NEXT + 1);
        sum = row.operand<const Acc>(num_written);
    }

    template <int LANES> DEVICE void at(i64 i) const {
        const auto before = this->template before<LANES>(i);
        Lanes<Acc, LANES> mean = load<Acc, LANES>(sum, i);
        period.divide(mean);
        const Lanes<Acc, LANES> v = this->template by<LANES>(i, before, mean);
        store(copy, i, v);
        if constexpr (Base::MASTER) store(master, i, v);
    }
};

template <template <template <typename> class, typename, typename> class Body,
          template <typename> class Rule, typename T, typename State, typename... Scalars>
DEVICE void changed_by(const Table& table, Scalars... scalars) {
    elementwise<Body<Rule, T, State>, lanes_of<T, State>::value>(table, scalars...);
}
