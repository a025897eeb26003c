"""How the kernels of a step are launched.

ahead.py                 compiles all kernels in parallel, for all numbers of tokens, before the first launch
once.py                  what Triton does once in a process, in threads beside the imports
sources.py               what Triton reads of the kernels' sources, faster
launchers.py             reads Triton's compiled launchers in one thread at a time
replay.py                captures the launches of a step once and repeats them
driver_launch.py         launches captured kernels through the CUDA driver
launch_graphs.py         launches them as one CUDA graph, if the addresses are those of an earlier call
"""
