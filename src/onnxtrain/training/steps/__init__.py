"""The steps of a training: in one process, in several, with the states of the optimizer shared out."""
