"""The optimizers, one module each: the update rule, and the class of settings with the operator's schema."""
