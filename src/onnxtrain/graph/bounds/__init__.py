"""Facts that a graph proves about its values: bounds, and equal sums along an axis.

:class:`Facts` propagates them from constants and activations to the outputs, operator by operator, like shapes. They
prove that a value holds probabilities, whatever nodes stand behind the Softmax or Sigmoid, and without one.
"""

from onnxtrain.graph.bounds import elementwise, layers, moving
from onnxtrain.graph.bounds.facts import Fact, Facts, is_weight

__all__ = ["Fact", "Facts", "elementwise", "is_weight", "layers", "moving"]
