"""The behaviours, by topic; importing this fills ``outcomes.ROWS``."""

from . import autograd, identity, meshes, mistakes, modules, precision, saving, setup, training

__all__ = [
    "autograd",
    "identity",
    "meshes",
    "mistakes",
    "modules",
    "precision",
    "saving",
    "setup",
    "training",
]
