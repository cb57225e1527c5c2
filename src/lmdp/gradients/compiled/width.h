/* The loops for vectors of BYTES bytes, of both types of numbers. */
#define REAL float
#include "loops.h"
#include "grid.h"
#undef REAL
#define REAL double
#include "loops.h"
#include "grid.h"
#undef REAL
#undef TARGET
#undef BYTES
#undef VECTORS
#undef STORE_PAST_CACHE
