"""The rules: one function per operator, its first docstring line the formula.

``x y`` are a node's values, ``dx dy`` their gradients. A rule emits for all inputs; what nobody asked for is
removed afterwards. Broadcasting, accumulation and zero gradients are the engine's.
"""
