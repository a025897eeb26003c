"""Arithmetic of sizes on the host. Triton's functions of these names also take its constants, and so 3 to 10 us."""


def cdiv(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is not below a positive `number`."""
    return 1 << (number - 1).bit_length()
