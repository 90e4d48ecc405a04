"""The demo model's folder is found as the engine's tests find it."""

from tests.unit.engine.conftest import smollm2_dir

__all__ = ["smollm2_dir"]
