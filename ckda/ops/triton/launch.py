"""One kernel launch as data, and what every launch shares."""

from typing import Any, NamedTuple

__all__ = ["Launch", "power_of_two"]


class Launch(NamedTuple):
    """A kernel, its grid and its arguments, so that it can also be compiled without a device."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int = 2
    maxnreg: int | None = None  #: registers a thread may take, where more programs at a time are worth a few spills

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}

    def __call__(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.options)


def power_of_two(n: int) -> int:
    """The tile that holds n channels: a power of two, at least 16.

    Example:
        >>> power_of_two(3), power_of_two(64), power_of_two(65)
        (16, 64, 128)
    """
    return max(16, 1 << (n - 1).bit_length())
