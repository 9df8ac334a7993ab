// distance_scale: out = sum / (away * away / gamma + 1), away = center - pulled
// order    as written, one rounding per operation (-fmad=false), one at the store
// types    <T>: of center and pulled; 16-bit types computed in float, sum and out are then float
// aliasing out may be the sum exactly; all others are different arrays
// launch   1-D, any grid and block; blocks stride over chunks; 64-bit indices
// limits   none on rows or elements; gamma is above 0
// reference src/gradreduce/ops/distance_scale.py, bit-equal except NaN payloads
// source   own; the rule is that of J. Hermans' thesis, which follows arXiv 1710.02368
#include "common.cuh"

template <typename T> struct DistanceScale : Elementwise {
    typedef typename accumulate<T>::type Acc;
    Acc* out;
    const Acc* sum;
    const T *center, *pulled;
    const Acc gamma;

    DEVICE DistanceScale(const Row& row, double gamma) : gamma((Acc)gamma) {
        out = row.operand<Acc>(0);
        sum = row.operand<const Acc>(1);
        center = row.operand<const T>(2);
        pulled = row.operand<const T>(3);
    }

    template <int LANES> DEVICE void at(i64 i) const {
        Lanes<Acc, LANES> total = load<Acc, LANES>(sum, i);
        const Lanes<Acc, LANES> now = load<Acc, LANES>(center, i), then = load<Acc, LANES>(pulled, i);
        UNROLL
        for (int l = 0; l < LANES; ++l) {
            const Acc away = now.lane[l] - then.lane[l];
            total.lane[l] = total.lane[l] / (away * away / gamma + (Acc)1);
        }
        store(out, i, total);
    }
};

template <typename T> __global__ void distance_scale(TABLE_ARGUMENT table, double gamma) {
    elementwise<DistanceScale<T>, lanes_of<T, T>::value>(table, gamma);
}
