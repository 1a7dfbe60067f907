"""What is trained, how, on what, and for how long: from arguments to a trained model."""
