"""Working copy of a model: training changes its modes, types and weights, never the file."""
