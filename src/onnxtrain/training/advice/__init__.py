"""What is worth knowing about a model before it is trained."""
