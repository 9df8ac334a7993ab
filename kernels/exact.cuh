// Additions whose errors are kept: for exact_sum and add_words.
#include "common.cuh"

// Never contracted and never reassociated, whatever the compiler's flags are.
#if defined(__CUDACC__)
DEVICE float plus(float left, float right) { return __fadd_rn(left, right); }
DEVICE double plus(double left, double right) { return __dadd_rn(left, right); }
#else
DEVICE float plus(float left, float right) { return left + right; }
DEVICE double plus(double left, double right) { return left + right; }
#endif

// Before a loop over lanes: on the host g++ vectorises it.
#if defined(__CUDACC__)
#define EACH_LANE UNROLL
#else
#define EACH_LANE INDEPENDENT
#endif

DEVICE u32 bits_of(float value) {
    union { float value; u32 bits; } pun;
    pun.value = value;
    return pun.bits;
}

DEVICE u64 bits_of(double value) {
    union { double value; u64 bits; } pun;
    pun.value = value;
    return pun.bits;
}

DEVICE float float_of(u32 bits) {
    union { u32 bits; float value; } pun;
    pun.bits = bits;
    return pun.value;
}

DEVICE double float_of(u64 bits) {
    union { u64 bits; double value; } pun;
    pun.bits = bits;
    return pun.value;
}

template <typename T> DEVICE bool is_finite(T value) { return value - value == 0; }

// Two floats: a sum rounded to nearest, and its error, which is a float too. If the sum overflows or is not
// finite, the error is NaN.
template <typename T> struct TwoSum {
    typedef decltype(bits_of(T())) Bits;
    T sum, error;

    DEVICE TwoSum(T left, T right) {
        sum = plus(left, right);
        const T added = plus(sum, -left);
        error = plus(plus(left, -plus(sum, -added)), plus(right, -added));
    }

    // The exact sum, rounded to odd: to the neighbour whose last bit is 1, unless it is a float. Another rounding,
    // to at most 22 bits or of a number that it is added to, then sees on which side of a tie it lies.
    DEVICE T to_odd() const {
        // Without branches, which g++ does not vectorise. A NaN is neither above nor below 0.
        const Bits bits = bits_of(sum), above = error > 0, below = error < 0, positive = sum > 0;
        const Bits moved = (above | below) & ~bits & 1, down = above ^ positive;
        return float_of(bits + moved - 2 * (moved & down));
    }
};

// ---- sums of any number of words ----------------------------------------------------------------

// A sum that is not finite: word 0, and the others are 0.
template <int MOST, typename T> DEVICE bool replace(T* word, T sum) {
    word[0] = sum;
    UNROLL
    for (int w = 1; w < MOST; ++w) word[w] = 0;
    return true;
}

// Adds the rest to the words, and returns whether some of it, or a sum of finite numbers that overflows, is left.
// Neighbours become their sum and its error, from the least on, until each word is the rounded sum of itself and the
// next one. No pass changes the exact sum, so the limit of their number only bounds the time.
template <int MOST, typename T> DEVICE bool renormalise(T* word, T rest, int count, bool finite) {
    if (rest != rest) return replace<MOST>(word, word[0]) && finite;
    bool moves = true;
    NO_UNROLL
    for (int pass = 0; moves && pass < count + 2; ++pass) {
        moves = false;
        UNROLL
        for (int w = MOST - 1; w >= 0; --w) {
            if (w >= count) continue;
            const int next = w + 1 < MOST ? w + 1 : w;
            const T left = word[w];
            const TwoSum<T> made(left, w + 1 == count ? rest : word[next]);
            if (made.error != made.error) return replace<MOST>(word, made.sum);
            (w + 1 == count ? rest : word[next]) = made.error;
            word[w] = made.sum;
            moves |= made.sum != left;
        }
    }
    return rest != 0;
}

