"""Presets shipped with the package: ``models/*.yaml`` and ``serve/*.yaml``."""
