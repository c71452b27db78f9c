// The loops for one instruction set; the build compiles this file with the compiler's flags for it.
#define SPARE_LOOPS spare_loops_avx512
#include "cpu_loops.inc"
