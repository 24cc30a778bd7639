"""Private views over upstream's models: no weights of their own, nothing that a checkpoint could hold."""

from .view import DetectionLayout, NetworkView, UnsupportedNetwork, objective_blocker

__all__ = ["DetectionLayout", "NetworkView", "UnsupportedNetwork", "objective_blocker"]
