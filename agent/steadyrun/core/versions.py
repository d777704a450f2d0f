"""Which versions of packages are installed."""

from __future__ import annotations

__all__ = ["installed_version"]


def installed_version(package: str) -> str:
    """Empty when it is not installed as a package."""
    from importlib import metadata  # here: it is needed seldom, and processes start the faster without

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
