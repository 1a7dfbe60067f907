"""L-BFGS: minimizes the loss of a trainer on one fixed batch, such as the collocation points of a physical equation."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
