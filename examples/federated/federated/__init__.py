"""The apps of a federation."""
