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
