"""Many small steps in one program that XLA compiles, for `jit_compile=loop`, and stacks of batches for it."""
