"""How a step reaches the GPU.

ahead.py                 its kernels compiled side by side, for all numbers of tokens, before the first launch
replay.py                a step's launches, captured once and repeated
driver_launch.py         as the CUDA driver takes them
launch_graphs.py         at the addresses of an earlier call: as one
"""
