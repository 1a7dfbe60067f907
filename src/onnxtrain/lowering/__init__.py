"""From a training model, or a model whose gradient is asked for, to the graph that a session runs."""
