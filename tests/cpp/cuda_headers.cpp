// Compiled with AREAL_HPC_CUDA_HEADERS: the assertions at the end of cuda.hpp are the test.
#include "cuda.hpp"
