"""Which tensors of a model are learned, and how they are named, tied, masked and grouped."""