// The words of LANES elements: MOST of them in registers, of which `count` are used.
template <typename T, int MOST, int LANES> struct LaneWords {
    Lanes<T, LANES> word[MOST];
    int count;

    // Adds a term, and returns whether a sum did not fit.
    DEVICE bool add(const Lanes<T, LANES>& term) {
        // Minus the errors: that of an exact sum is +0, and a word of -0 minus it stays -0.
        Lanes<T, LANES> first, error;
        EACH_LANE
        for (int l = 0; l < LANES; ++l) {
            first.lane[l] = word[0].lane[l];
            error.lane[l] = -term.lane[l];
        }
        u32 inexact = 0;
        UNROLL
        for (int w = 0; w < MOST; ++w) {
            if (w < count) {
                subtract(word[w], error);
                if (w == 0) continue;
                inexact = 0;
                EACH_LANE
                for (int l = 0; l < LANES; ++l) inexact |= (u32)!(error.lane[l] == 0) << l;
                if (!inexact) return false;
            }
        }
        u32 finite = 0;
        EACH_LANE
        for (int l = 0; l < LANES; ++l)
            finite |= (u32)(is_finite(first.lane[l]) && is_finite(term.lane[l])) << l;
        return renormalise_lanes(inexact, finite, error);
    }

    // word - error; the error becomes minus that of this sum.
    static DEVICE void subtract(Lanes<T, LANES>& word, Lanes<T, LANES>& error) {
        EACH_LANE
        for (int l = 0; l < LANES; ++l) {
            const T before = word.lane[l], sum = plus(before, -error.lane[l]), added = plus(sum, -before);
            error.lane[l] = plus(plus(added, error.lane[l]), plus(plus(sum, -added), -before));
            word.lane[l] = sum;
        }
    }

    // Makes each word the rounded sum of itself and the next one; returns whether a sum overflows.
    DEVICE bool renormalise_all() {
        u32 lanes = 0;
        Lanes<T, LANES> error;
        EACH_LANE
        for (int l = 0; l < LANES; ++l) {
            u32 moves = 0;
            UNROLL
            for (int w = 0; w < MOST - 1; ++w) moves |= plus(word[w].lane[l], word[w + 1].lane[l]) != word[w].lane[l];
            lanes |= (moves & (u32)is_finite(word[0].lane[l])) << l;
            error.lane[l] = 0;
        }
        return lanes && renormalise_lanes(lanes, lanes, error);
    }

    // The exact sum of renormalised words, rounded once: the lower ones to odd.
    DEVICE Lanes<T, LANES> rounded() const {
        Lanes<T, LANES> total;
        EACH_LANE
        for (int l = 0; l < LANES; ++l) {
            T lower = word[MOST - 1].lane[l];
            UNROLL
            for (int w = MOST - 2; w > 0; --w) lower = TwoSum<T>(word[w].lane[l], lower).to_odd();
            total.lane[l] = plus(word[0].lane[l], lower);
        }
        return total;
    }

    // Subtracts the errors of some lanes from their words. Returns whether a sum still does not fit.
    DEVICE bool renormalise_lanes(u32 lanes, u32 finite, const Lanes<T, LANES>& error) {
        bool inexact = false;
        NO_UNROLL
        for (int lane = 0; lane < LANES; ++lane) {
            if (!(lanes >> lane & 1)) continue;
            T part[MOST] = {}, rest = 0;
            EACH_LANE  // no variable index: the lanes are registers
            for (int l = 0; l < LANES; ++l) {
                if (l != lane) continue;
                UNROLL
                for (int w = 0; w < MOST; ++w) part[w] = word[w].lane[l];
                rest = -error.lane[l];
            }
            inexact |= renormalise<MOST>(part, rest, count, finite >> lane & 1);
            EACH_LANE
            for (int l = 0; l < LANES; ++l) {
                UNROLL
                for (int w = 0; w < MOST; ++w) word[w].lane[l] = l == lane ? part[w] : word[w].lane[l];
            }
        }
        return inexact;
    }
};
