"""Programs of the C++ kernels: their operators, and the lowering of recorded ops to them."""
