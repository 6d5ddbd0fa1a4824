"""What settings and requests from outside may hold, whoever made them: plain numbers of a sane size."""

LARGEST = 1e300  # of any number; unlike math.isfinite, a comparison takes integers of any size


def is_int(value: object) -> bool:
    """Whether it is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a number; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
