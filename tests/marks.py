"""Marks of modules whose tests run the kernels on a GPU, or in Triton's interpreter where there is none."""

import pytest
import torch

ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
# without a GPU, conftest.py turns the interpreter on before anything imports triton
IN_INTERPRETER = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run for real on this machine (marker gpu)"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy on log2(0) and exp2 of large numbers, and on hashes
]
