"""What is kept of a training so that it can go on."""
