"""Packages that only some parts need."""

from importlib.util import find_spec

__all__ = ["require"]


def require(package: str, extra: str) -> None:
    """A ValueError that names the extra, where the package is missing.

    Example:
        >>> require("json", "lm")
        >>> require("no_such_package", "lm-data")
        Traceback (most recent call last):
        ValueError: this needs the package 'no_such_package': pip install 'ckda[lm-data]'
    """
    if find_spec(package) is None:
        raise ValueError(f"this needs the package {package!r}: pip install 'ckda[{extra}]'")
