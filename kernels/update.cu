// update:        the rule's step on var and slots, by grad
// local_update:  sum = grad, or sum + grad; and update
// global_update: update by the mean, sum / divisor; then copy = var
// order    the rule's, one rounding per operation (-fmad=false), one at each store; the sum left to right
// types    <Rule, T, State, double…>: 16-bit T computed in float; State (of the slots) is T, or float
//          with a master; the sum is T, or float for 16-bit T; one double for each scalar of the rule
// aliasing copy may be the variable, and the copy's master the variable's; no others overlap
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none on rows or elements; num_written: operands before the last; first: 1 or 0; the divisor is rounded to Acc once
// reference src/gradreduce/ops/update.py, bit-equal except NaN payloads
// source   TensorFlow's AGNOptimizer (agn_optimizer.md): local and global update
#include "rules.cuh"

// ---- operands of a rule -------------------------------------------------------------------------

template <typename A, typename B> struct is_same { static constexpr bool value = false; };
template <typename A> struct is_same<A, A> { static constexpr bool value = true; };

// The first operands of a row: var, [master,] slots. State is T; or float for a 16-bit T with a master,
// which is before the slots. The master is used in place of the variable if it rounds to it. If not, the
// variable was assigned, and is used itself.
template <template <typename> class Rule, typename T, typename State> struct Changed : Elementwise {
    static constexpr bool MASTER = !is_same<T, State>::value;
    typedef typename accumulate<T>::type Acc;
    static constexpr int SLOTS = Rule<Acc>::SLOTS;
    static constexpr int NEXT = 1 + MASTER + SLOTS;  // the first operand after these
    T* var;
    State* state[1 + SLOTS];  // the master (or nothing), and the slots
    Rule<Acc> rule;

    template <typename... Scalars>
    DEVICE Changed(const Row& row, Scalars... scalars) : rule{(Acc)scalars...} {
        var = row.operand<T>(0);
        state[0] = row.operand<State>(1);
        UNROLL
        for (int k = 1; k <= SLOTS; ++k) state[k] = row.operand<State>(MASTER + k);
    }

    // The old values, which are all loaded before anything is stored.
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
    const Divisor<Acc> divisor;

    template <typename... Scalars>
    DEVICE GlobalUpdate(const Row& row, i64 num_written, double divisor, Scalars... scalars)
        : Base(row, scalars...), divisor(divisor) {
        copy = row.operand<T>(Base::NEXT);
        master = row.operand<State>(Base::NEXT + 1);
        sum = row.operand<const Acc>(num_written);
    }

    template <int LANES> DEVICE void at(i64 i) const {
        const auto before = this->template before<LANES>(i);
        Lanes<Acc, LANES> mean = load<Acc, LANES>(sum, i);
        divisor.divide(mean);
        const Lanes<Acc, LANES> v = this->template by<LANES>(i, before, mean);
        store(copy, i, v);
        if constexpr (Base::MASTER) store(master, i, v);
    }
};

// ---- the entries ----------------------------------------------------------------------------------

template <template <typename> class Rule, typename T, typename State, typename... Scalars>
__global__ void update(TABLE_ARGUMENT table, i64 num_written, Scalars... scalars) {
    elementwise<Update<Rule, T, State>, lanes_of<T, State>::value>(table, num_written, scalars...);
}

template <template <typename> class Rule, typename T, typename State, typename... Scalars>
__global__ void local_update(TABLE_ARGUMENT table, i64 num_written, i64 first, Scalars... scalars) {
    elementwise<LocalUpdate<Rule, T, State>, lanes_of<T, State>::value>(table, num_written, first, scalars...);
}

template <template <typename> class Rule, typename T, typename State, typename... Scalars>
__global__ void global_update(TABLE_ARGUMENT table, i64 num_written, double divisor, Scalars... scalars) {
    elementwise<GlobalUpdate<Rule, T, State>, lanes_of<T, State>::value>(table, num_written, divisor, scalars...);
}
