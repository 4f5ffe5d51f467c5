"""Sizes rounded up to a multiple, or to a divisor nearby, and binary units."""

MIB = 1 << 20
GIB = 1 << 30


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` closest to `wanted` (the smaller one of two equally close)."""
    divisors = [d for d in range(1, number + 1) if number % d == 0] if number > 0 else [1]
    return min(divisors, key=lambda d: (abs(d - wanted), d))
