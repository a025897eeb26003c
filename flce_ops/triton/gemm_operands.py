"""Matrices as the GEMMs take them: by tensor maps (TMA) where all of them allow it."""

from collections.abc import Sequence

from torch import Tensor


def fits_tma(tensor: Tensor | None) -> bool:
    """Rows contiguous and apart, base and row stride multiples of 16 bytes: what a tensor map can address."""
    if tensor is None:
        return True
    stride, unit = tensor.stride()
    aligned = stride * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
    return unit == 1 and stride >= tensor.shape[1] and aligned


def descriptors(matrices: Sequence[Tensor | None], blocks: Sequence[list[int]]) -> list:
    """Tensor maps of the matrices in tiles of those sizes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [
        None if matrix is None else TensorDescriptor.from_tensor(matrix, block)
        for matrix, block in zip(matrices, blocks)
    ]
