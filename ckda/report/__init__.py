"""Results to one self-contained HTML page: figures inside, no scripts, nothing fetched."""

from ckda.report.page import Page

__all__ = ["Page"]
