"""Runs compiled Triton kernels without a GPU: the PTX that a device would get, instruction by instruction.

Triton's interpreter runs a kernel's Python, a program as one thread. What a device runs is something else:
layouts, shuffles, shared memory, barriers, asynchronous copies, operands of tensor cores, inline assembly. Here
that code runs on CPU tensors, as threads of warps, in numpy. What `compute-sanitizer` looks for on a device is
looked for here: accesses outside of an allocation or misaligned, races in shared and global memory, shuffles and
barriers that not all threads reach; docs/gpu.md says what is not.

`program` parses PTX, `machine` runs it, `memory` holds and watches what it reads and writes, `arithmetic` and
`warps` are the instructions, `launch` puts the machine behind Triton's launches. It is complete for what our
kernels compile to, and refuses every other instruction. Time means nothing here.
"""
