"""The C++ kernels of a CPU, and the op sets over them."""
