"""Private views over upstream's models: no weights of their own, nothing that a checkpoint could hold."""

from .objective import objective_blocker
from .view import DetectionLayout, NetworkView, UnsupportedNetwork

__all__ = ["DetectionLayout", "NetworkView", "UnsupportedNetwork", "objective_blocker"]
